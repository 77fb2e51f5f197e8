"""The policy as the trainer sees it: a Hugging Face causal model, and log-probs of the tokens that bear loss.

Invariants
- Log-probs are those of the distribution tokens are drawn from at the run's temperature, computed in fp32.
- Logits exist for the positions that predict a trainable token only, a bounded number of rows at a time; the backward pass computes them again.
- Activations are bounded: `fits` tokens go through the model together. Of a longer row each layer keeps its input alone, and the backward pass
  computes the rest of it again.
- Rows are padded on the right, so a causal model needs no attention mask; a row ends before its last trainable token. Or trajectories are packed as
  trees (tree.py), each shared token once, where that saves something.
- The model stays in evaluation mode: dropout would make the ratio to the rollout's log-probs a lottery.

Not here: top-p and top-k (the rollout's log-probs are of the truncated distribution, these of the whole), parallelism within a cell.

Shapes: R rows of a micro-batch, T padded length, N trainable tokens, C ≤ N rows of a chunk, D hidden size, V vocabulary; `_S` is all tokens of a
micro-step one behind the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gyre.config import Config, Model
from gyre.errors import UsageError
from gyre.train import tree as trees
from gyre.train.tree import Tree
from gyre.types import PackedTrajectory

_LOGITS_AT_ONCE: Final = 1 << 24  # elements of a chunk's logits: 64 MiB in fp32
_KEPT_BYTES: Final = 1 << 31  # of activations, on a CPU; on a GPU a quarter of its memory
_KEPT_PER: Final = {torch.float32: 92, torch.bfloat16: 53}  # bytes of activations per token, layer and element of a hidden state, about
_WORTH: Final = 0.9  # a tree with more than this part of its rows' tokens is trained as rows


class TokenStats(NamedTuple):
    """Of each trainable token: its log-prob (with gradient) and the entropy of the distribution it was drawn from (without)."""

    logprobs_N: Tensor
    entropy_N: Tensor


@dataclass(frozen=True, slots=True)
class MicroStepData:
    """A claimed micro-step: its trajectories and their tokens one behind the other, on the CPU."""

    trajectories: Sequence[PackedTrajectory]
    token_ids_S: Tensor
    loss_mask_S: Tensor
    logprobs_S: Tensor
    versions_S: Tensor

    @classmethod
    def from_arrays(cls, trajectories: Sequence[PackedTrajectory], arrays: dict[str, memoryview]) -> MicroStepData:
        """From a message's arrays, which are read-only and not ours, hence copied."""

        def tensor(name: str, dtype: torch.dtype) -> Tensor:
            raw = bytearray(arrays[name])
            return torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)

        data = cls(
            trajectories,
            tensor("token_ids", torch.int32),
            tensor("loss_mask", torch.int8),
            tensor("logprobs", torch.float32),
            tensor("versions", torch.int32),
        )
        n_tokens = sum(t.n_tokens for t in trajectories)
        assert all(len(a) == n_tokens for a in (data.token_ids_S, data.loss_mask_S, data.logprobs_S, data.versions_S)), "arrays of one length"
        return data


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows that go through the model together. `at_N` points into the flattened [R·T] positions that predict `targets_N`."""

    ids_RT: Tensor
    at_N: Tensor
    targets_N: Tensor
    old_logprobs_N: Tensor
    versions_N: Tensor
    advantages_N: Tensor
    execution_trainable_N: Tensor
    sequences_N: Tensor  # which of the batch's trajectories
    learns: bool  # some advantage is not 0: else there is nothing to go backward for
    tree: Tree | None = None  # how the one packed row is to be read


class _Row(NamedTuple):
    """A trajectory's share of a micro-step: where it starts, the positions of its trainable tokens, its length as model input."""

    trajectory: PackedTrajectory
    start: int
    positions: Tensor
    length: int

    def ids(self, data: MicroStepData) -> Tensor:
        """Its token ids as model input."""
        return data.token_ids_S[self.start : self.start + self.length]


class _Unit(NamedTuple):
    """What is batched whole: a trajectory as a row, or all trajectories of an execution as a tree of `size` tokens."""

    rows: list[_Row]
    size: int
    tree: bool

    @property
    def idle(self) -> bool:
        return self.rows[0].trajectory.advantage == 0


