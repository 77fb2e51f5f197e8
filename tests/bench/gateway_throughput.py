"""Tokens a second where the engine is the limit: 64 rollouts of several turns each through their gateways, against the same calls on its wire.

The engine is a process of its own that decodes 64 requests together, each a token every `TOKEN_S`, as a small model does on one device; it recites.
`python tests/bench/gateway_throughput.py` prints both rates, and the CPU time of a call in the gateways' process, which holds the harnesses too.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import shutil
import tempfile
import time
from array import array
from pathlib import Path
from typing import NamedTuple

from gateway_calls import ROOT, Chat, make_renderer, post

from gyre.net.sockets import Client, Server, mint
from gyre.rollout.scripted import Line, Script, ScriptedEngine
from gyre.rollout.shell import Desk
from gyre.sandbox.gateway.endpoint import Endpoint, body_limit
from gyre.sandbox.gateway.http import HttpServer
from gyre.sandbox.gateway.render import Renderer
from gyre.sandbox.gateway.route import Router
from gyre.sandbox.gateway.session import Limits, Session
from gyre.types import Purpose, Sampling, Ticket, Version
from gyre.wire import messages as w

ROLLOUTS, TURNS, TOKEN_S = 64, 6, 0.02
FIRST = Version(1, 0)


class Rates(NamedTuple):
    """Tokens a second through the gateways and on the wire; seconds of CPU time of the gateways' process for a call."""

    through: float
    alone: float
    cpu: float


def serve(address: str, opening: list[int], reply: list[int]) -> None:
    """The engine's process, until it is killed."""

    async def main() -> None:
        script = Script([(Line(suffix_ids=opening, token_delay_s=TOKEN_S), reply)])
        engine = ScriptedEngine(script, eos=frozenset(reply[-1:]), context=1 << 20, slots=ROLLOUTS, queue=ROLLOUTS)
        engine.load(FIRST, [], memoryview(b"")).result(30)
        server = Server.bind(address, w.ToRollout, kind="rollout", name="cell", run_id="r")
        desk = Desk(server, "cell", 1 << 20)
        desk.engine, desk.version = engine, FIRST
        await server.serve(desk.handle)

    asyncio.run(main())


async def rollout(renderer: Renderer, router: Router, folder: Path, n: int, source: str) -> list[array[int]]:
    """All turns of one harness; the prompts that were sent."""
    limits = Limits(sampling=Sampling(max_tokens=512), context=200_000, max_turns=1000, max_trajectories=1, deadline=time.monotonic() + 300)
    session = Session(Ticket(f"q/0/{n}", 0, "q/0", "q", 0, "/task", Purpose.TRAIN, FIRST, n, 30.0), renderer, router, limits)
    http = HttpServer(Endpoint(session), body_limit(limits.context))
    await http.start(folder / f"{n}.sock")
    reader, writer = await asyncio.open_unix_connection(folder / f"{n}.sock", limit=1 << 24)
    agent = Chat([(f"tool{i}", source[i * 300 : i * 300 + 300]) for i in range(8)])
    for turn in range(TURNS):
        answer = await post(reader, writer, agent.path, json.dumps(agent.body()).encode())
        agent.take(json.loads(answer), source[turn * 2000 : turn * 2000 + 5000])
    outcome = await session.close()
    writer.close()
    await http.close()
    prompts, ids = [], outcome.graph.token_ids
    at = 0
    for node in outcome.graph.nodes:  # a chain: prompt, completion, prompt, completion
        if node.call_id is not None:
            prompts.append(ids[:at])
        at += node.n_tokens
    assert len(prompts) == TURNS, "a turn was not bridged"
    return prompts


async def measure(renderer: Renderer, address: str, folder: Path, n_reply: int) -> Rates:
    router = Router.connect([address], 5.0, 60.0, name="s", incarnation="i", run_id="r", resend_s=5.0)
    client = Client.connect(address, w.FromRollout, kind="sandbox", name="d", incarnation="1", run_id="r")
    await client.ready(60, "the engine")
    source = (ROOT / "gyre" / "config.py").read_text()
    total = ROLLOUTS * TURNS * n_reply
    started, cpu = time.perf_counter(), time.process_time()
    prompts = await asyncio.gather(*[rollout(renderer, router, folder, n, source) for n in range(ROLLOUTS)])
    through, busy = time.perf_counter() - started, time.process_time() - cpu

    async def direct(n: int) -> None:
        for turn, prompt in enumerate(prompts[n]):
            ask = w.Generate(id=mint(), request_id=f"{n}.{turn}", rollout_id=f"d{n}", min_version=FIRST, sampling=Sampling(max_tokens=512), seed=1)
            await client.request(ask, {"prompt_ids": prompt}, deadline_s=120, what="tokens")

    started = time.perf_counter()
    await asyncio.gather(*[direct(n) for n in range(ROLLOUTS)])
    alone = time.perf_counter() - started
    client.close()
    router.close()
    return Rates(total / through, total / alone, busy / (ROLLOUTS * TURNS))


def throughput(renderer: Renderer) -> Rates:
    """One measurement."""
    tokenizer = renderer.template.tokenizer
    text = "<think>\nThe test still fails, so look at the parser.\n</think>\n\n" * 3
    text += 'Look.<tool_call>\n{"name": "bash", "arguments": {"cmd": "sed -n 100,140p gyre/sandbox/gateway/parse.py"}}\n</tool_call>'
    reply = [*tokenizer.encode(text).ids, renderer.end_id or 0]
    folder = Path(tempfile.mkdtemp(prefix="gyre-bench-"))
    address = f"ipc://{folder}/e"
    engine = multiprocessing.get_context("spawn").Process(target=serve, args=(address, tokenizer.encode(renderer.opening).ids, reply), daemon=True)
    engine.start()
    try:
        return asyncio.run(measure(renderer, address, folder, len(reply)))
    finally:
        engine.kill()
        engine.join(10)
        shutil.rmtree(folder)


if __name__ == "__main__":
    rates = throughput(make_renderer())
    print(f"{rates.through:.0f} tokens/s through {ROLLOUTS} gateways, {rates.alone:.0f} on the wire: {rates.through / rates.alone:.3f}; ", end="")
    print(f"{rates.cpu * 1e3:.2f} ms of CPU time a call")
