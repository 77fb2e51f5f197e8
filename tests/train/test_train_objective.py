"""Objectives against values computed by hand, and by published implementations."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import published
import pytest
import torch

from gyre.buffer.advantage import advantages as group_advantages
from gyre.config import Train
from gyre.errors import UsageError
from gyre.train.objective import OBJECTIVES, Tokens, cispo, dapo, dis, divisor, dr_grpo, grpo, gspo, numerator, region, tis

# π_old = 0.5 everywhere; π_new = 0.5, 0.75, 0.1, 0.9 → ratios 1, 1.5, 0.2, 1.8; advantages 1, -1, 1, -1.
OLD = [math.log(0.5)] * 4
NEW = [math.log(0.5), math.log(0.75), math.log(0.1), math.log(0.9)]
ADVANTAGES = [1.0, -1.0, 1.0, -1.0]


def tokens() -> Tokens:
    """Two trajectories of two tokens."""
    return Tokens(torch.tensor(NEW, requires_grad=True), torch.tensor(OLD), torch.tensor(ADVANTAGES), torch.tensor([0, 0, 1, 1]))


def lone(new: list[float], old: list[float], advantages: list[float]) -> Tokens:
    return Tokens(torch.tensor(new, requires_grad=True), torch.tensor(old), torch.tensor(advantages), torch.arange(len(new)))


def gradient(loss: torch.Tensor, t: Tokens) -> list[float]:
    (found,) = torch.autograd.grad(loss.sum(), t.new_logprobs_N)
    return found.tolist()


@pytest.mark.pain(29)
def test_dis_golden() -> None:
    """Region (0.5, 1.6): tokens 0 and 1 are inside.

    loss = -ratio·A·log π: 1·0.693147 = 0.693147; 1.5·log 0.75 = 1.5·(-0.287682) = -0.431523; 0; 0.
    gradient by log π_new = -ratio·A: -1; 1.5; 0; 0 (the weight bears none).
    """
    t = tokens()
    loss, outside = dis(t, 0.5, 1.6)
    assert outside.tolist() == [False, False, True, True]
    assert loss.tolist() == pytest.approx([0.693147, -0.431523, 0.0, 0.0], abs=1e-5)
    assert gradient(loss, t) == pytest.approx([-1.0, 1.5, 0.0, 0.0], abs=1e-5)


def test_dis_drops_both_sides_whatever_the_sign() -> None:
    loss, outside = dis(lone([-3.0, 3.0, -3.0, 3.0], [0.0] * 4, [1.0, 1.0, -1.0, -1.0]), 0.5, 2.0)
    assert outside.all()
    assert loss.tolist() == [0.0] * 4


@pytest.mark.pain(29)
def test_grpo_golden() -> None:
    """ε = 0.2: region [0.8, 1.2].

    A = 1, ratio 1: loss -1, gradient -ratio = -1. A = -1, ratio 1.5: min(-1.5, -1.2) = -1.5 → loss 1.5, gradient 1.5 (not clipped).
    A = 1, ratio 0.2: min(0.2, 0.8) = 0.2 → loss -0.2, gradient -0.2. A = -1, ratio 1.8: min(-1.8, -1.2) = -1.8 → loss 1.8, gradient 1.8.
    """
    t = tokens()
    loss, outside = grpo(t, 0.8, 1.2)
    assert loss.tolist() == pytest.approx([-1.0, 1.5, -0.2, 1.8], abs=1e-5)
    assert gradient(loss, t) == pytest.approx([-1.0, 1.5, -0.2, 1.8], abs=1e-5)
    assert outside.tolist() == [False, True, True, True]


def test_grpo_clips_the_optimistic_side() -> None:
    """A = 1, ratio 1.5: min(1.5, 1.2) = 1.2, constant. A = -1, ratio 0.5: min(-0.5, -0.8) = -0.8, constant."""
    t = lone([math.log(1.5), math.log(0.5)], [0.0, 0.0], [1.0, -1.0])
    loss, _ = grpo(t, 0.8, 1.2)
    assert loss.tolist() == pytest.approx([-1.2, 0.8], abs=1e-5)
    assert gradient(loss, t) == [0.0, 0.0]


def test_dapo_clips_higher() -> None:
    """A = 1, ratios 1.25 and 1.5, ε_high = 0.28: the first still grows, which grpo's 1.2 would have clipped; the second is clipped."""
    t = lone([math.log(1.25), math.log(1.5)], [0.0, 0.0], [1.0, 1.0])
    loss, outside = dapo(t, 0.8, 1.28)
    assert loss.tolist() == pytest.approx([-1.25, -1.28], abs=1e-5) and outside.tolist() == [False, True]
    assert gradient(loss, t) == pytest.approx([-1.25, 0.0], abs=1e-5)
    assert gradient(dr_grpo(t, 0.8, 1.2).loss_N, t) == [0.0, 0.0]


def test_gspo_golden() -> None:
    """Trajectory 0: ratios 1 and 4, so s = 2 (the mean of the logarithms), A = -1: loss 2 at both tokens, gradient of their sum 2·2/2 each.
    Trajectory 1: s = 1.5 with A = 1 is clipped at 1.3: loss -1.3, no gradient."""
    new = torch.tensor([math.log(1.0), math.log(4.0), math.log(1.5)], requires_grad=True)
    t = Tokens(new, torch.zeros(3), torch.tensor([-1.0, -1.0, 1.0]), torch.tensor([0, 0, 1]))
    loss, outside = gspo(t, 0.8, 1.3)
    assert loss.tolist() == pytest.approx([2.0, 2.0, -1.3], abs=1e-5) and outside.all()
    assert gradient(loss, t) == pytest.approx([2.0, 2.0, 0.0], abs=1e-5)


