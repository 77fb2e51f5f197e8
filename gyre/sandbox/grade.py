"""Grading: the verifier runs in a fresh sandbox on the workspace an agent left, and its reward is read.

Invariants
- A reward comes from the verifier's own run or not at all: `/logs/verifier` is new and empty in each attempt, whatever the agent wrote.
- `reward.json` wins over `reward.txt`; only finite numbers count. No valid reward, a time-out or a death by signal is a failed verifier, tried
  again within its budget, and then `Grade.reward` is None: never 0. Its exit status says nothing (scripts that end with pytest's are common).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from typing import Final

import msgspec

from gyre.sandbox.backends.base import INSTRUCTION, TESTS, Backend, Bind, Exit, Limits, Spec, Workspace
from gyre.sandbox.task import Task

REWARD_FILES: Final = ("reward.json", "reward.txt")


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    """What grading found. `reward` None: the verifier failed, `detail` says how."""

    reward: float | None
    rewards: dict[str, float] = {}
    detail: str = ""
    attempts: int = 1
    seconds: float = 0.0
    output: bytes = b""


class NoReward(Exception):
    """Why there is no reward."""


def read_reward(files: Mapping[str, bytes]) -> dict[str, float]:
    """All rewards by name; the one that counts is called `reward`. `NoReward` if it is missing or no finite number."""
    if (data := files.get("reward.json")) is not None:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            raise NoReward("reward.json is not JSON") from None
        entries = value if isinstance(value, dict) else {"reward": value}
        if "reward" not in entries:
            if len(entries) != 1:
                raise NoReward('reward.json has no entry "reward"')
            entries = {"reward": next(iter(entries.values()))}
        if not all(name.isprintable() for name in entries):  # half a surrogate pair could not be sent on
            raise NoReward("reward.json has a name that cannot be printed")
        return {name: _finite(f"reward.json: {name}", number) for name, number in entries.items()}
    if (data := files.get("reward.txt")) is not None:
        try:
            number = float(data.decode("utf-8").strip())
        except ValueError:
            raise NoReward("reward.txt is not a number") from None
        return {"reward": _finite("reward.txt", number)}
    raise NoReward("the verifier wrote no reward")


def _finite(what: str, value: object) -> float:
    try:
        if not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value):
            return float(value)
    except OverflowError:  # an integer that no float holds
        pass
    raise NoReward(f"{what} is not a finite number")


def verifier_spec(task: Task, workspace: Workspace, limits: Limits) -> Spec:
    """The verifier's sandbox. `limits.timeout_s` is its deadline."""
    return Spec(
        workspace=workspace,
        argv=task.verifier_argv(),
        limits=limits,
        env={**task.env, **task.verifier_env},
        binds=[Bind(str(task.tests), TESTS), Bind(str(task.path / "instruction.md"), INSTRUCTION)],
        collect=REWARD_FILES,
    )


async def grade(backend: Backend, workspace: Workspace, task: Task, limits: Limits, *, retries: int) -> Grade:
    """Run the verifier, again up to `retries` times if it fails. The agent's sandbox must be dead. `SandboxLost`, `InfraSetupFailed`."""
    started = time.monotonic()
    spec = verifier_spec(task, workspace, limits)
    attempt = 0
    while True:
        attempt += 1
        ended = await backend.run(spec)
        seconds = time.monotonic() - started
        try:
            rewards = _judge(ended, limits)
        except NoReward as e:
            if attempt > retries:
                return Grade(reward=None, detail=str(e), attempts=attempt, seconds=seconds, output=ended.output)
            continue
        return Grade(reward=rewards["reward"], rewards=rewards, attempts=attempt, seconds=seconds, output=ended.output)


def _judge(ended: Exit, limits: Limits) -> dict[str, float]:
    if ended.timed_out:
        raise NoReward(f"the verifier ran longer than {limits.timeout_s:g} s")
    if ended.status > 128:
        why = "the memory limit" if ended.oom else f"signal {ended.status - 128}"
        raise NoReward(f"the verifier was killed by {why}")
    try:
        return read_reward(ended.files)
    except NoReward as e:
        raise NoReward(f"{e} (its exit status is {ended.status})") from None
