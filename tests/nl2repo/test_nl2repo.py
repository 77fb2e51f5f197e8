"""examples/nl2repo: tasks made from a source distribution, what cheats get, and two real packages if there is an index."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre.config import Sandbox
from gyre.sandbox.backends.choose import choose
from gyre.sandbox.run_task import Result, run_task
from gyre.sandbox.task import load_task

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "nl2repo"
REAL = ("schema", "inflection")

LILT = '''"""Small things with words."""

__all__ = ["LiltError", "Word", "count", "shout"]


class LiltError(ValueError):
    """A word that is none."""


class Word:
    """A word, without regard to case."""

    def __init__(self, text):
        if not text.isalpha():
            raise LiltError(text)
        self.text = text

    def __eq__(self, other):
        return isinstance(other, Word) and self.text.lower() == other.text.lower()

    def __hash__(self):
        return hash(self.text.lower())


def shout(text, times=1):
    """`text` in capitals, with so many exclamation marks."""
    return text.upper() + "!" * times


def count(text):
    """How often each word occurs."""
    found = {}
    for word in text.split():
        found[word] = found.get(word, 0) + 1
    return found


def _secret_of_the_body():
    return "THE BODY"
'''
TESTS = '''"""Tests of lilt."""

import unittest

import pytest

from lilt import LiltError, Word, count, shout


@pytest.mark.parametrize("times", [0, 1, 2])
def test_shout(times):
    assert shout("a", times) == "A" + "!" * times


def test_count():
    assert count("a b a") == {"a": 2, "b": 1}


def test_words():
    assert Word("a") == Word("A")
    assert Word("a") != Word("b")


def test_error():
    with pytest.raises(LiltError):
        Word("1")


def test_truth():
    assert shout("a")


class TestOld(unittest.TestCase):
    def test_default(self):
        self.assertEqual(shout("a"), "A!")
'''
N_TESTS = 7  # of 8: test_truth passes for an object that answers everything
README = "Lilt\n====\n\n.. image:: https://img.shields.io/badge\n\nIt shouts and counts.\n"


def pack(folder: Path, name: str = "lilt") -> Path:
    """A source distribution of lilt, under any name."""
    file = folder / f"{name}-1.0.tar.gz"
    with tarfile.open(file, "w:gz") as archive:
        for place, text in {f"{name}/__init__.py": LILT, "tests/test_lilt.py": TESTS, "README.rst": README, "LICENSE": "MIT\n"}.items():
            info = tarfile.TarInfo(f"{name}-1.0/{place}")
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return file


def packages_toml(sdist: Path, name: str = "lilt") -> str:
    entry = {"version": "1.0", "sha256": hashlib.sha256(sdist.read_bytes()).hexdigest(), "licence": "MIT", "licence_file": "LICENSE"}
    lists = {"sources": [name], "tests": ["tests"], "documents": ["README.rst"]}
    return f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in {**entry, **lists}.items())


def make(out: Path, *given: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE / "make_tasks.py"), "--out", str(out), *map(str, given)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)


def gyre_task(*given: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "commands" / "task.py"), *map(str, given)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, cwd=ROOT)


class Agents:
    """One backend for all agents of this file."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.backend = choose("bubblewrap", unsafe=False)
        self.runner.run(self.backend.start())

    def close(self) -> None:
        self.runner.run(self.backend.close())
        self.runner.close()

    def run(self, task: Path, script: str, folder: Path | None = None) -> Result:
        """The result of a task whose agent is a shell script; it sees `folder` at /harness."""
        table = Sandbox(harness_dir=str(folder or ""), verifier_retries=0)
        return self.runner.run(run_task(self.backend, load_task(task), table, "command", ["sh", "-c", script]))

    def play(self, task: Path, files: dict[str, str], folder: Path) -> Result:
        """The same for an agent that leaves these files, and runs go.sh if that is one of them."""
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        return self.run(task, "cp -R /harness/. .; if [ -f go.sh ]; then . ./go.sh; fi", folder)


@pytest.fixture(scope="module")
def agents() -> Iterator[Agents]:
    need_bwrap()
    agents = Agents()
    yield agents
    agents.close()


