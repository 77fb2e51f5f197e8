"""Objectives: per-token losses as pure functions, and what each is divided by.

Invariants
- Inputs and outputs are fp32 vectors over trainable tokens; nothing here knows a model, a batch or a process.
- The gradient flows through `new_logprobs_N` alone.
- π_old is the distribution the rollout was sampled from: `old_logprobs_N` are the engine's own. With one update per batch any other π_old
  would make the ratio 1 and clipping vacuous.
- A token's contribution is its loss, over its execution's trainable tokens where the denominator is `executions`. Contributions are summed raw, by
  whoever has the token; the core divides the sum once, at the seal. So who adds which token changes nothing.
- Splitting an execution into several trajectories changes nothing either, but for `gspo`, whose ratio is a trajectory's.

Not here: advantages (the buffer's), KL terms, critics.

Shapes: N trainable tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gyre.config import Train
from gyre.errors import UsageError

Denominator: TypeAlias = Literal["executions", "tokens", "constant"]
"""What a step's sum is divided by: its graded executions (a mean over executions of their means over tokens), its trainable tokens, or its graded
executions times `train.constant_tokens`."""


class Tokens(NamedTuple):
    """What a loss is made of. `sequences_N` numbers the trajectory that a token belongs to; all its tokens are here."""

    new_logprobs_N: Tensor
    old_logprobs_N: Tensor
    advantages_N: Tensor
    sequences_N: Tensor


class TokenLoss(NamedTuple):
    """`loss_N` bears the gradient; `outside_N` says which tokens lie outside the trust region."""

    loss_N: Tensor
    outside_N: Tensor


def dis(t: Tokens, low: float, high: float) -> TokenLoss:
    """Double-sided importance sampling: loss = -w·A·log π_new, w = ratio·1[low < ratio < high] without gradient.

    ratio = exp(log π_new - log π_rollout) per token. Outside the region a token contributes nothing, whatever the sign of A: right when a
    trajectory spans several policy versions. Denominator: executions. Source: the technical report of GLM-5 (arXiv 2602.15763).
    """
    ratio_N = torch.exp(t.new_logprobs_N.detach() - t.old_logprobs_N)
    outside_N = (ratio_N <= low) | (ratio_N >= high)
    weight_N = ratio_N.masked_fill(outside_N, 0.0)
    return TokenLoss(-weight_N * t.advantages_N * t.new_logprobs_N, outside_N)


def grpo(t: Tokens, low: float, high: float) -> TokenLoss:
    """Clipped surrogate: loss = -min(ratio·A, clip(ratio, low, high)·A), with low = 1 - ε and high = 1 + ε.

    Denominator: executions. Source: PPO (arXiv 1707.06347, equation 7) with the group-relative advantages of GRPO (arXiv 2402.03300, equation 3).
    """
    return _clipped(torch.exp(t.new_logprobs_N - t.old_logprobs_N), t.advantages_N, low, high)


def dapo(t: Tokens, low: float, high: float) -> TokenLoss:
    """Clip-higher: the clipped surrogate with low = 1 - ε_low and a wider high = 1 + ε_high, so that unlikely tokens may grow.

    Denominator: tokens, all of the step's weigh alike. Source: DAPO (arXiv 2503.14476, equation 8); its dynamic sampling is `train.drop_uniform`.
    """
    return grpo(t, low, high)


def dr_grpo(t: Tokens, low: float, high: float) -> TokenLoss:
    """GRPO done right: the clipped surrogate, with neither an execution's length nor the group's deviation in a denominator.

    Denominator: constant, so a long wrong answer is not excused by its length; belongs with advantage `mean`. Source: arXiv 2503.20783, equation 3.
    """
    return grpo(t, low, high)


def gspo(t: Tokens, low: float, high: float) -> TokenLoss:
    """Sequence-level ratios: s = exp(mean over a trajectory's trainable tokens of log π_new - log π_old); loss of each = -min(s·A, clip(s)·A).

    Denominator: executions; a trajectory weighs by its share of its execution's tokens. The one objective that splitting an execution changes: its
    ratio is a mean over the trajectory. Source: GSPO (arXiv 2507.18071, equations 5 and 7).
    """
    zeros_R = t.new_logprobs_N.new_zeros(int(t.sequences_N.max()) + 1 if len(t.sequences_N) else 0)
    sums_R = zeros_R.index_add(0, t.sequences_N, t.new_logprobs_N - t.old_logprobs_N)
    counts_R = zeros_R.index_add(0, t.sequences_N, torch.ones_like(t.old_logprobs_N)).clamp(min=1.0)
    return _clipped(torch.exp(sums_R / counts_R)[t.sequences_N], t.advantages_N, low, high)


def cispo(t: Tokens, low: float, high: float) -> TokenLoss:
    """Clipped weights: loss = -clip(ratio, low, high)·A·log π_new, the weight without gradient: no token is ever without one.

    Denominator: tokens. The paper sets no lower end (low = 0). Source: CISPO of MiniMax-M1 (arXiv 2506.13585, equations 4 and 5).
    """
    ratio_N = torch.exp(t.new_logprobs_N.detach() - t.old_logprobs_N)
    return TokenLoss(-ratio_N.clamp(low, high) * t.advantages_N * t.new_logprobs_N, (ratio_N < low) | (ratio_N > high))


def tis(t: Tokens, low: float, high: float) -> TokenLoss:
    """Truncated importance sampling: loss = -min(ratio, high)·A·(π_new / π_new without gradient), the weight without gradient too.

    The truncated ratio to the rollout corrects for staleness and for what engine and trainer compute differently; the surrogate's own ratio is 1 with
    one update per batch. Above low = 0 the weight is bounded below as well. In gradient it is `cispo` but for the denominator: executions.
    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; Ionides 2008 for the truncation.
    """
    ratio_N = torch.exp(t.new_logprobs_N.detach() - t.old_logprobs_N)
    itself_N = torch.exp(t.new_logprobs_N - t.new_logprobs_N.detach())
    return TokenLoss(-ratio_N.clamp(low, high) * t.advantages_N * itself_N, (ratio_N < low) | (ratio_N > high))


def _clipped(ratio_N: Tensor, advantages_N: Tensor, low: float, high: float) -> TokenLoss:
    loss_N = -torch.minimum(ratio_N * advantages_N, ratio_N.clamp(low, high) * advantages_N)
    detached_N = ratio_N.detach()
    return TokenLoss(loss_N, (detached_N <= low) | (detached_N >= high))


class Objective(NamedTuple):
    """A loss with what it is divided by and the region (low, high) of ratios that it has unless the run says otherwise."""

    loss: Callable[[Tokens, float, float], TokenLoss]
    denominator: Denominator
    region: tuple[float, float]


OBJECTIVES: Final[dict[str, Objective]] = {
    "dis": Objective(dis, "executions", (0.5, 2.0)),
    "grpo": Objective(grpo, "executions", (0.8, 1.2)),
    "dapo": Objective(dapo, "tokens", (0.8, 1.28)),
    "dr_grpo": Objective(dr_grpo, "constant", (0.8, 1.2)),
    "gspo": Objective(gspo, "executions", (1 - 3e-4, 1 + 4e-4)),
    "cispo": Objective(cispo, "tokens", (0.0, 5.0)),
    "tis": Objective(tis, "executions", (0.0, 2.0)),
}


def region(train: Train) -> tuple[float, float]:
    """Ends of the region of ratios. Raises `UsageError` for one that is empty."""
    own = OBJECTIVES[train.objective].region
    low, high = train.ratio_low if train.ratio_low >= 0 else own[0], train.ratio_high if train.ratio_high >= 0 else own[1]
    if low >= high:
        raise UsageError("train.ratio_low", f"{low} is not below train.ratio_high = {high}", "lower it")
    return low, high


def numerator(values_N: Tensor, execution_trainable_N: Tensor, denominator: Denominator = "executions") -> Tensor:
    """The raw sum: Σ value / (trainable tokens of the token's execution) if it will be divided by executions, else Σ value. A scalar, fp32."""
    return (values_N / execution_trainable_N).sum() if denominator == "executions" else values_N.sum()


def divisor(train: Train, executions: int, trainable: int) -> int:
    """What a step's sum is divided by: of its graded executions and trainable tokens, as the objective declares."""
    match OBJECTIVES[train.objective].denominator:
        case "executions":
            return executions
        case "tokens":
            return trainable
        case "constant":
            return executions * train.constant_tokens
