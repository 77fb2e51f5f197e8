"""Trajectories that share prefixes, as one packed row in which each shared token is once; and attention over such a row.

Invariants
- A token attends to its own path alone: in the packed row, to j ≤ i < end of j, where `end` closes the subtree below j's segment. Its position is
  its depth in its path. So each path's hidden states are those of the path as a row of its own.
- What is shared is found by token ids: equal prefixes have equal hidden states, whichever execution they come from.
- On a GPU attention is FlexAttention under a block mask; elsewhere it goes branch by branch, each over the runs of its path. Both skip what the
  mask forbids, neither holds a mask of T x T.

Not here: models whose layers are not all full attention (sliding windows, recurrent layers). `adopt` tells them apart.

Shapes: T tokens of the packed row, P of a path, H heads, D their size; B is 1.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

log = logging.getLogger(__name__)

NAME: Final = "gyre_tree"  # of the attention, and of the argument that hands the tree down to it
_flash: Final = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward: Final = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_BLOCK: Final = 128  # FlexAttention's


class Branch(NamedTuple):
    """Tokens [start, stop) of the row continue the path that lies in `above`, runs of the row from the root on."""

    start: int
    stop: int
    above: list[tuple[int, int]]


@dataclass(eq=False)
class Tree:
    """A packed row: token ids, depths, where each token's subtree ends, where each path lies."""

    ids_T: Tensor
    depth_T: Tensor
    end_T: Tensor
    paths: list[Tensor]  # of each path given: its tokens' places in the row
    branches: list[Branch]
    reached: int = field(default=0)  # attention layers that were handed this tree
    _block_mask: BlockMask | None = None

    def to(self, device: torch.device) -> Tree:
        """The same with ids, depths and ends on a device."""
        return Tree(self.ids_T.to(device), self.depth_T.to(device), self.end_T.to(device), self.paths, self.branches)

    @property
    def block_mask(self) -> BlockMask:
        """For FlexAttention, made once for all layers: blocks where all pairs are allowed, and those where each pair is asked."""
        if self._block_mask is None:
            end_T, n = self.end_T, -(-len(self.end_T) // _BLOCK)
            padded = torch.nn.functional.pad(end_T, (0, n * _BLOCK - len(end_T)), value=0).view(n, _BLOCK)
            query = torch.arange(n, device=end_T.device)[:, None]
            some = (query >= query.T) & (query * _BLOCK < padded.amax(1)[None])
            all_ = (query > query.T) & ((query + 1) * _BLOCK <= padded.amin(1)[None])
            partly, wholly = _table(some & ~all_), _table(all_)

            def allowed(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return (k <= q) & (q < end_T[k])

            t = len(end_T)
            self._block_mask = BlockMask.from_kv_blocks(*partly, *wholly, BLOCK_SIZE=_BLOCK, mask_mod=allowed, seq_lengths=(t, t))
        return self._block_mask


def _table(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Of each block of queries: how many blocks of keys, and which, those first."""
    counts = wanted.sum(1, dtype=torch.int32)
    order = torch.argsort(wanted.int(), dim=1, descending=True, stable=True).int()
    return counts[None, None], order[None, None].contiguous()


def lay_out(paths: Sequence[Tensor]) -> Tree:
    """Pack paths (token ids, at least one each). In lexicographic order a path shares with its predecessor all that it shares with any before it."""
    order = sorted(range(len(paths)), key=lambda i: paths[i].tolist())
    at: list[Tensor] = [torch.empty(0, dtype=torch.int64)] * len(paths)
    ids, depths, branches, closing = [], [], [], []
    total, previous = 0, -1
    for i in order:
        shared = _common(paths[previous], paths[i]) if previous >= 0 else 0
        own = len(paths[i]) - shared
        above = at[previous][:shared] if previous >= 0 else at[i]
        if previous >= 0:
            closing.append((at[previous][shared:], total))
        at[i] = torch.cat([above, torch.arange(total, total + own)])
        if own:
            branches.append(Branch(total, total + own, _runs(above)))
        ids.append(paths[i][shared:])
        depths.append(torch.arange(shared, len(paths[i])))
        total, previous = total + own, i
    end_T = torch.full((total,), total)
    for tokens, stop in closing:
        end_T[tokens] = stop
    return Tree(torch.cat(ids).long(), torch.cat(depths), end_T, at, branches)


def _common(a: Tensor, b: Tensor) -> int:
    n = min(len(a), len(b))
    differ = (a[:n] != b[:n]).nonzero()
    return int(differ[0]) if len(differ) else n


def _runs(places: Tensor) -> list[tuple[int, int]]:
    """Increasing places as half-open runs."""
    if not len(places):
        return []
    breaks = ((places[1:] - places[:-1]) != 1).nonzero().flatten() + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in torch.tensor_split(places, breaks)]


# --- attention ---


def attend(
    module: Any, query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor, attention_mask: Tensor | None, **others: Any
) -> tuple[Tensor, Tensor | None]:
    """An attention function of transformers: over a tree where one is handed down, else the usual causal one. Returns [B, T, H, D]."""
    from transformers.integrations.flex_attention import flex_attention_forward
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    tree: Tree | None = others.pop(NAME, None)
    if tree is None:
        return sdpa_attention_forward(module, query_BHTD, key_BHTD, value_BHTD, attention_mask, **others)
    tree.reached += 1
    scale = others.get("scaling")
    if query_BHTD.is_cuda:
        return flex_attention_forward(module, query_BHTD, key_BHTD, value_BHTD, tree.block_mask, scaling=scale)
    key_BHTD, value_BHTD = (_as_many(x, query_BHTD) for x in (key_BHTD, value_BHTD))
    found_BHTD: Tensor = _ByRun.apply(query_BHTD, key_BHTD, value_BHTD, tree.branches, scale)  # type: ignore[no-untyped-call]
    return found_BHTD.transpose(1, 2), None


def _as_many(x_BHTD: Tensor, query_BHTD: Tensor) -> Tensor:
    """Keys or values, repeated for the heads of queries that share them."""
    return x_BHTD.repeat_interleave(query_BHTD.shape[1] // x_BHTD.shape[1], 1)


class _ByRun(torch.autograd.Function):
    """Attention over a tree on a CPU, without a mask: the tokens of a branch meet each run of their path apart, and what they find is put together by
    the runs' shares of Σ exp(score). Backward, each run's part is as if it had been alone with the whole sum: Liu et al. 2023 (ring attention)."""

    @staticmethod
    def forward(ctx: Any, query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor, branches: Sequence[Branch], scale: float | None) -> Tensor:
        found_BHTD, sums_BHT = torch.empty_like(query_BHTD), query_BHTD.new_empty(query_BHTD.shape[:3], dtype=torch.float32)
        for start, stop, above in branches:
            query = query_BHTD[:, :, start:stop]
            found, sums = _flash(query, key_BHTD[:, :, start:stop], value_BHTD[:, :, start:stop], is_causal=True, scale=scale)
            for a, b in above:
                more, its = _flash(query, key_BHTD[:, :, a:b], value_BHTD[:, :, a:b], scale=scale)
                both = torch.logaddexp(sums, its)
                found = found * (sums - both).exp()[..., None] + more * (its - both).exp()[..., None]
                sums = both
            found_BHTD[:, :, start:stop], sums_BHT[:, :, start:stop] = found, sums
        ctx.save_for_backward(query_BHTD, key_BHTD, value_BHTD, found_BHTD, sums_BHT)
        ctx.branches, ctx.scale = branches, scale
        return found_BHTD

    @staticmethod
    def backward(ctx: Any, grad_BHTD: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, found, sums = ctx.saved_tensors
        into = [torch.zeros_like(x) for x in (query, key, value)]
        for start, stop, above in ctx.branches:
            own = slice(start, stop)
            for a, b in [*above, (start, stop)]:
                parts = _flash_backward(
                    grad_BHTD[:, :, own], query[:, :, own], key[:, :, a:b], value[:, :, a:b], found[:, :, own], sums[:, :, own], 0.0, a == start,
                    scale=ctx.scale,
                )  # fmt: skip
                for whole, place, part in zip(into, (own, slice(a, b), slice(a, b)), parts, strict=True):
                    whole[:, :, place] += part
        return *into, None, None


# --- models ---


def install(model: Any) -> None:
    """Give a Hugging Face model this attention."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    model.set_attn_implementation(NAME)


@torch.no_grad()
def adopt(model: Any, body: Any, device: torch.device) -> bool:
    """Give a model this attention if it can be trained with it, and say so if not: then it keeps its own and trajectories are trained as rows."""
    before = model.config._attn_implementation
    why = _windowed(model.config.get_text_config())
    if not why:
        try:
            install(model)
            why = _differs(model, body, device)
        except Exception as e:  # whatever a model or a kernel does not like about it
            why = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
    if why:
        model.set_attn_implementation(before)
        log.warning("%s trains each trajectory as a row of its own, train.prefix_tree has no effect: %s", type(model).__name__, why)
    return not why


def _windowed(config: Any) -> str:
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention"}:
        return f"it has layers of the kind {', '.join(sorted(kinds - {'full_attention'}))}"
    if not kinds and getattr(config, "sliding_window", None):
        return "its attention is a sliding window"
    return ""


def _differs(model: Any, body: Any, device: torch.device) -> str:
    """Compare a small tree with its paths as rows."""
    paths = [torch.tensor(p) % int(model.config.get_text_config().vocab_size) for p in ([3, 5, 2, 7, 4], [3, 5, 9, 8, 6, 1], [3, 5, 9, 4])]
    tree = lay_out(paths).to(device)
    packed_TD = body(input_ids=tree.ids_T[None], position_ids=tree.depth_T[None], use_cache=False, **{NAME: tree}).last_hidden_state[0]
    layers = int(model.config.get_text_config().num_hidden_layers)
    if tree.reached != layers:
        return f"{tree.reached} of its {layers} layers take another attention"
    limit = 1e-4 if packed_TD.dtype == torch.float32 else 5e-2
    for path, at in zip(paths, tree.paths, strict=True):
        row_PD = body(input_ids=path[None].to(device), use_cache=False).last_hidden_state[0]
        if not float((packed_TD[at.to(device)] - row_PD).norm()) <= limit * float(row_PD.norm()):
            return "its hidden states depend on more than tokens and positions"
    return ""
