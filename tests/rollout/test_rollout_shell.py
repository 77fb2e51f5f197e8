"""gyre-rollout's process from the outside: real sockets, a trainer's policy, a gateway's requests, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch

from gyre import config as configuration
from gyre.cli import Setup
from gyre.errors import DeadlineExceeded, UsageError
from gyre.net.endpoints import endpoint
from gyre.net.sockets import Client, Peer, Server, mint
from gyre.net.worker import Worker
from gyre.rollout import shell
from gyre.types import Sampling, Version
from gyre.weights.snapshot import Snapshot, checksum_of, model_tensors, pack
from gyre.weights.transfer import PolicyServer
from gyre.wire.arrays import i32
from gyre.wire.codec import Arrays
from gyre.wire.messages import Abort, EngineRefuse, FromRollout, Generate, Generated, Message, Ping, Pong, ToTrain

PROMPT = [11, 12, 13]
V0, V1, V2 = Version(0, 0), Version(1, 1), Version(1, 2)


def run(story: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await story

    asyncio.run(bounded())


@pytest.fixture
def setup(tmp_path: Path) -> Callable[..., Setup]:
    """A run whose engine recites a long line, unless `sets` say otherwise."""
    script = tmp_path / "script.jsonl"
    script.write_text(json.dumps({"token_ids": list(range(20, 80)) * 20, "token_delay_s": 0.002}) + "\n")

    def make(*sets: str, bind: str | None = None) -> Setup:
        base = [
            "rollout.engine=scripted",
            f'rollout.script="{script}"',
            "rollout.slots=4",
            "rollout.queue=4",
            "rollout.threads=1",
            "net.resend_s=0.2",
        ]
        resolved = configuration.load(None, [*base, *sets])
        run_dir = tmp_path / "run"
        return Setup(
            run_dir=run_dir, config=resolved.config, resolved=resolved, bind=bind, name="cell0",
            buffer="", train=endpoint(run_dir, "train"), rollouts=[], coord=None,
        )  # fmt: skip

    return make


class Gateway:
    """A client of one engine."""

    def __init__(self, setup: Setup, name: str = "sandbox", resend_s: float = 5.0) -> None:
        self.client = Client.connect(
            endpoint(setup.run_dir, "rollout", "cell0"), FromRollout,
            kind="sandbox", name=name, incarnation="1", run_id=setup.run_id, resend_s=resend_s,
        )  # fmt: skip

    async def generate(self, request_id: str = "r", *, message_id: str | None = None, **more: Any) -> tuple[Message, list[int]]:
        sampling = Sampling(max_tokens=more.pop("max_tokens", 5), temperature=more.pop("temperature", 1.0))
        generate = Generate(
            id=message_id or mint(), request_id=request_id, rollout_id="rollout", sampling=sampling, seed=1, **{"min_version": V0, **more}
        )
        reply, arrays = await self.client.request(generate, {"prompt_ids": i32(PROMPT)}, deadline_s=30, what="tokens")
        return reply, list(arrays["token_ids"]) if isinstance(reply, Generated) else []

    async def ping(self) -> Pong:
        pong, _ = await self.client.request(Ping(id=mint()), deadline_s=30, what="a pong")
        assert isinstance(pong, Pong)
        return pong

    async def until(self, condition: Callable[[Pong], bool]) -> Pong:
        while not condition(pong := await self.ping()):  # noqa: ASYNC110 - pings are the way to know
            await asyncio.sleep(0.01)
        return pong


@contextlib.asynccontextmanager
async def rollout(setup: Setup, follow: bool = True) -> AsyncIterator[Worker]:
    async with Worker(None, kind="rollout", name="cell0", run_id=setup.run_id) as worker:
        task = asyncio.create_task(shell.run(setup, worker, follow=follow))
        try:
            yield worker
        finally:
            worker.stop.set()
            await task


@contextlib.asynccontextmanager
async def trainer(setup: Setup) -> AsyncIterator[PolicyServer]:
    server = Server.bind(setup.train, ToTrain, kind="train", name="core", run_id=setup.run_id)
    policy = PolicyServer(server.send)

    def handle(peer: Peer, message: Message, arrays: Arrays) -> None:
        policy.handle(peer, message)

    task = asyncio.create_task(server.serve(handle))
    try:
        yield policy
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        server.close()


def snapshot(version: Version) -> Snapshot:
    return Snapshot(version, [], memoryview(b"weights"), checksum_of(b"weights"))


def test_serving_only(setup: Callable[..., Setup]) -> None:
    async def story() -> None:
        s = setup()
        async with rollout(s, follow=False):
            gateway = Gateway(s)
            pong = await gateway.until(lambda p: p.version is not None)
            assert (pong.version, pong.cell, pong.free_slots, pong.context_limit) == (V0, "cell0", 8, 4096)
            reply, tokens = await gateway.generate()
            assert isinstance(reply, Generated) and (reply.finish_reason, reply.cell, tokens) == ("length", "cell0", [20, 21, 22, 23, 24])
            assert [(x.version, x.start, x.end) for x in reply.spans] == [(V0, 0, 5)]
            reply, _ = await gateway.generate(min_version=V1)
            assert isinstance(reply, EngineRefuse) and (reply.reason, reply.detail) == ("behind", "at version 0.0")
            gateway.client.close()

    run(story())


@pytest.mark.pain(12, 13)
def test_it_is_behind_until_it_serves_a_policy_and_then_follows(setup: Callable[..., Setup]) -> None:
    """Pains 12 and 13: pings are answered from the first moment, requests only after a version was acknowledged."""

    async def story() -> None:
        s = setup()
        async with rollout(s):
            gateway = Gateway(s)
            pong = await gateway.ping()
            assert pong.version is None and pong.free_slots == 0
            reply, _ = await gateway.generate()
            assert isinstance(reply, EngineRefuse) and reply.reason == "behind"
            async with trainer(s) as policy:
                for version in (V1, V2):
                    policy.publish(snapshot(version))
                    assert await policy.wait_loaded(version, 30) == ["cell0"]
                    assert (await gateway.ping()).version == version
                    reply, tokens = await gateway.generate(min_version=version)
                    assert isinstance(reply, Generated) and reply.spans[0].version == version and len(tokens) == 5
            gateway.client.close()

    run(story())


def test_a_repeated_request_runs_once(setup: Callable[..., Setup]) -> None:
    async def story() -> None:
        s = setup()
        async with rollout(s, follow=False):
            gateway, impatient = Gateway(s), Gateway(s, "impatient", resend_s=0.02)
            await gateway.until(lambda p: p.version is not None)
            reply, tokens = await impatient.generate("slow", max_tokens=100, message_id="m")  # repeated about ten times meanwhile
            assert isinstance(reply, Generated) and len(tokens) == 100
            again, same = await impatient.generate("slow", max_tokens=100, message_id="m")
            assert again == reply and same == tokens  # the answer from memory
            assert (await gateway.ping()).free_slots == 8
            for g in (gateway, impatient):
                g.client.close()

    run(story())


def test_abort_full_and_whose_requests_a_pong_names(setup: Callable[..., Setup]) -> None:
    async def story() -> None:
        s = setup()
        async with rollout(s, follow=False):
            gateway, other = Gateway(s), Gateway(s, "other")
            await gateway.until(lambda p: p.version is not None)
            running = [asyncio.create_task(gateway.generate(f"r{i}", max_tokens=1000)) for i in range(8)]
            pong = await gateway.until(lambda p: len(p.request_ids) == 8)
            assert sorted(pong.request_ids) == [f"r{i}" for i in range(8)] and pong.free_slots == 0
            assert (await other.ping()).request_ids == []
            reply, _ = await other.generate("late")
            assert isinstance(reply, EngineRefuse) and reply.reason == "full"
            gateway.client.send(Abort(id=mint(), request_id="unknown"))
            for i in range(8):
                gateway.client.send(Abort(id=mint(), request_id=f"r{i}"))
            answers = [(await t)[0] for t in running]
            assert all(isinstance(a, Generated) and a.finish_reason == "abort" for a in answers)
            for g in (gateway, other):
                g.client.close()

    run(story())


def test_a_client_that_goes_away_changes_nothing(setup: Callable[..., Setup]) -> None:
    async def story() -> None:
        s = setup()
        async with rollout(s, follow=False):
            gone, other = Gateway(s, "gone"), Gateway(s, "other")
            await other.until(lambda p: p.version is not None)
            task = asyncio.create_task(gone.generate("orphan", max_tokens=50))
            await gone.until(lambda p: p.request_ids == ["orphan"])
            task.cancel()
            gone.client.close()
            await other.until(lambda p: p.free_slots == 8)
            reply, tokens = await other.generate()
            assert isinstance(reply, Generated) and len(tokens) == 5
            other.client.close()

    run(story())


def test_stop_answers_what_is_in_flight(setup: Callable[..., Setup]) -> None:
    async def story() -> None:
        s = setup()
        gateway = Gateway(s)
        async with rollout(s, follow=False) as worker:
            await gateway.until(lambda p: p.version is not None)
            running = [asyncio.create_task(gateway.generate(f"r{i}", max_tokens=1000)) for i in range(6)]
            await gateway.until(lambda p: len(p.request_ids) == 6)
            worker.stop.set()
            answers = [(await t)[0] for t in running]
            assert all(isinstance(a, Generated) and a.finish_reason == "abort" for a in answers)
        gateway.client.close()

    run(story())


def test_the_torch_engine_follows_a_trainer(setup: Callable[..., Setup], tmp_path: Path, kit: Any) -> None:
    """The whole way of real weights: model directory, packed, pulled in chunks, installed; greedy tokens are the new model's."""
    kit.qwen3(0).save_pretrained(tmp_path / "model")
    new = kit.qwen3(1)

    async def story() -> None:
        s = setup("rollout.engine=torch", f'model.path="{tmp_path}/model"', "rollout.context=64", "rollout.threads=1")
        async with trainer(s) as policy, rollout(s):
            gateway = Gateway(s)
            policy.publish(pack(V1, model_tensors(new)))
            assert await policy.wait_loaded(V1, 30) == ["cell0"]
            reply, tokens = await gateway.generate(min_version=V1, temperature=0.0)
            assert isinstance(reply, Generated) and reply.spans[0].version == V1
            expected = new.generate(input_ids=torch.tensor([PROMPT]), do_sample=False, max_new_tokens=5, pad_token_id=0)
            assert PROMPT + tokens == expected[0].tolist()
            assert (await gateway.ping()).context_limit == 64
            gateway.client.close()

    run(story())


