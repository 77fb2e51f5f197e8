"""Objectives: per-token losses as pure functions, and the mean that is taken over them.

Invariants
- Inputs and outputs are fp32 vectors over trainable tokens; nothing here knows a model, a batch or a process.
- The gradient flows through `new_logprobs_N` alone.
- π_old is the distribution the rollout was sampled from: `old_logprobs_N` are the engine's own. With one update per batch any other π_old
  would make the ratio 1 and clipping vacuous.
- Splitting an execution into several trajectories or micro-steps changes nothing: a token's contribution is value / (trainable tokens of its
  whole execution), and the sum is divided once, by the step's executions, at the seal.

Not here: sequence-level ratios, KL terms, critics.

Shapes: N trainable tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor


class TokenLoss(NamedTuple):
    """`loss_N` bears the gradient; `outside_N` says which tokens lie outside the trust region."""

    loss_N: Tensor
    outside_N: Tensor


def dis(new_logprobs_N: Tensor, old_logprobs_N: Tensor, advantages_N: Tensor, low: float, high: float) -> TokenLoss:
    """Double-sided importance sampling: loss = -w·A·log π_new, w = ratio·1[low < ratio < high] without gradient.

    ratio = exp(log π_new - log π_rollout) per token. Outside the region a token contributes nothing, whatever the sign of A: right when a
    trajectory spans several policy versions. Source: the technical report of GLM-5 (arXiv 2602.15763).
    """
    ratio_N = torch.exp(new_logprobs_N.detach() - old_logprobs_N)
    outside_N = (ratio_N <= low) | (ratio_N >= high)
    weight_N = ratio_N.masked_fill(outside_N, 0.0)
    return TokenLoss(-weight_N * advantages_N * new_logprobs_N, outside_N)


def grpo(new_logprobs_N: Tensor, old_logprobs_N: Tensor, advantages_N: Tensor, low: float, high: float) -> TokenLoss:
    """Clipped surrogate: loss = -min(ratio·A, clip(ratio, low, high)·A), with low = 1 - ε and high = 1 + ε.

    Source: PPO (arXiv 1707.06347, equation 7) with the group-relative advantages of GRPO (arXiv 2402.03300).
    """
    ratio_N = torch.exp(new_logprobs_N - old_logprobs_N)
    loss_N = -torch.minimum(ratio_N * advantages_N, ratio_N.clamp(low, high) * advantages_N)
    detached_N = ratio_N.detach()
    return TokenLoss(loss_N, (detached_N <= low) | (detached_N >= high))


def numerator(values_N: Tensor, execution_trainable_N: Tensor) -> Tensor:
    """The two-level mean's raw numerator: Σ value / (trainable tokens of the token's execution). A scalar, fp32."""
    return (values_N / execution_trainable_N).sum()


Objective = Callable[[Tensor, Tensor, Tensor, float, float], TokenLoss]

OBJECTIVES: Final[dict[str, Objective]] = {"dis": dis, "grpo": grpo}
