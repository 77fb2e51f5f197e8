"""What the gateway adds to a call: a turn of a conversation of 10,000 tokens through HTTP, matching, rendering and the graph, against the engine's
wire alone with the same ids. The engine answers at once with a recorded tool call, so all that is measured is overhead.

`python tests/bench/gateway_calls.py [chat|responses|messages]` prints milliseconds, by the clock and of this process's CPU time (which holds both
sides; on a machine with other load it says more).
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gyre.net.sockets import Client, Peer, Server, mint
from gyre.sandbox.gateway.endpoint import Endpoint, body_limit
from gyre.sandbox.gateway.http import HttpServer
from gyre.sandbox.gateway.render import Renderer
from gyre.sandbox.gateway.route import Router
from gyre.sandbox.gateway.session import Limits, Session
from gyre.sandbox.gateway.template import ChatTemplate
from gyre.types import Purpose, Sampling, Ticket, Version
from gyre.wire import messages as w
from gyre.wire.arrays import f32
from gyre.wire.codec import Arrays

ROOT = Path(__file__).resolve().parents[2]
BEFORE, MEASURED = 26, 20  # turns; halfway through the measured ones the prompt has 10,000 tokens
FIRST = Version(1, 0)
TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n' -}}{%- for tool in tools %}{{ tool | tojson }}\n{% endfor %}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- for m in messages -%}
{{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\\n' -}}
{%- if m.reasoning_content -%}{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' -}}{%- endif -%}
{{- m.content -}}
{%- for c in m.tool_calls or [] -%}
{{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' + (c.function.arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}}}


def make_renderer() -> Renderer:
    """A tokenizer learned from this repository: some four bytes a token, as of a large one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8000, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train([str(f) for f in sorted((ROOT / "gyre").rglob("*.py"))], trainer)
    return Renderer(ChatTemplate(tokenizer, TEMPLATE, {}))


class Chat:
    path = "/v1/chat/completions"

    def __init__(self, tools: list[tuple[str, str]]) -> None:
        self.tools = [{"type": "function", "function": {"name": n, "description": d, "parameters": SCHEMA}} for n, d in tools]
        self.history: list[Any] = [{"role": "system", "content": "You are a coding agent."}, {"role": "user", "content": "Go."}]

    def body(self) -> dict[str, Any]:
        return {"model": "m", "messages": self.history, "tools": self.tools}

    def take(self, reply: dict[str, Any], told: str) -> None:
        message = reply["choices"][0]["message"]
        self.history += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": told}]


class Responses:
    path = "/v1/responses"

    def __init__(self, tools: list[tuple[str, str]]) -> None:
        self.tools = [{"type": "function", "name": n, "description": d, "parameters": SCHEMA} for n, d in tools]
        self.history: list[Any] = [{"role": "user", "content": "Go."}]

    def body(self) -> dict[str, Any]:
        return {"model": "m", "instructions": "You are a coding agent.", "input": self.history, "tools": self.tools, "store": False}

    def take(self, reply: dict[str, Any], told: str) -> None:
        self.history += [*reply["output"], {"type": "function_call_output", "call_id": reply["output"][-1]["call_id"], "output": told}]


class Messages:
    path = "/v1/messages"

    def __init__(self, tools: list[tuple[str, str]]) -> None:
        self.tools = [{"name": n, "description": d, "input_schema": SCHEMA} for n, d in tools]
        self.history: list[Any] = [{"role": "user", "content": "Go."}]

    def body(self) -> dict[str, Any]:
        return {"model": "m", "max_tokens": 512, "system": "You are a coding agent.", "messages": self.history, "tools": self.tools}

    def take(self, reply: dict[str, Any], told: str) -> None:
        result = {"type": "tool_result", "tool_use_id": reply["content"][-1]["id"], "content": told}
        self.history += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": [result]}]


PROTOCOLS = {"chat": Chat, "responses": Responses, "messages": Messages}


