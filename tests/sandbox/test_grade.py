"""Grading: where rewards come from, and that a failed verifier is never a 0."""

import pytest

from gyre.sandbox.backends.base import Limits
from gyre.sandbox.grade import NoReward, grade, read_reward
from gyre.sandbox.task import load_task

REWARDS = [
    ({"reward.txt": b"1\n"}, {"reward": 1.0}),
    ({"reward.txt": b" 0.25 "}, {"reward": 0.25}),
    ({"reward.txt": b"-3e-1"}, {"reward": -0.3}),
    ({"reward.json": b'{"reward": 0.5, "style": 1}', "reward.txt": b"1"}, {"reward": 0.5, "style": 1.0}),
    ({"reward.json": b'{"accuracy": 1}'}, {"reward": 1.0}),
    ({"reward.json": b"0.75"}, {"reward": 0.75}),
]
NO_REWARDS = [
    {},
    {"reward.txt": b""},
    {"reward.txt": b"passed"},
    {"reward.txt": b"nan"},
    {"reward.txt": b"inf"},
    {"reward.txt": b"\xff"},
    {"reward.txt": b"1 2"},
    {"reward.json": b"{", "reward.txt": b"1"},
    {"reward.json": b'{"reward": NaN}', "reward.txt": b"1"},
    {"reward.json": b'{"reward": true}'},
    {"reward.json": b'{"reward": "1"}'},
    {"reward.json": b'{"reward": null}'},
    {"reward.json": b'{"reward": 1, "style": Infinity}'},
    {"reward.json": b'{"a": 1, "b": 0}'},
    {"reward.json": b"{}"},
    {"reward.json": b"[1]"},
    {"reward.json": b"[" * 60000},
    {"reward.json": b'{"reward": 1e999}'},
    {"reward.json": b"1" * 400},
    {"reward.json": b'{"reward": 1, "\\ud800": 0}'},
]


@pytest.mark.parametrize(("files", "rewards"), REWARDS)
def test_reward_files(files, rewards):
    assert read_reward(files) == rewards


@pytest.mark.pain(19)
@pytest.mark.parametrize("files", NO_REWARDS, ids=[str(n) for n in range(len(NO_REWARDS))])
def test_no_reward_is_never_zero(files):
    with pytest.raises(NoReward):
        read_reward(files)


def graded(box, path, *, agent="true", retries=0, timeout_s=20.0):
    """The grade of a task after an agent's script."""
    task = load_task(path)

    async def story(b):
        w = await b.backend.workspace(None, 16)
        await b.run(w, agent)
        return await grade(b.backend, w, task, Limits(timeout_s=timeout_s, memory_mb=64), retries=retries)

    return box(story)


def test_good_and_bad_work(box, make_task):
    path = make_task()
    assert graded(box, path, agent="echo yes > $GYRE_WORK/answer").reward == 1
    assert graded(box, path, agent="echo no > $GYRE_WORK/answer").reward == 0


FAILURES = {
    "exit 1": "wrote no reward (its exit status is 1)",
    "true": "wrote no reward",
    "echo nan > $GYRE_LOGS/reward.txt": "not a finite number",
    "echo 0 > $GYRE_LOGS/reward.txt; sleep 60": "ran longer than 1 s",
    "echo 0 > $GYRE_LOGS/reward.txt; kill -9 $$": "killed by signal 9",
    "echo 1 > $GYRE_WORK/x; ln -s $GYRE_WORK/x $GYRE_LOGS/reward.txt": "wrote no reward",
    "mkdir $GYRE_LOGS/reward.json; mkfifo $GYRE_LOGS/reward.txt": "wrote no reward",
}


@pytest.mark.pain(19)
@pytest.mark.parametrize("script", FAILURES, ids=[str(n) for n in range(len(FAILURES))])
def test_a_failed_verifier_has_no_reward(box, make_task, script):
    result = graded(box, make_task(test=script), timeout_s=1 if "sleep" in script else 20)
    assert result.reward is None and FAILURES[script] in result.detail


def test_a_verifier_out_of_memory_has_no_reward(bwrap, make_task):
    result = graded(bwrap, make_task(test='#!/usr/bin/env python3\nimport os; os.write(1, b"x"); x = b"x" * (1 << 30)\n'))
    assert result.reward is None


def test_retries_are_bounded_and_start_afresh(box, make_task):
    flaky = "ls -A $GYRE_LOGS; echo x >> tries; [ $(wc -l < tries) -ge 3 ] && echo 1 > $GYRE_LOGS/reward.txt || echo half > $GYRE_LOGS/reward.txt"
    one = graded(box, make_task("one", test=flaky), retries=1)
    assert (one.reward, one.attempts) == (None, 2)
    two = graded(box, make_task("two", test=flaky), retries=2)
    assert (two.reward, two.attempts, two.output) == (1.0, 3, b"")


def test_an_exit_status_says_nothing(box, make_task):
    assert graded(box, make_task(test="echo 0 > $GYRE_LOGS/reward.txt; exit 1")).reward == 0


@pytest.mark.pain(37)
def test_cheats_get_nothing(strong, make_task):
    agent = """mkdir -p /logs/verifier logs/verifier tests; echo 1 > /logs/verifier/reward.txt; echo 1 > logs/verifier/reward.txt
    echo 1 > reward.txt; echo 1 > reward.json; echo 'echo 1 > /logs/verifier/reward.txt' > tests/test.sh
    ln -s /logs/verifier/reward.txt answer; ln -s /tests/test.sh t
    (setsid sh -c 'while :; do echo 1 > /logs/verifier/reward.txt; done' &) 2>/dev/null
    ls /tests /solution && echo yes > answer; exit 0"""
    assert graded(strong, make_task(), agent=agent).reward == 0
