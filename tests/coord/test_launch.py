"""From hosts.txt to processes and cells, under each rule."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from gyre_commands.coord import main

from gyre.coord import hosts, launch
from gyre.coord.claim import PID, address, claimed, holder
from gyre.errors import Busy, UsageError

TURNING = "buffer localhost\nsandbox localhost\ncell localhost name=a\ncell localhost name=b set.rollout.slots=7\n"


def plans(text: str, rule: str | None = None) -> list[launch.Plan]:
    lines = hosts.parse(text, "hosts.txt")
    return launch.plans(lines, Path("/r"), resume=False, log_level="info", coord="ipc:///c", rule=rule or launch.default_rule(lines), slots=16)


def option(plan: launch.Plan, name: str) -> str | None:
    return plan.argv[plan.argv.index(name) + 1] if name in plan.argv else None


def test_a_cell_is_a_trainer_and_an_engine() -> None:
    made = {p.name: p for p in plans(TURNING)}
    assert list(made) == ["buffer", "sandbox0", "a-train", "a-rollout", "b-train", "b-rollout"]
    for cell in "ab":
        for part in (made[f"{cell}-train"], made[f"{cell}-rollout"]):
            assert (option(part, "--role"), option(part, "--cell"), option(part, "--name")) == ("auto", cell, part.name)
        assert option(made[f"{cell}-rollout"], "--train") == made["a-train"].address
    addresses = [made["sandbox0"].argv[i + 1] for i, word in enumerate(made["sandbox0"].argv) if word == "--rollout"]
    assert addresses == [made["a-rollout"].address, made["b-rollout"].address]
    a, b = launch.cells(list(made.values()))
    assert (a.name, a.trainer, a.engine, a.capacity, a.fixed) == ("a", "a-train", "a-rollout", 16, False)
    assert (a.core_address, a.address, b.capacity) == (made["a-train"].address, made["a-rollout"].address, 7)


def test_fixed_roles_have_one_process_each() -> None:
    made = {p.name: p for p in plans(TURNING, "async")}
    assert list(made) == ["buffer", "sandbox0", "a", "b"] and (made["a"].kind, made["b"].kind) == ("train", "rollout")
    assert "--role" not in made["a"].argv and "--role" not in made["b"].argv
    three = plans(TURNING + "cell localhost name=c\n", "async:2+stream")
    assert [(p.name, p.kind, option(p, "--role")) for p in three[2:]] == [("a", "train", None), ("b", "train", "satellite"), ("c", "rollout", None)]
    assert option(three[3], "--train") == three[2].address
    assert [c.fixed for c in launch.cells(three)] == [True, True, True]
    old = plans("buffer localhost\ntrain-cell localhost name=core\nrollout-cell localhost name=x\nsandbox localhost\n")
    assert [(p.name, p.kind) for p in old] == [("buffer", "buffer"), ("core", "train"), ("x", "rollout"), ("sandbox0", "sandbox")]


def test_what_is_started_again_goes_on() -> None:
    made = {p.name: p for p in plans(TURNING)}
    assert made["buffer"].again().argv[-1] == made["a-train"].again().argv[-1] == "--resume"
    assert made["a-train"].again().again().argv.count("--resume") == 1
    assert made["a-rollout"].again() == made["a-rollout"] and made["sandbox0"].again() == made["sandbox0"]


FAR = """buffer localhost
cell 192.0.2.[1-2] gpus=0-1
cell 192.0.2.3 bind=198.51.100.3 name=c python=/opt/python
sandbox ops@192.0.2.9:2222
"""


def test_other_hosts() -> None:
    """Everyone listens where the others reach it, at the same port after every start; what runs elsewhere has its configuration and keys there."""
    lines = hosts.parse(FAR, "hosts.txt")

    def made(run_dir: str) -> dict[str, launch.Plan]:
        found = launch.plans(
            lines, Path(run_dir), resume=False, log_level="info", coord="tcp://192.0.2.100:1", rule="elastic", here="192.0.2.100", keys=True
        )  # fmt: skip
        return {p.name: p for p in found}

    one, other = made("/r/one"), made("/r/other")
    assert one == made("/r/one")
    at = {name: p.address.rpartition(":")[0] for name, p in one.items()}
    assert at == {
        "buffer": "tcp://192.0.2.100", "cell0-train": "tcp://192.0.2.1", "cell0-rollout": "tcp://192.0.2.1", "cell1-train": "tcp://192.0.2.2",
        "cell1-rollout": "tcp://192.0.2.2", "c-train": "tcp://198.51.100.3", "c-rollout": "tcp://198.51.100.3", "sandbox0": "",
    }  # fmt: skip
    assert all(20_000 <= int(p.address.rpartition(":")[2]) < 30_000 for p in one.values() if p.address)
    assert one["buffer"].address != other["buffer"].address, "two runs can share hosts"
    box = one["sandbox0"]
    assert box.host == hosts.Host("192.0.2.9", "ops", 2222) and option(box, "--config") == "/r/one/node/sandbox0/run.toml"
    assert option(box, "--set") == "net.keys=/r/one/node/sandbox0/keys" and option(one["buffer"], "--set") is None
    assert one["c-train"].argv[0] == "/opt/python" and one["cell0-train"].env == {"CUDA_VISIBLE_DEVICES": "0,1"}


def test_a_cell_of_several_hosts() -> None:
    """The trainer on the first host, the first of their ranks on each other one, told where they meet; only the trainer talks to the run."""
    text = "buffer localhost\nsandbox localhost\ntrain-cell 192.0.2.[1-2],192.0.2.7 name=core gpus=0-3 set.train.lr=1\nrollout-cell 192.0.2.9\n"
    lines = hosts.parse(text, "hosts.txt")
    made = {p.name: p for p in launch.plans(lines, Path("/r"), resume=True, log_level="info", coord="c", here="192.0.2.100", keys=True)}
    ranks = [made["core"], made["core.1"], made["core.2"]]
    assert [(p.kind, p.host.host, p.cell) for p in ranks] == [("train", "192.0.2.1", "core"), ("rank", "192.0.2.2", ""), ("rank", "192.0.2.7", "")]
    meet = ranks[0].env["GYRE_RANK"].partition("@")[2]
    assert meet.startswith("tcp://192.0.2.1:") and meet != ranks[0].address
    assert [p.env for p in ranks] == [{"CUDA_VISIBLE_DEVICES": "0,1,2,3", "GYRE_RANK": f"{n}/12/4@{meet}"} for n in (0, 4, 8)]
    assert all(option(p, "--ranks") == "12" for p in ranks) and "--coord" not in ranks[1].argv
    assert ranks[2].argv[3:] == ["--run", "/r", "--config", "/r/node/core.2/run.toml", "--ranks", "12", "--set", "train.lr=1"]


def test_a_dry_run_hides_what_may_be_secret_and_nothing_else(tmp_path: Path) -> None:
    text = "buffer localhost\nsandbox localhost env.TOKEN=unsaid\ntrain-cell localhost,localhost ranks=2\nrollout-cell localhost\n"
    (tmp_path / "hosts.txt").write_text(text)
    done = CliRunner().invoke(main, ["--dry-run", "--run", str(tmp_path / "run"), "--cells", str(tmp_path / "hosts.txt")])
    assert done.exit_code == 0 and "GYRE_RANK=0/2/1@tcp://" in done.stdout and "GYRE_RANK=1/2/1@tcp://" in done.stdout, done.output
    assert "TOKEN=…" in done.stdout.replace("'", "") and "unsaid" not in done.stdout


@pytest.mark.parametrize(
    ("host", "complaint"),
    [("no-such-host.invalid", "hosts.txt:2: bind: no-such-host.invalid does not resolve here; give the address"),
     ("127.0.0.2", "hosts.txt:2: bind: 127.0.0.2 resolves to 127.0.0.2 here")],
)  # fmt: skip
def test_hosts_that_cannot_be(host: str, complaint: str) -> None:
    lines = hosts.parse(f"buffer localhost\ncell {host}\nsandbox localhost\n", "hosts.txt")
    with pytest.raises(UsageError, match=complaint):
        launch.plans(lines, Path("/r"), resume=False, log_level="info", coord="", rule="elastic", here="192.0.2.100")


def test_one_coordinator(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no running coordinator"):
        holder(tmp_path)
    with claimed(tmp_path, "ipc:///run/at"):
        assert holder(tmp_path) == os.getpid() and address(tmp_path) == "ipc:///run/at"
        with pytest.raises(Busy, match=rf"another gyre-coord \(process {os.getpid()} on .*\) has this run"), claimed(tmp_path, ""):
            pass
    with (tmp_path / PID).open() as early:  # whoever opened it before the end of the last one
        with claimed(tmp_path, ""):
            pass
        assert os.fstat(early.fileno()).st_ino == (tmp_path / PID).stat().st_ino, "one file, so one lock"
    assert address(tmp_path) is None
    (tmp_path / PID).write_text("1 on a host where it was killed")
    with pytest.raises(UsageError, match="no running coordinator"):
        holder(tmp_path)


@pytest.mark.parametrize(
    ("text", "rule", "complaint"),
    [
        ("buffer localhost\nsandbox localhost\ntrain-cell localhost\nrollout-cell localhost\n", "elastic", "turns cells, and there are none"),
        (TURNING, "async:3", "async:3 with 0 train-cell and 2 cell lines"),
        (TURNING, "async:2", "no cell is left to roll out"),
        (TURNING, "fastest", "is no rule"),
        (TURNING.replace("name=a", "name=a bind=tcp://127.0.0.1:1"), None, "listens at two addresses"),
        (TURNING + "rollout-cell localhost name=a-rollout\n", None, "two processes would be called a-rollout"),
    ],
)  # fmt: skip
def test_what_cannot_be(text: str, rule: str | None, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        plans(text, rule)
