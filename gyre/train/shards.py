"""One rank's share of a learner: FSDP2 shards of parameters, accumulator and moments. All ranks of a cell call the same method at the same time.

Invariants
- Sums, never means: a gradient is reduce-scattered by addition in fp32, into accumulators that are this rank's shards of Σ ∇ numerator. The division
  is the optimizer's, once. So 1, 2 or 4 ranks accumulate the same.
- Every rank goes forward and backward equally often: one with fewer batches adds rows whose loss is 0, which count nowhere.
- The masters are the fp32 shards themselves; FSDP casts to the model's type when it gathers. Nothing is stored twice.
- Tallies and the gradient's norm are made equal on all ranks before anything is decided by them.
- Tied embeddings: the whole path from ids to log-probs is one root module, which gathers the shared matrix once for both its ends.

Not here: processes and who tells whom what to do (ranks.py). Tensor, context and expert parallelism: a row is one rank's, and so is a block's whole
layer while it is computed.

Shapes: N trainable tokens, R rows, T padded length.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from gyre.config import Config
from gyre.errors import WorkFailed
from gyre.train.group import TorchCollective
from gyre.train.metrics import Tally, merged
from gyre.train.model import MicroBatch, MicroStepData, Policy, TokenStats, micro_batches
from gyre.train.optimizer import SHARDS, Learner, set_random_state
from gyre.train.protocols import CollectiveFailed, Group
from gyre.weights.snapshot import model_tensors

_BACKWARD: Final = 3  # a trajectory to learn from costs so many times one that is only looked at


class _Scorer(torch.nn.Module):
    """FSDP's root: from a batch to its log-probs."""

    policy: Policy

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: MicroBatch) -> TokenStats:
        stats = self.policy.token_stats(batch)
        return TokenStats(stats.logprobs_N.clone(), stats.entropy_N)  # FSDP hooks onto its outputs, and warns of views


