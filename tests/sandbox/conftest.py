"""What the sandbox tests share: backends as available, sandboxes in one line, tasks on disk."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import engines
import pytest

from gyre.config import Sandbox
from gyre.sandbox.backends.base import Backend, Bind, Exit, Limits, Spec, Workspace
from gyre.sandbox.backends.choose import choose

CONTAINING = ["bubblewrap", "docker", "podman"]
ENGINES = ["docker", "podman"]
GUARANTEES = Path(__file__).parents[2] / "docs" / "guarantees.md"


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
    if name in ENGINES and not os.environ.get(f"GYRE_{name.upper()}"):
        if name in os.environ.get("GYRE_REQUIRE", "").split(","):
            pytest.fail(f"GYRE_REQUIRE={name}, but no {name} was started: make test-docker")
        pytest.skip(f"no {name} for tests: make test-docker")


async def started(name: str) -> Backend:
    """A backend; Docker's and Podman's are one, with another address."""
    if name not in ENGINES:
        backend = choose(name, unsafe=name == "process")
        await backend.start()
        return backend
    backend = choose("docker", unsafe=False, table=Sandbox(image=os.environ["GYRE_IMAGE"]), run="tests")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", os.environ[f"GYRE_{name.upper()}"])
        await backend.start()
    return backend


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
    return await asyncio.wait_for(story(box), 60 if box.backend.name != "docker" else 180)


class Shared:
    """Backends that live as long as the tests do, on one event loop."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.backends: dict[str, Backend] = {}

    def tell(self, name: str, story: Story) -> Any:
        need(name)
        if name not in self.backends:
            self.backends[name] = self.runner.run(started(name))
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


@pytest.fixture(params=[*CONTAINING, "process"])
def box(request: pytest.FixtureRequest, shared: Shared) -> Callable[[Story], Any]:
    """Tell a story with each backend."""
    return lambda story: shared.tell(request.param, story)


@pytest.fixture(params=CONTAINING)
def strong(request: pytest.FixtureRequest, shared: Shared) -> Callable[[Story], Any]:
    """Tell a story with each backend that contains."""
    return lambda story: shared.tell(request.param, story)


@pytest.fixture
def bwrap(shared: Shared) -> Callable[[Story], Any]:
    return lambda story: shared.tell("bubblewrap", story)


@pytest.fixture(params=[*CONTAINING, "process"])
def new_box(request: pytest.FixtureRequest) -> Callable[[Story], Any]:
    """Tell a story with a backend of its own."""

    def tell(story: Story) -> Any:
        need(request.param)

        async def main() -> Any:
            backend = await started(request.param)
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


# --- the table of what hostile programs try, for docs/guarantees.md ---------------------------------------------------------------------------

CELLS: dict[tuple[str, str], dict[str, bool]] = {}  # what it tries, what happens -> backend -> contained
SHOWN: dict[str, list[str]] = {}  # what it tries -> tests


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "hostile(tries, happens): a row of the table of containment")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    name = next((v for v in getattr(getattr(item, "callspec", None), "params", {}).values() if v in ENGINES), None)
    address = os.environ.get(f"GYRE_{name.upper()}") if name is not None else None
    if report.when == "call" and report.failed and address and not engines.answers(address):
        print(f"\n{report.longreprtext}")
        pytest.exit(f"{name} does not answer any more", returncode=engines.STUCK)
    mark = item.get_closest_marker("hostile")
    if mark is not None and report.when == "call" and isinstance(item, pytest.Function) and not report.skipped:
        backend = next(v for k, v in item.callspec.params.items() if k in ("box", "strong", "new_box"))
        row = CELLS.setdefault(mark.args, {})
        row[backend] = row.get(backend, True) and report.passed
        name = f"`{item.path.relative_to(item.config.rootpath)}::{item.originalname}`"
        if name not in SHOWN.setdefault(mark.args[0], []):
            SHOWN[mark.args[0]].append(name)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """GYRE_CONTAINMENT=write writes the table, =check fails if what was run says otherwise, in the columns of the backends that are here."""
    wish = os.environ.get("GYRE_CONTAINMENT")
    if not wish or not CELLS or session.exitstatus == engines.STUCK:
        return
    lines = [f"| what it tries | what happens | {' | '.join(CONTAINING)} | shown by |", "|---|---|" + "---|" * (len(CONTAINING) + 1)]
    for (tries, happens), row in CELLS.items():
        cells = ["not run" if b not in row else "contained" if row[b] else "**not contained**" for b in CONTAINING]
        lines.append(f"| {tries} | {happens} | {' | '.join(cells)} | {' '.join(SHOWN[tries])} |")
    text = GUARANTEES.read_text(encoding="utf-8")
    absent = {n + 2 for n, b in enumerate(CONTAINING) if not any(b in row for row in CELLS.values())}
    table = "<!-- containment -->\n" + "\n".join(lines) + "\n<!-- /containment -->"
    found = re.search(r"<!-- containment -->.*?<!-- /containment -->", text, re.S)
    assert found is not None, f"{GUARANTEES} has no place for the table"
    if found[0] != table and wish == "write":
        GUARANTEES.write_text(text.replace(found[0], table), encoding="utf-8")
    elif _without(absent, found[0]) != _without(absent, table):
        print(f"\n{GUARANTEES} does not say what the tests say (GYRE_CONTAINMENT=write writes it):\n{table}")
        session.exitstatus = 1


def _without(columns: set[int], table: str) -> list[list[str]]:
    return [[cell for n, cell in enumerate(line.split(" | ")) if n not in columns] for line in table.splitlines()]
