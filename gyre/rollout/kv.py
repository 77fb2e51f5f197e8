"""Keys and values of the requests in flight: one row each, in dense tensors that grow on demand.

Invariants
- Rows in use are 0..n-1, and a row's tokens lie in columns 0..len-1: a decode step reads one view per layer, without copying.
- What lies behind a row's length is finite (zeros or older values) and masked, never read into a result.

Not here: paging, sharing of prefixes, sliding windows. The width read is that of the longest row in flight.

Shapes: B rows, K key-value heads, H query heads, Q query positions, T columns, D head dimension.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION: Final = "gyre_slots"
_LEAST_COLUMNS: Final = 64


class Cursor:
    """Where the forward pass under way writes, shared by all layers."""

    def __init__(self) -> None:
        self.rows_B: torch.Tensor = torch.empty(0, dtype=torch.long)
        self.columns_B: torch.Tensor = torch.empty(0, dtype=torch.long)  # decode: where each row's new token goes
        self.n = 0  # decode: rows 0..n-1 are read; 0 means prefill
        self.width = 0  # columns written (prefill) or read (decode)
        self.rows_held = 0


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's rows. Prefill hands the new keys and values straight on; decode returns views on all columns."""

    def __init__(self, cursor: Cursor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cursor = cursor

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = key_states.new_zeros(0, key_states.shape[1], 0, key_states.shape[3])
        self.values = value_states.new_zeros(0, value_states.shape[1], 0, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        c = self._cursor
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._grow(c.rows_held, c.width)
        assert self.keys is not None and self.values is not None
        if c.n == 0:
            self.keys[c.rows_B, :, : c.width] = key_states
            self.values[c.rows_B, :, : c.width] = value_states
            return key_states, value_states
        self.keys[c.rows_B, :, c.columns_B] = key_states[:, :, 0]
        self.values[c.rows_B, :, c.columns_B] = value_states[:, :, 0]
        return self.keys[: c.n, :, : c.width], self.values[: c.n, :, : c.width]

    def _grow(self, rows: int, columns: int) -> None:
        assert self.keys is not None and self.values is not None
        held_rows, heads, held_columns, _ = self.keys.shape
        if rows <= held_rows and columns <= held_columns:
            return
        rows = held_rows if rows <= held_rows else max(rows, 2 * held_rows)
        columns = held_columns if columns <= held_columns else max(columns, 2 * held_columns, _LEAST_COLUMNS)
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(rows, heads, columns, old.shape[3])
            new[:held_rows, :, :held_columns] = old
            setattr(self, name, new)

    def move(self, source: int, target: int, length: int) -> None:
        if self.keys is not None and self.values is not None:
            self.keys[target, :, :length] = self.keys[source, :, :length]
            self.values[target, :, :length] = self.values[source, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cursor.width, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """The cache of all layers. Tell it with `prefill` or `decode` what the next forward pass is, then pass it as `past_key_values`."""

    def __init__(self, n_layers: int) -> None:
        self.cursor = Cursor()
        self._slot_layers = [SlotLayer(self.cursor) for _ in range(n_layers)]
        super().__init__(layers=list(self._slot_layers))

    def prefill(self, rows_B: torch.Tensor, width: int, rows_held: int) -> None:
        """The next pass computes columns 0..width-1 of `rows_B` from nothing (right-padded)."""
        c = self.cursor
        c.rows_B, c.n, c.width, c.rows_held = rows_B, 0, width, rows_held

    def decode(self, rows_B: torch.Tensor, columns_B: torch.Tensor, width: int) -> None:
        """The next pass computes one token for each of rows 0..B-1, at `columns_B`, and reads columns 0..width-1."""
        c = self.cursor
        c.rows_B, c.columns_B, c.n, c.width, c.rows_held = rows_B, columns_B, len(rows_B), width, len(rows_B)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a row's first `length` columns over another row."""
        for layer in self._slot_layers:
            layer.move(source, target, length)

    def clear(self) -> None:
        """Forget everything, memory included."""
        for layer in self._slot_layers:
            layer.keys = layer.values = None
            layer.is_initialized = False


def slots_attention(
    module: torch.nn.Module,
    query_BHQD: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of an engine's two kinds of pass, sparing the copies that masked grouped-query attention costs otherwise.

    Prefill (Q = T) is causal whatever the mask says. In decoding (Q = 1) the query heads of a group become its query positions.
    """
    batch, heads, queries, dim = query_BHQD.shape
    kv_heads = key_BKTD.shape[1]
    if queries == 1 and attention_mask is not None and attention_mask.shape[-1] == key_BKTD.shape[2]:
        grouped = query_BHQD.reshape(batch, kv_heads, heads // kv_heads, dim)
        out = F.scaled_dot_product_attention(grouped, key_BKTD, value_BKTD, attn_mask=attention_mask, scale=scaling)
        return out.reshape(batch, 1, heads, value_BKTD.shape[3]), None
    return sdpa_attention_forward(module, query_BHQD, key_BKTD, value_BKTD, None, dropout=dropout, scaling=scaling, is_causal=True, **kwargs)


def use_slots_attention(model: torch.nn.Module) -> bool:
    """Let `model` attend by `slots_attention`. Returns False, and leaves it as it is, when its family does not allow that."""
    if not getattr(model, "_supports_attention_backend", False):
        return False
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, slots_attention)
    model.set_attn_implementation(ATTENTION)  # type: ignore[operator]
    return True
