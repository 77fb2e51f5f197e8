"""Sandboxes of the deterministic world: they lease tickets, take their time, and send prefix graphs of random tokens, or lose what they had.

Invariant: what an execution brings is a function of (seed, rollout, epoch) alone, so the reference can look it up without asking anyone.
"""

from __future__ import annotations

import asyncio
import functools
import random
from array import array
from dataclasses import dataclass
from typing import Any

from gyre.config import Config
from gyre.errors import DeadlineExceeded
from gyre.types import CallRecord, CallStatus, Ending, GraphNode, LeafClass, Ticket, TrajectoryMeta
from gyre.wire.messages import FromBuffer, GradingStarted, LeaseRef, LeasesRenewed, LeaseTickets, Refuse, RenewLeases, RolloutEnded, Tickets
from theorem.clock import Process
from theorem.network import Client, Network

VOCABULARY = 7

_GRADED = (Ending.FINISHED, Ending.FINISHED, Ending.FINISHED, Ending.FINISHED, Ending.HARNESS_TIMEOUT, Ending.TURN_LIMIT)
_OTHER = (Ending.OVERALL_TIMEOUT, Ending.VERIFIER_FAILED, Ending.ENGINE_LOST, Ending.TASK_SETUP_FAILED, Ending.NO_TRAINABLE_TOKEN)


@dataclass(frozen=True)
class Branch:
    """One trajectory: tokens, and which of them bear loss, with the log-prob each was sampled with."""

    index: int
    tokens: list[int]
    trainable: list[bool]
    logprobs: list[float]


@dataclass(frozen=True)
class Execution:
    """What a rollout brings."""

    ending: Ending
    reward: float | None
    branches: list[Branch]


def execution(seed: int, rollout_id: str, epoch: int, *, trouble: float, rewards: int) -> Execution:
    """The outcome of a rollout under one epoch of its ticket. `rewards` is the number of different rewards: few make uniform groups."""
    rng = random.Random(f"{seed}/{rollout_id}/{epoch}")
    ending = rng.choice(_OTHER) if rng.random() < trouble else rng.choice(_GRADED)
    if ending not in (*_GRADED, Ending.NO_TRAINABLE_TOKEN):
        return Execution(ending, None, [])
    reward = rng.randrange(rewards) / max(1, rewards - 1)
    prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 3))]
    branches = []
    for index in range(rng.choice((1, 1, 2, 3))):
        n = rng.randint(1, 9)
        tokens = prompt + [rng.randrange(VOCABULARY) for _ in range(n)]
        learns = ending is not Ending.NO_TRAINABLE_TOKEN
        trainable = [False] * len(prompt) + [learns] * n
        branches.append(Branch(index, tokens, trainable, [rng.uniform(-3.0, -1.0) for _ in tokens]))
    return Execution(ending, reward, branches)


def prompt_of(b: Branch) -> int:
    """The number of tokens before those that are sampled."""
    return b.trainable.count(False) if any(b.trainable) else 1


def message(id: str, ticket: Ticket, e: Execution, versions: list[Any] | None = None) -> tuple[RolloutEnded, dict[str, Any]]:
    """An execution as it goes to the buffer: one node for the prompt, one for each branch, whose tokens have these versions, or the ticket's."""
    nodes: list[GraphNode] = []
    calls: list[CallRecord] = []
    trajectories: list[TrajectoryMeta] = []
    arrays: dict[str, Any] = {"token_ids": array("i"), "logprobs": array("f"), "versions": array("i")}
    for b in e.branches:
        n_prompt = prompt_of(b)
        if not nodes:
            nodes.append(GraphNode(-1, n_prompt))
            _extend(arrays, b, 0, [-1] * n_prompt)
        node, n = len(nodes), len(b.tokens) - n_prompt
        nodes.append(GraphNode(0, n, f"c{b.index}"))
        _extend(arrays, b, n_prompt, versions[b.index] if versions else [ticket.policy.step] * n)
        calls.append(CallRecord(f"c{b.index}", 0, node, CallStatus.COMPLETE, "stop", LeafClass.MAIN, "engine", 0.0, 1.0, n_prompt, n))
        trainable = [node] if any(b.trainable) else []
        trajectories.append(TrajectoryMeta(b.index, LeafClass.MAIN, [0, node], trainable, n_prompt + n, n if trainable else 0))
    ended = RolloutEnded(
        id=id, rollout_id=ticket.rollout_id, epoch=ticket.epoch, ending=e.ending, reward=e.reward, nodes=nodes, calls=calls, trajectories=trajectories
    )
    return ended, arrays