async def post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, body: bytes) -> bytes:
    writer.write(b"POST %s HTTP/1.1\r\nHost: m\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body)) + body)
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
    return await reader.readexactly(length)


class Cost(NamedTuple):
    """Median seconds of a call through the gateway and of one on the engine's wire right behind it, of their difference, by the clock and of CPU
    time; tokens of the prompt halfway."""

    through: float
    alone: float
    added: float
    added_cpu: float
    n_prompt: int


class Watch:
    """Times by the clock and of the process."""

    def __init__(self) -> None:
        self.clock: list[float] = []
        self.cpu: list[float] = []

    def __enter__(self) -> None:
        self._at = time.perf_counter(), time.process_time()

    def __exit__(self, *failure: object) -> None:
        self.clock.append(time.perf_counter() - self._at[0])
        self.cpu.append(time.process_time() - self._at[1])


async def calls(renderer: Renderer, protocol: str) -> Cost:
    """One conversation."""
    folder = Path(tempfile.mkdtemp(prefix="gyre-bench-"))
    text = "<think>\nThe test still fails, so look at the parser.\n</think>\n\n" * 2
    text += 'Look.<tool_call>\n{"name": "bash", "arguments": {"cmd": "sed -n 100,140p gyre/sandbox/gateway/parse.py"}}\n</tool_call>'
    reply = array("i", [*renderer.template.tokenizer.encode(text).ids, renderer.end_id or 0])
    server = Server.bind(f"ipc://{folder}/e", w.ToRollout, kind="rollout", name="c", run_id="r")
    source = (ROOT / "gyre" / "config.py").read_text()
    prompt = array("i")

    def handle(peer: Peer, message: w.Message, arrays: Arrays) -> None:
        nonlocal prompt
        if isinstance(message, w.Ping):
            pong = w.Pong(id=mint(), cause=message.id, incarnation="1", cell="c", version=FIRST, request_ids=[], free_slots=8, context_limit=1 << 20)
            server.send(peer, pong)
        elif isinstance(message, w.Generate):
            prompt = array("i", bytes(arrays["prompt_ids"]))
            spans = [w.VersionSpan(FIRST, 0, len(reply))]
            done = w.Generated(id=mint(), cause=message.id, request_id=message.request_id, finish_reason="stop", spans=spans, cell="c")
            server.send(peer, done, {"token_ids": reply, "logprobs": f32([-0.5] * len(reply))})

    serving = asyncio.create_task(server.serve(handle))
    router = Router.connect([server.address], 5.0, 30.0, name="s", incarnation="i", run_id="r", resend_s=5.0)
    limits = Limits(sampling=Sampling(max_tokens=512), context=200_000, max_turns=1000, max_trajectories=1, deadline=time.monotonic() + 300)
    session = Session(Ticket("q/0/0", 0, "q/0", "q", 0, "/task", Purpose.TRAIN, FIRST, 7, 30.0), renderer, router, limits)
    http = HttpServer(Endpoint(session), body_limit(limits.context))
    await http.start(folder / "m.sock")
    reader, writer = await asyncio.open_unix_connection(folder / "m.sock", limit=1 << 24)
    client = Client.connect(server.address, w.FromRollout, kind="sandbox", name="d", incarnation="1", run_id="r")
    agent = PROTOCOLS[protocol]([(f"tool{i}", source[i * 300 : i * 300 + 300]) for i in range(8)])
    ours, theirs, sizes = Watch(), Watch(), []
    for turn in range(BEFORE + MEASURED):
        body = json.dumps(agent.body(), ensure_ascii=False).encode()
        with ours:
            answer = await post(reader, writer, agent.path, body)
        sizes.append(len(prompt))
        agent.take(json.loads(answer), source[turn * 100 : turn * 100 + 500])
        direct = w.Generate(id=mint(), request_id=f"d{turn}", rollout_id="d", min_version=FIRST, sampling=Sampling(), seed=1)
        with theirs:
            await client.request(direct, {"prompt_ids": prompt}, deadline_s=30, what="tokens")
    outcome = await session.close()
    assert len(outcome.trajectories) == 1 and outcome.trajectories[0].n_trainable == len(reply) * (BEFORE + MEASURED), "a turn was not bridged"
    writer.close()
    await http.close()
    client.close()
    router.close()
    serving.cancel()
    server.close()
    shutil.rmtree(folder)
    added, added_cpu = ([a - b for a, b in zip(*pair, strict=True)] for pair in ((ours.clock, theirs.clock), (ours.cpu, theirs.cpu)))
    return Cost(*(statistics.median(times[BEFORE:]) for times in (ours.clock, theirs.clock, added, added_cpu)), sizes[BEFORE + MEASURED // 2])


if __name__ == "__main__":
    shared = make_renderer()
    for name in sys.argv[1:] or PROTOCOLS:
        c = asyncio.run(calls(shared, name))
        print(f"{name:10} {c.n_prompt} tokens: {c.through * 1e3:.2f} ms through the gateway, {c.alone * 1e3:.2f} ms on the wire: ", end="")
        print(f"{c.added * 1e3:+.2f} ms, {c.added_cpu * 1e3:+.2f} ms of CPU time")
