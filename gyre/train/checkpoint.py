"""Checkpoints: `checkpoints/step-N/` is a Hugging Face model directory with the optimizer beside it.

Invariants
- A directory named step-N is complete: it is written under another name, flushed to disk and renamed. The checksums in `gyre.json` tell
  damage that came later.
- Nothing is pickled: weights and optimizer are safetensors, the rest is JSON.
- What is loaded continues bit for bit: fp32 masters, both moments, the counters of AdamW, torch's random state. One rank writes the optimizer as
  one file, several write a shard each (torch's distributed checkpoint, as safetensors); either is read by any number of ranks.

Not here: which groups a checkpoint consumed (the buffer's ledger knows by step), when to save.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

import msgspec
import xxhash
from safetensors import SafetensorError

from gyre.errors import WorkFailed
from gyre.train.model import Policy
from gyre.train.optimizer import OPTIMIZER, SHARDS

log = logging.getLogger(__name__)

STATE: Final = "gyre.json"
SCHEMA: Final = "gyre.checkpoint/2"
_NAME: Final = re.compile(r"step-(\d+)")
_TOKENIZER: Final = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "chat_template*", "generation_config.json",
)  # fmt: skip


class FileSum(msgspec.Struct, frozen=True):
    """Size and XXH3-128 of a file."""

    nbytes: int
    xxh3: str


class State(msgspec.Struct, frozen=True, kw_only=True):
    """`gyre.json`: what a checkpoint holds beside tensors. The learning rate follows from `step` and the configuration; it is kept for readers."""

    schema: str = SCHEMA
    term: int
    step: int
    lr: float
    files: dict[str, FileSum] = {}


class _Head(msgspec.Struct):
    """What every gyre's `gyre.json` says."""

    schema: str = ""
    term: int = 0


class Saved(Protocol):
    """What can be saved: a `Learner`, or several ranks as one."""

    policy: Policy

    def write(self, directory: Path) -> None: ...


class Checkpoint(msgspec.Struct, frozen=True):
    """A checkpoint that was read and found whole."""

    path: Path
    state: State


def save(directory: Path, learner: Saved, *, term: int, step: int, lr: float, keep: int) -> Path:
    """Write `directory`/step-N, replacing an older one of that step. Of the others the last `keep` - 1 before it remain; later ones are of a life
    that was given up. Raises `WorkFailed` when the disk fails, or holds a checkpoint of a newer term: then this core was replaced."""
    final = directory / f"step-{step}"
    work = directory / f".step-{step}.tmp"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if newer := max((t for _, p in _found(directory) if (t := _term(p)) > term), default=0):
            raise WorkFailed(f"checkpoint {final} was not written: there are some of term {newer}, a newer core exists")
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        _write(work, learner, State(term=term, step=step, lr=lr))
        if final.exists():
            final.rename(directory / f".step-{step}.old")
        work.rename(final)
        _fsync(directory)
        kept = sorted((n, p) for n, p in _found(directory) if n <= step)[-keep:]
        for stale in [*directory.glob(".step-*"), *(p for n, p in _found(directory) if (n, p) not in kept)]:
            shutil.rmtree(stale)
    except (OSError, SafetensorError) as e:
        shutil.rmtree(work, ignore_errors=True)  # room for what is next
        raise WorkFailed(f"checkpoint {final} could not be written: {e}") from e
    return final


def _write(work: Path, learner: Saved, state: State) -> None:
    learner.write(work)
    for pattern in _TOKENIZER:
        for file in learner.policy.source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, work / file.name)
    files = {str(p.relative_to(work)): _sum(p) for p in sorted(work.rglob("*")) if p.is_file()}
    (work / STATE).write_bytes(msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(state, files=files))))
    for p in work.rglob("*"):
        _fsync(p)
    _fsync(work)


def last_good(directory: Path, before: int | None = None) -> Checkpoint | None:
    """The newest whole checkpoint (of a step below `before`); newer ones that are torn or damaged are skipped, with a message that says why.

    Raises `WorkFailed` when there are checkpoints and none is whole: to begin again at step 0 is the operator's decision.
    """
    found = sorted(((n, p) for n, p in _found(directory) if before is None or n < before), reverse=True)
    for _, path in found:
        try:
            return verify(path)
        except ValueError as e:
            log.warning("checkpoint %s skipped: %s", path, e)
    if found:
        raise WorkFailed(f"no checkpoint in {directory} is whole; mend one, or move them away to begin again at step 0")
    return None


def verify(path: Path) -> Checkpoint:
    """Read a checkpoint's state and compare its checksums. Raises ValueError saying what is wrong."""
    try:
        text = (path / STATE).read_bytes()
        if (schema := msgspec.json.decode(text, type=_Head).schema) != SCHEMA:
            raise ValueError(f"{STATE} is written as {schema or 'something unknown'}, this gyre reads {SCHEMA}: go on with the gyre that wrote it")
        state = msgspec.json.decode(text, type=State)
        for name, expected in state.files.items():
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"{STATE} names {name!r}")
            if _sum(path / name) != expected:
                raise ValueError(f"{name} has another checksum than when it was written")
    except (OSError, msgspec.DecodeError, SafetensorError) as e:
        raise ValueError(str(e)) from e
    if OPTIMIZER not in state.files and not any(Path(name).parts[0] == SHARDS for name in state.files):
        raise ValueError(f"{STATE} does not name {OPTIMIZER}")
    return Checkpoint(path, state)


def _term(path: Path) -> int:
    """The term a checkpoint was written under, 0 if it does not say."""
    try:
        return msgspec.json.decode((path / STATE).read_bytes(), type=_Head).term
    except (OSError, msgspec.DecodeError):
        return 0


def _found(directory: Path) -> Iterator[tuple[int, Path]]:
    if directory.is_dir():
        for p in directory.iterdir():
            if match := _NAME.fullmatch(p.name):
                yield int(match[1]), p


def _sum(path: Path) -> FileSum:
    with path.open("rb") as f:
        digest = hashlib.file_digest(f, xxhash.xxh3_128)
    return FileSum(path.stat().st_size, digest.hexdigest())


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
