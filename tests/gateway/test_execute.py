"""One ticket through all phases, in real processes: every row of the endings table that a sandbox can produce."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gyre.config import Config, Rollout, Sandbox, TrajectoryTable
from gyre.sandbox.backends.base import Exit, InfraSetupFailed, SandboxLost, Spec
from gyre.sandbox.backends.process import Process
from gyre.sandbox.execute import Ended, Executor
from gyre.sandbox.gateway.route import Router
from gyre.trajectory.flatten import flatten
from gyre.types import CallStatus, Ending, Purpose, Ticket, Version

HARNESS = """
import http.client, json, os, socket, sys, time

class Connection(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(os.environ["GYRE_MODEL_SOCKET"])

def ask(messages):
    c = Connection("m")
    c.request("POST", "/v1/chat/completions", json.dumps({"messages": messages}))
    r = c.getresponse()
    return r.status, json.loads(r.read())

mode, instruction = sys.argv[1], open(os.environ["GYRE_INSTRUCTION"]).read().strip()
messages = [{"role": "user", "content": instruction}]
if mode == "finish":
    for _ in range(2):
        status, reply = ask(messages)
        assert status == 200, reply
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "go on"}]
    open("answer", "w").write(instruction)
elif mode == "argument":
    ask([{"role": "user", "content": sys.argv[2]}])
    open("answer", "w").write(sys.argv[2])
elif mode == "hang":
    open("answer", "w").write(instruction)
    ask(messages)
    time.sleep(600)
elif mode == "loop":
    open("answer", "w").write(instruction)
    while True:
        ask(messages)
        time.sleep(0.01)
elif mode == "silent":
    open("answer", "w").write(instruction)
elif mode == "crash":
    sys.exit("it broke")
elif mode == "long":
    open("answer", "w").write(instruction)
    ask(messages)
    status, _ = ask(messages * 500)
    sys.exit(0 if status == 400 else 1)