class Shards(Learner):
    """A learner whose tensors are this rank's shards. Every public method is collective; `full` tensors exist on rank 0 alone."""

    def __init__(self, config: Config, source: Path, loaded: Policy | None, mesh: DeviceMesh, control: dist.ProcessGroup, total_steps: int) -> None:
        """`loaded`: on rank 0 the whole policy, on the CPU; the others get their shards of it and need the directory's config.json only."""
        self.mesh, self._control = mesh, control
        self.rank, self.size = mesh.get_rank(), mesh.size()
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        scorer = _shard(source, self._dtype, mesh)
        dist.monitored_barrier(control, timedelta(seconds=config.run.start_timeout_s))  # imports and disks differ; from here on they keep step
        found = torch.tensor([int(loaded is not None and loaded.tree)])
        dist.all_reduce(found, dist.ReduceOp.MAX, control)
        path = Path(config.model.path) if config.model.path else source
        scorer.policy = Policy(scorer.model, path, config.rollout.temperature, check=False, tree=bool(found))
        self._asleep: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        self._skeleton: Any = None
        tensors: dict[str, Tensor] | None = None
        if loaded is not None:
            tensors = {**dict(loaded.model.named_parameters()), **dict(loaded.model.named_buffers())}
        _fill(scorer.model, tensors, mesh)
        if loaded is not None:
            self._skeleton = loaded.model.to("meta")  # knows how to write the model's files
        super().__init__(scorer.policy, config.train, total_steps)
        wanted, natural = config.train.backend, "nccl" if mesh.device_type == "cuda" else "gloo"
        self._collective = TorchCollective(self, None, natural if wanted == "auto" else wanted)
        self._scorer = scorer

    def _token_stats(self, batch: MicroBatch) -> TokenStats:
        stats: TokenStats = self._scorer(batch)
        return stats

    def _master(self, parameter: Tensor) -> Tensor:
        return _local(parameter).detach().requires_grad_()  # the same memory

    def _collect(self, name: str, parameter: Tensor) -> None:
        parameter.grad = self._whole(name, self._sums[name])  # FSDP adds to it in place

    def _whole(self, name: str, local: Tensor) -> DTensor:
        """A tensor of which `local` is this rank's shard, sharded like the parameter of that name."""
        p = self.parameters[name]
        assert isinstance(p, DTensor)
        return DTensor.from_local(local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())

    def accumulate(self, data: MicroStepData, version: int) -> None:
        """Add a micro-step's gradient; `data` is the whole of it, on every rank."""
        share = divide(data, self.size)[self.rank]
        batches = list(micro_batches(share, min(self._train.micro_step_tokens, self.policy.fits), self.policy.device, tree=self.policy.tree))
        learning, looking = [b for b in batches if b.learns], [b for b in batches if not b.learns]
        passes = torch.tensor([len(learning), len(looking)])
        dist.all_reduce(passes, dist.ReduceOp.MAX, self._control)
        whole, self.tally = self.tally, Tally()
        try:
            for own, number, learns in zip((learning, looking), passes.tolist(), (True, False), strict=True):
                for batch in own:
                    self._accumulate(batch, version)
                for _ in range(number - len(own)):
                    self._accumulate(_nothing(self.policy.device, learns), version, counted=False)
        finally:
            part, self.tally = self.tally, whole
        self._count(part)

    def _count(self, part: Tally) -> None:
        """Add all ranks' tallies of a micro-step to each rank's."""
        own = torch.tensor(part.numbers(), dtype=torch.float64)
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(parts, own, self._control)
        self.tally = merged([self.tally, *(Tally.of(p.tolist()) for p in parts)])

    def _norm(self, sums: list[Tensor]) -> float:
        squares = torch.stack([torch.linalg.vector_norm(s) for s in sums]).square().sum()
        dist.all_reduce(squares, dist.ReduceOp.SUM, self.mesh.get_group())
        return float(squares.sqrt())

    def _round(self) -> None:
        pass  # the masters are the model

    @torch.no_grad()
    def gradient(self, denominator: int) -> dict[str, Tensor]:
        """The full gradient, on every rank."""
        return {n: self._whole(n, s / denominator).full_tensor() for n, s in self._sums.items()}

    @property
    def weights(self) -> list[Tensor]:
        """This rank's shards of the weights, fp32, in the order of the parameters."""
        return [m.detach() for m in self.masters.values()]

    @torch.no_grad()
    def full(self) -> dict[str, Tensor]:
        """On rank 0 the policy's full tensors in the model's type, on the CPU; on the others nothing. At most one is whole on a device at a time."""
        full: dict[str, Tensor] = {}
        for name, tensor in model_tensors(self.policy.model).items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self.rank == 0:
                full[name] = whole.to(self._dtype if name in self.parameters else whole.dtype).cpu()
        return full

    def load(self, tensors: Mapping[str, Tensor] | None) -> None:
        """Take other weights: rank 0 brings them all, each rank keeps its shards."""
        _fill(self.policy.model, tensors, self.mesh, buffers=False)

    @torch.no_grad()
    def write(self, directory: Path) -> None:
        """Weights by rank 0 as a Hugging Face directory; the optimizer by all, each its shards, in one safetensors file a rank."""
        weights = self.full()
        if self.rank == 0:
            self._skeleton.save_pretrained(directory, state_dict=weights)
            (directory / SHARDS).mkdir()
        tensors: dict[str, Any] = {"random/torch": torch.get_rng_state()}
        if self._dtype != torch.float32:
            tensors |= {f"master/{n}": self._whole(n, m) for n, m in self.masters.items()}
        for name, master in self.masters.items():
            for kind, value in self.adam.state.get(master, {}).items():
                tensors[f"{kind}/{name}"] = self._whole(name, value) if value.ndim else value
        dist.barrier(self._control)  # the directory is there
        writer = HuggingFaceStorageWriter(str(directory / SHARDS), save_distributed=True)
        save_distributed(tensors, storage_writer=writer, process_group=self._control)

    @torch.no_grad()
    def read(self, directory: Path) -> None:
        """Set the optimizer from a checkpoint of any number of ranks; each rank reads what is its own."""
        found = _reader(directory)
        tensors: dict[str, Tensor] = {}
        for key, size in found.items():
            kind, _, name = key.partition("/")
            if kind == "random":
                tensors[key] = torch.empty(size, dtype=torch.uint8)
            elif name not in self.masters or (size and size != self.parameters[name].shape):
                raise WorkFailed(f"the optimizer in {directory} does not fit the model: {name}")
            elif kind == "master":
                tensors[key] = self._whole(name, self.masters[name].detach())
            else:
                tensors[key] = self._whole(name, torch.zeros_like(self.masters[name])) if size else torch.zeros(())
        load_distributed(tensors, storage_reader=HuggingFaceStorageReader(str(_place(directory))), process_group=self._control)
        set_random_state(tensors)
        for key, value in tensors.items():
            kind, _, name = key.partition("/")
            if kind != "master":
                self.adam.state[self.masters[name]][kind] = _local(value)

    def across(self, group: Group, deadline_s: float, weights: bool) -> None:
        """Reduce accumulators to the core, or take its weights: this rank with the same rank of the other cells, in a group of their own.

        The ranks of the cell agree whether it succeeded: if not, all of them raise `CollectiveFailed`, and accumulators are as before.
        """
        why, own = "", replace(group, name=f"{group.name}/{self.rank}")
        try:
            self._collective.together(own, deadline_s, weights)
        except CollectiveFailed as e:
            why = str(e)
        failed = torch.tensor([float(bool(why))])
        dist.all_reduce(failed, dist.ReduceOp.MAX, self._control)
        if failed.item():
            self.totals = self.totals if weights else None
            raise CollectiveFailed(why or "another rank of this cell failed")

    def sleep(self) -> None:
        """Leave the device: weights, sums and moments go to the host. Nothing changes in value. On a CPU there is nothing to do."""
        if self.policy.device.type != "cpu":
            self.evict()
            torch.cuda.empty_cache()

    def evict(self) -> None:
        """Copy the storages to the host and free them; whoever aliases them, FSDP too, finds them again after `wake`."""
        moments = [v for state in self.adam.state.values() for v in state.values() if v.ndim]
        for tensor in (*self.masters.values(), *self._sums.values(), *(self.totals or ()), *moments):
            storage = tensor.untyped_storage()
            if storage.size():
                self._asleep.append((storage, storage.cpu() if storage.device.type != "cpu" else storage.clone()))
                storage.resize_(0)

    def wake(self) -> None:
        """Come back to the device."""
        for storage, host in self._asleep:
            storage.resize_(host.size())
            storage.copy_(host)
        self._asleep.clear()


