"""The gradient accumulator and the update: numerators in fp32, divided once, clipped, AdamW.

Invariants
- Between `zero` and `update` the accumulator holds Σ ∇ numerator over what was accumulated, undivided, in fp32 whatever the weights' type, and
  the weights do not change. A reduction over cells writes `totals` and leaves it as it is.
- The masters are fp32: the model's own parameters if it is fp32, else copies which are rounded into the model after each update.
- Weight decay spares vectors (norms, biases).
- What continues a run is named tensors: `{kind}/{parameter}` with kind exp_avg, exp_avg_sq, step and, where the model is not fp32, master; and the
  random state.

Not here: which micro-steps belong to a step (the ledger's), how cells reduce (group.py), several ranks (shards.py, which overrides what they change).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from gyre.config import Train
from gyre.errors import WorkFailed
from gyre.train.metrics import Tally, detached
from gyre.train.model import MicroBatch, MicroStepData, Policy, TokenStats, micro_batches
from gyre.train.objective import OBJECTIVES, TokenLoss, Tokens, divisor, numerator, region
from gyre.train.protocols import Update
from gyre.types import TensorSpec, Version
from gyre.weights.snapshot import Allocate, Snapshot, install, model_tensors, pack, unpack

OPTIMIZER: Final = "optimizer.safetensors"  # a checkpoint's optimizer as one rank writes it
SHARDS: Final = "optimizer"  # as several ranks write it: a directory with one file of each


def learning_rate(train: Train, step: int, total_steps: int) -> float:
    """The rate of step 1..total_steps: linear warm-up, then constant or a decay that reaches lr_min at the last step."""
    if step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    if train.lr_schedule == "constant" or total_steps <= train.warmup_steps:
        return train.lr
    done = min(1.0, (step - train.warmup_steps) / (total_steps - train.warmup_steps))
    share = 1.0 - done if train.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return train.lr_min + (train.lr - train.lr_min) * share


class Learner:
    """A policy with its accumulator and optimizer state. Not thread-safe: one thread computes."""

    publish_s = 0.0  # a publication takes at least so long

    def __init__(self, policy: Policy, train: Train, total_steps: int) -> None:
        self._region = region(train)
        self.policy = policy
        self.tally = Tally()
        self._train = train
        self.total_steps = total_steps
        self._objective = OBJECTIVES[train.objective]
        self.parameters: dict[str, Tensor] = dict(policy.model.named_parameters())
        self.masters = {n: self._master(p) for n, p in self.parameters.items()}
        self._sums = {n: torch.zeros_like(m, requires_grad=False) for n, m in self.masters.items()}
        self.totals: list[Tensor] | None = None  # the accumulators of all cells, summed, once they were reduced
        for name, p in self.parameters.items():
            self._collect(name, p)
        groups = [
            {"params": [m for m in self.masters.values() if m.ndim >= 2], "weight_decay": train.weight_decay},
            {"params": [m for m in self.masters.values() if m.ndim < 2], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW([g for g in groups if g["params"]], lr=train.lr, betas=(train.beta1, train.beta2), eps=train.eps)

    def _token_stats(self, batch: MicroBatch) -> TokenStats:
        return self.policy.token_stats(batch)

    def _master(self, parameter: Tensor) -> Tensor:
        return parameter if parameter.dtype == torch.float32 else parameter.detach().float().requires_grad_()

    def _collect(self, name: str, parameter: Tensor) -> None:
        """Make backward passes add this parameter's gradient to its sum."""
        parameter.register_post_accumulate_grad_hook(self._adder(self._sums[name]))  # type: ignore[no-untyped-call]

    @staticmethod
    def _adder(sums: Tensor) -> Callable[[Tensor], None]:
        def add(parameter: Tensor) -> None:
            assert parameter.grad is not None
            sums.add_(parameter.grad)
            parameter.grad = None

        return add

    def zero(self) -> None:
        """Forget what was accumulated."""
        for s in self._sums.values():
            s.zero_()
        self.totals = None
        self.tally = Tally()

    @property
    def sums(self) -> list[Tensor]:
        """The accumulator, fp32, in the order of the parameters."""
        return list(self._sums.values())

    @property
    def weights(self) -> list[Tensor]:
        """The weights, each storage once, in the order of the model."""
        return list(model_tensors(self.policy.model).values())

    def snapshot(self, version: Version, allocate: Allocate = bytearray) -> Snapshot:
        """A copy of the weights."""
        return pack(version, model_tensors(self.policy.model), allocate)

    def install(self, specs: list[TensorSpec], data: memoryview) -> None:
        """Take the weights of a snapshot; masters follow."""
        install(self.policy.model, unpack(specs, data))
        with torch.no_grad():
            for name, master in self.masters.items():
                if master is not self.parameters[name]:
                    master.copy_(self.parameters[name])

    def accumulate(self, data: MicroStepData, version: int) -> None:
        """Add a micro-step's gradient of the objective's numerator. `version` is that of the weights."""
        for batch in micro_batches(data, min(self._train.micro_step_tokens, self.policy.fits), self.policy.device, tree=self.policy.tree):
            self._accumulate(batch, version)

    def _accumulate(self, batch: MicroBatch, version: int, *, counted: bool = True) -> None:
        if not bool(batch.old_logprobs_N.isfinite().all()):
            raise WorkFailed("a trainable token came without the log-prob it was sampled with")
        with torch.set_grad_enabled(batch.learns):
            stats = self._token_stats(batch)
            kept_N = self._young(batch, version)
            tokens = Tokens(*(x[kept_N] for x in (stats.logprobs_N, batch.old_logprobs_N, batch.advantages_N, batch.sequences_N)))
            losses: TokenLoss = self._objective.loss(tokens, *self._region)
            total = numerator(losses.loss_N, batch.execution_trainable_N[kept_N], self._objective.denominator)
        if batch.learns:
            total.backward()  # type: ignore[no-untyped-call]
        if not counted:
            return
        self.tally.add(
            numerator=float(total.detach()),
            new_logprobs_N=detached(stats.logprobs_N),
            old_logprobs_N=detached(batch.old_logprobs_N),
            entropy_N=detached(stats.entropy_N),
            outside_N=losses.outside_N.cpu(),
            versions_N=batch.versions_N.cpu(),
            version=version,
        )

    def _young(self, batch: MicroBatch, version: int) -> Tensor | slice:
        """Which tokens may bear loss: those not older than the cap, if there is one. The others stay in every denominator."""
        lag = self._train.max_version_lag
        return version - batch.versions_N <= lag if lag else slice(None)

    @torch.no_grad()
    def update(self, step: int, executions: int, trainable: int | None = None) -> Update:
        """Divide the sums of all cells, clip, AdamW; then forget the gradient. The tally stays until `zero`.

        `executions`, `trainable`: graded executions and trainable tokens of the whole step, the latter by default those of this cell.
        """
        lr = learning_rate(self._train, step, self.total_steps)
        trainable = self.tally.trainable if trainable is None else trainable
        if executions == 0 or trainable == 0:
            return Update(False, None, lr)
        sums = self.sums if self.totals is None else self.totals
        for s in sums:
            s.div_(divisor(self._train, executions, trainable))
        norm = self._norm(sums)
        if not math.isfinite(norm):
            return Update(False, None, lr)
        if norm == 0:  # every group was uniform: momentum alone would drift on without any signal
            return Update(False, 0.0, lr)
        if 0 < self._train.clip_norm < norm:
            for s in sums:
                s.mul_(self._train.clip_norm / norm)
        for master, s in zip(self.masters.values(), sums, strict=True):
            master.grad = s
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        for master in self.masters.values():
            master.grad = None
        self._round()
        return Update(True, norm, lr)

    def _norm(self, sums: list[Tensor]) -> float:
        return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(s) for s in sums])))

    def _round(self) -> None:
        """Bring the masters into the model."""
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                self.parameters[name].copy_(master)

    def write(self, directory: Path) -> None:
        """Write weights and optimizer into a checkpoint that is being made."""
        from safetensors.torch import save_file

        self.policy.model.save_pretrained(directory)
        tensors = {"random/torch": torch.get_rng_state()}
        if torch.cuda.is_available():
            tensors["random/cuda"] = torch.cuda.get_rng_state()
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                tensors[f"master/{name}"] = master.detach().cpu().contiguous()
            for kind, value in self.adam.state.get(master, {}).items():
                tensors[f"{kind}/{name}"] = value.detach().cpu().contiguous()
        save_file(tensors, directory / OPTIMIZER)

    @torch.no_grad()
    def read(self, directory: Path) -> None:
        """Set the optimizer from a checkpoint that any number of ranks wrote; the weights were loaded from it before. Raises `WorkFailed`."""
        if (directory / SHARDS).is_dir():
            from gyre.train.shards import read_full

            tensors = read_full(directory / SHARDS)
        else:
            from safetensors.torch import load_file

            tensors = load_file(directory / OPTIMIZER)
        set_random_state(tensors)
        for key, value in tensors.items():
            kind, _, name = key.partition("/")
            master = self.masters.get(name)
            if master is None or (value.ndim and value.shape != master.shape):
                raise WorkFailed(f"the optimizer in {directory} does not fit the model: {name}")
            if kind == "master":
                master.copy_(value)
            else:
                self.adam.state[master][kind] = value if kind == "step" else value.to(master.device)

    def sleep(self) -> None:
        """Leave the device, so that the cell's engine has it. Values stay, bit for bit."""
        self._move(torch.device("cpu"))

    def wake(self) -> None:
        """Come back to the device."""
        self._move(self.policy.device)

    def _move(self, device: torch.device) -> None:
        """Move storages under their tensors, which hooks and optimizer go on to hold."""
        moments = [t for state in self.adam.state.values() for t in state.values() if isinstance(t, Tensor) and t.ndim]
        for t in [*self.policy.model.parameters(), *self.policy.model.buffers(), *self.masters.values(), *self._sums.values(), *moments]:
            t.data = t.data.to(device)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def set_random_state(tensors: dict[str, Tensor]) -> None:
    """Take the random states out of a checkpoint's tensors and set them."""
    torch.set_rng_state(tensors.pop("random/torch"))
    cuda = tensors.pop("random/cuda", None)
    if cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)
