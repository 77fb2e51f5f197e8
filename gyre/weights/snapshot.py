"""Weights as bytes: named tensors in one contiguous buffer, and the store that lends such snapshots to readers.

Invariants
- A snapshot is immutable: its buffer is written once, before it exists, and never again. A reader sees the bytes of exactly one version, or is told
  that they are gone; torn bytes cannot happen.
- Tied tensors (lm_head = embed_tokens) are stored once, under the first of their names; `install` ties them again by the model's own rule.
- The store holds at most two snapshots: the latest, which anyone may read, and the one before it, while somebody's lease on it lasts. A third
  publication drops the oldest even if it is leased: memory is bounded, readers are not waited for.
- The store is pure: time comes in as `now`, nothing is sent.

Not here: sockets (transfer.py), files (checkpoints are safetensors written by the trainer), gathering sharded tensors (give `pack` full ones).
torch is imported inside the functions that need it, so that an engine without torch can use the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final

import msgspec
import xxhash

from gyre.errors import WorkFailed
from gyre.types import TensorSpec, Version
from gyre.weights.shared import Shared

if TYPE_CHECKING:
    import torch

ALIGN_BYTES: Final = 64
TORCH_DTYPES: Final = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""safetensors' names → torch's."""

Allocate = Callable[[int], "bytearray | Shared"]
"""Writable memory of so many bytes."""


class Snapshot(msgspec.Struct, frozen=True):
    """The weights of one version: `data[t.offset : t.offset + t.nbytes]` are the bytes of tensor `t` (row-major, little-endian)."""

    version: Version
    tensors: list[TensorSpec]
    data: memoryview
    checksum: str  # XXH3-128 of all bytes, hex
    memory: str = ""  # where a process of this host may map them

    @property
    def nbytes(self) -> int:
        return len(self.data)


def checksum_of(data: bytes | bytearray | memoryview) -> str:
    """XXH3-128, hex: as quick as memory. Against damage; against malice there are keys."""
    return xxhash.xxh3_128_hexdigest(data)


def model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a model's state dict, each storage once: a tied tensor appears under its first name only."""
    saved = model.state_dict().keys()
    named = [*model.named_parameters(), *model.named_buffers()]  # both leave duplicates out
    return {name: tensor.detach() for name, tensor in named if name in saved}