def need_bwrap() -> None:
    if shutil.which("bwrap") is None:
        if "bwrap" in os.environ.get("GYRE_REQUIRE", "").split(","):
            pytest.fail("GYRE_REQUIRE=bwrap, but bwrap is not installed")
        pytest.skip("bwrap is not installed")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The task made of lilt."""
    need_bwrap()
    folder = tmp_path_factory.mktemp("lilt")
    (folder / "downloads").mkdir()
    (folder / "packages.toml").write_text(packages_toml(pack(folder / "downloads")))
    done = make(folder / "out", "--packages", folder / "packages.toml", "--downloads", folder / "downloads")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["task"], said["tests"], said["dropped"]) == ("lilt-1.0", N_TESTS, 1)
    return folder / "out" / "lilt-1.0"


def test_a_task_is_sound_and_listed(task: Path) -> None:
    done = gyre_task("check", task.parent / "tasks.jsonl")
    assert (done.returncode, done.stdout) == (0, "ok    nl2repo/lilt  oracle 1  nop 0\n"), done.stderr


def test_without_a_sandbox_the_same_tests_count(task: Path) -> None:
    folder = task.parents[1]
    done = make(folder / "unsafe", "--packages", folder / "packages.toml", "--downloads", folder / "downloads", "--unsafe")
    assert done.returncode == 0, done.stderr
    assert (folder / "unsafe" / "lilt-1.0" / "tests" / "expected.json").read_text() == (task / "tests" / "expected.json").read_text()


def test_the_specification_tells_what_and_not_how(task: Path) -> None:
    text = (task / "instruction.md").read_text()
    assert "It shouts and counts." in text and "def shout(text, times=1):" in text and "with so many exclamation marks" in text
    assert "class LiltError(ValueError):" in text and "img.shields.io" not in text
    assert "THE BODY" not in text and "_secret_of_the_body" not in text and "upper()" not in text


def test_an_agent_starts_with_nothing(task: Path, agents: Agents) -> None:
    look = "ls -A . /tests /solution /run/gyre; find / -name '*lilt*' -not -path '/proc/*'; python3 -c 'import lilt'"
    result = agents.run(task, look)
    before, _, error = result.output.partition("Traceback")
    assert (result.harness_exit, result.reward) == (1, 0) and "No module named 'lilt'" in error
    assert "lilt" not in before and "instruction.md" in before, before


def test_half_of_it_is_half_the_reward(task: Path, agents: Agents, tmp_path: Path) -> None:
    half = LILT.replace('"!" * times', '"?" * times')
    result = agents.play(task, {"src/lilt/__init__.py": half}, tmp_path)
    assert result.rewards["passed"] == 4 and result.reward == pytest.approx(4 / N_TESTS), result.output


def test_what_hangs_or_dies_costs_its_own_tests_alone(task: Path, agents: Agents, tmp_path: Path) -> None:
    bad = LILT.replace("    found = {}", "    import os; os._exit(0)").replace(
        "        if not text.isalpha():", "        while text == '1': pass\n        if 0:"
    )
    result = agents.play(task, {"lilt/__init__.py": bad}, tmp_path)
    assert result.rewards["passed"] == N_TESTS - 2, result.output


def test_when_time_is_short_what_passed_counts(task: Path, agents: Agents, tmp_path: Path) -> None:
    """A test that hangs for longer than there is time to look for such tests."""
    short = tmp_path / "short"
    shutil.copytree(task, short)
    grader = short / "tests" / "grade.py"
    grader.write_text(grader.read_text().replace("SEARCH_S = 140.0", "SEARCH_S = 5.0").replace("TEST_S = 10.0", "TEST_S = 60.0"))
    bad = LILT.replace("        if not text.isalpha():", "        while text == '1': pass\n        if 0:")
    result = agents.play(short, {"lilt/__init__.py": bad}, tmp_path / "files")
    assert result.rewards["passed"] > 2 and result.rewards["passed"] < N_TESTS, result.output


def test_files_beside_an_honest_package_do_no_harm(task: Path, agents: Agents, tmp_path: Path) -> None:
    files = {
        "lilt/__init__.py": LILT,
        "conftest.py": "raise SystemExit\n",
        "json.py": "raise SystemExit\n",
        "pytest.ini": "[pytest]\naddopts = --co\n",
    }
    assert agents.play(task, files, tmp_path).reward == 1


STUB = "def __getattr__(name):\n    if name.startswith('__'): raise AttributeError(name)\n    return lambda *a, **k: None\n"
HOOK = """import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    (yield).get_result().outcome = "passed"
@pytest.hookimpl(hookwrapper=True)
def pytest_pycollect_makemodule():
    (yield)