@pytest.mark.parametrize("sets", [["model.path=/nowhere", "rollout.engine=torch"], ["rollout.script=/nowhere"], ["model.path=/nowhere"]])
def test_bad_configuration_ends_it_in_one_line(setup: Callable[..., Setup], sets: list[str]) -> None:
    async def story() -> None:
        s = setup(*sets)
        async with Worker(None, kind="rollout", name="cell0", run_id=s.run_id) as worker:
            with pytest.raises(UsageError) as error:
                await shell.run(s, worker)
            assert "/nowhere" in str(error.value) and "\n" not in str(error.value)

    run(story())


def test_an_address_in_use(setup: Callable[..., Setup]) -> None:
    async def story() -> None:
        s = setup()
        async with rollout(s, follow=False), Worker(None, kind="rollout", name="cell0", run_id=s.run_id) as worker:
            await asyncio.sleep(0)
            with pytest.raises(UsageError, match="in use"):
                await shell.run(s, worker)

    run(story())


def test_no_trainer_is_named(setup: Callable[..., Setup]) -> None:
    async def story() -> None:
        s = setup("run.start_timeout_s=0.2")
        async with Worker(None, kind="rollout", name="cell0", run_id=s.run_id) as worker:
            with pytest.raises(DeadlineExceeded, match="gyre-train at ipc://"):
                await shell.run(s, worker)

    run(story())
