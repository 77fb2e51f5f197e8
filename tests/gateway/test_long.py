"""A rollout of a million tokens: what it takes in memory, that nothing of it is tokenised twice, and whom a large request holds up."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from array import array
from typing import Any

import pytest
from agents import AGENTS, Chat, Responses, Stepped, open_session

from gyre.sandbox.gateway.endpoint import Endpoint
from gyre.sandbox.gateway.http import Request
from gyre.sandbox.gateway.render import Renderer
from gyre.trajectory.flatten import flatten

CALLS, NEW = 8, 62_500  # calls; tokens that each samples, and that each tool says


@pytest.mark.pain(10, 21)
@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("agent", [Chat, Responses])
def test_a_million_tokens(renderer: Renderer, agent: Any, store: bool) -> None:
    """pains 10, 21: bytes per token in the gateway are bounded, the bodies that came last among them; drift is no token."""
    if store and agent is Chat:
        pytest.skip("chat completions store nothing")
    tokenizer = renderer.template.tokenizer
    call = tokenizer.encode('<tool_call>{"name": "bash", "arguments": {"cmd": "ls"}}</tool_call>').ids
    (x,) = tokenizer.encode("x").ids
    told = "the the quick brown fox " * (NEW // 6)
    n_told = len(tokenizer.encode(told).ids)
    ids = array("i", [x] * NEW + [*call, renderer.end_id])

    async def run() -> None:
        router = Stepped(lambda job: ids)
        session = open_session(renderer, router, max_tokens=1 << 20)
        endpoint = Endpoint(session)
        harness = agent()
        harness.user("go")

        async def turn(n: int) -> None:
            response = await endpoint(Request("POST", harness.path, {}, harness.body(**({"store": store} if agent is Responses else {}))))
            assert response.status == 200 and isinstance(response.body, bytes)
            harness.tool(harness.take(response.body).calls[0][0], told)

        tracemalloc.start()
        for n in range(CALLS):
            await turn(n)
        total = len(router.jobs[-1][0]) + len(ids)
        assert total > 0.9 * CALLS * (NEW + n_told)
        prompts, router.jobs = [prompt for prompt, _ in router.jobs], []
        lengths = [len(p) for p in prompts]
        harness.history = []
        last = prompts[-1]
        del prompts
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        bound = 64 if store else 32
        assert (held - 4 * len(last)) / total < bound, f"{held / total:.1f} bytes per token"
        outcome = await session.close()
        (trajectory,) = outcome.trajectories
        flat = flatten(outcome.graph.nodes, trajectory, outcome.graph.arrays())
        assert flat.token_ids[: len(last)] == last and flat.token_ids[len(last) :] == ids
        assert [span.start for span in flat.calls] == lengths and sum(flat.loss_mask) == CALLS * len(ids)

    asyncio.run(run())


@pytest.mark.parametrize("agent", AGENTS)
def test_a_large_request_holds_up_its_own_rollout_only(renderer: Renderer, agent: Any) -> None:
    """Others are answered while it is read, rendered and tokenised; its own next call waits its turn, and a client that goes away leaves it whole."""

    async def run() -> None:
        ids = array("i", [*renderer.template.tokenizer.encode("done").ids, renderer.end_id or 0])
        order: list[str] = []

        def says(name: str) -> Any:
            def say(job: Any) -> array[int]:
                order.append(name)
                return ids

            return Stepped(say)

        large, other = (Endpoint(open_session(renderer, says(name))) for name in ("large", "other"))
        harness, small = agent(), agent()
        harness.user("the quick brown fox runs ls -la in a workspace " * 40_000)
        small.user("go")
        body = harness.body()

        async def ask(endpoint: Endpoint, what: bytes) -> Any:
            response = await endpoint(Request("POST", agent.path, {}, what))
            assert response.status == 200
            return json.loads(response.body)  # type: ignore[arg-type]

        first = asyncio.create_task(ask(large, body))
        await asyncio.sleep(0)
        await ask(other, small.body())
        assert order == ["other"] and not first.done()
        await first
        dropped = asyncio.create_task(ask(large, body))
        await asyncio.sleep(0)
        dropped.cancel()
        await ask(large, small.body())
        assert dropped.cancelled() and order[1:] == ["large", "large"]

    asyncio.run(run())