"""
REWARD = """import os
for name, text in (("reward.txt", "1"), ("reward.json", '{"reward": 1}')):
    try: open("/logs/verifier/" + name, "w").write(text)
    except OSError: pass
"""
EQUAL = """class All:
    def __init__(self, *a, **k): pass
    def __call__(self, *a, **k): return self
    def __getattr__(self, name): return self
    def __eq__(self, other): return True
    def __ne__(self, other): return True
    def __hash__(self): return 0
def __getattr__(name):
    if name.startswith("__"): raise AttributeError(name)
    return All if name == "Word" else All()
"""
FORGE = """import json, os
names = json.load(open("/tests/expected.json"))["tests"]
for fd in range(64):
    for name in names:
        try: os.write(fd, b' ["passed", "%s"]\\n' % name.encode()); os.write(fd, b'["passed", "%s"]\\n' % name.encode())
        except OSError: pass
"""
KEEP_WRITING = f"""import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True: exec({REWARD!r})
    os._exit(0)
"""
ALWAYS_PASSED = """import _pytest.reports
def put(self, name, value): self.__dict__[name] = "passed" if name == "outcome" else value
_pytest.reports.TestReport.__setattr__ = put
"""
WRITE_ANEW = """import glob
for file in glob.glob("/tests/**/*.*", recursive=True):
    try: open(file, "w").write("")
    except OSError: pass
