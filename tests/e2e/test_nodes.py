"""A run on four nodes, launched over ssh from a fifth: cables pulled, the buffer and the coordinator killed; nothing lost, doubled or left."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes import Nodes, nodes
from whole_run import DEADLINE_S, RIGHT, ROOT, WRONG, Run, step_groups

from gyre.net.keys import load
from gyre.wire.speakers import KINDS

HOSTS = """
buffer  localhost
cell    node1 name=a            # the core
cell    node2 name=b env.TOKEN=unsaid
sandbox node[3-4] slots=4
"""
COMPLETE_S = 600.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Nodes]:
    with nodes(tmp_path / "nodes", 4) as made:
        yield made


class Far:
    """A run whose coordinator is at the login node."""

    def __init__(self, run: Run, cluster: Nodes) -> None:
        self.run, self.cluster, self.keys = run, cluster, run.folder / "keys"
        (run.folder / "hosts.txt").write_text(HOSTS)
        subprocess.run([sys.executable, "-m", "gyre_commands.keys", str(self.keys)], check=True, timeout=DEADLINE_S, capture_output=True)
        text = run.config.read_text().replace("[rollout]", "[rollout]\nslots = 6")
        text = text.replace("[net]", f'[net]\nengine_timeout_s = 4\nkeys = "keys"\nssh = "{cluster.ssh}"')
        run.config.write_text(f"[run]\ncoord_grace_s = 60\n{text}")
        self.log = run.folder / "coord.log"

    def argv(self, *flags: str, command: str = "coord") -> list[str]:
        return self.cluster.on("login", *self.run.argv(command, "--cells", str(self.run.folder / "hosts.txt"), *flags))

    def start(self, *flags: str) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(self.argv(*flags), stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def wait(self, coord: subprocess.Popen[bytes], code: int = 0) -> None:
        ended = coord.wait(COMPLETE_S)
        assert ended == code, self.log.read_text()[-8000:]

    def until_step(self, coord: subprocess.Popen[bytes], step: int) -> None:
        def there() -> bool:
            assert coord.poll() is None, self.log.read_text()[-8000:]
            return (self.run.dir / "ledger.db").exists() and len(self.run.dump("--kind", "steps")) >= step

        self.run.until(there, f"step {step}")

    def look(self) -> None:
        """From the login node by the run directory, from another by addresses; who has no key sees nothing."""
        held = ["--keys", str(self.keys)]
        line = next(line for line in self.cluster.processes().values() if "--buffer" in line).split()
        coord, buffer = (line[line.index(flag) + 1] for flag in ("--coord", "--buffer"))

        def at(node: str, command: str, *flags: str) -> subprocess.CompletedProcess[str]:
            return self.cluster.run(node, sys.executable, "-m", f"gyre_commands.{command}", *flags)

        for seen in (at("login", "top", str(self.run.dir)), at("node3", "top", "--coord", coord, *held)):
            assert seen.returncode == 0 and "tokens/s" in seen.stdout and "sandbox1" in seen.stdout and "no coordinator" not in seen.stdout, seen
        assert [s["step"] for s in map(json.loads, at("node3", "dump", buffer, "--kind", "steps", *held).stdout.splitlines())][:1] == [1]
        assert at("node3", "top", "--coord", coord).returncode == 1

    def check(self, steps: int, *whole: str) -> None:
        """Exact accounts, nothing left on any node, no secret anywhere; the logs of `whole` came here, as they were."""
        run = self.run
        assert [s["step"] for s in run.dump("--kind", "steps")] == list(range(1, steps + 1))
        groups = step_groups(run)
        assert len(groups) == len(set(groups)) == 2 * steps, "every group in exactly one step"
        consumed = [r["rollout_id"] for r in run.dump("--kind", "rollouts") if r["state"] == "consumed"]
        assert len(consumed) == len(set(consumed)) == 8 * steps
        counts = dict(run.report()["counts"])  # type: ignore[call-overload]
        assert counts.pop("admitted") == sum(counts.values())
        run.until(lambda: not self.cluster.processes(), f"the end of all processes: {self.cluster.processes()}")
        secrets = [load(self.keys, kind).secret for kind in KINDS]
        for file in [self.log, *(f for f in run.dir.rglob("*") if f.is_file() and f.suffix != ".key_secret")]:
            assert not any(secret in file.read_bytes() for secret in secrets), file
        for name in whole or ("a-train", "b-rollout", "sandbox1"):
            assert (run.dir / "logs" / f"{name}.log").read_bytes() == (run.dir / "node" / name / "log").read_bytes(), name


@pytest.fixture
def far(run: Run, cluster: Nodes) -> Far:
    return Far(run, cluster)


def test_a_run_over_ssh(far: Far) -> None:
    """Launched, seen through, and nothing left; --dry-run says what is run where; a second coordinator is refused and told who has the run."""
    dry = subprocess.run(far.argv("--dry-run"), capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert dry.returncode == 0 and "unsaid" not in dry.stdout, dry.stderr
    commands = [shlex.split(line) for line in dry.stdout.splitlines()]
    assert [c[c.index("--") + 1] if c[0] == "ssh" else "here" for c in commands] == ["here", "node1", "node1", "node2", "node2", "node3", "node4"]
    healthy = subprocess.run(far.argv(command="doctor"), capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert healthy.returncode == 0 and healthy.stdout.count("none") == 5, healthy.stdout + healthy.stderr
    far.run.script(RIGHT, WRONG, delay_s=0.1)
    coord = far.start("--steps", "6")
    far.until_step(coord, 1)
    for line in far.cluster.processes().values():
        assert "unsaid" not in line
    second = subprocess.run(far.argv("--resume"), capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert second.returncode == 75 and f"another gyre-coord (process {coord.pid} on " in second.stderr, second.stderr
    far.wait(coord)
    far.check(6)


def test_nothing_is_started_when_a_host_is_not_well(far: Far) -> None:
    """Out of reach, a Python that is not there: named together, before anything runs anywhere. To resume, a host may be out of reach."""
    hosts = far.run.folder / "hosts.txt"
    hosts.write_text(HOSTS.replace("name=b", "name=b python=/no/python"))
    far.cluster.cable("node3", plugged=False)
    refused = subprocess.run(far.argv(), capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert refused.returncode == 2 and not far.run.dir.joinpath("node").exists(), refused.stderr
    assert "node2: /no/python does not run" in refused.stderr and "node3: not reached" in refused.stderr
    hosts.write_text(HOSTS)
    nothing = subprocess.run(far.argv("--resume"), capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert nothing.returncode == 2 and "holds no run" in nothing.stderr, nothing.stderr
    far.cluster.cable("node3", plugged=True)
    far.wait(far.start("--steps", "1"))
    far.cluster.cable("node3", plugged=False)
    coord = far.start("--steps", "2", "--resume")
    far.wait(coord)
    assert "node3: not reached" in far.log.read_text()
    far.check(2)


def test_cables_and_deaths(far: Far) -> None:
    """A cell's cable is pulled in a step and plugged in again, the buffer killed, the coordinator killed and resumed."""
    run, cluster = far.run, far.cluster
    run.script(RIGHT, WRONG, delay_s=0.05)
    steps = 16
    coord = far.start("--steps", str(steps))
    far.until_step(coord, 2)
    cluster.cable("node2", plugged=False)
    time.sleep(12)  # longer than any lease here
    cluster.cable("node2", plugged=True)
    assert cluster.processes(["node2"]), "what is cut off works on"

    far.until_step(coord, 5)
    buffer = run.pid_of("buffer")
    assert buffer is not None
    os.kill(buffer, signal.SIGKILL)
    far.until_step(coord, 7)

    coord.kill()
    coord.wait(DEADLINE_S)
    done, names = len(run.dump("--kind", "steps")), ("buffer", "a-train", "a-rollout", "b-train", "b-rollout", "sandbox0", "sandbox1")
    pids = {name: run.pid_of(name) for name in names}
    time.sleep(5)
    assert None not in pids.values() and pids == {name: run.pid_of(name) for name in names}, "all work on"
    coord = far.start("--steps", str(steps), "--resume")
    far.until_step(coord, done + 2)
    text = far.log.read_text()
    for name, pid in pids.items():
        assert f"{name} lives, as process {pid} of " in text, text[-8000:]
    far.wait(coord)
    far.check(steps)