def micro_batches(data: MicroStepData, tokens: int, device: torch.device, *, tree: bool = False) -> Iterator[MicroBatch]:
    """Cut a micro-step into batches of at most `tokens` tokens, padded ones included (a longer row or tree gets one of its own), rows of like length
    together. With `tree`, an execution's trajectories that share prefixes are packed as one.

    Trajectories without advantage come in batches of their own, for their statistics. A trajectory's first token has no prediction and is never
    trainable; one without a trainable token is left out.
    """
    batch: list[_Unit] = []
    for unit in sorted(_units(data, tree), key=lambda u: (u.idle, u.tree, u.size)):
        same = batch and (batch[0].idle, batch[0].tree) == (unit.idle, unit.tree)
        size = unit.size + sum(u.size for u in batch) if unit.tree else unit.size * (len(batch) + 1)
        if batch and (not same or size > tokens):
            yield _micro_batch(data, batch, device)
            batch = []
        batch.append(unit)
    if batch:
        yield _micro_batch(data, batch, device)


def _units(data: MicroStepData, tree: bool) -> Iterator[_Unit]:
    executions: dict[str, list[_Row]] = {}
    start = 0
    for t in data.trajectories:
        positions = data.loss_mask_S[start + 1 : start + t.n_tokens].nonzero().flatten() + 1
        if len(positions):
            executions.setdefault(t.rollout_id, []).append(_Row(t, start, positions, int(positions[-1])))
        start += t.n_tokens
    for rows in executions.values():
        if tree and len(rows) > 1:
            size = len(trees.lay_out([r.ids(data) for r in rows]).ids_T)
            if size <= _WORTH * sum(r.length for r in rows):
                yield _Unit(rows, size, True)
                continue
        yield from (_Unit([r], r.length, False) for r in rows)


def _micro_batch(data: MicroStepData, units: list[_Unit], device: torch.device) -> MicroBatch:
    rows = [r for u in units for r in u.rows]
    tree = trees.lay_out([r.ids(data) for r in rows]) if units[0].tree else None
    if tree is not None:
        ids_RT = tree.ids_T[None]
        at_N = torch.cat([path[r.positions - 1] for path, r in zip(tree.paths, rows, strict=True)])
    else:
        width = max(r.length for r in rows)
        ids_RT = torch.zeros(len(rows), width, dtype=torch.int64)
        for i, r in enumerate(rows):
            ids_RT[i, : r.length] = r.ids(data)
        at_N = torch.cat([i * width + r.positions - 1 for i, r in enumerate(rows)])
    from_N = torch.cat([r.start + r.positions for r in rows])
    counts_R = torch.tensor([len(r.positions) for r in rows])
    advantages_R = torch.tensor([r.trajectory.advantage for r in rows], dtype=torch.float32)
    trainable_R = torch.tensor([r.trajectory.execution_trainable for r in rows], dtype=torch.float32)
    return MicroBatch(
        ids_RT=ids_RT.to(device),
        at_N=at_N.to(device),
        targets_N=data.token_ids_S[from_N].long().to(device),
        old_logprobs_N=data.logprobs_S[from_N].to(device),
        versions_N=data.versions_S[from_N].to(device),
        advantages_N=advantages_R.repeat_interleave(counts_R).to(device),
        execution_trainable_N=trainable_R.repeat_interleave(counts_R).to(device),
        sequences_N=torch.arange(len(rows)).repeat_interleave(counts_R).to(device),
        learns=bool((advantages_R != 0).any()),
        tree=None if tree is None else tree.to(device),
    )


