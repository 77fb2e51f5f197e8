"""From logits to tokens, given the uniform draws.

The distribution sampled is softmax(logits / temperature), cut to the `top_k` likeliest and then to the smallest set of likeliest tokens that holds
`top_p` of what is left, renormalised. The token is the inverse of its cumulative distribution (in order of token ids, float64) at the draw;
the log-prob returned is that of this distribution. Temperature 0 is greedy: the likeliest token, log-prob 0.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gyre.types import Sampling


def sample(logits_BV: torch.Tensor, samplings: Sequence[Sampling], draws: Sequence[float]) -> tuple[list[int], list[float]]:
    """One token per row, with its log-prob."""
    logits_BV = logits_BV.float()
    device = logits_BV.device
    if any(s.temperature not in (0.0, 1.0) for s in samplings):
        temperature_B = torch.tensor([s.temperature or 1.0 for s in samplings], device=device)
        logits_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)) / temperature_B[:, None]  # small temperatures must not overflow
    if any(s.top_k > 0 or s.top_p < 1 for s in samplings):
        logits_BV = cut(logits_BV, samplings)
    logprobs_BV = torch.log_softmax(logits_BV, -1)
    ids_B = pick(logprobs_BV, draws)
    chosen_B = logprobs_BV.gather(1, ids_B[:, None])[:, 0]
    if any(s.temperature == 0.0 for s in samplings):
        greedy_B = torch.tensor([s.temperature == 0.0 for s in samplings], device=device)
        ids_B = torch.where(greedy_B, logits_BV.argmax(-1), ids_B)
        chosen_B = torch.where(greedy_B, chosen_B.new_zeros(()), chosen_B)
    return ids_B.tolist(), chosen_B.tolist()


def pick(logprobs_BV: torch.Tensor, draws: Sequence[float]) -> torch.Tensor:
    """The tokens at these draws (B): the inverse of each row's cumulative distribution."""
    cumulated_BV = logprobs_BV.double().exp_().cumsum_(-1)
    total_B = cumulated_BV[:, -1]
    draws_B = torch.tensor(draws, dtype=torch.float64, device=logprobs_BV.device)
    target_B = torch.minimum(draws_B * total_B, torch.nextafter(total_B, total_B.new_zeros(())))
    return torch.searchsorted(cumulated_BV, target_B[:, None], right=True)[:, 0].clamp_max_(logprobs_BV.shape[1] - 1)


def cut(logits_BV: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Top-k, then top-p: what is cut becomes -inf."""
    n = logits_BV.shape[1]
    device = logits_BV.device
    top_k_B = torch.tensor([s.top_k if 0 < s.top_k < n else n for s in samplings], device=device)
    top_p_B = torch.tensor([s.top_p for s in samplings], dtype=torch.float64, device=device)
    sorted_BV, order_BV = torch.sort(logits_BV, dim=-1, descending=True, stable=True)
    sorted_BV = sorted_BV.masked_fill(torch.arange(n, device=device) >= top_k_B[:, None], float("-inf"))
    probs_BV = sorted_BV.double().softmax(-1)
    before_BV = probs_BV.cumsum(-1) - probs_BV
    sorted_BV = sorted_BV.masked_fill((before_BV >= top_p_B[:, None]) & (top_p_B[:, None] < 1), float("-inf"))
    return torch.full_like(logits_BV, float("-inf")).scatter_(1, order_BV, sorted_BV)
