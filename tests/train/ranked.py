"""A program whose learner has several ranks: it does what a script says and writes down what came of it. Its followers are this program again.

ranked.py SCRIPT OUT      SCRIPT: msgpack of `Script`; OUT: a directory
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file

from gyre.config import Config
from gyre.errors import WorkFailed
from gyre.train import checkpoint
from gyre.train.processes import leave
from gyre.train.protocols import CollectiveFailed, Group
from gyre.train.ranks import Accumulate, RankedLearner, follow
from gyre.types import Version
from gyre.weights.snapshot import pack, unpack


class Step(msgspec.Struct):
    """A step's micro-steps; its outcome is written down as `label`."""

    label: str
    step: int
    executions: int
    micro_steps: list[Accumulate]


class Script(msgspec.Struct):
    """What to do, in this order: `steps`, save, then for each of `resume` (label, checkpoint): load it and do `after`; then `finally_`."""

    config: Config
    source: str
    steps: list[Step] = []
    save: str = ""
    read: bool = False  # the optimizer of `source`, first
    resume: list[tuple[str, str]] = []
    after: list[Step] = []
    meeting: Group | None = None
    finally_: str = ""  # idle | busy | sleep


def command_of(data: Any) -> Accumulate:
    """A micro-step as bytes."""
    return Accumulate(
        list(data.trajectories), [a.numpy().tobytes() for a in (data.token_ids_S, data.loss_mask_S, data.logprobs_S, data.versions_S)], 0
    )


def data_of(command: Accumulate) -> Any:
    """And back."""
    from gyre.train.model import MicroStepData

    names = ("token_ids", "loss_mask", "logprobs", "versions")
    return MicroStepData.from_arrays(command.trajectories, {n: memoryview(a) for n, a in zip(names, command.arrays, strict=True)})


def weights(learner: Any) -> dict[str, torch.Tensor]:
    """As they are published."""
    snapshot = learner.snapshot(Version(1, 1))
    return unpack(snapshot.tensors, snapshot.data)


def gradient(learner: Any, denominator: int) -> dict[str, torch.Tensor]:
    """The step's full gradient."""
    if isinstance(learner, RankedLearner):
        return learner.gradient(denominator)
    return {n: s / denominator for n, s in zip(learner.parameters, learner.sums, strict=True)}


def take(learner: Any, step: Step, prefix: str = "") -> dict[str, torch.Tensor]:
    """Do a step; its gradient, norm, tally and the new weights, by name."""
    learner.zero()
    for m in step.micro_steps:
        learner.accumulate(data_of(m), step.step - 1)
    label = prefix + step.label
    found = {f"{label}/gradient/{n}": t.clone() for n, t in gradient(learner, step.executions).items()}
    t = learner.tally
    found[f"{label}/tally"] = torch.tensor(
        [
            t.trainable,
            t.loss_numerator,
            t.entropy,
            t.outside,
            t.all_versions.tokens,
            t.all_versions.total,
            t.all_versions.largest,
            t.current_version.tokens,
        ]
    )
    update = learner.update(step.step, step.executions)
    found[f"{label}/update"] = torch.tensor([update.updated, -1.0 if update.grad_norm is None else update.grad_norm, update.lr])
    found |= {f"{label}/weight/{n}": t for n, t in weights(learner).items()}
    return {n: t.contiguous() for n, t in found.items()}


def play(learner: Any, script: Script) -> dict[str, torch.Tensor]:
    """The script's steps, checkpoints and collectives."""
    found: dict[str, torch.Tensor] = {}
    if script.read:
        learner.read(Path(script.source))
    for s in script.steps:
        found |= take(learner, s)
    if script.save:
        checkpoint.save(Path(script.save), learner, term=1, step=3, lr=0.1, keep=2)
    for label, path in script.resume:
        snapshot = pack(Version(1, 1), load_file(Path(path) / "model.safetensors"))
        learner.install(snapshot.tensors, snapshot.data)
        learner.read(Path(path))
        for s in script.after:
            found |= take(learner, s, f"{label}:")
    if script.meeting is not None:
        learner.zero()
        for m in script.after[0].micro_steps[script.meeting.rank :: script.meeting.size]:
            learner.accumulate(data_of(m), 0)
        if script.meeting.rank == 0:
            try:
                learner.across(replace(script.meeting, name="nobody comes"), 2.0, False)
                raise AssertionError("a meeting of one")
            except CollectiveFailed:
                pass
        learner.across(script.meeting, 60.0, False)
        if script.meeting.rank == 0:
            update = learner.update(1, script.after[0].executions)
            found["reduced/norm"] = torch.tensor([update.grad_norm])
        learner.across(replace(script.meeting, name="weights"), 60.0, True)
        found |= {f"reduced/weight/{n}": t for n, t in weights(learner).items()}
    return found


def main() -> None:
    script = msgspec.msgpack.decode(Path(sys.argv[1]).read_bytes(), type=Script)
    if os.environ.get("GYRE_RANK") or os.environ.get("RANK", "0") != "0":
        leave(follow(script.config))
    out = Path(sys.argv[2])
    learner = RankedLearner(script.config, Path(script.source), 10)
    try:
        save_file(play(learner, script), out / "found.safetensors")
        (out / "pids").write_text(" ".join(str(f.process.pid) for f in learner._followers))
        match script.finally_:
            case "idle":
                asyncio.run(learner.watch())
            case "busy":
                while True:
                    take(learner, script.steps[0])
            case "sleep":
                time.sleep(1.5 * script.config.train.ranks_timeout_s)
                take(learner, script.steps[0])
    except WorkFailed as e:
        learner.close()
        print(f"error: {e}", file=sys.stderr)
        leave(1)
    learner.close()
    leave(0)


if __name__ == "__main__":
    main()