"""

FIRST = Version(1, 0)

VERIFIER = """#!/bin/sh
case "$(cat answer)" in "say it") echo 1 ;; *) echo 0 ;; esac > "$GYRE_LOGS/reward.txt"
"""


def make_task(path: Path, verifier: str = VERIFIER, toml: str = "") -> Path:
    (path / "tests").mkdir(parents=True)
    (path / "task.toml").write_text('[task]\nname = "t"\n' + toml)
    (path / "instruction.md").write_text("say it\n")
    (path / "tests" / "test.sh").write_text(verifier)
    return path


@pytest.fixture
def run_ticket(tmp_path: Path, renderer: Any, fake_engine: Any, sampled: Any) -> Any:
    harness = tmp_path / "harness"
    harness.mkdir()
    (harness / "h.py").write_text(HARNESS)

    def run(
        mode: str,
        *,
        task: Path | None = None,
        backend: Any = None,
        delay_s: float = 0.0,
        version: Version | None = FIRST,
        named: str = "q/0/0",
        **keys: Any,
    ) -> tuple[Ended, list[str]]:
        task = task or make_task(tmp_path / "task")
        rollout = Rollout(context=keys.pop("context", 4000), max_tokens=32)
        command = keys.pop("harness", f"python3 -I /harness/h.py {mode}")
        sandbox = Sandbox(harness=command, harness_dir=str(harness), verifier_retries=0, **keys)
        config = Config(rollout=rollout, sandbox=sandbox, trajectory=TrajectoryTable(max_per_execution=4))
        graded: list[str] = []

        async def go() -> Ended:
            ids = [*renderer.template.tokenizer.encode("hm").ids, renderer.end_id]
            engine = fake_engine(f"ipc://{tmp_path}/e", lambda r, p: sampled(ids, delay_s=delay_s), version=version)
            router = Router.connect([engine.server.address], 2.0, 0.5, name="s", incarnation="i", run_id="r", resend_s=1.0)
            used = backend or Process(unsafe=True)
            await used.start()
            executor = Executor(config, used, router, renderer)
            ticket = Ticket(named, 3, "q/0", "q", 0, str(task), Purpose.TRAIN, Version(1, 0), 7, 30.0)
            try:
                return await executor.execute(ticket, lambda: graded.append("grading"))
            finally:
                home = executor._home
                assert list(home.iterdir()) == []
                executor.close()
                assert not home.exists()
                router.close()
                engine.close()
                await used.close()

        return asyncio.run(go()), graded

    return run


def test_finished(run_ticket: Any) -> None:
    ended, graded = run_ticket("finish")
    m = ended.message
    assert (m.ending, m.reward, m.rewards, m.harness_exit, m.epoch, graded) == (Ending.FINISHED, 1.0, {"reward": 1.0}, 0, 3, ["grading"])
    assert [c.status for c in m.calls] == [CallStatus.COMPLETE] * 2 and m.cells == ["cell0"]
    (t,) = m.trajectories
    flat = flatten(m.nodes, t, ended.arrays)
    assert sum(flat.loss_mask) == sum(c.n_completion for c in m.calls) == t.n_trainable
    assert set(m.seconds) == {"setup", "harness", "model", "grade"}


def test_the_instruction_may_be_a_word_of_the_command(run_ticket: Any) -> None:
    assert run_ticket("argument {instruction}")[0].message.reward == 1.0


def test_a_harness_that_talks_tcp(run_ticket: Any, tmp_path: Path) -> None:
    (tmp_path / "harness" / "tcp.py").write_text(
        "import json, os, urllib.request\n"
        "request = urllib.request.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions',"
        " json.dumps({'messages': [{'role': 'user', 'content': 'x'}]}).encode())\n"
        "assert json.load(urllib.request.urlopen(request))['choices']\n"
        "open('answer', 'w').write('say it')\n"
    )
    m = run_ticket("", harness="python3 -I /harness/tcp.py", forward_tcp=True)[0].message
    assert (m.ending, m.reward, m.detail, len(m.calls)) == (Ending.FINISHED, 1.0, "", 1)


@pytest.mark.pain(19, 36)
@pytest.mark.parametrize(
    ("mode", "keys", "ending", "reward"),
    [
        ("hang", {"harness_timeout_s": 1.5}, Ending.HARNESS_TIMEOUT, 1.0),
        ("loop", {"max_turns": 3}, Ending.TURN_LIMIT, 1.0),
        ("long", {}, Ending.CONTEXT_FULL, 1.0),
        ("silent", {}, Ending.NO_TRAINABLE_TOKEN, 1.0),
        ("crash", {}, Ending.INFRA_SETUP_FAILED, None),  # it never reached the model
        ("finish", {"delay_s": 60.0, "harness_timeout_s": 1.5}, Ending.NO_TRAINABLE_TOKEN, 0.0),  # its only call was aborted
        ("hang", {"overall_timeout_s": 1.5}, Ending.OVERALL_TIMEOUT, None),
        ("finish", {"version": Version(0, 9)}, Ending.ENGINE_LOST, None),
    ],
)
def test_endings(run_ticket: Any, mode: str, keys: dict[str, Any], ending: Ending, reward: float | None) -> None:
    """pains 19: every ending has its row."""
    ended, graded = run_ticket(mode, **keys)
    assert (ended.message.ending, ended.message.reward) == (ending, reward), ended.message.detail
    assert graded == ([] if reward is None else ["grading"])
    assert (len(ended.message.trajectories) > 0) == (ending in (Ending.HARNESS_TIMEOUT, Ending.TURN_LIMIT, Ending.CONTEXT_FULL))
    if reward is None:
        assert ended.message.nodes == [] and len(ended.arrays["token_ids"]) == 0 and ended.message.detail


def test_the_harness_own_words_are_kept(run_ticket: Any) -> None:
    assert run_ticket("crash")[0].message.detail == "the harness ended with status 1: it broke, before any model call"


@pytest.mark.pain(36)
@pytest.mark.parametrize(
    ("verifier", "ending"),
    [("#!/bin/sh\nexit 3\n", Ending.VERIFIER_FAILED), ("#!/bin/sh\nsleep 60\n", Ending.VERIFIER_FAILED)],
)
def test_a_failed_verifier_is_never_reward_0(run_ticket: Any, tmp_path: Path, verifier: str, ending: Ending) -> None:
    ended, graded = run_ticket("finish", task=make_task(tmp_path / "t2", verifier), verifier_timeout_s=1.0)
    assert (ended.message.ending, ended.message.reward, graded) == (ending, None, ["grading"])


def test_nothing_to_grade(run_ticket: Any, tmp_path: Path) -> None:
    ended, _ = run_ticket("finish", task=tmp_path / "missing")
    assert ended.message.ending is Ending.TASK_SETUP_FAILED and "no such directory" in ended.message.detail
    unhealthy = '[environment.healthcheck]\ncommand = "echo not ready; exit 2"\nretries = 1\n'
    ended, graded = run_ticket("finish", task=make_task(tmp_path / "unhealthy", toml=unhealthy))
    assert (ended.message.ending, ended.message.calls, graded) == (Ending.TASK_SETUP_FAILED, [], [])
    assert ended.message.detail == "the task's healthcheck failed 1 times, at last with status 2: not ready"


@pytest.mark.parametrize("place", ["task", "{tmp}/x/../task", "../../{tmp}/task", "", "{tmp}/task\0"])
def test_a_ticket_that_names_no_place_of_a_task(run_ticket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """A path from the wire is absolute and plain, or nothing is looked at."""
    make_task(tmp_path / "task")
    (tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path)
    ended, graded = run_ticket("finish", task=place.format(tmp=tmp_path) or "\0")
    assert ended.message.ending is Ending.TASK_SETUP_FAILED and "is no place of a task" in ended.message.detail and not graded


def test_names_in_a_ticket_touch_no_file(run_ticket: Any, tmp_path: Path) -> None:
    before = sorted(tmp_path.parent.iterdir())
    ended, _ = run_ticket("finish", named="../../../../../tmp/gyre-was-here/0/0")
    assert ended.message.ending is Ending.FINISHED and not Path("/tmp/gyre-was-here").exists() and sorted(tmp_path.parent.iterdir()) == before


class Broken(Process):
    """A backend whose machinery fails where it is told to."""

    def __init__(self, error: Exception, where: str) -> None:
        super().__init__(unsafe=True)
        self._error, self._where = error, where

    async def workspace(self, *args: Any, **keys: Any) -> Any:
        if self._where == "workspace":
            raise self._error
        return await super().workspace(*args, **keys)

    async def run(self, spec: Spec) -> Exit:
        if self._where == ("verifier" if "/tests" in " ".join(spec.argv) else "agent"):
            raise self._error
        return await super().run(spec)


@pytest.mark.pain(19)
@pytest.mark.parametrize(
    ("error", "where", "ending"),
    [
        (InfraSetupFailed("no space"), "workspace", Ending.INFRA_SETUP_FAILED),
        (InfraSetupFailed("no bwrap"), "agent", Ending.INFRA_SETUP_FAILED),
        (SandboxLost("gone"), "workspace", Ending.SANDBOX_LOST),
        (SandboxLost("gone"), "agent", Ending.SANDBOX_LOST),
        (SandboxLost("gone"), "verifier", Ending.SANDBOX_LOST),
        (InfraSetupFailed("no bwrap"), "verifier", Ending.INFRA_SETUP_FAILED),
    ],
)
def test_broken_machinery(run_ticket: Any, error: Exception, where: str, ending: Ending) -> None:
    ended, _ = run_ticket("finish", backend=Broken(error, where))
    assert (ended.message.ending, ended.message.reward, ended.message.detail) == (ending, None, str(error))


@pytest.mark.pain(33)
def test_a_bug_is_no_ending(run_ticket: Any) -> None:
    """pains 33."""
    with pytest.raises(ZeroDivisionError):
        run_ticket("finish", backend=Broken(ZeroDivisionError(), "agent"))
