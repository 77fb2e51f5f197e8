"""Executions that last as long as a workload says, without a harness or a workspace: for time-compressed runs.

An execution draws its length (by the run's seed, its query's number and its index: what gyre-sim draws), makes its model calls through the gateway's
routes, sleeps where an agent would use tools, and reports a prefix graph as any other does. Its reward is drawn from the ticket's seed.

Invariants
- Its calls ask for exactly the tokens that it drew, whatever happens to the engines meanwhile.
- With slots, the time-out is part of what was drawn: waiting for a slot is no part of an execution. With shared engines its own clock decides.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable
from hashlib import blake2b
from random import Random
from typing import Final

import msgspec

from gyre.config import Config
from gyre.errors import DeadlineExceeded, WorkFailed
from gyre.net.sockets import mint
from gyre.rules.pace import Pace, Turn, open_pace
from gyre.sandbox.execute import Ended
from gyre.sandbox.gateway.route import Completion, ContextFull, Job, Router
from gyre.trajectory.graph import PrefixGraph
from gyre.trajectory.select import select
from gyre.types import ENDINGS, CallRecord, CallStatus, Ending, LeafClass, Sampling, Ticket
from gyre.wire.arrays import f32, i32
from gyre.wire.messages import RolloutEnded

PROMPT_TOKENS: Final = 8
TOOL_TOKENS: Final = 4  # a tool's answer, in the next call's prompt


class PacedExecutor:
    """Runs tickets by the clock. Shared by all executions of a process."""

    def __init__(self, config: Config, pace: Pace, router: Router) -> None:
        self._config, self._pace, self._router = config, pace, router

    async def execute(self, ticket: Ticket, grading: Callable[[], None]) -> Ended:
        """Run one ticket; its end is in the message. `grading` is called when its last call is over."""
        run = _Execution(ticket, self._config, self._pace, self._router)
        ending, detail = await run.live()
        if ENDINGS[ending].grade:
            grading()
        return run.ended(ending, detail)


class _Execution:
    def __init__(self, ticket: Ticket, config: Config, pace: Pace, router: Router) -> None:
        self._ticket, self._config, self._pace, self._router = ticket, config, pace, router
        self._graph = PrefixGraph()
        self._calls: list[CallRecord] = []
        self._cells: list[str] = []
        self._started = time.monotonic()
        self._model_s = 0.0
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # its own time is up

    async def live(self) -> tuple[Ending, str]:
        """All calls, one behind the other; why it ended."""
        number = int("".join(c for c in self._ticket.query_id if c.isdigit()))
        drawn = self._pace.execution(self._config.run.seed, number, self._ticket.index)
        timer = None
        if drawn.timeout_s is not None:
            timer = asyncio.get_running_loop().call_later(drawn.timeout_s, self._time_up)
        try:
            prompt = i32(range(number, number + PROMPT_TOKENS))
            for turn in drawn.turns:
                completion = await self._call(prompt, turn)
                prompt = prompt + completion.token_ids + i32([TOOL_TOKENS] * TOOL_TOKENS)
                if not self._over.done():
                    await asyncio.wait((self._over,), timeout=turn.tool_s) if turn.tool_s else None
                if self._over.done():
                    return Ending.HARNESS_TIMEOUT, f"longer than {drawn.timeout_s:g} s"
        except ContextFull as e:
            return Ending.CONTEXT_FULL, str(e)
        except DeadlineExceeded as e:
            return Ending.OVERALL_TIMEOUT, str(e)
        except WorkFailed as e:
            return Ending.ENGINE_LOST, str(e)
        finally:
            if timer is not None:
                timer.cancel()
        return (Ending.HARNESS_TIMEOUT, "as drawn") if drawn.cut else (Ending.FINISHED, "")

    def _time_up(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    async def _call(self, prompt: array[int], turn: Turn) -> Completion:
        ticket, number = self._ticket, len(self._calls) + 1
        began = time.monotonic()
        completion = await self._router.generate(
            Job(
                rollout_id=ticket.rollout_id,
                name=f"{ticket.rollout_id}.{ticket.epoch}.{number}",
                prompt=prompt,
                sampling=Sampling(max_tokens=turn.tokens),
                seed=_seed(ticket.seed, number),
                policy=ticket.policy,
                deadline=self._started + self._config.sandbox.overall_timeout_s,
                aborted=self._over,
            )
        )
        ended = time.monotonic()
        self._model_s += ended - began
        self._cells += [c for c in completion.cells if c not in self._cells]
        call_id, n = f"c{number}", len(completion.token_ids)
        if n:
            after = self._calls[-1].call_id if self._calls else None
            self._graph.insert(call_id, prompt, completion.token_ids, completion.logprobs, completion.versions, after)
        status = CallStatus.ABORTED if completion.finish == "abort" else CallStatus.COMPLETE
        self._calls.append(
            CallRecord(
                call_id=call_id, prompt_node=-1, node=-1, status=status, finish_reason=completion.finish, leaf_class=LeafClass.MAIN,
                cell=completion.cells[-1] if completion.cells else "", started_s=round(began - self._started, 6),
                ended_s=round(ended - self._started, 6), n_prompt=len(prompt), n_completion=n,
            )
        )  # fmt: skip
        return completion

    def ended(self, ending: Ending, detail: str) -> Ended:
        """The outcome, ready for the wire."""
        ticket, lived_s = self._ticket, time.monotonic() - self._started
        message = RolloutEnded(
            id=mint(), rollout_id=ticket.rollout_id, epoch=ticket.epoch, ending=ending, detail=detail, harness="paced",
            seconds={"harness": round(lived_s, 6), "model": round(self._model_s, 6)},
        )  # fmt: skip
        if not ENDINGS[ending].grade:
            return Ended(message, {"token_ids": i32(), "logprobs": f32(), "versions": i32()})
        graph = self._graph.export()
        calls = [msgspec.structs.replace(c, prompt_node=p.prompt_node, node=p.node) for c in self._calls if (p := graph.calls.get(c.call_id))]
        random = Random(_seed(ticket.seed, 0))
        reward = float(random.random() < 0.5)
        trajectories = select(graph.nodes, calls, {c.call_id for c in calls[:-1]}, self._config.trajectory.max_per_execution, random)
        message = msgspec.structs.replace(
            message, reward=reward, rewards={"reward": reward}, nodes=graph.nodes, calls=calls, trajectories=trajectories, cells=self._cells,
            ending=ending if trajectories else Ending.NO_TRAINABLE_TOKEN,
        )  # fmt: skip
        return Ended(message, graph.arrays())


def _seed(seed: int, turn: int) -> int:
    """63 bits from the ticket's seed and the call's number; number 0 is the reward's."""
    return int.from_bytes(blake2b(f"{seed}/{turn}".encode(), digest_size=8).digest(), "big") >> 1


def open_paced(config: Config, router: Router) -> PacedExecutor:
    """The executor of a configuration. Raises `UsageError`."""
    return PacedExecutor(config, open_pace(config.run.workload, config.run.compress), router)
