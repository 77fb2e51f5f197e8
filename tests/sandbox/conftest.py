"""What the sandbox tests share: backends as available, sandboxes in one line, tasks on disk."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gyre.sandbox.backends.base import Backend, Bind, Exit, Limits, Spec, Workspace
from gyre.sandbox.backends.choose import choose


@pytest.fixture(autouse=True, scope="session")
def signals_as_usual() -> None:
    """What a shell starts in the background, or nohup starts, ignores these, and so would all that it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def need(name: str) -> None:
    """Skip, visibly, what needs bwrap where there is none; fail where CI promised it."""
    if name == "bubblewrap" and shutil.which("bwrap") is None:
        if "bwrap" in os.environ.get("GYRE_REQUIRE", "").split(","):
            pytest.fail("GYRE_REQUIRE=bwrap, but bwrap is not installed")
        pytest.skip("bwrap is not installed")


class Box:
    """A started backend with a shorthand for its runs."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    async def run(self, workspace: Workspace, script: str, **given: Any) -> Exit:
        """Run a shell script (or `argv`); other names are fields of `Limits` or of `Spec`."""
        limits = {k: given.pop(k) for k in list(given) if k in Limits.__struct_fields__}
        argv: Sequence[str] = given.pop("argv", ["sh", "-c", script])
        binds = [Bind(str(source), target, *rest) for source, target, *rest in given.pop("binds", ())]
        return await self.backend.run(Spec(workspace=workspace, argv=argv, limits=Limits(**{"timeout_s": 20.0, **limits}), binds=binds, **given))

    async def once(self, script: str, **given: Any) -> Exit:
        """Run a script in a workspace of its own."""
        workspace = await self.backend.workspace(None, given.get("workspace_mb", 16))
        try:
            return await self.run(workspace, script, **given)
        finally:
            await self.backend.drop(workspace)


Story = Callable[[Box], Awaitable[Any]]


async def _bounded(story: Story, box: Box) -> Any:
    return await asyncio.wait_for(story(box), 60)


class Shared:
    """Backends that live as long as the tests do, on one event loop."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.backends: dict[str, Backend] = {}

    def tell(self, name: str, story: Story) -> Any:
        need(name)
        if name not in self.backends:
            backend = choose(name, unsafe=name == "process")
            self.runner.run(backend.start())
            self.backends[name] = backend
        return self.runner.run(_bounded(story, Box(self.backends[name])))

    def close(self) -> None:
        for backend in self.backends.values():
            self.runner.run(backend.close())
        self.runner.close()


@pytest.fixture(scope="session")
def shared() -> Iterator[Shared]:
    shared = Shared()
    yield shared
    shared.close()


@pytest.fixture(params=["bubblewrap", "process"])
def box(request: pytest.FixtureRequest, shared: Shared) -> Callable[[Story], Any]:
    """Tell a story with either backend."""
    return lambda story: shared.tell(request.param, story)


@pytest.fixture
def bwrap(shared: Shared) -> Callable[[Story], Any]:
    """Tell a story with the backend that contains."""
    return lambda story: shared.tell("bubblewrap", story)


@pytest.fixture(params=["bubblewrap", "process"])
def new_box(request: pytest.FixtureRequest) -> Callable[[Story], Any]:
    """Tell a story with a backend of its own."""

    def tell(story: Story) -> Any:
        need(request.param)

        async def main() -> Any:
            backend = choose(request.param, unsafe=request.param == "process")
            await backend.start()
            try:
                return await _bounded(story, Box(backend))
            finally:
                await backend.close()

        return asyncio.run(main())

    return tell


@pytest.fixture
def make_task(tmp_path: Path) -> Callable[..., Path]:
    """Write a task directory: its name, the text of tests/test.sh, of solution/solve.sh, of task.toml; files of the workspace."""

    def make(name: str = "task", *, test: str | None = None, solve: str | None = "echo yes > answer\n", toml: str = "", **files: str) -> Path:
        task = tmp_path / name
        (task / "tests").mkdir(parents=True)
        (task / "instruction.md").write_text("Write yes to the file `answer`.\n")
        (task / "task.toml").write_text(toml)
        default = 'r=0; [ "$(cat $GYRE_WORK/answer 2>/dev/null)" = yes ] && r=1; echo $r > $GYRE_LOGS/reward.txt\n'
        (task / "tests" / "test.sh").write_text(default if test is None else test)
        if solve is not None:
            (task / "solution").mkdir()
            (task / "solution" / "solve.sh").write_text(solve)
        for path, text in files.items():
            (task / "environment" / "workspace").mkdir(parents=True, exist_ok=True)
            (task / "environment" / "workspace" / path).write_text(text)
        return task

    return make


def alive(word: str) -> list[int]:
    """Processes of this machine with `word` in their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if word.encode() in (entry / "cmdline").read_bytes() and int(entry.name) != os.getpid():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.fixture
def living() -> Callable[[str], list[int]]:
    return alive