class Policy:
    """A causal model, and the directory of its tokenizer. `model` is the Hugging Face model, in evaluation mode; `tree`: it takes packed trees."""

    def __init__(
        self, model: Any, source: Path, temperature: float, logits_at_once: int = _LOGITS_AT_ONCE, kept_bytes: int = 0, *, check: bool = True,
        tree: bool = False,
    ) -> None:  # fmt: skip
        self.model = model.eval()
        self.source = source
        self.device: torch.device = next(model.parameters()).device
        self._temperature = temperature or 1.0  # greedy rollouts are scored by the distribution itself
        self._body = model.base_model
        self._head = model.get_output_embeddings()
        config = model.config.get_text_config()
        self._rows_at_once = max(1, logits_at_once // int(config.vocab_size))
        per_token = _KEPT_PER.get(model.dtype, 92) * int(config.hidden_size) * int(config.num_hidden_layers)
        self.fits = max(1, (kept_bytes or _kept_bytes(self.device)) // per_token)
        self._again = False  # compute activations again in the backward pass
        self._watch_layers()
        if check:
            self._check_head()
        self.tree = tree and (trees.adopt(model, self._body, self.device) if check else True)
        if tree and not check:
            trees.install(model)

    @classmethod
    def load(cls, path: Path, config: Model, temperature: float, *, tree: bool = False) -> Policy:
        """Load a model directory. Raises `UsageError` for a directory or device that cannot be used.

        Its `source`, whose tokenizer goes into checkpoints, is `config.path` if there is one: a checkpoint it was loaded from may be pruned.
        `tree`: have it take packed trees, if it can.
        """
        from safetensors import SafetensorError
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # type: ignore[no-untyped-call]  # a process's log is no place for one
        if not path.is_dir():
            raise UsageError("run.toml", f"{str(path)!r} is not a directory", "give a Hugging Face model directory", "model.path")
        if not (path / "config.json").is_file():
            raise UsageError("run.toml", f"{path} has no config.json", "give a Hugging Face model directory", "model.path")
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, config.dtype), local_files_only=True)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as e:
            first = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
            raise UsageError("run.toml", f"{path} cannot be loaded ({first})", "give a complete Hugging Face causal model", "model.path") from e
        return cls(model.to(device_of(config.device)), Path(config.path) if config.path else path, temperature, tree=tree)

    @torch.no_grad()
    def _check_head(self) -> None:
        """Models that scale or cap their logits behind the output embeddings would be trained on wrong log-probs."""
        if self._head is None or self._body is self.model:
            raise UsageError(
                "run.toml", f"{type(self.model).__name__} has no separate output embeddings", "give a decoder-only causal model", "model.path"
            )
        ids = torch.arange(2, device=self.device)[None]
        whole = self.model(input_ids=ids, use_cache=False).logits
        if not torch.allclose(whole, self._head(self._body(input_ids=ids, use_cache=False).last_hidden_state), rtol=1e-3, atol=1e-3):
            name = type(self.model).__name__
            raise UsageError(
                "run.toml", f"{name} changes its logits after the output embeddings", "give a model that does not cap or scale them", "model.path"
            )

    def _watch_layers(self) -> None:
        """Have each layer compute again what it did not keep, when `_again` says so. Transformers would do it in training mode alone."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        def forward(layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self._again:
                return checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
            return layer(*args, **kwargs)

        for module in self.model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.forward = partial(forward, module.forward)

    def token_stats(self, batch: MicroBatch) -> TokenStats:
        """Log-prob and entropy of each trainable token of a micro-batch."""
        self._again = torch.is_grad_enabled() and batch.ids_RT.numel() > self.fits
        tree = {} if batch.tree is None else {"position_ids": batch.tree.depth_T[None], trees.NAME: batch.tree}
        hidden_RTD = self._body(input_ids=batch.ids_RT, use_cache=False, **tree).last_hidden_state
        hidden_ND = hidden_RTD.flatten(0, 1)[batch.at_N]
        size = self._rows_at_once
        if len(batch.at_N) <= size:
            return TokenStats(*self._chunk(hidden_ND, batch.targets_N))
        parts = [
            checkpoint(self._chunk, hidden_CD, targets_C, use_reentrant=False, preserve_rng_state=False)
            for hidden_CD, targets_C in zip(torch.split(hidden_ND, size), torch.split(batch.targets_N, size), strict=True)
        ]
        return TokenStats(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))

    def _chunk(self, hidden_CD: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        logits_CV = self._head(hidden_CD).float()
        if self._temperature != 1.0:
            logits_CV = logits_CV / self._temperature
        all_logprobs_CV = torch.log_softmax(logits_CV, -1)
        with torch.no_grad():
            entropy_C = -(all_logprobs_CV.exp() * all_logprobs_CV).nan_to_num(0.0).sum(-1)
        return all_logprobs_CV.gather(-1, targets_C[:, None])[:, 0], entropy_C


def _kept_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory // 4 if device.type == "cuda" else _KEPT_BYTES


def takes_trees(config: Config) -> bool:
    """Can a run have executions with several trajectories, to be packed as trees?"""
    return config.train.prefix_tree and config.trajectory.max_per_execution > 1


def device_of(name: str) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UsageError("run.toml", "no usable GPU", "set it to auto or cpu", "model.device")
    return torch.device("cuda" if name != "cpu" and available else "cpu")