def divide(data: MicroStepData, ranks: int) -> list[MicroStepData]:
    """Share a micro-step's executions among ranks, evenly by work: the heaviest first, each to the rank that has least. Some may get none."""
    weights: Counter[str] = Counter()
    for t in data.trajectories:
        weights[t.rollout_id] += t.n_tokens * (_BACKWARD if t.advantage else 1)
    loads, owners = [0] * ranks, dict.fromkeys(weights, 0)
    for execution in sorted(weights, key=lambda e: -weights[e]):
        owners[execution] = loads.index(min(loads))
        loads[owners[execution]] += weights[execution]
    owner = [owners[t.rollout_id] for t in data.trajectories]
    owner_S = torch.tensor(owner, dtype=torch.int64).repeat_interleave(torch.tensor([t.n_tokens for t in data.trajectories], dtype=torch.int64))
    return [
        MicroStepData(
            [t for t, o in zip(data.trajectories, owner, strict=True) if o == rank],
            *(a[owner_S == rank] for a in (data.token_ids_S, data.loss_mask_S, data.logprobs_S, data.versions_S)),
        )
        for rank in range(ranks)
    ]


def _nothing(device: torch.device, learns: bool) -> MicroBatch:
    """A row whose loss and gradient are 0."""
    zero_N = torch.zeros(1, dtype=torch.int64, device=device)
    return MicroBatch(zero_N.new_zeros(1, 2), zero_N, zero_N, zero_N.float(), zero_N, zero_N.float(), zero_N.float() + 1, zero_N, learns)


def _shard(source: Path, dtype: torch.dtype, mesh: DeviceMesh) -> Any:
    """The model of a directory, its memory allocated but not set: each block's parameters in shards of their own, all else in the root's."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        config = AutoConfig.from_pretrained(source, local_files_only=True)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    scorer = _Scorer(model.eval())
    mixed = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    blocks = [m for m in model.modules() if type(m).__name__ in (model._no_split_modules or ())]
    for module in (*blocks, scorer):
        fully_shard(module, mesh=mesh, mp_policy=mixed, reshard_after_forward=True)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reduce_scatter_unused_params(True)  # an expert that no token of this rank met: all ranks must reduce the same
    scorer.to_empty(device=mesh.device_type)
    return scorer


@torch.no_grad()
def _fill(model: torch.nn.Module, tensors: Mapping[str, Tensor] | None, mesh: DeviceMesh, *, buffers: bool = True) -> None:
    """Set a sharded model's parameters, and its buffers, from rank 0's `tensors`, one at a time."""
    for name, target in (*model.named_parameters(), *(model.named_buffers() if buffers else ())):
        if tensors is None:
            source = torch.empty(target.shape, dtype=target.dtype, device=mesh.device_type)
        else:
            source = tensors[name].detach().to(device=mesh.device_type, dtype=target.dtype)
        if isinstance(target, DTensor):
            target.to_local().copy_(distribute_tensor(source, mesh, target.placements, src_data_rank=0).to_local())
        else:
            dist.broadcast(source, 0, mesh.get_group())
            target.copy_(source)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _place(directory: Path) -> Path:
    """Where a checkpoint's optimizer lies: in shards, or in one file beside the weights, whose names differ from all of its own."""
    return directory / SHARDS if (directory / SHARDS).is_dir() else directory


def _reader(directory: Path) -> dict[str, torch.Size]:
    """Names and full sizes of a checkpoint's optimizer tensors."""
    place = _place(directory)
    found = HuggingFaceStorageReader(str(place)).read_metadata().state_dict_metadata
    kinds: Iterable[str] = ("random", "master", "exp_avg", "exp_avg_sq", "step")
    return {k: v.size for k, v in found.items() if k.partition("/")[0] in kinds}  # type: ignore[union-attr]


def read_full(place: Path) -> dict[str, Tensor]:
    """All tensors of an optimizer that several ranks wrote, whole, without any process group."""
    reader = HuggingFaceStorageReader(str(place))
    tensors = {k: torch.empty(v.size, dtype=v.properties.dtype) for k, v in reader.read_metadata().state_dict_metadata.items()}  # type: ignore[union-attr]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it was told to be
        load_distributed(tensors, storage_reader=reader, no_dist=True)
    return tensors
