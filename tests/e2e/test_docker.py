"""gyre-sandbox with containers: a whole run, and what kill -9 leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import docker
import pytest
from whole_run import DEADLINE_S, RIGHT, WRONG, Run, run, tasks, tiny_model  # noqa: F401 (fixtures)

from gyre.sandbox.backends import reaper

MINE = [n for n in ("docker", "podman") if os.environ.get(f"GYRE_{n.upper()}")]


@pytest.fixture(params=["docker", "podman"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of an engine that holds nothing of gyre's."""
    if request.param not in MINE:
        if request.param in os.environ.get("GYRE_REQUIRE", "").split(","):
            pytest.fail(f"GYRE_REQUIRE={request.param}, but no {request.param} was started: make test-docker")
        pytest.skip(f"no {request.param} for tests: make test-docker")
    monkeypatch.setenv("DOCKER_HOST", os.environ[f"GYRE_{request.param.upper()}"])
    client = docker.from_env()
    client.before = frozenset(left(client))  # of other tests' backends
    yield client
    client.close()


def left(client: Any) -> list[str]:
    """Containers and volumes that were not there before."""
    volumes = client.api.volumes({"label": [reaper.OWNER]})["Volumes"] or []
    names = [c["Names"][0] for c in client.api.containers(all=True)] + [v["Name"] for v in volumes]
    return [name for name in names if name not in getattr(client, "before", ())]


def flags(*sets: str) -> list[str]:
    wanted = ["sandbox.backend=docker", f"sandbox.image={os.environ['GYRE_IMAGE']}", "sandbox.unsafe=false", *sets]
    return [word for s in wanted for word in ("--set", s)]


def command_lines(mark: str) -> list[bytes]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found.append((entry / "cmdline").read_bytes())
    return [words for words in found if mark.encode() in words]


def state_of_the_machine() -> set[str]:
    """Mount points and control groups."""
    mounts = {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    groups = {str(p) for p in Path("/sys/fs/cgroup").rglob("*") if p.is_dir() and ("docker" in str(p) or "libpod" in str(p) or "gyre" in str(p))}
    return mounts | groups


def more_than(before: set[str]) -> list[str]:
    """Mount points and control groups that were not there; those that Podman makes for all containers, once, stay by design."""
    return sorted(p for p in state_of_the_machine() - before if not p.endswith(("/libpod_parent", "/libpod_parent/conmon", "/data/overlay")))


def eventually_none(found: Callable[[], list[str]], why: str) -> None:
    until = time.monotonic() + 60
    while there := found():
        assert time.monotonic() < until, f"{why}: {there}"
        time.sleep(0.1)


def test_a_whole_run_in_containers(run: Run, engine: Any) -> None:  # noqa: F811
    more = flags("train.steps=2", "tasks.eval_every=0")
    for command in ("buffer", "train", "rollout", "sandbox"):
        run.start(command, *more)
    run.finish()
    rollouts = run.dump("--kind", "rollouts")
    assert {r["reward"] for r in rollouts if r["ending"] == "finished"} == {0.0, 1.0}, run.log("sandbox")
    assert left(engine) == []


@pytest.mark.pain(35)
def test_one_failure_in_eight_makes_nine_workspaces_and_removes_nine(run: Run, engine: Any) -> None:  # noqa: F811
    """Somebody removes the container of one agent; that execution alone is tried again, and nothing of it stays."""
    seen = set(engine.before)
    names: dict[str, set[str]] = {}
    stream = engine.api.events(since=int(time.time()), filters={"type": "volume"}, decode=True)  # it remembers the last few only, or too many

    def note() -> None:
        for event in stream:
            names.setdefault(event["Action"], set()).add(event["Actor"]["ID"] or event["Actor"]["Attributes"]["name"])

    noting = Thread(target=note, daemon=True)
    noting.start()
    more = flags("train.steps=1", "tasks.eval_every=0", "system.target_staleness=0", "system.steps_per_burst=1")
    run.script(RIGHT, WRONG, delay_s=0.05)
    for command in ("buffer", "train", "rollout", "sandbox"):
        run.start(command, *more)

    def agents() -> list[str]:
        there = [c["Names"][0] for c in engine.api.containers(filters={"label": [reaper.OWNER]})]
        return [n for n in there if n not in seen and engine.api.inspect_container(n)["Config"]["User"] != "0:0"]  # that is a keeper

    run.until(lambda: agents() != [], "an agent's container")
    engine.api.remove_container(agents()[0], force=True)
    run.finish()
    rollouts = run.dump("--kind", "rollouts")
    assert sorted(r["epoch"] for r in rollouts) == [0] * 7 + [1], rollouts
    assert {r["ending"] for r in rollouts} == {"finished"} and left(engine) == []

    def kept() -> list[str]:  # Podman tells of what happened up to seconds later
        return sorted(names["create"] - names.get("destroy", set()) - names.get("remove", set()))

    eventually_none(kept, "volumes made and, as its events go, not removed")
    stream.close()
    noting.join(DEADLINE_S)
    assert len(names["create"]) == 18, (names, run.log("sandbox"), run.log("buffer"))  # two for each workspace


def test_killed_with_16_containers_and_16_bubblewraps_it_leaves_nothing(run: Run, engine: Any) -> None:  # noqa: F811
    mark = uuid.uuid4().hex
    before = state_of_the_machine()
    harness = f"sh -c 'setsid sleep 3000 & sleep 3000; : {mark}'"
    more = ["--set", f"sandbox.harness={harness}", "--set", "system.groups_per_step=8", "--set", "sandbox.slots=16"]
    for command in ("buffer", "train", "rollout"):
        run.start(command, *more)
    run.start("sandbox", *more, *flags(), "--name", "boxes", name="boxes")
    run.start("sandbox", *more, "--set", "sandbox.backend=bubblewrap", "--name", "wraps", name="wraps")

    def running() -> tuple[int, int]:
        owned = [c for c in engine.api.containers(filters={"label": [reaper.OWNER]}) if c["Names"][0] not in engine.before]
        return len(owned), sum(words.startswith(b"sh\0-c") for words in command_lines(mark))

    run.until(lambda: running() == (32, 32), f"16 keepers, 16 agents and as many bubblewraps, but there are {running()}")
    for name in ("boxes", "wraps"):
        killed = run.processes.pop(name)
        killed.kill()
        killed.wait(30)
    eventually_none(lambda: left(engine), "containers or volumes are left, and nobody was started")
    for name in ("buffer", "train", "rollout"):
        run.processes[name].send_signal(signal.SIGKILL)
    for backend in ("docker", "bubblewrap"):  # the next start reaps
        argv = [sys.executable, "-c", REAP, backend, os.environ["GYRE_IMAGE"]]
        subprocess.run(argv, timeout=DEADLINE_S, check=True)
    assert running() == (0, 0) and left(engine) == []
    eventually_none(lambda: more_than(before), "mounts or control groups are left")


REAP = """
import asyncio, sys
from gyre.config import Sandbox
from gyre.sandbox.backends.choose import choose
async def main():
    backend = choose(sys.argv[1], unsafe=False, table=Sandbox(image=sys.argv[2]))
    await backend.start()
    await backend.close()
asyncio.run(main())
"""
