"""A small tokenizer with a ChatML template, a scripted engine behind a real socket, and a plain HTTP client: what the gateway's tests talk to."""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import h11
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from gyre.net.sockets import Peer, Server, mint
from gyre.rollout.scripted import Line, Script, ScriptedEngine
from gyre.rollout.shell import Desk
from gyre.sandbox.gateway.endpoint import Endpoint
from gyre.sandbox.gateway.http import HttpServer
from gyre.sandbox.gateway.render import Renderer
from gyre.sandbox.gateway.route import Router
from gyre.sandbox.gateway.session import Limits, Outcome, Session
from gyre.sandbox.gateway.template import ChatTemplate
from gyre.types import Purpose, Sampling, Ticket, Version
from gyre.wire.messages import Abort, EngineRefuse, Generate, Generated, Message, Ping, Pong, ToRollout, VersionSpan

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]

CHATML = """\
{%- if tools %}<|im_start|>system
Tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.reasoning_content -%}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}{%- endif -%}
{{- message.content or '' -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

FORGETFUL = """\
{%- set ns = namespace(last=0) -%}
{%- for message in messages -%}{%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.reasoning_content and loop.index0 > ns.last -%}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}{%- endif -%}
{{- message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def build_tokenizer() -> Tokenizer:
    """Byte-level BPE whose merges make most texts tokenise in several ways."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\s+|\w+|[^\s\w]+"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    corpus = ["the quick brown fox runs ls -la in a workspace", '{"name": "bash", "arguments": {"cmd": "ls"}}', "user assistant system"] * 4
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=CONTROL + MARKS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] in CONTROL
    return Tokenizer.from_str(json.dumps(state))


def save_model(directory: Path, template: str = CHATML) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Path]:
    return save_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def renderer(model_dir: Path) -> Renderer:
    return Renderer(ChatTemplate.load(model_dir))


@pytest.fixture(scope="session")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """A template that, like Qwen3's, drops the reasoning before the last user turn."""
    return Renderer(ChatTemplate.load(save_model(tmp_path_factory.mktemp("forgetful"), FORGETFUL)))


FIRST = Version(1, 0)


class Sampled(NamedTuple):
    """What the engine says to one request."""

    ids: list[int]
    finish: str = "stop"
    version: Version = FIRST
    delay_s: float = 0.0
    refuse: str = ""
    when_aborted: str = "abort"  # or how it finished just before


Says = Callable[[Generate, list[int]], Sampled]


class FakeEngine:
    """Speaks the wire protocol of gyre-rollout; a script says what is sampled. Records every prompt and every reply."""

    def __init__(self, address: str, script: Says, name: str = "cell0", version: Version | None = FIRST, run_id: str = "r") -> None:
        self.script, self.name, self.version = script, name, version
        self.free_slots = 8
        self.server = Server.bind(address, ToRollout, kind="rollout", name=name, run_id=run_id)
        self.incarnation = self.server.incarnation
        self.requests: list[Generate] = []
        self.prompts: dict[str, list[int]] = {}
        self.replies: dict[str, tuple[list[int], list[float]]] = {}
        self.aborted: list[str] = []
        self._pending: dict[str, tuple[Peer, Generate, Sampled, asyncio.TimerHandle]] = {}
        self._task = asyncio.create_task(self.server.serve(self._handle))

    def _handle(self, peer: Peer, message: Message, arrays: dict[str, memoryview]) -> None:
        match message:
            case Ping():
                pong = Pong(
                    id=mint(), cause=message.id, incarnation=self.incarnation, cell=self.name, version=self.version,
                    request_ids=list(self._pending), free_slots=self.free_slots, context_limit=4096,
                )  # fmt: skip
                self.server.send(peer, pong)
            case Abort():
                self.aborted.append(message.request_id)
                if message.request_id in self._pending:
                    peer, request, sampled, timer = self._pending.pop(message.request_id)
                    timer.cancel()
                    self._answer(peer, request, sampled._replace(ids=sampled.ids[:2], finish=sampled.when_aborted))
            case Generate():
                if message.request_id in self._pending:
                    return
                self.requests.append(message)
                prompt = arrays["prompt_ids"].tolist()
                self.prompts[message.request_id] = prompt
                sampled = self.script(message, prompt)
                if sampled.refuse:
                    self.server.send(peer, EngineRefuse(id=mint(), cause=message.id, request_id=message.request_id, reason=sampled.refuse))
                elif sampled.delay_s:
                    timer = asyncio.get_running_loop().call_later(sampled.delay_s, self._late, message.request_id)
                    self._pending[message.request_id] = (peer, message, sampled, timer)
                else:
                    self._answer(peer, message, sampled)

    def _late(self, request_id: str) -> None:
        peer, request, sampled, _ = self._pending.pop(request_id)
        self._answer(peer, request, sampled)

    def _answer(self, peer: Peer, request: Generate, sampled: Sampled) -> None:
        logprobs = [-0.25 - i / 1024 for i in range(request.drawn, request.drawn + len(sampled.ids))]
        self.replies[request.request_id] = (sampled.ids, logprobs)
        spans = [VersionSpan(sampled.version, 0, len(sampled.ids))] if sampled.ids else []
        reply = Generated(id=mint(), cause=request.id, request_id=request.request_id, finish_reason=sampled.finish, spans=spans, cell=self.name)
        self.server.send(peer, reply, {"token_ids": array("i", sampled.ids), "logprobs": array("f", logprobs)})

    def close(self) -> None:
        if not self._task.cancelled() and not self._task.cancelling():
            self._task.cancel()
            self.server.close()


class Reciting:
    """The real scripted engine behind the real desk of gyre-rollout. Notes every prompt, in order."""

    def __init__(self, address: str, lines: list[dict[str, Any]], renderer: Renderer) -> None:
        tokenizer = renderer.template.tokenizer
        script = [(line := Line(**x), line.token_ids or [*tokenizer.encode(line.text).ids, renderer.end_id]) for x in lines]
        self.engine = ScriptedEngine(
            Script(script, lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)),
            eos=frozenset([renderer.end_id]), context=400_000, slots=16, queue=64,
        )  # fmt: skip
        self.engine.load(FIRST, [], memoryview(b"")).result(30)
        self._prompts: dict[str, list[int]] = {}  # a request may come again
        self.server = Server.bind(address, ToRollout, kind="rollout", name="cell0", run_id="r")
        self.desk = Desk(self.server, "cell0", 400_000)
        self.desk.engine, self.desk.version = self.engine, FIRST
        self._task = asyncio.create_task(self.server.serve(self._handle))

    def _handle(self, peer: Peer, message: Message, arrays: dict[str, memoryview]) -> None:
        if isinstance(message, Generate):
            self._prompts[message.request_id] = arrays["prompt_ids"].tolist()
        self.desk.handle(peer, message, arrays)

    @property
    def prompts(self) -> list[list[int]]:
        return list(self._prompts.values())

    def close(self) -> None:
        self._task.cancel()
        self.engine.close()
        self.server.close()


@pytest.fixture
def fake_engine() -> type[FakeEngine]:
    return FakeEngine


@pytest.fixture(scope="session")
def sampled() -> type[Sampled]:
    return Sampled


class Client:
    """One keep-alive HTTP connection to the gateway."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.h11 = h11.Connection(h11.CLIENT)

    @classmethod
    async def open(cls, path: Path) -> Client:
        return cls(*await asyncio.open_unix_connection(path))

    def send(self, method: str, target: str, body: bytes) -> None:
        head = h11.Request(method=method, target=target, headers=[("Host", "m"), ("Content-Length", str(len(body)))])
        self.writer.write((self.h11.send(head) or b"") + (self.h11.send(h11.Data(data=body)) or b"") + (self.h11.send(h11.EndOfMessage()) or b""))

    async def receive(self) -> tuple[int, bytes]:
        status, body = 0, b""
        while True:
            event = self.h11.next_event()
            if event is h11.NEED_DATA:
                self.h11.receive_data(await self.reader.read(65536))
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                if self.h11.our_state is h11.DONE and self.h11.their_state is h11.DONE:
                    self.h11.start_next_cycle()
                return status, body
            elif isinstance(event, h11.ConnectionClosed):
                raise ConnectionError("closed")

    async def request(self, method: str, target: str, body: bytes = b"") -> tuple[int, bytes]:
        self.send(method, target, body)
        return await self.receive()

    async def chat(self, messages: list[dict[str, Any]], **more: Any) -> tuple[int, Any]:
        """Status and the assistant's message, or the error; a stream is put together."""
        status, body = await self.request("POST", "/v1/chat/completions", json.dumps({"model": "x", "messages": messages, **more}).encode())
        if status != 200:
            return status, json.loads(body)["error"]
        if more.get("stream"):
            return status, assemble(body)
        return status, json.loads(body)["choices"][0]["message"]

    def close(self) -> None:
        self.writer.close()


def assemble(body: bytes) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for line in body.decode().split("\n\n"):
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        for choice in json.loads(line[6:])["choices"]:
            delta = choice["delta"]
            for key in ("content", "reasoning_content"):
                if delta.get(key):
                    message[key] = message.get(key, "") + delta[key]
            for part in delta.get("tool_calls", []):
                message.setdefault("tool_calls", []).append({k: v for k, v in part.items() if k != "index"})
    return message


async def wait_until(what: Callable[[], Any]) -> None:
    """Until it is true; a generous deadline against hangs."""
    for _ in range(2000):
        if what():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never became true")


@pytest.fixture
def until() -> Callable[[Callable[[], Any]], Awaitable[None]]:
    return wait_until


class Gateway(NamedTuple):
    """One rollout's gateway, with its engines and its clients."""

    session: Session
    engines: list[FakeEngine]
    router: Router
    socket: Path
    connect: Callable[[], Awaitable[Client]]

    async def close(self) -> Outcome:
        return await self.session.close()


def a_ticket(policy: Version = FIRST) -> Ticket:
    return Ticket("q/0/0", 0, "q/0", "q", 0, "/task", Purpose.TRAIN, policy, 7, 30.0)


@pytest.fixture
def gateway(tmp_path: Path, renderer: Renderer) -> Callable[..., Any]:
    @asynccontextmanager
    async def make(
        *scripts: Says,
        keep_alive_s: float = 5.0,
        use: Renderer | None = None,
        patience_s: float = 5.0,
        models: tuple[str, ...] = (),
        **limits: Any,
    ) -> AsyncIterator[Gateway]:
        shown = use or renderer
        engines = [
            FakeEngine(f"ipc://{tmp_path}/e{i}", s, f"cell{i}") if callable(s) else Reciting(f"ipc://{tmp_path}/e{i}", s, shown)
            for i, s in enumerate(scripts)
        ]
        router = Router.connect([e.server.address for e in engines], 2.0, patience_s, name="s", incarnation="i", run_id="r", resend_s=1.0)
        values: dict[str, Any] = {
            "sampling": Sampling(max_tokens=512), "context": 200_000, "max_turns": 1000, "max_trajectories": 1, "deadline": time.monotonic() + 30
        }  # fmt: skip
        session = Session(a_ticket(), shown, router, Limits(**{**values, **limits}))
        server = HttpServer(Endpoint(session, keep_alive_s, models), 1 << 24)
        socket = tmp_path / "m.sock"
        await server.start(socket)
        clients: list[Client] = []

        async def connect() -> Client:
            clients.append(await Client.open(socket))
            return clients[-1]

        try:
            yield Gateway(session, engines, router, socket, connect)
        finally:
            for client in clients:
                client.close()
            await server.close()
            router.close()
            for engine in engines:
                engine.close()
        assert server.failure is None

    return make