def layout(named: Iterable[tuple[str, str, Iterable[int], int]]) -> tuple[list[TensorSpec], int]:
    """Place tensors (name, safetensors dtype, shape, bytes) one behind the other, each aligned. Returns the specs and the total of bytes."""
    specs: list[TensorSpec] = []
    end = 0
    for name, dtype, shape, nbytes in named:
        offset = -(-end // ALIGN_BYTES) * ALIGN_BYTES
        specs.append(TensorSpec(name=name, dtype=dtype, shape=list(shape), offset=offset, nbytes=nbytes))
        end = offset + nbytes
    return specs, end


def pack(version: Version, tensors: Mapping[str, torch.Tensor], allocate: Allocate = bytearray) -> Snapshot:
    """Copy full (unsharded) tensors, from any device, into a snapshot in memory from `allocate`."""
    import torch

    names = {getattr(torch, theirs): ours for ours, theirs in TORCH_DTYPES.items()}
    specs, total = layout((name, names[t.dtype], t.shape, t.numel() * t.element_size()) for name, t in tensors.items())
    data = allocate(total)
    with torch.no_grad():
        for (_, target), source in zip(_views(specs, data), tensors.values(), strict=True):
            target.copy_(source)
    whole = memoryview(data).toreadonly()[:total]
    return Snapshot(version, specs, whole, checksum_of(whole), data.path if isinstance(data, Shared) else "")


def unpack(specs: Iterable[TensorSpec], data: bytes | bytearray | memoryview) -> dict[str, torch.Tensor]:
    """Views on the bytes of a snapshot, which must outlive them. Read-only bytes are copied first (torch wants writable memory)."""
    return dict(_views(specs, bytearray(data) if memoryview(data).readonly else data))


def _views(specs: Iterable[TensorSpec], data: bytes | bytearray | memoryview | Shared) -> Iterable[tuple[str, torch.Tensor]]:
    import torch

    flat = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
    for s in specs:
        dtype = getattr(torch, TORCH_DTYPES[s.dtype])
        part = flat[s.offset : s.offset + s.nbytes]
        yield s.name, part.view(dtype).view(s.shape) if s.nbytes else torch.empty(s.shape, dtype=dtype)


def check_fit(ours: Mapping[str, list[int]], published: Mapping[str, list[int]]) -> None:
    """Compare names and shapes. Raises `WorkFailed` when they differ."""
    wrong = sorted(ours.keys() ^ published.keys()) or [n for n in ours if ours[n] != published[n]]
    if wrong:
        raise WorkFailed(f"published weights do not fit the engine's model: {wrong[0]} ({len(wrong)} tensors differ); start both from one model.path")


def install(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy a snapshot's tensors into a model and tie what it ties.

    Raises `WorkFailed`, before anything is written, when names or shapes differ from the model's.
    """
    import torch

    ours = model_tensors(model)
    check_fit({n: list(t.shape) for n, t in ours.items()}, {n: list(t.shape) for n, t in tensors.items()})
    with torch.no_grad():
        for name, tensor in ours.items():
            tensor.copy_(tensors[name])
    tie = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()


class Gone(msgspec.Struct, frozen=True):
    """The bytes asked for are no longer, or not yet, held; `latest` is what is held now (None: nothing was published)."""

    latest: Version | None


class SnapshotStore:
    """The latest snapshot and, while leases on it last, the one before.

    Every read is a lease: it keeps the snapshot readable by that reader for `lease_ttl_s` more. `release` ends a lease early.
    """

    def __init__(self, lease_ttl_s: float = 60.0) -> None:
        self._ttl_s = lease_ttl_s
        self._latest: Snapshot | None = None
        self._previous: Snapshot | None = None
        self._leases: dict[tuple[str, Version], float] = {}  # (reader, version) → deadline

    @property
    def latest(self) -> Snapshot | None:
        return self._latest

    @property
    def held(self) -> list[Version]:
        """Versions whose bytes are in memory, newest first."""
        return [s.version for s in (self._latest, self._previous) if s is not None]

    def publish(self, now: float, snapshot: Snapshot) -> None:
        """Make `snapshot` the latest; what was the latest stays for those who are reading it."""
        if self._latest is not None and snapshot.version <= self._latest.version:
            raise ValueError(f"{snapshot.version} is not newer than {self._latest.version}")
        self._previous, self._latest = self._latest, snapshot
        self.expire(now)

    def lease(self, now: float, reader: str, version: Version) -> None:
        """Begin or renew a lease, if the version is held."""
        if self._find(now, reader, version) is not None:
            self._leases[reader, version] = now + self._ttl_s

    def read(self, now: float, reader: str, version: Version, offset: int, nbytes: int) -> memoryview | Gone:
        """Bytes [offset, offset + nbytes) of a version, or `Gone`. Raises `ValueError` for bytes outside the snapshot."""
        snapshot = self._find(now, reader, version)
        if snapshot is None:
            return Gone(self._latest.version if self._latest else None)
        if offset < 0 or nbytes < 0 or offset + nbytes > snapshot.nbytes:
            raise ValueError(f"bytes [{offset}, {offset + nbytes}) of a snapshot of {snapshot.nbytes}")
        self._leases[reader, version] = now + self._ttl_s
        return snapshot.data[offset : offset + nbytes]

    def release(self, now: float, reader: str, version: Version) -> None:
        """The reader has all it wants of this version (and of older ones)."""
        for key in [k for k in self._leases if k[0] == reader and k[1] <= version]:
            del self._leases[key]
        self.expire(now)

    def expire(self, now: float) -> None:
        """Forget leases that ran out, and the previous snapshot with the last lease on it."""
        held = set(self.held)
        self._leases = {k: t for k, t in self._leases.items() if t > now and k[1] in held}
        if self._previous is not None and not any(v == self._previous.version for _, v in self._leases):
            self._previous = None

    def _find(self, now: float, reader: str, version: Version) -> Snapshot | None:
        if self._latest is not None and version == self._latest.version:
            return self._latest
        if self._previous is not None and version == self._previous.version and self._leases.get((reader, version), now) > now:
            return self._previous
        return None