def test_nothing_is_left_when_nobody_comes_back(far: Far) -> None:
    """The coordinator is killed and does not come back: after the grace time all have ended by themselves."""
    far.run.config.write_text(far.run.config.read_text().replace("coord_grace_s = 60", "coord_grace_s = 5"))
    far.run.script(RIGHT, WRONG, delay_s=0.2)
    coord = far.start("--steps", "500")
    far.until_step(coord, 1)
    assert far.cluster.processes()
    coord.kill()
    coord.wait(DEADLINE_S)
    far.run.until(lambda: not far.cluster.processes() and not far.run.pid_of("buffer"), "the end of all processes")


def test_ctrl_c_ends_everything_on_every_node(far: Far) -> None:
    far.run.script(RIGHT, WRONG, delay_s=0.2)
    coord = far.start("--steps", "500")
    far.until_step(coord, 1)
    far.look()
    coord.send_signal(signal.SIGINT)
    far.wait(coord, 130)
    assert not far.cluster.processes() and not far.run.pid_of("buffer")


def test_a_host_that_is_dead_for_good(far: Far) -> None:
    """Its cell is given up, the others complete the run. The host itself is well, but alone: what runs there ends after the grace time."""
    far.run.config.write_text(far.run.config.read_text().replace("coord_grace_s = 60", "coord_grace_s = 20\nstall_s = 8"))
    far.run.script(RIGHT, WRONG, delay_s=0.1)
    coord = far.start("--steps", "12")
    far.until_step(coord, 1)
    far.cluster.cable("node2", plugged=False)
    far.wait(coord)
    text = far.log.read_text()
    assert "b-rollout is silent for " in text and "b-rollout cannot be killed, node2 is not reached: taken for dead" in text, text[-8000:]
    far.check(12, "a-train", "a-rollout", "sandbox1")