def test_cispo_golden() -> None:
    """Ratios 1, 1.5, 0.2, 1.8 with weights clipped to [0.5, 1.6]: 1, 1.5, 0.5, 1.6; loss -w·A·log π, gradient -w·A at every token."""
    t = tokens()
    loss, outside = cispo(t, 0.5, 1.6)
    assert outside.tolist() == [False, False, True, True]
    assert loss.tolist() == pytest.approx([0.693147, 1.5 * math.log(0.75), -0.5 * math.log(0.1), 1.6 * math.log(0.9)], abs=1e-5)
    assert gradient(loss, t) == pytest.approx([-1.0, 1.5, -0.5, 1.6], abs=1e-5)


def test_tis_golden() -> None:
    """Ratios 1, 1.5, 0.2, 1.8 truncated at 1.6; loss -w·A, gradient the same."""
    t = tokens()
    loss, outside = tis(t, 0.0, 1.6)
    assert outside.tolist() == [False, False, False, True]
    assert loss.tolist() == gradient(loss, t) == pytest.approx([-1.0, 1.5, -0.2, 1.6], abs=1e-5)


# --- against published implementations ---


def ours(name: str, given: dict[str, Any]) -> tuple[float, list[list[float]]]:
    """Loss and gradient of the same step, each row an execution of one trajectory."""
    mask = torch.tensor(given["mask"]).bool()
    new = torch.tensor(given["new"], dtype=torch.float64, requires_grad=True)
    old, counts = torch.tensor(given["old"], dtype=torch.float64), mask.sum(1)
    rows = torch.arange(len(mask)).repeat_interleave(counts)
    t = Tokens(new[mask], old[mask], torch.tensor(given["advantages"], dtype=torch.float64)[rows], rows)
    objective = OBJECTIVES[name]
    total = numerator(objective.loss(t, *published.REGIONS[name]).loss_N, counts[rows], objective.denominator)
    total = total / divisor(Train(objective=name, constant_tokens=published.CONSTANT), len(mask), int(mask.sum()))  # type: ignore[arg-type]
    (found,) = torch.autograd.grad(total, new)
    return float(total.detach()), found.tolist()


def same(a: tuple[float, list[list[float]]], b: tuple[float, list[list[float]]]) -> None:
    assert a[0] == pytest.approx(b[0], abs=1e-6)
    assert torch.tensor(b[1]).abs().max() > 1e-3, "a gradient that is 0 proves nothing"
    for mine, theirs in zip(a[1], b[1], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-6)


@pytest.mark.pain(29)
@pytest.mark.parametrize("name", published.REGIONS)
def test_equal_to_what_trl_computed(name: str) -> None:
    """published.json: TRL 1.16's losses and gradients on random executions with gaps in their masks."""
    for case in json.loads(published.GOLDEN.read_text()):
        same(ours(name, case), case["losses"][name])


def test_rloo_is_equal_to_what_verl_computed() -> None:
    """published.json: verl 0.9's advantages of random groups."""
    for case in json.loads(published.GOLDEN.read_text()):
        for rewards, expected in zip(case["rewards"], case["rloo"], strict=True):
            assert group_advantages(rewards, "rloo") == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", published.REGIONS)
def test_equal_to_trl(name: str) -> None:
    """The same, computed now, on more inputs."""
    pytest.importorskip("trl", reason="TRL is not installed: compared with published.json only")
    for seed in range(100, 150):
        given = published.inputs(seed)
        same(ours(name, given), published.loss(name, given))


def test_rloo_is_equal_to_verl() -> None:
    pytest.importorskip("verl", reason="verl is not installed: compared with published.json only")
    for seed in range(100, 150):
        for rewards in published.inputs(seed)["rewards"]:
            assert group_advantages(rewards, "rloo") == pytest.approx(published.rloo(rewards), abs=1e-6)


# --- the table ---


def test_the_configuration_and_the_documentation_have_each_objective() -> None:
    choices = get_args(get_args(get_type_hints(Train, include_extras=True)["objective"])[0])
    assert set(choices) == set(OBJECTIVES)
    page = (Path(__file__).parents[2] / "docs" / "objectives.md").read_text().partition("## Advantages")[0]
    for name, objective in OBJECTIVES.items():
        (line,) = re.findall(rf"^\| `{name}` \|.*$", page, re.M)
        assert f"| {objective.denominator} |" in line
        low, high = objective.region
        assert f"| {low:g}, {high:g} |" in line
        assert re.search(r"arXiv \d{4}\.\d{5}|Ionides", line) and objective.loss.__doc__ is not None


def test_an_empty_region_is_refused_and_none_is_the_objectives_own() -> None:
    assert region(Train(objective="dapo")) == (0.8, 1.28)
    assert region(Train(objective="grpo", ratio_low=0.0)) == (0.0, 1.2)
    with pytest.raises(UsageError, match=r"ratio_low: 1\.5 is not below"):
        region(Train(objective="grpo", ratio_low=1.5))


def test_numerator_is_a_mean_within_executions() -> None:
    """Execution A of 3 tokens (values 1, 2, 3) and B of 1 (value 10): 6/3 + 10/1 = 12; over two executions 6, not 16/4."""
    assert float(numerator(torch.tensor([1.0, 2.0, 3.0, 10.0]), torch.tensor([3.0, 3.0, 3.0, 1.0]))) == pytest.approx(12.0)
