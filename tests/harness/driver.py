"""Drive a real harness in the real sandbox against a scripted engine, with a tap between the two that notes requests and makes faults.

Nothing here stands in for a part of gyre: executor, backend, gateway, router and engine are the ones that run. The tap is what a bad network is.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import h11

from gyre.config import Config, Rollout, Sandbox, TrajectoryTable
from gyre.net.sockets import Server
from gyre.rollout.engine import EngineRefused, EngineRequest
from gyre.rollout.scripted import Line, Script, ScriptedEngine
from gyre.rollout.shell import Desk
from gyre.sandbox.backends.base import Bind, Exit, Spec
from gyre.sandbox.backends.choose import choose
from gyre.sandbox.execute import Ended, Executor
from gyre.sandbox.gateway.render import Renderer
from gyre.sandbox.gateway.route import Router
from gyre.sandbox.gateway.template import ChatTemplate
from gyre.trajectory.flatten import flatten, offsets
from gyre.types import CallStatus, Purpose, Ticket, Version
from gyre.wire.messages import Generate, ToRollout

FIRST = Version(1, 0)
Say = Callable[[str], str | None]
"""The prompt's text → what is sampled; None: the prompt does not fit."""
Fault = Callable[[int, str, bytes], str]
"""The number of a request among those that ask for a completion, its path, its body → "" | "500" | "drop"."""


