"""The real process of a core, less its command, against a buffer of forty lines that speaks the wire and an engine that pulls weights."""

from __future__ import annotations

import array
import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gyre import config as configuration
from gyre.cli import Setup
from gyre.errors import DeadlineExceeded, UsageError, WorkFailed
from gyre.net.endpoints import endpoint
from gyre.net.sockets import Client, Peer, Server, mint
from gyre.net.worker import Worker
from gyre.train import checkpoint, shell
from gyre.types import PackedTrajectory, TensorSpec, Version
from gyre.weights.snapshot import install, unpack
from gyre.weights.transfer import PolicyClient
from gyre.wire import messages as m
from gyre.wire.codec import Arrays

DEADLINE_S = 60.0

Trajectory = tuple[list[int], list[int], list[float], list[int], float, float]
"""ids, mask, log-probs, versions, advantage, reward"""


class TinyBuffer:
    """Hands out `source(step)` as micro-steps of one trajectory each, once the policy that it needs is published."""

    def __init__(self, source: Callable[[int], Sequence[Trajectory]], total_steps: int, every: int = 1) -> None:
        self.source, self.total_steps, self.every = source, total_steps, every
        self.term = 0
        self.published: list[Version] = []
        self.committed: dict[int, dict[str, float | None]] = {}
        self.checkpoints: list[int] = []
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.incarnations: list[str] = []
        self.refuse: Callable[[m.Message], m.Refuse | None] = lambda message: None
        self.on_commit: Callable[[int], None] = lambda step: None
        self._queues: dict[tuple[int, int, str], list[int]] = {}
        self._held: dict[tuple[int, str], list[str]] = {}

    def answer(self, message: m.Message) -> tuple[m.Message, Arrays | None]:
        new = {"id": mint(), "cause": message.id}
        if refusal := self.refuse(message):
            return refusal, None
        match message:
            case m.AcquireTerm():
                self.term += 1
                return m.TermGranted(**new, term=self.term, step=message.step, total_steps=self.total_steps), None
            case m.ClaimMicroStep():
                return self.claim(message, new)
            case m.Accumulated():
                self._held.setdefault((message.step, message.incarnation), []).append(message.micro_step_id)
            case m.SealStep():
                entries = [m.ManifestEntry(cell="core", incarnation=i, micro_steps=ids) for (s, i), ids in self._held.items() if s == message.step]
                rows = self.source(message.step)
                rewards = [r[5] for r in rows]
                stats = m.StepStats(
                    groups=1, executions=len(rows), trajectories=len(rows), tokens=sum(len(r[0]) for r in rows),
                    trainable_tokens=sum(sum(r[1]) for r in rows), reward_mean=sum(rewards) / len(rows) if rows else None,
                    staleness_mean=0.0, staleness_p95=0.0, staleness_max=0.0, staleness_interpolated=None, staleness_predicted=0.0,
                    discarded_groups=0 if rows else 1, uniform_groups=0,
                )  # fmt: skip
                return m.Manifest(**new, term=self.term, step=message.step, entries=entries[-1:], stats=stats, hash=f"h{message.step}"), None
            case m.CommitStep():
                self.committed[message.step] = message.metrics
                self.on_commit(message.step)
            case m.Published():
                self.published.append(message.version)
            case m.CheckpointSaved():
                self.checkpoints.append(message.step)
            case m.Note():
                self.notes.append((message.event, message.fields))
        return m.Ack(**new), None

    def claim(self, message: m.ClaimMicroStep, new: dict[str, str]) -> tuple[m.Message, Arrays | None]:
        if Version(self.term, (message.step - 1) // self.every * self.every) not in self.published:
            return m.NothingToClaim(**new, drained=False, waiting_for="a publication"), None
        if not self.incarnations or self.incarnations[-1] != message.incarnation:
            self.incarnations.append(message.incarnation)
        rows = self.source(message.step)
        queue = self._queues.setdefault((self.term, message.step, message.incarnation), list(range(len(rows))))
        if not queue:
            return m.NothingToClaim(**new, drained=True), None
        i = queue.pop(0)
        ids, mask, logprobs, versions, advantage, reward = rows[i]
        packed = PackedTrajectory(
            trajectory_id=f"t{i}", rollout_id=f"r{i}", group_id="g", n_tokens=len(ids), n_trainable=sum(mask),
            execution_trainable=sum(mask), advantage=advantage, reward=reward, version_at_dispatch=max(versions),
        )  # fmt: skip
        arrays: dict[str, array.array[Any]] = {
            "token_ids": array.array("i", ids), "loss_mask": array.array("b", mask),
            "logprobs": array.array("f", logprobs), "versions": array.array("i", versions),
        }  # fmt: skip
        reply = m.MicroStepClaimed(**new, micro_step_id=f"m{message.step}.{i}", step=message.step, lease_ttl_s=60.0, trajectories=[packed])
        return reply, {k: memoryview(v) for k, v in arrays.items()}


class TinyEngine:
    """An engine that loads what is published into a model and can be asked to sample one token after a prompt."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.loaded: list[Version] = []

    async def load(self, version: Version, tensors: list[TensorSpec], data: memoryview) -> None:
        install(self.model, unpack(tensors, data))
        self.loaded.append(version)

    @torch.no_grad()
    def logprobs(self, prompt: list[int]) -> torch.Tensor:
        return torch.log_softmax(self.model(input_ids=torch.tensor([prompt])).logits[0, -1], -1)


def setup_of(run_dir: Path, model: Path, **sets: Any) -> Setup:
    defaults = {"train.lr": 1e-2, "train.threads": 1, "model.device": "cpu", "model.path": str(model), "run.start_timeout_s": 30.0}
    given = defaults | {k.replace("__", "."): v for k, v in sets.items()}
    resolved = configuration.load(None, [], given)
    return Setup(
        run_dir=run_dir, config=resolved.config, buffer=endpoint(run_dir, "buffer"), train=endpoint(run_dir, "train"),
        rollouts=[], coord=None, bind=None, name="core", resolved=resolved,
    )  # fmt: skip


async def live(setup: Setup, buffer: TinyBuffer, engine: TinyEngine | None, *, resume: bool = False, stop_after: int = 0) -> None:
    """One life of the process, with its peers, ended by `stop_after` commits if that is given."""
    server = Server.bind(setup.buffer, m.ToBuffer, kind="buffer", name="buffer", run_id=setup.run_id)

    def handle(peer: Peer, message: m.Message, _: Arrays) -> None:
        server.send(peer, *buffer.answer(message))

    tasks = [asyncio.create_task(server.serve(handle))]
    if engine is not None:
        who = {"kind": "rollout", "name": "cell0", "incarnation": "e", "run_id": setup.run_id}
        client = PolicyClient(lambda push: Client.connect(setup.train, m.FromTrain, **who, on_push=push), engine.load, cell="cell0")
        tasks.append(asyncio.create_task(client.run(30.0)))
    try:
        async with asyncio.timeout(DEADLINE_S), Worker(None, kind="train", name="core", run_id=setup.run_id) as worker:
            if stop_after:
                buffer.on_commit = lambda step: worker.stop.set() if step == stop_after else None
            await shell.run(setup, worker, resume=resume)
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        server.close()


def fixed(step: int) -> list[Trajectory]:
    """Three trajectories that depend on the step alone."""
    g = torch.Generator().manual_seed(step)
    rows: list[Trajectory] = []
    for advantage in (1.0, -0.5, -0.5):
        ids = torch.randint(2, 32, (9,), generator=g).tolist()
        rows.append((ids, [0] * 5 + [1] * 4, [float("nan")] * 5 + [-3.4] * 4, [-1] * 5 + [step - 1] * 4, advantage, float(advantage > 0)))
    return rows


def weights(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")


@pytest.mark.pain(28)
def test_learns_what_is_rewarded(tiny_model: Path, tmp_path: Path) -> None:
    """A rewarded token becomes likely within a few steps; every step's numbers arrive; the last policy is published and saved."""
    engine, prompt, rewarded, steps = TinyEngine(tiny_model), [2, 3, 4], 7, 12
    batches: dict[int, list[Trajectory]] = {}

    def sample(step: int) -> list[Trajectory]:
        if step not in batches:
            logprobs = engine.logprobs(prompt)
            tokens = torch.multinomial(logprobs.exp(), 64, replacement=True, generator=torch.Generator().manual_seed(step)).tolist()
            tokens[0] = rewarded  # a tiny model may never draw it by itself
            mean = tokens.count(rewarded) / len(tokens)
            batches[step] = []
            for t in tokens:
                reward, old = float(t == rewarded), [float("nan")] * 3 + [float(logprobs[t])]
                batches[step].append(([*prompt, t], [0, 0, 0, 1], old, [-1, -1, -1, step - 1], reward - mean, reward))
        return batches[step]

    buffer = TinyBuffer(sample, steps)
    before = float(engine.logprobs(prompt)[rewarded].exp())
    asyncio.run(live(setup_of(tmp_path / "run", tiny_model, train__lr=0.02), buffer, engine))
    after = float(engine.logprobs(prompt)[rewarded].exp())
    assert before < 0.1
    assert after > 0.5, f"{before:.3f} -> {after:.3f}"
    assert list(buffer.committed) == list(range(1, steps + 1))
    assert buffer.published == [Version(1, s) for s in range(steps + 1)] == engine.loaded
    assert buffer.checkpoints == [steps]
    for step, numbers in buffer.committed.items():
        assert numbers["updated"] == float(0 < (numbers["reward"] or 0) < 1), "a step of which every reward is equal changes nothing"
        for name in ("loss", "grad_norm", "reward", "entropy", "clip_fraction", "staleness_mean", "seconds_wait", "seconds_compute"):
            assert numbers[name] is not None, (step, name)
        worst = numbers["logprob_diff_current_max"]
        assert worst is not None and worst < 1e-4, "trainer and engine agree on tokens of the current version (pains 28)"
        assert numbers["current_version_tokens"] == 64
    assert {event for event, _ in buffer.notes} <= {"step_without_update", "update"}
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))
    assert (tmp_path / "run" / "checkpoints" / f"step-{steps}" / "tokenizer.json").is_file()


