"""Processes here and over ssh: one contract. The sshd is the test's own, at a port of this host."""

from __future__ import annotations

import asyncio
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import nodes
import pytest

from gyre.config import Config
from gyre.coord import doctor, hosts
from gyre.coord.hosts import Host
from gyre.coord.launch import Plan, folder_of
from gyre.coord.launcher import Launcher
from gyre.coord.machine import UNREACHED
from gyre.errors import Busy

DEADLINE_S = 60.0
SSHD = "/usr/sbin/sshd"
SAYS = """import os, sys, time
print('began', os.environ['SECRET'], flush=True)
while not os.path.exists(sys.argv[1]): time.sleep(0.05)
print('over')
sys.exit(int(sys.argv[2]))
"""


class Place:
    """A host, how it is reached, and a run directory."""

    def __init__(self, run_dir: Path, host: Host, ssh: str = "ssh") -> None:
        self.run_dir, self.host, self.ssh = run_dir, host, ssh
        run_dir.mkdir()
        (run_dir / "run.toml").touch()
        (run_dir / "logs").mkdir()

    def plan(self, code: int) -> Plan:
        """Of a process that goes on until `release`."""
        argv = [sys.executable, "-c", SAYS, str(self.run_dir / "released"), str(code)]
        return Plan("box", "sandbox", argv, {"SECRET": 'it\'s $HOME "quoted"'}, "", host=self.host)

    def release(self) -> None:
        (self.run_dir / "released").touch()

    def log(self, plan: Plan) -> str:
        return (self.run_dir / "logs" / f"{plan.name}.log").read_text()

    def do(self, work: Callable[[Launcher], Awaitable[None]]) -> None:
        async def run() -> None:
            await asyncio.wait_for(work(Launcher(self.run_dir, self.ssh)), DEADLINE_S)

        asyncio.run(run())


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, str]]:
    """Its port, and the command that reaches it."""
    if not shutil.which(SSHD):
        assert "netns" not in os.environ.get("GYRE_REQUIRE", ""), "GYRE_REQUIRE=netns and there is no sshd"
        pytest.skip("there is no sshd: apt-get install openssh-server")
    folder = tmp_path_factory.mktemp("sshd")
    for name in ("key", "host_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True, timeout=DEADLINE_S)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    text = nodes.SSHD.format(folder=folder).replace("Port 22", f"Port {port}\nListenAddress 127.0.0.1")
    (folder / "sshd_config").write_text(text)
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {' '.join((folder / 'host_key.pub').read_text().split()[:2])}\n")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    with (folder / "log").open("wb") as log:
        sshd = subprocess.Popen([SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        end = time.monotonic() + DEADLINE_S
        while b"Server listening" not in (folder / "log").read_bytes():
            assert sshd.poll() is None and time.monotonic() < end, (folder / "log").read_text()
            time.sleep(0.05)
        yield port, f"ssh -F /dev/null -i '{folder}/key' -o UserKnownHostsFile={folder}/known_hosts"
    finally:
        sshd.terminate()
        sshd.wait(DEADLINE_S)


@pytest.fixture(params=["here", "ssh"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "here":
        return Place(tmp_path / "run", Host("localhost"))
    port, ssh = request.getfixturevalue("daemon")
    return Place(tmp_path / "run", Host("127.0.0.1", getpass.getuser(), port), ssh)


def test_start_find_follow(place: Place) -> None:
    """From its start to its exit code; its log, its environment and its pid are what they should be, and it is found by whoever asks."""
    plan = place.plan(7)

    async def work(hosts: Launcher) -> None:
        assert await hosts.find(plan) is None
        pid = await hosts.start(plan)
        assert pid and str(plan.argv[-2]) in words(pid)
        assert await hosts.find(plan) == pid == await Launcher(place.run_dir, place.ssh).find(plan)
        place.release()
        assert await hosts.follow(plan) == 7
        assert await hosts.find(plan) is None and await hosts.follow(plan) == 7
        assert await hosts.signal(plan, signal.SIGKILL), "nobody is there to be killed, and that is well"

    place.do(work)
    assert place.log(plan) == 'began it\'s $HOME "quoted"\nover\n'
    kept = folder_of(place.run_dir, plan)
    assert kept.stat().st_mode & 0o77 == 0 and (kept / "start").stat().st_mode & 0o77 == 0


def test_signals(place: Place) -> None:
    plan = place.plan(0)

    async def work(hosts: Launcher) -> None:
        for number, code in ((signal.SIGKILL, -9), (signal.SIGTERM, 143)):  # 143: as one that ended in order says it too
            assert await hosts.start(plan)
            following = asyncio.create_task(hosts.follow(plan))
            assert await hosts.signal(plan, number)
            assert await following == code

    place.do(work)


def test_one_at_a_time(place: Place) -> None:
    """What lives is not started twice, and is replaced if that is what is wanted."""
    plan, next_one = place.plan(0), place.plan(3)

    async def work(hosts: Launcher) -> None:
        first = await hosts.start(plan)
        with pytest.raises(Busy, match=r"box runs on .* already"):
            await hosts.start(plan)
        assert await hosts.find(plan) == first
        second = await hosts.start(next_one, replace=True)
        place.release()
        assert second and second != first and await hosts.follow(next_one) == 3
        assert not words(first)

    place.do(work)


def test_it_outlives_whoever_started_it(place: Place) -> None:
    """The follower dies with its coordinator, the process does not; who follows next gets the rest of the log, and nothing twice."""
    plan = place.plan(0)
    module = "import asyncio, sys, msgspec; from pathlib import Path; from gyre.coord.launch import Plan; from gyre.coord.launcher import Launcher\n"
    module += "async def main():\n    plan = msgspec.json.decode(sys.argv[3], type=Plan); l = Launcher(Path(sys.argv[1]), sys.argv[2])\n"
    module += "    print(await l.start(plan), flush=True)\n    await l.follow(plan)\nasyncio.run(main())\n"
    argv = [sys.executable, "-c", module, str(place.run_dir), place.ssh, msgspec.json.encode(plan).decode()]
    starter = subprocess.Popen(argv, stdout=subprocess.PIPE)
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    end = time.monotonic() + DEADLINE_S
    while not (place.run_dir / "logs" / "box.log").exists() or "began" not in place.log(plan):
        assert time.monotonic() < end
        time.sleep(0.05)
    starter.kill()
    starter.wait(DEADLINE_S)
    starter.stdout.close()

    async def work(hosts: Launcher) -> None:
        assert await hosts.find(plan) == pid
        place.release()
        assert await hosts.follow(plan) == 0

    place.do(work)
    assert place.log(plan) == 'began it\'s $HOME "quoted"\nover\n'


def test_a_host_that_is_not_there(tmp_path: Path) -> None:
    place = Place(tmp_path / "run", Host("127.0.0.1", ssh_port=1))
    plan = place.plan(0)

    async def work(hosts: Launcher) -> None:
        assert await hosts.start(plan) is None and await hosts.find(plan) is None and not await hosts.signal(plan, signal.SIGTERM)
        assert (await hosts.call(place.host, "true"))[0] == UNREACHED

    place.do(work)


def test_what_the_doctor_finds(place: Place) -> None:
    """Each host by each interpreter: what it has, and what is missing there."""
    text = f"""
    buffer {target(place.host)}
    train-cell {target(place.host)} python=/no/python
    sandbox {target(place.host)}
    rollout-cell 127.0.0.1:1
    """
    config = msgspec.convert({"tasks": {"train": "/no/tasks"}, "sandbox": {"backend": "process"}}, Config)

    async def work(launcher: Launcher) -> None:
        fine, wrong, gone = await doctor.examine(hosts.parse(text, "hosts.txt"), launcher, config)
        assert fine.reached and fine.problems == ["lacks /no/tasks"] and fine.python and fine.torch and abs(fine.offset_s) < DEADLINE_S
        assert "/no/python does not run" in wrong.problems[0] and "not reached" in gone.problems[0] and not gone.reached

    place.do(work)


def words(pid: int | None) -> list[str]:
    """Of a process's command, [] if it is gone."""
    file = Path(f"/proc/{pid}/cmdline")
    return file.read_text().split("\0")[:-1] if file.exists() else []


def target(host: Host) -> str:
    return host.host if host.local else f"{host.user}@{host.host}:{host.ssh_port}"
