"""The paced executor through the real router to real paced engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from gyre import config as configuration
from gyre.buffer.shell import malformed
from gyre.cli import Setup
from gyre.net.endpoints import endpoint
from gyre.net.worker import Worker
from gyre.rollout import shell as rollout
from gyre.rules.pace import open_pace
from gyre.sandbox.execute import Ended
from gyre.sandbox.gateway.route import Router
from gyre.sandbox.paced import PacedExecutor, open_paced
from gyre.types import Ending, Purpose, Ticket, Version
from gyre.wire.arrays import view
from gyre.wire.messages import RolloutEnded

WORKLOADS = Path(__file__).resolve().parents[2] / "examples" / "workloads"


def make(tmp_path: Path, workload: str, compress: float) -> Setup:
    sets = ["rollout.engine=paced", "sandbox.backend=paced", "rollout.context=65536", f'run.workload="{WORKLOADS / workload}"', "net.resend_s=0.5"]
    resolved = configuration.load(None, [*sets, f"run.compress={compress}"])
    return Setup(
        run_dir=tmp_path / "run", config=resolved.config, resolved=resolved, bind=None, name="cell0", buffer="", train="", rollouts=[], coord=None
    )


@asynccontextmanager
async def cells(setup: Setup, *names: str) -> AsyncIterator[PacedExecutor]:
    """Engines of these names without a trainer, and an executor over them."""
    async with asyncio.timeout(60):
        workers = [Worker(None, kind="rollout", name=n, run_id=setup.run_id) for n in names]
        for w in workers:
            await w.__aenter__()
        tasks = [asyncio.create_task(rollout.run(msgspec.structs.replace(setup, name=w.name), w, follow=False)) for w in workers]
        identity: dict[str, Any] = {"name": "box", "incarnation": "1", "run_id": setup.run_id, "resend_s": 0.5}
        router = Router.connect([endpoint(setup.run_dir, "rollout", n) for n in names], 20.0, 30.0, **identity)
        try:
            while not all(e.serves(Version(0, 0)) for e in router.engines):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            yield open_paced(setup.config, router)
        finally:
            router.close()
            for w in workers:
                w.stop.set()
            await asyncio.gather(*tasks)


def ticket(query: int, index: int) -> Ticket:
    return Ticket(
        rollout_id=f"g{query:06d}.{index}", epoch=0, group_id=f"g{query:06d}", query_id=f"q{query:06d}", index=index, task="", purpose=Purpose.TRAIN,
        policy=Version(0, 0), seed=query * 100 + index, lease_ttl_s=30,
    )  # fmt: skip


async def play(setup: Setup, tickets: list[Ticket], *names: str) -> list[Ended]:
    graded: list[str] = []
    async with cells(setup, *names) as executor:
        done = await asyncio.gather(*(executor.execute(t, lambda t=t: graded.append(t.rollout_id)) for t in tickets))  # type: ignore[misc]
    assert sorted(graded) == sorted(t.rollout_id for t in tickets)
    return done


def test_executions_that_hold_a_slot(tmp_path: Path) -> None:
    setup = make(tmp_path, "nl2repo-122b.toml", 20_000)
    pace = open_pace(setup.config.run.workload, setup.config.run.compress)
    tickets = [ticket(q, i) for q in range(6) for i in range(8)]
    done = asyncio.run(play(setup, tickets, "cell0", "cell1"))
    for t, (message, arrays) in zip(tickets, done, strict=True):
        drawn = pace.execution(0, int(t.query_id[1:]), t.index)
        assert message.ending is (Ending.HARNESS_TIMEOUT if drawn.cut else Ending.FINISHED)
        assert [c.n_completion for c in message.calls] == [drawn.turns[0].tokens] == [message.trajectories[0].n_trainable]
        assert malformed(message, {k: view(memoryview(v).cast("B"), RolloutEnded.ARRAYS[k]) for k, v in arrays.items()}) == ""
        assert message.reward in (0.0, 1.0)
    assert {c for message, _ in done for c in message.cells} == {"cell0", "cell1"}
    again = asyncio.run(play(setup, tickets[:5], "cell0"))
    assert [(a.message.reward, a.arrays["token_ids"]) for a in again] == [(a.message.reward, a.arrays["token_ids"]) for a in done[:5]]


def test_executions_that_share_take_turns(tmp_path: Path) -> None:
    setup = make(tmp_path, "shared-rate.toml", 20_000)
    pace = open_pace(setup.config.run.workload, setup.config.run.compress)
    tickets = [ticket(q, 0) for q in range(6)]
    for t, (message, _) in zip(tickets, asyncio.run(play(setup, tickets, "cell0")), strict=True):
        drawn = pace.execution(0, int(t.query_id[1:]), t.index)
        if message.ending is Ending.FINISHED:
            assert [c.n_completion for c in message.calls] == [turn.tokens for turn in drawn.turns]
            assert message.trajectories[0].n_trainable == sum(turn.tokens for turn in drawn.turns)
        else:  # the machine was too busy for a day of 4 s
            assert message.ending is Ending.HARNESS_TIMEOUT
