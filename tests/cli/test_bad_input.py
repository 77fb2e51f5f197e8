"""Bad input through the real commands: one error line that names file or flag, key and remedy; exit 2. And nobody to talk to: a name, exit 1."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from gyre.net.endpoints import endpoint

DEADLINE_S = 120
KINDS = ["buffer", "sandbox", "rollout", "train"]

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def gyre(tmp_path: Path) -> Command:
    """Run a command in a folder of its own, its run directory being `run` there."""

    def call(command: str, *argv: object) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", f"gyre_commands.{command}", *map(str, argv)]
        words += ["--run", "run"] if command in [*KINDS, "coord"] and "--run" not in argv else []
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=False)

    return call


def error(done: subprocess.CompletedProcess[str], code: int = 2) -> str:
    """The error's line: the last one, the only one, and no traceback."""
    lines = done.stderr.splitlines()
    assert done.returncode == code and done.stdout == "", done
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:] and "Traceback" not in done.stderr, done.stderr
    return lines[-1]


def task(folder: Path, *, tests: bool = True) -> Path:
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text("")
    (folder / "instruction.md").write_text("Do it.\n")
    if tests:
        (folder / "tests" / "test.sh").write_text("echo 1 > $GYRE_LOGS/reward.txt\n")
    return folder


def model(folder: Path, template: str | None = "{% for m in messages %}{{ m.content }}{% endfor %}") -> Path:
    """What a gateway reads of a model directory."""
    folder.mkdir()
    Tokenizer(models.WordLevel({"?": 0}, unk_token="?")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({} if template is None else {"chat_template": template}))
    return folder


@pytest.mark.pain(40)
@pytest.mark.parametrize(
    ("kind", "text", "line"),
    [
        ("buffer", "[train]\nlrr = 1\n", "error: run.toml: train.lrr: unknown key; did you mean train.lr?"),
        ("coord", "[system]\ngroup_per_step = 1\n", "error: run.toml: system.group_per_step: unknown key; did you mean system.groups_per_step?"),
        ("rollout", "[trian]\nlr = 1\n", "error: run.toml: trian: unknown table; did you mean [train]?"),
        ("sandbox", '[sandbox]\nslots = "many"\n', "error: run.toml: sandbox.slots: expected `int`, got `str`; give integer"),
        ("train", "[train\n", "error: run.toml: not TOML: "),
    ],
)
def test_a_mistake_in_the_file(gyre: Command, tmp_path: Path, kind: str, text: str, line: str) -> None:
    (tmp_path / "run.toml").write_text(text)
    hosts = ["--cells", "hosts.txt"] if kind == "coord" else []
    done = gyre(kind, "--config", "run.toml", *hosts)
    assert error(done).startswith(line) and done.stderr.count("\n") == 1


@pytest.mark.pain(40)
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["coord", "--cells", "hosts.txt"], ["hosts.txt: no such file", "--cells"]),
        (["buffer", "--set", "tasks.train=none"], ["none: tasks.train: no such task directory", "set tasks.train"]),
        (["sandbox", "--set", "model.path=none"], ["none/tokenizer.json: no such file", "model.path"]),
        (["sandbox"], ["model.path: missing", "give the model directory"]),
        (["rollout", "--engine", "scripted", "--set", "rollout.script=none"], ["none: rollout.script: no such file", "JSON-lines file"]),
        (["train", "--set", "model.path=none"], ["none", "model.path", "Hugging Face model directory"]),
        (["dump", "none"], ["none: holds no ledger.db", "the directory of a run"]),
        (["report", "none"], ["none: holds no ledger.db", "the directory of a run"]),
        (["task", "run", "none"], ["none: no such directory", "task directory"]),
    ],
)
def test_a_missing_file(gyre: Command, argv: list[str], words: list[str]) -> None:
    line = error(gyre(*argv))
    assert all(w in line for w in words), line


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--harness-cmd", "'a"], 'error: --harness-cmd: "\'a" cannot be understood (No closing quotation); mend the quotes'),
        (["--harness-cmd", " "], "error: --harness-cmd: ' ' is no command; name a program"),
        (["--fail-under", "nan"], "error: --fail-under: nan compares with nothing; give a number"),
    ],
)
def test_a_harness_or_a_bound_that_is_none(gyre: Command, tmp_path: Path, argv: list[str], words: str) -> None:
    assert error(gyre("task", "run", task(tmp_path / "task"), *argv)).startswith(words)


