"""The engine inside the process: a Hugging Face causal language model with continuous batching.

The keys and values of a row hold all its tokens but the last, which the next decode step feeds: so joining, and computing anew after an update, are
the same prefill, and no logits of it are needed. Rows of like lengths are prefilled together; a decode step serves all rows.

Invariants: those of engine.py; the turns are threaded.py's.

Not here: prefix reuse between calls, prefill of a long prompt in parts, sliding windows, several GPUs.

Shapes: B rows in flight, T cached columns, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import torch

from gyre.config import Config
from gyre.errors import WorkFailed
from gyre.rollout.engine import EngineRefused, EngineState, Transcript, uniform
from gyre.rollout.kv import SlotCache, use_slots_attention
from gyre.rollout.model import eos_ids, load_model, model_dir, position_limit
from gyre.rollout.sampling import sample
from gyre.rollout.threaded import Row, ThreadedEngine
from gyre.types import TensorSpec
from gyre.weights.snapshot import install, unpack

PREFILL_TOKENS: Final = {"cpu": 2048, "cuda": 8192}
"""Padded tokens of one prefill pass (one prompt may be longer). On a CPU, a pass whose activations leave the cache is a third slower."""


class TorchEngine(ThreadedEngine[Row]):
    """See `Engine`. The model (a causal language model of transformers) is the engine's from now on."""

    def __init__(self, model: Any, *, eos: frozenset[int], context: int, slots: int, queue: int, threads: int = 0) -> None:
        super().__init__(eos=eos, context=context, slots=slots, queue=queue)
        self._model = model
        self._threads = threads
        parameter = next(model.parameters())
        self._device, self._dtype = parameter.device, parameter.dtype
        self._prefill_tokens = PREFILL_TOKENS.get(self._device.type, PREFILL_TOKENS["cuda"])
        self._own_attention = use_slots_attention(model)
        self._vocabulary: int = model.get_input_embeddings().num_embeddings
        self._shapes: list[torch.Size] = []  # of the parameters, while it sleeps
        self._blank = False  # awake again, and without weights
        self._cache = SlotCache(model.config.get_text_config().num_hidden_layers)
        self._start()

    def _run(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)
        with torch.inference_mode():
            super()._run()

    def state(self) -> EngineState:
        held = sum(len(row.ids) for row in list(self.rows))  # of another thread: as good as a gauge need be
        return msgspec.structs.replace(super().state(), gauges={"kv_use": held / (self._slots * self.context)})

    def _row(self, transcript: Transcript) -> Row:
        row = Row(transcript)
        if min(row.ids) < 0 or max(row.ids) >= self._vocabulary:
            raise EngineRefused("error", f"token ids must lie in 0..{self._vocabulary - 1}")
        return row

    def _install(self, tensors: list[TensorSpec], data: memoryview) -> None:
        if tensors:
            install(self._model, unpack(tensors, data))
            self._blank = False
        elif self._blank:
            raise WorkFailed("there are no weights to keep: the engine has slept")
        self._cache.clear()
        self._prefill(range(len(self.rows)))

    def _drop(self) -> None:
        """Buffers (rotary frequencies and the like: kilobytes that no snapshot brings back) stay."""
        self._cache.clear()
        for parameter in self._model.parameters():
            self._shapes.append(parameter.shape)
            parameter.data = parameter.data.new_empty(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _restore(self) -> None:
        for parameter, shape in zip(self._model.parameters(), self._shapes, strict=True):
            parameter.data = parameter.data.new_empty(shape)
        self._shapes.clear()
        self._blank = True

    def _joined(self, first: int) -> None:
        self._prefill(range(first, len(self.rows)))

    def _moved(self, source: int, target: int) -> None:
        self._cache.move(source, target, len(self.rows[target].ids) - 1)

    def _prefill(self, indices: Sequence[int]) -> None:
        """Cache all tokens but the last of these rows: equal ones (a group's first calls) once, rows of like lengths together."""
        twins: dict[tuple[int, ...], list[int]] = {}
        for i in indices:
            if len(self.rows[i].ids) > 1:
                twins.setdefault(tuple(self.rows[i].ids[:-1]), []).append(i)
        order = sorted(twins.items(), key=lambda item: len(item[0]))
        while order:
            width = len(order[-1][0])
            n = max(1, min(len(order), self._prefill_tokens // width))
            part, order = order[-n:], order[:-n]
            padded = [[*ids, *[0] * (width - len(ids))] for ids, _ in part]
            self._cache.prefill(self._tensor([rows[0] for _, rows in part]), width, len(self.rows))
            self._forward(self._tensor(padded), self._causal_mask(width), torch.arange(width, device=self._device).expand(n, -1))
        for ids, rows in twins.items():
            for twin in rows[1:]:
                self._cache.move(rows[0], twin, len(ids))

    def _step(self) -> list[tuple[int, int, float]]:
        rows = self.rows
        columns = [len(row.ids) - 1 for row in rows]
        width = max(columns) + 1
        columns_B = self._tensor(columns)
        self._cache.decode(torch.arange(len(rows), device=self._device), columns_B, width)
        hidden_BT = torch.arange(width, device=self._device) > columns_B[:, None]
        mask_B11T = torch.zeros(len(rows), 1, 1, width, dtype=self._dtype, device=self._device).masked_fill_(hidden_BT[:, None, None], -math.inf)
        logits_BV = self._forward(self._tensor([[row.ids[-1]] for row in rows]), mask_B11T, columns_B[:, None])
        draws = [uniform(row.request.seed, row.transcript.draws) for row in rows]
        tokens, logprobs = sample(logits_BV, [row.request.sampling for row in rows], draws)
        if any(map(math.isnan, logprobs)):
            raise WorkFailed(f"the weights of version {self.version} give no finite probabilities: the policy has diverged")
        return list(zip(range(len(rows)), tokens, logprobs, strict=True))

    def _tensor(self, values: list[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, device=self._device)

    def _causal_mask(self, width: int) -> torch.Tensor:
        """The mask of a prefill pass; our own attention knows without."""
        if self._own_attention:
            return torch.zeros(1, 1, 1, 1, dtype=self._dtype, device=self._device)
        return torch.full((1, 1, width, width), -math.inf, dtype=self._dtype, device=self._device).triu_(1)

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The logits at the last position, (B, V)."""
        out = self._model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        logits_BV: torch.Tensor = out.logits[:, -1]
        return logits_BV


def open_torch(config: Config) -> TorchEngine:
    """The engine of a configuration; it has no version until the first `load`. Raises `UsageError`."""
    r = config.rollout
    model = load_model(config.model)
    directory = model_dir(config.model.path)
    context = min(r.context, position_limit(directory) or r.context)
    return TorchEngine(model, eos=eos_ids(directory), context=context, slots=r.slots, queue=r.queue, threads=r.threads)
