"""The paced engine beyond the contract: tokens by the clock, and executions that move."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from gyre import config as configuration
from gyre.errors import UsageError
from gyre.rollout.paced import PacedEngine, open_paced
from gyre.types import Version

MakeEngine = Callable[..., PacedEngine]
WORKLOAD = Path(__file__).resolve().parents[2] / "examples" / "workloads" / "nl2repo-122b.toml"


def test_an_execution_that_moves_often_has_exactly_its_tokens(paced_engine: MakeEngine, kit: Any) -> None:
    cells = [paced_engine(context=1000) for _ in range(3)]
    whole = cells[0].submit(kit.ask("whole", [3, 4], seed=11, max_tokens=150)).result(30)
    ids: list[int] = []
    for move in range(8):
        engine = cells[move % 3]
        going = engine.submit(kit.ask(f"part-{move}", [3, 4, *ids], seed=11, drawn=len(ids), max_tokens=150 - len(ids)))
        start = engine.state().generated
        kit.until(lambda engine=engine, start=start: engine.state().generated > start)
        engine.abort(f"part-{move}")
        part = going.result(30)
        assert part.finish_reason == "abort" or len(ids) + len(part.token_ids) == 150
        ids += part.token_ids
        if len(ids) == 150:
            break
    else:
        ids += cells[0].submit(kit.ask("rest", [3, 4, *ids], seed=11, drawn=len(ids), max_tokens=150 - len(ids))).result(30).token_ids
    assert ids == whole.token_ids and len(ids) == 150


def test_rows_that_share_an_engine_slow_each_other_down(paced_engine: MakeEngine, kit: Any) -> None:
    alone, shared = (paced_engine(token_s=lambda rows: 0.002 * rows, context=5000) for _ in range(2))
    many = [shared.submit(kit.ask(str(i), [1], max_tokens=4000)) for i in range(8)]
    alone.submit(kit.ask("one", [1], max_tokens=200)).result(30)
    for i in range(8):
        shared.abort(str(i))
    wait(many, 30)
    each = [len(f.result(0).token_ids) for f in many]
    assert max(each) - min(each) <= 1
    assert 12 <= sum(each) / 8 <= 100  # 25 to the clock


def test_more_than_the_slots_wait(paced_engine: MakeEngine, kit: Any) -> None:
    engine = paced_engine(slots=2, queue=8)
    futures = [engine.submit(kit.ask(str(i), [1], max_tokens=20)) for i in range(6)]
    kit.until(lambda: engine.state().running == 2)
    assert engine.state().queued == 4
    assert [len(f.result(30).token_ids) for f in futures] == [20] * 6


def test_asleep_it_has_given_back_everything(paced_engine: MakeEngine, kit: Any) -> None:
    engine = paced_engine(to_train_s=0.01, to_rollout_s=0.01)
    futures = [engine.submit(kit.ask(str(i), [1], max_tokens=200)) for i in range(4)]
    kit.until(lambda: engine.state().generated >= 8)
    engine.sleep().result(30)
    assert {f.result(0).finish_reason for f in futures} == {"abort"} and all(kit.covered(f.result(0)) for f in futures)
    engine.wake().result(30)
    engine.load(Version(1, 3), [], memoryview(b"")).result(30)
    assert engine.submit(kit.ask("next", [1], max_tokens=3)).result(30).spans[0].version == Version(1, 3)


def test_it_needs_a_workload() -> None:
    with pytest.raises(UsageError, match=r"run\.workload"):
        open_paced(configuration.load(None, ["rollout.engine=paced"]).config)
    engine = open_paced(configuration.load(None, ["rollout.engine=paced", f'run.workload="{WORKLOAD}"', "run.compress=100"]).config)
    assert engine.state().slots == 140
    engine.close()
