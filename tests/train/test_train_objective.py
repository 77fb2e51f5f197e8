"""Objectives against values computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from gyre.train.objective import dis, grpo, numerator

# π_old = 0.5 everywhere; π_new = 0.5, 0.75, 0.1, 0.9 → ratios 1, 1.5, 0.2, 1.8; advantages 1, -1, 1, -1.
OLD = [math.log(0.5)] * 4
NEW = [math.log(0.5), math.log(0.75), math.log(0.1), math.log(0.9)]
ADVANTAGES = [1.0, -1.0, 1.0, -1.0]


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.tensor(NEW, requires_grad=True), torch.tensor(OLD), torch.tensor(ADVANTAGES)


def test_dis_golden() -> None:
    """Region (0.5, 1.6): tokens 0 and 1 are inside.

    loss = -ratio·A·log π: 1·0.693147 = 0.693147; 1.5·log 0.75 = 1.5·(-0.287682) = -0.431523; 0; 0.
    gradient by log π_new = -ratio·A: -1; 1.5; 0; 0 (the weight bears none).
    """
    new, old, advantages = tensors()
    loss, outside = dis(new, old, advantages, 0.5, 1.6)
    assert outside.tolist() == [False, False, True, True]
    assert loss.tolist() == pytest.approx([0.693147, -0.431523, 0.0, 0.0], abs=1e-5)
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    assert gradient.tolist() == pytest.approx([-1.0, 1.5, 0.0, 0.0], abs=1e-5)


def test_dis_drops_both_sides_whatever_the_sign() -> None:
    new, old = torch.tensor([-3.0, 3.0, -3.0, 3.0]), torch.zeros(4)
    loss, outside = dis(new, old, torch.tensor([1.0, 1.0, -1.0, -1.0]), 0.5, 2.0)
    assert outside.all()
    assert loss.tolist() == [0.0] * 4


def test_grpo_golden() -> None:
    """ε = 0.2: region [0.8, 1.2].

    A = 1, ratio 1: loss -1, gradient -ratio = -1. A = -1, ratio 1.5: min(-1.5, -1.2) = -1.5 → loss 1.5, gradient 1.5 (not clipped).
    A = 1, ratio 0.2: min(0.2, 0.8) = 0.2 → loss -0.2, gradient -0.2. A = -1, ratio 1.8: min(-1.8, -1.2) = -1.8 → loss 1.8, gradient 1.8.
    """
    new, old, advantages = tensors()
    loss, outside = grpo(new, old, advantages, 0.8, 1.2)
    assert loss.tolist() == pytest.approx([-1.0, 1.5, -0.2, 1.8], abs=1e-5)
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    assert gradient.tolist() == pytest.approx([-1.0, 1.5, -0.2, 1.8], abs=1e-5)
    assert outside.tolist() == [False, True, True, True]


def test_grpo_clips_the_optimistic_side() -> None:
    """A = 1, ratio 1.5: min(1.5, 1.2) = 1.2, constant. A = -1, ratio 0.5: min(-0.5, -0.8) = -0.8, constant."""
    new = torch.tensor([math.log(1.5), math.log(0.5)], requires_grad=True)
    loss, _ = grpo(new, torch.zeros(2), torch.tensor([1.0, -1.0]), 0.8, 1.2)
    assert loss.tolist() == pytest.approx([-1.2, 0.8], abs=1e-5)
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    assert gradient.tolist() == [0.0, 0.0]


def test_numerator_is_a_mean_within_executions() -> None:
    """Execution A of 3 tokens (values 1, 2, 3) and B of 1 (value 10): 6/3 + 10/1 = 12; over two executions 6, not 16/4."""
    assert float(numerator(torch.tensor([1.0, 2.0, 3.0, 10.0]), torch.tensor([3.0, 3.0, 3.0, 1.0]))) == pytest.approx(12.0)