@pytest.mark.parametrize(
    ("kind", "flag", "address"),
    [
        ("rollout", "--train", "nonsense"),
        ("rollout", "--coord", "tcp://*:5000"),
        ("sandbox", "--rollout", "tcp://here:70000"),
        ("sandbox", "--buffer", "http://here:5000"),
        ("train", "--buffer", "tcp://:5000"),
        ("buffer", "--coord", "ipc://"),
    ],
)
def test_an_address_that_is_none(gyre: Command, kind: str, flag: str, address: str) -> None:
    assert error(gyre(kind, flag, address)).startswith(f"error: {flag}: {address!r} is no address to connect to; give tcp://HOST:PORT")


@pytest.mark.pain(40)
@pytest.mark.parametrize("argv", [["buffer"], ["task", "run"], ["task", "check"]], ids="-".join)
def test_a_task_without_tests(gyre: Command, tmp_path: Path, argv: list[str]) -> None:
    """The buffer refuses it before a sandbox ever sees it."""
    task(tmp_path / "tasks" / "good")
    bad = task(tmp_path / "tasks" / "untested", tests=False)
    done = gyre("buffer", "--set", "tasks.train=tasks") if argv == ["buffer"] else gyre(*argv, bad)
    line = error(done)
    assert str(bad) in line and "test.sh" in line and "; " in line
    assert not (tmp_path / "run" / "ledger.db").exists()


@pytest.mark.pain(40)
def test_a_tokenizer_without_a_chat_template(gyre: Command, tmp_path: Path) -> None:
    line = error(gyre("sandbox", "--set", f"model.path={model(tmp_path / 'model', template=None)}"))
    assert line.startswith(f"error: {tmp_path}/model/tokenizer_config.json: chat_template: the tokenizer has no chat template; add one")


@pytest.fixture
def taken() -> Iterator[str]:
    """An address that somebody else listens on."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        yield f"tcp://127.0.0.1:{holder.getsockname()[1]}"


@pytest.mark.pain(40)
@pytest.mark.parametrize("kind", ["buffer", "rollout"])
def test_a_port_in_use(gyre: Command, tmp_path: Path, taken: str, kind: str) -> None:
    task(tmp_path / "tasks" / "good")
    line = error(gyre(kind, "--set", "tasks.train=tasks", "--set", "rollout.engine=scripted", "--bind", taken))
    assert line == f"error: --bind: {taken} is in use; stop its holder or bind another address"


@pytest.mark.pain(40)
def test_an_engine_in_an_unwritable_run_directory(gyre: Command, tmp_path: Path) -> None:
    """A file where a directory is needed: this also stops root, who may write anywhere. (Buffer and coordinator: test_commands.py.)"""
    (tmp_path / "file").write_text("")
    line = error(gyre("rollout", "--engine", "scripted", "--run", "file/run"))
    assert f"{tmp_path}/file/run" in line and line.endswith("; make its directory writable or give another --run")


@pytest.mark.pain(1)
@pytest.mark.parametrize("kind", ["sandbox", "rollout"])
def test_alone_it_gives_up_and_says_for_whom_it_waited(gyre: Command, tmp_path: Path, kind: str) -> None:
    """A wait at the start is bounded (run.start_timeout_s) and names the peer and its address."""
    (tmp_path / "script.jsonl").write_text('{"token_ids": [1]}\n')
    sets: dict[str, Any] = {"run.start_timeout_s": 0.5, "sandbox.backend": "process", "sandbox.unsafe": "true", "rollout.engine": "scripted"}
    sets |= {"model.path": model(tmp_path / "model")} if kind == "sandbox" else {"rollout.script": "script.jsonl"}
    peer = {"sandbox": "buffer", "rollout": "train"}[kind]
    line = error(gyre(kind, *(word for k, v in sets.items() for word in ("--set", f"{k}={v}"))), 1)
    place = f"gyre-{peer} at {endpoint(tmp_path / 'run', peer)}"
    assert line == f"error: gave up after 0.5 s waiting for {place}, where nobody answers (does it run, and there?)"