def _gateway_conftest() -> Any:
    spec = importlib.util.spec_from_file_location("gateway_conftest", Path(__file__).parents[1] / "gateway" / "conftest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_renderer(path: Path) -> Renderer:
    return Renderer(ChatTemplate.load(_gateway_conftest().save_model(path)))


class Request(NamedTuple):
    """What a harness asked for, and what became of it."""

    path: str
    body: bytes
    fault: str

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def is_call(path: str) -> bool:
    return path.split("?")[0].endswith(("/completions", "/responses", "/messages"))


class Tap:
    """A Unix socket that passes requests on to another, notes them, and breaks some."""

    def __init__(self, upstream: Path, fault: Fault) -> None:
        self.upstream, self.fault = upstream, fault
        self.requests: list[Request] = []
        self._n = 0
        self._open: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}

    async def start(self, path: Path) -> None:
        self.server = await asyncio.start_unix_server(self._serve, path)
        os.chmod(path, 0o777)  # noqa: PTH101

    async def close(self) -> None:
        self.server.close()
        for task, writer in list(self._open.items()):
            writer.transport.abort()
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        await asyncio.sleep(0)  # transports say goodbye in the loop's next turn

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = writer
        connection = h11.Connection(h11.SERVER)
        request: h11.Request | None = None
        body = b""
        try:
            while True:
                event = connection.next_event()
                if event is h11.NEED_DATA:
                    connection.receive_data(await reader.read(1 << 16))
                elif isinstance(event, h11.Request):
                    request = event
                elif isinstance(event, h11.Data):
                    body += event.data
                elif isinstance(event, h11.EndOfMessage):
                    assert request is not None
                    await self._answer(request, body, writer)
                    return
                else:
                    return
        except (ConnectionError, h11.RemoteProtocolError):
            pass
        finally:
            writer.close()
            del self._open[task]

    async def _answer(self, request: h11.Request, body: bytes, writer: asyncio.StreamWriter) -> None:
        path, fault = request.target.decode(), ""
        if is_call(path):
            self._n += 1
            fault = self.fault(self._n, path, body)
        self.requests.append(Request(path, body, fault))
        if fault == "500":
            text = b'{"error": {"message": "a fault", "type": "server_error"}, "type": "error"}'
            writer.write(b"HTTP/1.1 500 Oh\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(text) + text)
            await writer.drain()
            return
        up_reader, up_writer = await asyncio.open_unix_connection(self.upstream)
        head = b"".join(b"%s: %s\r\n" % (k, v) for k, v in request.headers if k not in (b"connection", b"content-length", b"transfer-encoding"))
        up_writer.write(b"%s %s HTTP/1.1\r\n%sConnection: close\r\nContent-Length: %d\r\n\r\n" % (request.method, request.target, head, len(body)))
        up_writer.write(body)
        try:
            answer = await up_reader.read()
        finally:
            up_writer.close()
        if fault == "drop":  # a head and half a body
            at = answer.find(b"\r\n\r\n") + 4
            writer.write(answer[: at + (len(answer) - at) // 2])
            await writer.drain()
            writer.transport.abort()
            return
        writer.write(answer)
        await writer.drain()


class _Tapped(Executor):
    """An executor whose sandboxes talk to a tap."""

    tap: Tap
    output: bytes = b""
    fault: Fault = staticmethod(lambda n, path, body: "")  # type: ignore[assignment]

    def _spec(self, task: Any, workspace: Any, instruction: Path, socket: Path, timeout_s: float) -> Spec:
        spec = super()._spec(task, workspace, instruction, socket, timeout_s)
        tapped = socket.with_suffix(".tap")
        binds = [Bind(str(tapped), b.target, b.readonly) if b.source == str(socket) else b for b in spec.binds]
        self.tap = Tap(socket, self.fault)
        self._starting = asyncio.get_running_loop().create_task(self.tap.start(tapped))
        return Spec(workspace=spec.workspace, argv=spec.argv, limits=spec.limits, env=spec.env, binds=binds)


class _Player(Script):
    """A script that is a function of the prompt's text."""

    def __init__(self, renderer: Renderer, say: Say) -> None:
        super().__init__([])
        self._tokenizer, self._end, self._say = renderer.template.tokenizer, renderer.end_id, say
        self.said: dict[str, str] = {}

    def find(self, request: EngineRequest) -> tuple[Line, list[int]]:
        text = self._say(self._tokenizer.decode([int(t) for t in request.prompt_ids], skip_special_tokens=False))
        if text is None:
            raise EngineRefused("context", "so it was recorded")
        self.said[f"c{request.request_id.split('.')[-2]}"] = text
        return Line(text=text), [*self._tokenizer.encode(text).ids, self._end]


class Drive(NamedTuple):
    """One execution of a harness."""

    ended: Ended
    requests: list[Request]
    prompts: list[list[int]]  # as the engine saw them
    said: dict[str, str]  # by call: the text that was sampled
    output: str
    seconds: float

    @property
    def calls(self) -> list[Any]:
        return self.ended.message.calls

    def coverage(self) -> tuple[int, int]:
        """Tokens trained, tokens that completed calls sampled."""
        sampled = sum(c.n_completion for c in self.calls if c.status is CallStatus.COMPLETE)
        return sum(t.n_trainable for t in self.ended.message.trajectories), sampled


async def _drive(tmp: Path, harness: str, say: Say, fault: Fault, instruction: str, keys: dict[str, Any]) -> Drive:
    task = tmp / "task"
    (task / "tests").mkdir(parents=True)
    (task / "instruction.md").write_text(instruction)
    (task / "task.toml").write_text('[task]\nname = "t"\n')
    (task / "tests" / "test.sh").write_text('[ "$(cat answer)" = yes ]; echo $((1 - $?)) > "$GYRE_LOGS/reward.txt"\n')
    (task / "environment" / "workspace").mkdir(parents=True)
    (task / "environment" / "workspace" / "notes.txt").write_text("Notes of ours.\n")
    renderer = make_renderer(tmp / "model")
    config = Config(
        rollout=Rollout(context=keys.pop("context", 400_000), max_tokens=keys.pop("max_tokens", 8192)),
        sandbox=Sandbox(harness=harness, harness_timeout_s=keys.pop("timeout_s", 240.0), max_turns=60),
        trajectory=TrajectoryTable(max_per_execution=keys.pop("j_max", 5), **keys),
    )
    async with scripted(tmp, renderer, say) as (router, prompts, said):
        ended, requests, output = await _execute(config, router, renderer, task, fault)
    shown, seconds = (output.output.decode(errors="replace"), output.seconds) if output else ("", 0.0)
    return Drive(ended, requests, list(prompts.values()), said, shown, seconds)


@asynccontextmanager
async def scripted(tmp: Path, renderer: Renderer, say: Say) -> AsyncIterator[tuple[Router, dict[str, list[int]], dict[str, str]]]:
    """A router to a scripted engine; the prompts that reach the engine, by request, and what it says, by call."""
    player = _Player(renderer, say)
    engine = ScriptedEngine(player, eos=frozenset([renderer.end_id or 0]), context=1 << 20, slots=16, queue=64)
    engine.load(FIRST, [], memoryview(b"")).result(30)
    server = Server.bind(f"ipc://{tmp}/e", ToRollout, kind="rollout", name="cell0", run_id="r")
    desk = Desk(server, "cell0", 1 << 20)
    desk.engine, desk.version = engine, FIRST
    prompts: dict[str, list[int]] = {}

    def handle(peer: Any, message: Any, arrays: Any) -> None:
        if isinstance(message, Generate):
            prompts[message.request_id] = arrays["prompt_ids"].tolist()
        desk.handle(peer, message, arrays)

    serving = asyncio.create_task(server.serve(handle))
    router = Router.connect([server.address], 20.0, 60.0, name="s", incarnation="i", run_id="r", resend_s=1.0)
    try:
        yield router, prompts, player.said
    finally:
        router.close()
        serving.cancel()
        engine.close()
        server.close()


def a_ticket(task: str) -> Ticket:
    return Ticket("q/0/0", 3, "q/0", "q", 0, task, Purpose.TRAIN, FIRST, 7, 30.0)


async def _execute(config: Config, router: Router, renderer: Renderer, task: Path, fault: Fault) -> tuple[Ended, list[Request], Exit | None]:
    backend = choose("bubblewrap", unsafe=False)
    await backend.start()
    executor = _Tapped(config, backend, router, renderer)
    executor.fault = fault  # type: ignore[method-assign]
    try:
        original, output = backend.run, []

        async def run(spec: Spec) -> Exit:
            output.append(exit := await original(spec))
            return exit

        backend.run = run  # type: ignore[method-assign]
        ended = await executor.execute(a_ticket(str(task)), lambda: None)
        await executor.tap.close()
    finally:
        executor.close()
        await backend.close()
    return ended, executor.tap.requests, output[0] if output else None


def drive(
    tmp: Path, harness: str, say: Say, *, fault: Fault = lambda n, path, body: "", instruction: str = "Write yes to the file answer.", **keys: Any
) -> Drive:
    """Run one harness on a task. `keys`: context, max_tokens, timeout_s, j_max, and keys of [trajectory]."""
    tmp.mkdir(parents=True, exist_ok=True)
    return asyncio.run(asyncio.wait_for(_drive(tmp, harness, say, fault, instruction, keys), 300))


def check_graph(found: Any, arrays: Mapping[str, Any], prompts: list[list[int]]) -> None:
    """Of a rollout (its `nodes`, `calls`, `trajectories`): what lies above a completed call's tokens is a prompt that the engine was sent; its tokens
    bear the engine's log-probs and version; none is trained twice."""
    starts = offsets(found.nodes)
    ids, logprobs, versions = (list(arrays[name]) for name in ("token_ids", "logprobs", "versions"))
    sent = {tuple(prompt) for prompt in prompts}
    for call in found.calls:
        if call.status is CallStatus.COMPLETE:
            above: list[int] = []
            at = call.prompt_node
            while at >= 0:
                above[:0] = ids[starts[at] : starts[at + 1]]
                at = found.nodes[at].parent
            assert tuple(above) in sent and len(above) == call.n_prompt
    for i, node in enumerate(found.nodes):
        part = slice(starts[i], starts[i + 1])
        assert set(versions[part]) == ({0} if node.call_id else {-1})
        assert not node.call_id or set(logprobs[part]) == {-0.5}
    trained: set[int] = set()
    for t in found.trajectories:
        assert not trained & set(t.trainable)
        trained.update(t.trainable)
        flatten(found.nodes, t, arrays)
