"""Commands from outside: light help, exit codes, streams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SCRIPTS: dict[str, str] = PROJECT["project"]["scripts"]
HEAVY = {"torch", "transformers", "numpy", "zmq", "docker", "tokenizers", "jinja2", "vllm", "rich.live", "sqlite3"}


def module(script: str) -> str:
    return SCRIPTS[script].partition(":")[0]


def run(*argv: str, **kw: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *argv], capture_output=True, text=True, timeout=120, check=False, **kw)  # type: ignore[call-overload,no-any-return]


def test_one_file_per_command_and_every_package_listed() -> None:
    files = {p.stem for p in (ROOT / "commands").glob("*.py")} - {"__init__"}
    assert {module(s).removeprefix("gyre_commands.") for s in SCRIPTS} == files
    assert {s.removeprefix("gyre-") for s in SCRIPTS} == files
    tree = {str(p.parent.relative_to(ROOT)).replace("/", ".") for p in (ROOT / "gyre").rglob("__init__.py")}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == tree | {"gyre_commands"}


@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_help_is_light(script: str) -> None:
    code = f"import sys; from {module(script)} import main\ntry: main(['--help'])\nexcept SystemExit: print('LOADED', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    usage, _, loaded = done.stdout.partition("LOADED")
    assert usage.startswith("Usage: ")
    assert not HEAVY & set(loaded.split())


@pytest.mark.pain(40)
@pytest.mark.parametrize("kind", ["buffer", "sandbox", "rollout", "train"])
@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--config", "nowhere.toml"], "error: nowhere.toml: no such file; give the path of a run.toml to --config"),
        (["--set", "train.lrr=1"], "error: --set: train.lrr: unknown key; did you mean train.lr?"),
        (["--set", "train.steps=many"], "error: --set: train.steps: expected `int`, got `str`; give integer"),
    ],
)
def test_bad_configuration_is_one_line_and_2(kind: str, options: list[str], line: str, tmp_path: Path) -> None:
    done = run(f"gyre_commands.{kind}", "--run", str(tmp_path / "r"), *options, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line + "\n")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["train", "--bogus"], "error: gyre-train: no such option '--bogus'; gyre-train --help lists what it takes"),
        (["train", "--ranks", "0"], "error: command line: train.ranks: expected `int` >= 1; give integer"),
        (["task", "check"], "error: gyre-task check: missing argument 'TASKS...'; gyre-task check --help lists what it takes"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_2(argv: list[str], line: str) -> None:
    script = Path(sys.executable).with_name(f"gyre-{argv[0]}")
    done = subprocess.run([script, *argv[1:]], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line + "\n")


@pytest.mark.parametrize(
    ("words", "found"),
    [("gyre-train --set train.keep_c", ["train.keep_checkpoints="]), ("gyre-coord --rule as", ["async", "async+stream"])],
)
def test_shells_complete_keys_and_rules(words: str, found: list[str]) -> None:
    command = words.split()[0]
    asked = {f"_{command.upper().replace('-', '_')}_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": "2"}
    done = subprocess.run([Path(sys.executable).with_name(command)], env=os.environ | asked, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [f"plain,{word}" for word in found]


def test_print_config_says_origins_and_check_is_quiet(tmp_path: Path) -> None:
    done = run("gyre_commands.train", "--run", str(tmp_path), "--steps", "7", "--print-config")
    assert done.returncode == 0 and "steps = 7  # flag\n" in done.stdout and "lr = 1e-6  # default\n" in done.stdout
    done = run("gyre_commands.train", "--run", str(tmp_path), "--check")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "configuration ok\n")


@pytest.mark.pain(40)
def test_unwritable_run_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("buffer localhost\ntrain-cell localhost\nrollout-cell localhost\nsandbox localhost\n")
    for argv in (["gyre_commands.buffer"], ["gyre_commands.coord", "--cells", str(hosts)]):
        done = run(*argv, "--run", str(tmp_path / "file" / "run"), "--set", "tasks.train=t", "--set", "model.path=m")
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith("error: --run: ") and "not writable" in done.stderr


def test_logs_in_json(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("no event\n")
    done = run("gyre_commands.top", "--json-logs", str(tmp_path))
    line = json.loads(done.stderr)
    assert done.returncode == 0 and line["level"] == "warning" and "left out 1 damaged lines" in line["message"] and line["t"] > 0
    assert "left out 1 damaged lines" in run("gyre_commands.top", str(tmp_path)).stderr
