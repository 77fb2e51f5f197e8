"""Over several engines: versions, continuation, refusals, losses. Every wait ends and says what it waited for."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from gyre.types import CallStatus, Ending, Version
from gyre.wire.messages import Generate, Route, Routes

MESSAGES = [{"role": "user", "content": "hi"}]


def test_a_continuation_goes_on_from_the_tokens_already_had(gateway: Any, renderer: Any, sampled: Any, until: Any) -> None:
    """The first engine gives back two tokens (it closes); the second one continues behind them, at that version or later."""

    def closing(request: Generate, prompt: list[int]) -> Any:
        g.engines[0].free_slots = 0
        g.engines[1].version = Version(1, 4)
        return sampled([300, 301], "abort", Version(1, 3))

    def staying(request: Generate, prompt: list[int]) -> Any:
        return sampled([302, renderer.end_id], version=Version(1, 4))

    g: Any = None

    async def run() -> None:
        nonlocal g
        async with gateway(closing, staying) as g:
            g.engines[0].version, g.engines[1].version = Version(1, 3), Version(0, 9)  # the second one is behind for now
            await until(lambda: g.router.engines[0].serves(Version(1, 3)))
            client = await g.connect()
            assert (await client.chat(MESSAGES))[0] == 200
            first, second = g.engines[0].requests[0], g.engines[1].requests[0]
            assert (second.drawn, second.min_version, second.seed) == (2, Version(1, 3), first.seed)
            assert second.sampling.max_tokens == first.sampling.max_tokens - 2
            assert g.engines[1].prompts[second.request_id] == g.engines[0].prompts[first.request_id] + [300, 301]
            assert second.request_id != first.request_id
            outcome = await g.close()
            assert outcome.graph.versions.tolist()[-4:] == [3, 3, 4, 4]
            assert outcome.cells == ["cell0", "cell1"]
            assert outcome.calls[0].cell == "cell1" and outcome.calls[0].n_completion == 4

    asyncio.run(run())


@pytest.mark.pain(12)
def test_calls_go_only_to_engines_at_the_tickets_version(gateway: Any, renderer: Any, sampled: Any, until: Any) -> None:
    def script(request: Generate, prompt: list[int]) -> Any:
        return sampled([renderer.end_id])

    async def run() -> None:
        async with gateway(script, script) as g:
            g.engines[0].version = None
            await until(lambda: g.router.engines[1].serves(Version(1, 0)) and not g.router.engines[0].serves(Version(1, 0)))
            client = await g.connect()
            for _ in range(4):
                assert (await client.chat(MESSAGES))[0] == 200
            assert len(g.engines[0].requests) == 0 and len(g.engines[1].requests) == 4

    asyncio.run(run())


def test_full_closing_and_behind_are_retried_elsewhere(gateway: Any, renderer: Any, sampled: Any, until: Any) -> None:
    reasons = iter(["full", "closing", "behind"])

    def refusing(request: Generate, prompt: list[int]) -> Any:
        return sampled([], refuse=next(reasons, "full"))

    async def run() -> None:
        async with gateway(refusing, lambda r, p: sampled([renderer.end_id])) as g:
            await until(lambda: all(e.serves(Version(1, 0)) for e in g.router.engines))
            g.router.engines[0].in_flight = -9  # it looks the least loaded
            client = await g.connect()
            for _ in range(3):
                assert (await client.chat(MESSAGES))[0] == 200
            assert g.engines[0].requests and len(g.engines[1].requests) == 3

    asyncio.run(run())


def test_a_restarted_engine_has_lost_its_requests(gateway: Any, renderer: Any, sampled: Any, until: Any) -> None:
    """Another incarnation answers: what it held is asked again elsewhere, and nothing is had twice."""

    async def run() -> None:
        async with gateway(lambda r, p: sampled([300, renderer.end_id], delay_s=60.0), lambda r, p: sampled([301, renderer.end_id])) as g:
            g.engines[1].version = None
            await until(lambda: g.router.engines[0].serves(Version(1, 0)))
            client = await g.connect()
            asking = asyncio.create_task(client.chat(MESSAGES))
            await until(lambda: g.engines[0].requests)
            g.engines[0].incarnation = "another"
            g.engines[0].version = None
            g.engines[1].version = Version(1, 0)
            status, _ = await asking
            assert status == 200
            outcome = await g.close()
            assert outcome.cells == ["cell1"] and outcome.calls[0].n_completion == 2

    asyncio.run(run())


def test_engines_lost_for_good_end_the_rollout(gateway: Any, sampled: Any) -> None:
    async def run() -> None:
        async with gateway(lambda r, p: sampled([1]), patience_s=0.5) as g:
            g.engines[0].close()
            client = await g.connect()
            status, error = await client.chat(MESSAGES)
            assert (status, error["code"]) == (503, "unavailable")
            assert "an engine at version 1.0" in error["message"]
            ending, detail = g.session.ending.result()
            assert ending is Ending.ENGINE_LOST and "waiting for" in detail
            assert (await client.chat(MESSAGES))[0] == 410
            outcome = await g.close()
            assert outcome.calls[0].status is CallStatus.ERROR and outcome.graph.nodes == []

    asyncio.run(run())


@pytest.mark.pain(36)
def test_a_call_ends_at_the_harness_deadline(gateway: Any, sampled: Any, until: Any) -> None:
    async def run() -> None:
        async with gateway(lambda r, p: sampled([1], delay_s=60.0), deadline=time.monotonic() + 1.0) as g:
            client = await g.connect()
            status, error = await client.chat(MESSAGES)
            assert status == 503 and "call q/0/0.0.1 on cell0" in error["message"]
            assert not g.session.ending.done()
            await until(lambda: g.engines[0].aborted)

    asyncio.run(run())


def test_closing_a_session_gets_the_tokens_of_calls_in_flight(gateway: Any, sampled: Any, until: Any) -> None:
    async def run() -> None:
        async with gateway(lambda r, p: sampled([5, 6, 7], delay_s=60.0)) as g:
            client = await g.connect()
            client.send("POST", "/v1/chat/completions", json.dumps({"messages": MESSAGES}).encode())
            await until(lambda: g.engines[0].requests)
            outcome = await g.close()
            (call,) = outcome.calls
            assert (call.status, call.n_completion, outcome.trajectories) == (CallStatus.ABORTED, 2, [])
            assert (await client.receive())[0] == 410

    asyncio.run(run())


def table(g: Any, epoch: int, *rows: tuple[int, int, bool]) -> Routes:
    """Rows: which engine, its rank, open."""
    engines = [Route(f"cell{i}", g.engines[i].server.address, rank, is_open) for i, rank, is_open in rows]
    return Routes(id="t", epoch=epoch, engines=engines)


def test_a_route_table_closes_ranks_adds_and_removes(gateway: Any, renderer: Any, sampled: Any, until: Any) -> None:
    """Calls prefer who stays longest; a closed engine is not asked; one taken out loses its requests to another; an older table is nothing."""

    def quick(request: Generate, prompt: list[int]) -> Any:
        return sampled([renderer.end_id])

    async def run() -> None:
        async with gateway(quick, quick, lambda r, p: sampled([300, renderer.end_id], delay_s=60.0)) as g:
            g.router.follow(table(g, 5, (0, 0, True), (1, 1, True)))
            assert len(g.router.engines) == 2, "the third is not in the table"
            await until(lambda: all(e.serves(Version(1, 0)) for e in g.router.engines))
            client = await g.connect()

            async def asked(which: int) -> None:
                before = len(g.engines[which].requests)
                assert (await client.chat(MESSAGES))[0] == 200
                assert len(g.engines[which].requests) == before + 1

            await asked(1)
            g.router.follow(table(g, 6, (0, 1, True), (1, 0, True)))
            await asked(0)
            g.router.follow(table(g, 7, (0, 1, False), (1, 0, True)))
            await asked(1)
            g.router.follow(table(g, 6, (0, 1, True), (1, 0, True)))
            await asked(1)
            g.router.follow(table(g, 8, (0, 1, False), (1, 0, False), (2, 2, True)))
            await until(lambda: all(e.serves(Version(1, 0)) for e in g.router.engines))
            moving = asyncio.create_task(client.chat(MESSAGES))
            await until(lambda: g.engines[2].requests)
            g.router.follow(table(g, 9, (0, 0, True)))
            assert (await moving)[0] == 200 and len(g.router.engines) == 1
            assert g.engines[0].requests[-1].drawn == 0

    asyncio.run(run())


def test_what_an_engine_gave_back_is_said_to_have_moved(gateway: Any, renderer: Any, sampled: Any, until: Any) -> None:
    """Even before its first token: the next engine has room kept for it."""

    async def run() -> None:
        async with gateway(lambda r, p: sampled([], "abort"), lambda r, p: sampled([renderer.end_id])) as g:
            g.engines[1].version = None
            await until(lambda: g.router.engines[0].serves(Version(1, 0)))
            client = await g.connect()
            asking = asyncio.create_task(client.chat(MESSAGES))
            await until(lambda: g.engines[0].requests)
            g.engines[1].version, g.engines[0].version = Version(1, 0), None
            assert (await asking)[0] == 200
            assert not g.engines[0].requests[0].moved and g.engines[1].requests[-1].moved

    asyncio.run(run())


def test_closed_engines_are_not_lost_engines(gateway: Any, renderer: Any, sampled: Any, until: Any) -> None:
    """All cells train: the call waits, longer than for engines that should be there."""

    async def run() -> None:
        async with gateway(lambda r, p: sampled([renderer.end_id]), patience_s=0.3) as g:
            g.router.follow(table(g, 1, (0, 0, False)))
            g.engines[0].version = None
            await until(lambda: g.router.engines[0].pong and not g.router.engines[0].serves(Version(1, 0)))
            client = await g.connect()
            asking = asyncio.create_task(client.chat(MESSAGES))
            await asyncio.sleep(1.0)
            assert not asking.done()
            g.engines[0].version = Version(1, 0)
            g.router.follow(table(g, 2, (0, 0, True)))
            assert (await asking)[0] == 200

    asyncio.run(run())
