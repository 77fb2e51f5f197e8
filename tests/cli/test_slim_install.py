"""A plain `pip install gyre`, without extras: help everywhere; dump, report, coordinator and buffer work with the base dependencies alone.

Instead of installing into a new environment, which takes minutes and a network, commands run in a process whose imports refuse everything that the
base dependencies do not bring: whatever else is installed here is not there for them.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from gyre.buffer.ledger import Ledger
from gyre.types import CallRecord, CallStatus, Ending, GraphNode, LeafClass, Purpose, RolloutState, TrajectoryMeta
from gyre.wire.arrays import f32, i32
from gyre.wire.messages import RolloutEnded
from gyre.wire.rows import GroupRow, GroupState, Item, MetaRow, QueryRow, RolloutRow, StepRow, StepState

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCRIPTS: dict[str, str] = PROJECT["scripts"]
HEAVY = {"torch", "transformers", "tokenizers", "jinja2", "h11", "safetensors", "numpy"}

SLIM = """
import sys
refused = set(sys.argv[1].split(","))
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r} in a slim install", name=name)
sys.meta_path.insert(0, Refuse())
import importlib
main = getattr(importlib.import_module(sys.argv[2]), sys.argv[3])
sys.argv[:] = sys.argv[4:]
main()
"""


def base_distributions() -> set[str]:
    """gyre, its dependencies without extras, and theirs."""
    found: set[str] = set()
    todo = ["gyre"]
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in found:
            continue
        try:
            wanted = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform or Python
        found.add(name)
        todo += [re.split(r"[^A-Za-z0-9._-]", w, maxsplit=1)[0] for w in wanted if "extra ==" not in w]
    return found


@pytest.fixture(scope="module")
def refused() -> str:
    """Top-level modules that are installed here and would not be with the base dependencies; and what may not even be installed here."""
    base = base_distributions()
    assert {"click", "msgspec", "msgpack", "pyzmq", "rich", "docker", "xxhash"} < base
    names = {
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if not {re.sub(r"[-_.]+", "-", o).lower() for o in owners} & base and module.isidentifier()
    }
    assert names >= HEAVY - {"safetensors"}, "this test proves nothing where these are missing anyway"
    return ",".join(sorted(names | HEAVY | {"vllm"}))


def slim(refused: str, script: str, *argv: object) -> subprocess.CompletedProcess[str]:
    module, _, attribute = SCRIPTS[script].partition(":")
    words = [sys.executable, "-c", SLIM, refused, module, attribute, script, *map(str, argv)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.pain(39)
@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_help(refused: str, script: str) -> None:
    done = slim(refused, script, "--help")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(f"Usage: {script} ")


def test_the_refusal_refuses(refused: str) -> None:
    code = SLIM.partition("import importlib")[0] + "import click, zmq, msgpack\nimport torch"
    done = subprocess.run([sys.executable, "-c", code, refused], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "No module named 'torch' in a slim install" in done.stderr


def small_run(run_dir: Path) -> Path:
    """A ledger with one consumed group of one execution, as gyre-buffer would have written it."""
    ledger = Ledger(run_dir)
    nodes = [GraphNode(-1, 3), GraphNode(0, 2, "c1")]
    call = CallRecord("c1", 0, 1, CallStatus.COMPLETE, "stop", LeafClass.MAIN, "cell0", 0.0, 1.0, 3, 2)
    meta = TrajectoryMeta(0, LeafClass.MAIN, [0, 1], [1], 5, 2)
    message = RolloutEnded(
        id="m", rollout_id="g0.0", epoch=0, ending=Ending.FINISHED, reward=1.0, rewards={"reward": 1.0}, nodes=nodes, calls=[call],
        trajectories=[meta], cells=["cell0"],
    )  # fmt: skip
    nan = float("nan")
    arrays = {"token_ids": i32([5, 6, 7, 8, 9]), "logprobs": f32([nan, nan, nan, -0.5, -0.25]), "versions": i32([-1, -1, -1, 0, 0])}
    rollout = RolloutRow(
        "g0.0", "g0", "q0", Purpose.TRAIN, 0, "/t", 1, 1, 0, 0, 10.0, state=RolloutState.CONSUMED, ending=Ending.FINISHED, reward=1.0,
        advantage=0.0, rewards={"reward": 1.0}, items=[Item("g0.0", 0, 5, 2)], cells=["cell0"], ended_at=11.0,
    )  # fmt: skip
    ledger.store(rollout, message, arrays)
    rows = [
        MetaRow(run_id="r", term=1, committed=1, total_steps=1), QueryRow("q0", Purpose.TRAIN, "/t", "k", 0, 0), rollout,
        GroupRow("g0", "q0", 1, 0, 0, 10.0, state=GroupState.CONSUMED, step=1, reward_mean=1.0, graded=1),
        StepRow(1, 1, 10.0, state=StepState.COMMITTED, closed=True, groups=["g0"], manifest={"stats": {"reward_mean": 1.0}}, committed_at=12.0),
    ]  # fmt: skip
    ledger.commit(rows, [], []).result()
    ledger.close()
    return run_dir


@pytest.mark.pain(39)
def test_dump_and_report_of_a_run(refused: str, tmp_path: Path) -> None:
    run_dir = small_run(tmp_path / "run")
    done = slim(refused, "gyre-dump", run_dir)
    assert done.returncode == 0, done.stderr
    (record,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert (record["trajectory_id"], record["token_ids"], record["loss_mask"]) == ("g0.0.0", [5, 6, 7, 8, 9], [0, 0, 0, 1, 1])
    assert record["logprobs"] == [None, None, None, -0.5, -0.25] and record["calls"] == [{"call_id": "c1", "start": 3, "end": 5}]
    for kind in ("rollouts", "groups", "calls", "steps", "queries", "evals", "events"):
        done = slim(refused, "gyre-dump", run_dir, "--kind", kind, "--count")
        assert (done.returncode, done.stdout) == (0, "0\n" if kind in ("evals", "events") else "1\n"), done.stderr
    done = slim(refused, "gyre-dump", run_dir, "--format", "parquet")
    assert done.returncode == 2 and "pip install 'gyre[dump]'" in done.stderr and done.stderr.count("\n") == 1
    done = slim(refused, "gyre-graph", run_dir)
    assert done.returncode == 0 and "5 tokens · 1 call" in done.stdout and "messages are not shown" in done.stderr
    done = slim(refused, "gyre-report", run_dir, "--format", "json")
    assert done.returncode == 0 and json.loads(done.stdout)["reward"]["last"] == 1.0, done.stderr
    done = slim(refused, "gyre-report", run_dir)
    assert done.returncode == 0 and "1 consumed" in done.stdout, done.stderr
    for form in ("html", "svg", "png"):
        done = slim(refused, "gyre-report", run_dir, "--format", form, "-o", tmp_path / "out")
        assert done.returncode == 2 and "pip install 'gyre[report]'" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.pain(39)
def test_what_needs_no_model(refused: str, tmp_path: Path) -> None:
    """The coordinator plans, the buffer looks at its tasks, configuration is checked: none of it needs an extra."""
    (tmp_path / "hosts.txt").write_text("buffer localhost\ntrain-cell localhost\nrollout-cell localhost\nsandbox localhost\n")
    done = slim(refused, "gyre-coord", "--run", tmp_path / "run", "--cells", tmp_path / "hosts.txt", "--dry-run")
    assert done.returncode == 0 and done.stdout.count("gyre_commands.") == 4, done.stderr
    done = slim(refused, "gyre-buffer", "--run", tmp_path / "run", "--set", f"tasks.train={tmp_path}/none")
    assert done.returncode == 2 and "no such task directory" in done.stderr
    for script in ("gyre-buffer", "gyre-sandbox", "gyre-rollout", "gyre-train"):
        done = slim(refused, script, "--run", tmp_path / "run", "--check")
        assert (done.returncode, done.stderr) == (0, "configuration ok\n")


def test_what_is_installed_does_not_claim_the_name_commands() -> None:
    """Of the distribution that these tests run with, editable or not."""
    assert (importlib.metadata.distribution("gyre").read_text("top_level.txt") or "").split() == ["gyre", "gyre_commands"]


@pytest.mark.pain(39)
def test_the_wheel(tmp_path: Path) -> None:
    """The commands travel as gyre_commands; every module of the tree is there, and nothing else."""
    setuptools = pytest.importorskip("setuptools", reason="no setuptools here: the wheel cannot be built offline")
    if int(setuptools.__version__.partition(".")[0]) < 77:
        pytest.skip(f"setuptools {setuptools.__version__} is older than pyproject.toml asks for")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("gyre", "commands"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    code = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=source, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    wheel = zipfile.ZipFile(next(tmp_path.glob("*.whl")))
    names = set(wheel.namelist())
    modules = {n for n in names if n.endswith(".py")}
    expected = {str(p.relative_to(ROOT)) for p in (ROOT / "gyre").rglob("*.py")}
    expected |= {f"gyre_{p.relative_to(ROOT)}" for p in (ROOT / "commands").glob("*.py")}
    assert modules == expected
    assert "gyre/py.typed" in names and not any(n.startswith("commands/") for n in names)
    share = {n.partition("/data/share/")[2]: n for n in names if "/data/share/" in n}
    for script in SCRIPTS:
        bash, zsh, fish = f"bash-completion/completions/{script}", f"zsh/site-functions/_{script}", f"fish/vendor_completions.d/{script}.fish"
        assert {f"man/man1/{script}.1", bash, zsh, fish} <= share.keys()
    assert "man/man1/gyre-task-run.1" in share
    page = wheel.read(share["man/man1/gyre-top.1"]).decode()
    assert page.startswith('.TH "GYRE-TOP" "1"') and "\\fB\\-\\-stall\\fP" in page
    completion = tmp_path / "completion"
    completion.write_bytes(wheel.read(share["bash-completion/completions/gyre-top"]))
    (tmp_path / "gyre-top").write_text(f"#!{sys.executable}\nfrom gyre_commands.top import main\nmain()\n")
    (tmp_path / "gyre-top").chmod(0o755)
    ask = f'. {completion}; COMP_WORDS=(gyre-top --st); COMP_CWORD=1; _gyre_top_completion {tmp_path}/gyre-top; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "--stall\n", done.stderr