def test_a_cell_on_another_node_comes_and_goes(far: Far) -> None:
    """gyre-coord --reload: it is launched over ssh, rolls out, and is drained; nothing stays on its node. Then Ctrl-C twice kills all, at once:
    nobody waits for those that stand still, which an orderly end would kill after 35 s."""
    run, hosts = far.run, far.run.folder / "hosts.txt"
    alone = "".join(line for line in HOSTS.splitlines(keepends=True) if "node2" not in line)
    hosts.write_text(alone)
    run.script(RIGHT, WRONG, delay_s=0.1)
    coord = far.start("--steps", "500")
    far.until_step(coord, 1)
    assert not far.cluster.processes(["node2"])

    def reload(text: str) -> None:
        hosts.write_text(text)
        told = subprocess.run(far.cluster.on("login", *run.argv("coord", "--reload")), capture_output=True, timeout=DEADLINE_S, check=False)
        assert told.returncode == 0, told.stderr

    reload(HOSTS)
    run.until(lambda: any("b" in r["cells"] for r in run.dump("--kind", "rollouts")), "a rollout of the new cell")  # type: ignore[operator]
    reload(alone)
    run.until(lambda: not far.cluster.processes(["node2"]), "the end of what runs there")
    far.until_step(coord, len(run.dump("--kind", "steps")) + 1)
    for name in ("sandbox0", "a-rollout"):
        os.kill(run.pid_of(name) or 0, signal.SIGSTOP)
    coord.send_signal(signal.SIGINT)
    run.until(lambda: "once more to stop at once" in far.log.read_text(), "the answer to the first Ctrl-C")
    coord.send_signal(signal.SIGINT)
    far.wait(coord, 130)
    assert "did not end" not in far.log.read_text()
    run.until(lambda: not run.pid_of("buffer"), "the end of the buffer")
    far.check(len(run.dump("--kind", "steps")), "b-train", "b-rollout")


def test_by_node(far: Far) -> None:
    """examples/by_node.sh at each node: the same cluster without the coordinator. Engines are told to end."""
    at = {"buffer": ("login", 254), "train": ("node1", 1), "rollout": ("node2", 2)}
    lines = [f"{node} gyre-{kind} tcp://10.77.0.{n}:5000\n" for kind, (node, n) in at.items()] + ["node3 gyre-sandbox\n", "node4 gyre-sandbox\n"]
    cluster = far.run.folder / "cluster.txt"
    cluster.write_text("# NODE COMMAND ADDRESS\n" + "".join(lines))
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    started = {}
    for node in ("login", *far.cluster.names):
        argv = [str(ROOT / "examples" / "by_node.sh"), node, str(cluster), str(far.run.dir), "--config", str(far.run.config)]
        with (far.run.folder / f"{node}.log").open("wb") as log:
            started[node] = subprocess.Popen(far.cluster.on(node, *argv), env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    for node in ("login", "node1", "node3", "node4"):
        assert started[node].wait(DEADLINE_S) == 0, (far.run.folder / f"{node}.log").read_text()[-4000:]
    started["node2"].terminate()
    assert started["node2"].wait(DEADLINE_S) in (0, 143)
    assert far.run.report()["counts"]["consumed"] == 4 * 8  # type: ignore[index]
    far.run.until(lambda: not far.cluster.processes(), "the end of all processes")


def test_a_trainer_on_two_nodes(far: Far) -> None:
    """Its ranks meet on the nodes' own network, and end together."""
    far.run.folder.joinpath("hosts.txt").write_text(
        "buffer localhost\ntrain-cell node1,node2 name=a ranks=2\nrollout-cell node2 name=b\nsandbox node[3-4] slots=4\n"
    )
    text = far.run.config.read_text()
    far.run.config.write_text(text.replace("[train]\n", "[train]\nratio_low = 0.0\nratio_high = 1e9\n"))
    far.wait(far.start("--steps", "3"))
    assert [s["step"] for s in far.run.dump("--kind", "steps")] == [1, 2, 3]
    assert "step 3: " in (far.run.dir / "logs" / "a.log").read_text() and (far.run.dir / "logs" / "a.1.log").exists()
    assert len(list((far.run.dir / "checkpoints" / "step-3" / "optimizer").iterdir())) == 2
    far.run.until(lambda: not far.cluster.processes(), f"the end of all processes: {far.cluster.processes()}")