def _extend(arrays: dict[str, Any], b: Branch, start: int, versions: Any) -> None:
    end = start + len(versions)
    arrays["token_ids"].extend(b.tokens[start:end])
    arrays["logprobs"].extend(x if v >= 0 else float("nan") for x, v in zip(b.logprobs[start:end], versions, strict=True))
    arrays["versions"].extend(versions)


class Sandbox:
    """One life of a gyre-sandbox."""

    def __init__(
        self, network: Network, process: Process, config: Config, seed: int, *, slots: int, seconds: float, trouble: float, rewards: int
    ) -> None:
        self._client = Client(
            network, process, "buffer", FromBuffer,
            kind="sandbox", name=process.name, incarnation="1", resend_s=config.net.resend_s,
        )  # fmt: skip
        self._process, self._loop, self._config = process, network.loop, config
        self._seed, self._slots, self._seconds, self._trouble, self._rewards = seed, slots, seconds, trouble, rewards
        self._rng = random.Random(f"{seed}/{process.name}")
        self._running: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._ids = 0

    def _id(self) -> str:
        self._ids += 1
        return f"{self._process.name}-{self._ids}"

    async def serve(self) -> None:
        """Until the run is over or the process dies."""
        renewing = self._process.spawn(self._renew(), "renew")
        while True:
            free = self._slots - len(self._running)
            if free == 0:
                await asyncio.wait(list(self._running.values()), return_when=asyncio.FIRST_COMPLETED)
                continue
            answer = await self._ask(LeaseTickets(id=self._id(), n=free, wait_s=2.0), "tickets")
            if not isinstance(answer, Tickets):
                continue
            for ticket in answer.tickets:
                key = (ticket.rollout_id, ticket.epoch)
                if key not in self._running:
                    task = self._process.spawn(self._execute(ticket), f"{ticket.rollout_id}/{ticket.epoch}")
                    self._running[key] = task
                    task.add_done_callback(functools.partial(self._done, key))
            if answer.finished:
                renewing.cancel()
                return

    async def _ask(self, request: Any, what: str, arrays: dict[str, Any] | None = None) -> Any:
        try:
            return (await self._client.request(request, arrays, deadline_s=self._config.net.request_timeout_s, what=what))[0]
        except DeadlineExceeded:
            return None

    def _done(self, key: tuple[str, int], _: asyncio.Task[None]) -> None:
        self._running.pop(key, None)

    async def _execute(self, ticket: Ticket) -> None:
        await asyncio.sleep(self._rng.expovariate(1.0 / self._seconds))
        outcome = execution(self._seed, ticket.rollout_id, ticket.epoch, trouble=self._trouble, rewards=self._rewards)
        if outcome.reward is not None and self._rng.random() < 0.5:
            await self._ask(GradingStarted(id=self._id(), rollout_id=ticket.rollout_id, epoch=ticket.epoch), "grading to be noted")
            await asyncio.sleep(0.2 * self._rng.random())
        request, arrays = message(self._id(), ticket, outcome)
        answer = None
        while answer is None:
            answer = await self._ask(request, "a rollout to be taken", arrays)
        assert not isinstance(answer, Refuse) or answer.stale, answer.reason

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._config.sandbox.lease_ttl_s / 3)
            leases = [LeaseRef(*key) for key in self._running]
            answer = await self._ask(RenewLeases(id=self._id(), leases=leases), "leases to be renewed") if leases else None
            if isinstance(answer, LeasesRenewed):
                for ref in answer.lost:
                    task = self._running.get((ref.rollout_id, ref.epoch))
                    if task is not None:
                        task.cancel()
