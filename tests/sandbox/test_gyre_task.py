"""The command gyre-task: exit codes and what it prints."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from gyre.config import Sandbox
from gyre.sandbox.backends.choose import choose

ROOT = Path(__file__).parents[2]
BACKENDS = [["--backend", "bubblewrap"], ["--backend", "process", "--unsafe"]]


def gyre_task(*args):
    command = [sys.executable, str(ROOT / "commands" / "task.py"), *map(str, args)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False, env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    )


@pytest.fixture(autouse=True)
def _needs_bwrap(bwrap):
    async def story(b):
        return None

    bwrap(story)


@pytest.mark.parametrize("backend", BACKENDS, ids=["bubblewrap", "process"])
def test_run_exits_0_whenever_it_graded(make_task, backend):
    path = make_task("mine")
    for given, reward, code in [
        ([], "1", 0),
        (["--harness", "nop"], "0", 0),
        (["--harness", "nop", "--fail-under", "0.5"], "0", 1),
        (["--harness-cmd", "sh -c 'echo yes > answer; exit 4'"], "1", 0),
        (["--harness-cmd", "sh -c 'echo yes > answer; sleep 60'", "--set", "sandbox.harness_timeout_s=1"], "1", 0),
        (["--harness-cmd", "no-such-command"], "0", 0),
    ]:
        done = gyre_task("run", path, *backend, *given)
        assert (done.returncode, done.stdout.split()[:3]) == (code, ["reward", reward, "mine"]), done
        assert done.stdout.count("\n") == 1


def test_run_as_json(make_task):
    done = gyre_task("run", make_task(), "--json", "--harness-cmd", "sh -c 'printf \"\\033[31mred\"; exit 3'")
    result = json.loads(done.stdout)
    assert (result["reward"], result["ending"], result["harness_exit"], result["harness"]) == (0.0, "finished", 3, "command")
    assert "\033" not in result["output"] and "red" in result["output"] and result["seconds"].keys() == {"setup", "harness", "grade"}


def test_run_exits_1_when_it_could_not_grade(make_task):
    done = gyre_task("run", make_task(test="echo broken; exit 1"), "--json")
    assert done.returncode == 1 and json.loads(done.stdout)["ending"] == "verifier_failed"
    assert "not graded: the verifier wrote no reward" in done.stderr and "broken" in done.stderr
    too_large = make_task("large", toml="[environment]\nstorage_mb = 1\n", big="x" * 3_000_000)
    done = gyre_task("run", too_large, "--json")
    assert done.returncode == 1 and json.loads(done.stdout)["ending"] == "task_setup_failed" and "do not fit" in done.stderr


@pytest.mark.pain(40)
def test_bad_input_is_one_line_and_2(make_task, tmp_path):
    bare = make_task("bare", solve=None)
    (make_task("untested") / "tests" / "test.sh").unlink()
    for args, says in [
        (["run", tmp_path / "none"], "no such directory"),
        (["run", tmp_path / "untested"], "a task needs tests"),
        (["run", bare], "add the solution"),
        (["run", bare, "--set", "sandbox.memory=1"], "unknown key"),
        (["run", bare, "--config", tmp_path / "no.toml"], "no such file"),
        (["run", bare, "--harness", "nop", "--backend", "process"], "accept that with --unsafe"),
        (["check", bare], "add the solution"),
        (["check", tmp_path / "bare" / "tests"], "holds no task directories"),
    ]:
        done = gyre_task(*args)
        assert done.returncode == 2 and done.stdout == "" and says in done.stderr, done
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")


def test_without_bwrap_the_remedy_is_named(make_task):
    path = make_task()
    command = [sys.executable, str(ROOT / "commands" / "task.py"), "run", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env={"PATH": "/nowhere", "PYTHONPATH": str(ROOT)})
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "apt-get install bubblewrap" in done.stderr


def test_check(make_task, tmp_path):
    make_task("sound")
    good = gyre_task("check", tmp_path, "-j", 2)
    assert (good.returncode, good.stdout) == (0, "ok    sound  oracle 1  nop 0\n")
    make_task("easy", test="echo 1 > $GYRE_LOGS/reward.txt")
    make_task("broken", test="exit 1")
    bad = gyre_task("check", tmp_path, "-j", 3)
    lines = sorted(bad.stdout.splitlines())
    assert bad.returncode == 1 and "1 of 3 tasks are sound" in bad.stderr
    assert lines[0].startswith("FAIL  broken  oracle - (the verifier wrote no reward")
    assert lines[1:] == ["FAIL  easy  oracle 1  nop 1", "ok    sound  oracle 1  nop 0"]
    rows = [json.loads(line) for line in gyre_task("check", tmp_path, "--json").stdout.splitlines()]
    assert {row["task"]: row["sound"] for row in rows} == {"sound": True, "easy": False, "broken": False}


KEPT = {
    "a branch": "checkout -q -b fix; git checkout -q -B main HEAD~1",
    "a reflog": "reset -q --hard HEAD~1",
    "nothing": "reset -q --hard HEAD~1; rm -rf .git/logs",
}


@pytest.mark.pain(37)
@pytest.mark.parametrize("kept", [*KEPT, "no later commit"])
def test_an_answer_in_the_history_is_found(make_task, kept):
    """Whatever keeps the later commit."""
    work = make_task(x="x") / "environment" / "workspace"
    git = "git -c user.name=a -c user.email=a@b"
    script = f"git init -q -b main; {git} commit -q --allow-empty -m one; {git} commit -q --allow-empty -m two; git {KEPT.get(kept, 'status -s')}"
    subprocess.run(["sh", "-ec", script], cwd=work, check=True, timeout=60)
    done = gyre_task("check", work.parents[1])
    assert ("its history has a later commit: " in done.stdout, done.returncode) == ((kept in KEPT),) * 2, done


def test_tasks_of_a_harness_with_a_directory(make_task, tmp_path):
    (tmp_path / "h").mkdir(mode=0o700)
    (tmp_path / "h" / "go.py").write_text(
        "import os; open('answer', 'w').write('yes'); assert 'answer' in open(os.environ['GYRE_INSTRUCTION']).read()"
    )
    done = gyre_task("run", make_task(), "--harness-cmd", "python3 -I /harness/go.py", "--set", f"sandbox.harness_dir={tmp_path / 'h'}", "--json")
    result = json.loads(done.stdout)
    assert (result["reward"], result["harness_exit"]) == (1.0, 0), result


def test_a_list_and_notes(make_task, tmp_path):
    make_task("a", toml="[environment]\nallow_internet = true\n")
    make_task("b", toml='[environment]\nallow_internet = true\ndocker_image = "x:1"\ncpus = 1\n')
    (tmp_path / "list.jsonl").write_text('{"path": "b"}\n{"path": "a"}\n')
    done = gyre_task("check", tmp_path / "list.jsonl", "-j", 1)
    assert (done.returncode, done.stdout) == (0, "ok    b  oracle 1  nop 0\nok    a  oracle 1  nop 0\n")
    assert "2 of 2 tasks: environment: network public: sandboxes have none\n" in done.stderr
    assert "1 of 2 tasks: an image of its own: bubblewrap has none" in done.stderr
    assert "1 of 2 tasks: environment.cpus: bubblewrap does not limit processor time\n" in done.stderr


def test_a_run_is_told_at_its_start_that_processor_time_is_not_limited():
    assert "environment.cpus have no effect" in choose("bubblewrap", unsafe=False, table=Sandbox(), run="r").notes[0]
    assert choose("bubblewrap", unsafe=False, table=Sandbox()).notes == []  # gyre-task, which knows its tasks


def test_a_healthcheck_comes_before_the_agent(make_task):
    check = '[environment.healthcheck]\ncommand = "echo x >> tries; test $(wc -l < tries) -ge 3 && test $A = b"\ninterval_sec = 0.1\nretries = {}\n'
    env = '[environment]\nenv = { A = "b" }\n'
    good = make_task("good", toml=env + check.format(3), solve="test $(wc -l < tries) -eq 3 && echo yes > answer\n")
    done = gyre_task("run", good, "--json")
    assert json.loads(done.stdout)["reward"] == 1, done
    done = gyre_task("run", make_task("bad", toml=env + check.format(2)), "--json")
    result = json.loads(done.stdout)
    assert (done.returncode, result["ending"], result["reward"]) == (1, "task_setup_failed", None)
    assert "the task's healthcheck failed 2 times, at last with status 1" in result["detail"]


def test_a_solution_has_variables_of_its_own(make_task):
    path = make_task(toml='[solution]\nenv = { WHAT = "yes" }\n', solve="echo $WHAT > answer\n")
    assert json.loads(gyre_task("run", path, "--json").stdout)["reward"] == 1
    assert json.loads(gyre_task("run", path, "--json", "--harness-cmd", "sh -c 'echo $WHAT > answer'").stdout)["reward"] == 0


def test_on_a_terminal_there_is_a_bar_and_then_a_table(make_task, tmp_path):
    make_task("sound")
    make_task("easy", test="echo 1 > $GYRE_LOGS/reward.txt")
    ours, theirs = pty.openpty()
    command = [sys.executable, str(ROOT / "commands" / "task.py"), "check", str(tmp_path)]
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100"}
    done = subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    text = b""
    try:
        while data := os.read(ours, 65536):
            text += data
    except OSError:  # the terminal's other end is closed
        pass
    assert done.wait(60) == 1
    shown = text.decode()
    assert "checking" in shown and "2/2" in shown and "\x1b[" in shown
    table = shown[shown.rindex("oracle") :]
    assert "not sound" in table and "sound" in table and "1 of 2 tasks are sound" in table


def test_a_directory_of_tasks_is_no_task(make_task, tmp_path):
    task = make_task("one")
    done = gyre_task("run", task.parent)
    assert done.returncode == 2 and done.stderr == f"error: {task.parent}: holds tasks and is none; give one of them, such as {task}\n", done