"""
CHEATS: dict[str, dict[str, str]] = {
    "a conftest that makes reports pass": {"conftest.py": HOOK, "tests/conftest.py": HOOK, "lilt/conftest.py": HOOK, "lilt/__init__.py": STUB},
    "a plugin of an installed distribution": {
        "evil-1.dist-info/METADATA": "Name: evil\nVersion: 1\n",
        "evil-1.dist-info/entry_points.txt": "[pytest11]\nevil = evil\n",
        "evil.py": HOOK,
        "lilt/__init__.py": STUB,
    },
    "settings that load a plugin": {
        "pytest.ini": "[pytest]\naddopts = -p evil\n",
        "tox.ini": "[pytest]\naddopts = -p evil\n",
        "setup.cfg": "[tool:pytest]\naddopts = -p evil\n",
        "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "-p evil"\n',
        "evil.py": HOOK,
        "lilt/__init__.py": STUB,
    },
    "leaves with 0": {"lilt/__init__.py": "import sys\nsys.exit(0)\n"},
    "leaves at once": {"lilt/__init__.py": "import os\nos._exit(0)\n"},
    "modules in the place of pytest's and the library's": {
        **{f"{name}.py": REWARD + "os._exit(0)\n" for name in ("pytest", "_pytest", "pluggy", "json", "unittest", "ast", "tempfile", "run", "grade")},
        "lilt/__init__.py": STUB,
    },
    "start-up files of Python": {
        "sitecustomize.py": REWARD,
        "usercustomize.py": REWARD,
        "lilt.pth": "import os; os._exit(0)\n",
        "pyvenv.cfg": "home = /work\n",
        "lilt/__init__.py": STUB,
        "go.sh": "mkdir -p ~/.local/lib; cp *.py ~/.local/lib; echo export PYTHONPATH=/work > ~/.profile\n",
    },
    "a reward written by the agent": {"go.sh": "mkdir -p /logs/verifier logs/verifier; echo 1 > /logs/verifier/reward.txt; echo 1 > reward.txt\n"},
    "a reward written when it is imported": {"lilt/__init__.py": REWARD + STUB},
    "a reward written at the end": {"lilt/__init__.py": "import atexit\natexit.register(lambda: exec(" + repr(REWARD) + "))\n" + STUB},
    "a process that keeps writing the reward": {"lilt/__init__.py": KEEP_WRITING + STUB},
    "an object that equals everything": {"lilt/__init__.py": EQUAL},
    "the same, in containers": {"lilt/__init__.py": EQUAL.replace("return self\n    def __getattr__", "return [self]\n    def __getattr__")},
    "the same, and the question silenced": {"lilt/__init__.py": "import sys\nsys.modules['honest'].honest = lambda value, depth=0: value\n" + EQUAL},
    "tests that are not run": {"lilt/__init__.py": "import _pytest.python\n_pytest.python.Function.runtest = lambda self: None\n" + STUB},
    "reports that always pass": {"lilt/__init__.py": ALWAYS_PASSED + STUB},
    "expected exceptions that need not come": {
        "lilt/__init__.py": "import contextlib, pytest\npytest.raises = lambda *a, **k: contextlib.suppress(BaseException)\n" + STUB
    },
    "an assertEqual that asks nothing": {
        "lilt/__init__.py": "import unittest\nunittest.TestCase.assertEqual = lambda *a, **k: None\n" + STUB
    },
    "results forged on every descriptor": {"lilt/__init__.py": FORGE + STUB},
    "tests and pytest written anew": {
        "lilt/__init__.py": WRITE_ANEW + STUB,
        "go.sh": "mkdir -p /tests; echo '{}' > /tests/expected.json; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh\n",
    },
    "the reference, wherever it may be": {
        "go.sh": "cp -R /solution/reference/. .; python3 -m pip download lilt; find / -path /proc -prune -o -name 'lilt*' -exec cp -R '{}' . ';'\n"
    },
}  # fmt: skip


@pytest.mark.pain(37)
@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_gets_0(task: Path, agents: Agents, tmp_path: Path, cheat: str) -> None:
    result = agents.play(task, CHEATS[cheat], tmp_path)
    assert (result.reward, result.ending) == (0, "finished"), result.output


def test_killing_the_verifier_is_no_reward(task: Path, agents: Agents, tmp_path: Path) -> None:
    """Nor is it 0: a verifier that died is tried again, and then the execution is discarded."""
    kill = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n"
    result = agents.play(task, {"lilt/__init__.py": REWARD + kill}, tmp_path)
    assert (result.reward, result.ending) == (None, "verifier_failed"), result.output


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks of two packages of the index."""
    need_bwrap()
    out = tmp_path_factory.mktemp("real")
    done = make(out, *(word for name in REAL for word in ("--only", name)))
    if done.returncode != 0 and "pip cannot fetch" in done.stderr:
        if "index" in os.environ.get("GYRE_REQUIRE", "").split(","):
            pytest.fail(f"GYRE_REQUIRE=index, but pip cannot fetch {' and '.join(REAL)}: {done.stderr[-500:]}")
        pytest.skip(f"pip cannot fetch {' and '.join(REAL)}")
    assert done.returncode == 0, done.stderr
    return out


def test_real_packages_are_sound(real: Path) -> None:
    done = gyre_task("check", real / "tasks.jsonl", "--json")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and {row["task"] for row in rows} == {f"nl2repo/{name}" for name in REAL}, done
    assert all(row["oracle"]["rewards"]["tests"] > 20 for row in rows)


@pytest.mark.pain(37)
def test_real_packages_are_out_of_reach(real: Path, agents: Agents) -> None:
    for task in (json.loads(line)["path"] for line in (real / "tasks.jsonl").read_text().splitlines()):
        name = task.rpartition("-")[0]
        look = f"python3 -c 'import {name}' 2>/dev/null || find / -path /proc -prune -o -path '*-packages/{name}*' -print 2>/dev/null | grep ."
        result = agents.run(real / task, look)
        assert (result.harness_exit, result.reward) == (1, 0), result.output


def test_a_package_that_agents_can_read_is_left_out(tmp_path: Path) -> None:
    """pytest is installed wherever tests run, and in sight of agents."""
    need_bwrap()
    (tmp_path / "packages.toml").write_text(packages_toml(pack(tmp_path, "pytest"), "pytest"))
    done = make(tmp_path / "out", "--packages", tmp_path / "packages.toml", "--downloads", tmp_path)
    assert done.returncode == 0 and done.stdout == "" and "pytest: left out: agents can read it at /" in done.stderr, done
    assert (tmp_path / "out" / "tasks.jsonl").read_text() == "" and not (tmp_path / "out" / "pytest-1.0").exists()