@pytest.mark.pain(23)
def test_step_without_micro_steps_is_committed(tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """pains 23: the second of three steps has nothing; it is counted, named and passed over."""
    engine, buffer = TinyEngine(tiny_model), TinyBuffer(lambda step: [] if step == 2 else fixed(step), 3)
    with caplog.at_level(logging.WARNING):
        asyncio.run(live(setup_of(tmp_path / "run", tiny_model, train__checkpoint_every=1, train__keep_checkpoints=3), buffer, engine))
    assert [buffer.committed[s]["updated"] for s in (1, 2, 3)] == [1.0, 0.0, 1.0]
    assert buffer.committed[2]["loss"] is None
    (fields,) = [fields for event, fields in buffer.notes if event == "step_without_update"]
    counts = {"executions": 0, "trainable_tokens": 0, "discarded_groups": 1, "uniform_groups": 0, "gradient_not_finite": 0}
    assert fields == {"step": 2, **counts}
    assert "step 2 changed nothing: executions 0, trainable_tokens 0, discarded_groups 1" in caplog.text
    one, two = (weights(tmp_path / "run" / "checkpoints" / f"step-{s}") for s in (1, 2))
    assert all(torch.equal(one[k], two[k]) for k in one)


@pytest.mark.pain(28)
def test_alarm_when_trainer_and_engine_differ(tiny_model: Path, tmp_path: Path) -> None:
    """pains 28: log-probs that are not the current weights' raise an event."""
    buffer = TinyBuffer(fixed, 1)
    asyncio.run(live(setup_of(tmp_path / "run", tiny_model), buffer, TinyEngine(tiny_model)))
    (fields,) = [fields for event, fields in buffer.notes if event == "logprob_alarm"]
    assert fields["step"] == 1 and fields["max"] > fields["limit"] == 0.1


def test_bursts(tiny_model: Path, tmp_path: Path) -> None:
    """mu = 2 and five steps: versions 0, 2, 4, and 5 because it is the last."""
    engine, buffer = TinyEngine(tiny_model), TinyBuffer(fixed, 5, every=2)
    asyncio.run(live(setup_of(tmp_path / "run", tiny_model, system__steps_per_burst=2), buffer, engine))
    assert buffer.published == [Version(1, s) for s in (0, 2, 4, 5)]
    assert list(buffer.committed) == [1, 2, 3, 4, 5]


def test_voided_accumulator_is_computed_again(tiny_model: Path, tmp_path: Path) -> None:
    """The buffer gives up the incarnation at its second micro-step: a new one does all of the step, and the update is the same."""
    plain = TinyBuffer(fixed, 2)
    asyncio.run(live(setup_of(tmp_path / "a", tiny_model), plain, TinyEngine(tiny_model)))

    voided = TinyBuffer(fixed, 2)
    refused: list[str] = []

    def refuse(message: m.Message) -> m.Refuse | None:
        if isinstance(message, m.Accumulated) and message.micro_step_id == "m1.1" and not refused:
            refused.append(message.incarnation)
        if isinstance(message, m.Accumulated | m.ClaimMicroStep) and message.incarnation in refused:
            return m.Refuse(id=mint(), cause=message.id, reason="lease ran out", stale=True)
        return None

    voided.refuse = refuse
    asyncio.run(live(setup_of(tmp_path / "b", tiny_model), voided, TinyEngine(tiny_model)))
    assert len(voided.incarnations) == 2
    a, b = (weights(tmp_path / run / "checkpoints" / "step-2") for run in "ab")
    for name in a:
        torch.testing.assert_close(a[name], b[name])


@pytest.mark.parametrize("kind", [m.ClaimMicroStep, m.CommitStep, m.Published])
def test_newer_core_ends_this_one(tiny_model: Path, tmp_path: Path, kind: type[m.Message]) -> None:
    buffer = TinyBuffer(fixed, 3)

    def refuse(message: m.Message) -> m.Refuse | None:
        return m.Refuse(id=mint(), cause=message.id, reason="term 2 exists", stale=True) if isinstance(message, kind) else None

    buffer.refuse = refuse
    with pytest.raises(WorkFailed, match="term 2 exists"):
        asyncio.run(live(setup_of(tmp_path / "run", tiny_model), buffer, TinyEngine(tiny_model)))


@pytest.mark.pain(24)
def test_stop_and_resume_give_the_same_weights(tiny_model: Path, tmp_path: Path) -> None:
    """Stopped in order after two steps of five, it saves; resumed under a new term it ends as an uninterrupted run does, bit for bit."""
    straight = TinyBuffer(fixed, 5)
    asyncio.run(live(setup_of(tmp_path / "a", tiny_model), straight, TinyEngine(tiny_model)))

    buffer, setup = TinyBuffer(fixed, 5), setup_of(tmp_path / "b", tiny_model)
    asyncio.run(live(setup, buffer, TinyEngine(tiny_model), stop_after=2))
    found = checkpoint.last_good(tmp_path / "b" / "checkpoints")
    assert found is not None and found.state.step in (2, 3)  # the stop may find the next step committed
    buffer.on_commit = lambda step: None
    asyncio.run(live(setup, buffer, TinyEngine(tiny_model), resume=True))
    assert Version(2, found.state.step) in buffer.published and buffer.published[-1] == Version(2, 5)
    a, b = (weights(tmp_path / run / "checkpoints" / "step-5") for run in "ab")
    assert all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.pain(1)
def test_no_engine_is_named(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match="an engine"):
        asyncio.run(live(setup_of(tmp_path / "run", tiny_model, run__start_timeout_s=1.0), TinyBuffer(fixed, 1), None))


def test_bad_input_is_one_line(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"model\.path"):
        asyncio.run(live(setup_of(tmp_path / "a", tmp_path / "none"), TinyBuffer(fixed, 1), None))
    with pytest.raises(UsageError, match=r"model\.path"):
        asyncio.run(live(setup_of(tmp_path / "b", tmp_path / "none", model__path=""), TinyBuffer(fixed, 1), None))
