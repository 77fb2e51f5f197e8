from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gyre.rules.workload import Workload, apply_sets, build


@pytest.fixture
def tiny() -> Callable[..., Workload]:
    """A workload whose figures can be had by hand: 4 cells of 2 slots, B = 2, N = 2, mu = 1, two bursts; every execution lasts an hour."""

    def make(*sets: str) -> Workload:
        data: dict[str, Any] = {
            "system": {
                "cells": 4, "groups_per_step": 2, "rollouts_per_group": 2, "steps_per_burst": 1, "target_staleness": 0.0, "slots_per_cell": 2,
                "to_train_s": 10.0, "to_rollout_s": 5.0, "update_s": 20.0, "publish_s": 60.0,
            },
            "workload": {
                "model": "slots", "train_cell_h_per_group": 1.0, "bursts": 2, "seeds": [0],
                "execution_h": {"median": 1.0, "sigma": 0.0, "harness_timeout_h": 9.0},
            },
        }  # fmt: skip
        apply_sets(data, sets)
        return build("tiny", data)

    return make
