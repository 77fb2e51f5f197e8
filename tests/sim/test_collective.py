"""The promises of a collective, kept by torch's over Gloo and by those in memory that other tests use alike."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import cells
import pytest
import torch
from theorem import clock
from theorem.clock import Process, VirtualLoop
from theorem.collective import Meetings, MemoryCollective
from theorem.compute import Compute
from torch import Tensor

from gyre.train.group import TorchCollective
from gyre.train.protocols import CollectiveFailed, Group

DEADLINE_S = 20.0


class Numbers:
    """A learner as a collective sees it: rank r has accumulated 10^r in one tensor and 2·10^r in another, and weighs r."""

    def __init__(self, rank: int) -> None:
        self.totals: list[Tensor] | None = None
        self.sums = [torch.full((3, 2), 10.0**rank), torch.full((5,), 2 * 10.0**rank)]
        self.weights = [torch.full((4,), float(rank), dtype=torch.bfloat16), torch.full((2, 2), 2.0 * rank)]


Scenario = Callable[[list[Numbers], list[Any], Group], Awaitable[None]]


def in_memory(size: int, scenario: Scenario) -> None:
    async def main(loop: VirtualLoop) -> None:
        meetings = Meetings(loop, 0, trouble=0.0, seconds=0.5)
        learners = [Numbers(r) for r in range(size)]
        members = [MemoryCollective(meetings, x, Compute(loop, Process(loop, f"c{r}"), str(r), 0.1)) for r, x in enumerate(learners)]
        await scenario(learners, members, Group("g", "memory", 0, size))

    clock.run(main, end_s=10 * DEADLINE_S)


@contextmanager
def _thread() -> Iterator[Callable[..., Coroutine[Any, Any, Any]]]:
    with ThreadPoolExecutor(1) as pool:

        async def compute(function: Callable[..., Any], *arguments: Any) -> Any:
            return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)

        yield compute


def over_gloo(size: int, scenario: Scenario) -> None:
    async def main() -> None:
        from contextlib import ExitStack

        with ExitStack() as threads:
            learners = [Numbers(r) for r in range(size)]
            members = [TorchCollective(x, threads.enter_context(_thread()), "gloo") for x in learners]
            try:
                await scenario(learners, members, Group("g", members[0].open_store("127.0.0.1"), 0, size))
            finally:
                for m in members:
                    m.close()

    asyncio.run(main())


def in_one_process(size: int, scenario: Scenario) -> None:
    learners, place = [Numbers(r) for r in range(size)], {}
    asyncio.run(scenario(learners, [cells.MemoryCollective(x, place) for x in learners], Group("g", "", 0, size)))  # type: ignore[arg-type]


WORLDS = pytest.mark.parametrize("world", [in_memory, in_one_process, over_gloo])
World = Callable[[int, Scenario], None]


async def all_of(members: list[Any], kind: str, group: Group, deadline_s: float = DEADLINE_S) -> list[BaseException | None]:
    """What became of each member's part."""
    parts = [getattr(m, kind)(replace(group, rank=r), deadline_s) for r, m in enumerate(members) if m is not None]
    return await asyncio.gather(*parts, return_exceptions=True)


@WORLDS
@pytest.mark.parametrize("size", [2, 4])
def test_a_reduction_gives_the_core_the_sum_and_changes_no_accumulator(world: World, size: int) -> None:
    async def scenario(learners: list[Numbers], members: list[Any], group: Group) -> None:
        for _ in range(2):  # a second one gives the same, not twice as much
            assert await all_of(members, "reduce", group) == [None] * size
            total = float(sum(10**r for r in range(size)))
            assert learners[0].totals is not None
            assert [t.unique().tolist() for t in learners[0].totals] == [[total], [2 * total]]
            assert [t.shape for t in learners[0].totals] == [(3, 2), (5,)]
            for r, x in enumerate(learners):
                assert x.totals is None or r == 0
                assert [t.unique().tolist() for t in x.sums] == [[10.0**r], [2 * 10.0**r]]

    world(size, scenario)


@WORLDS
def test_a_broadcast_gives_all_the_cores_weights_in_the_group_that_reduced(world: World) -> None:
    async def scenario(learners: list[Numbers], members: list[Any], group: Group) -> None:
        assert await all_of(members, "reduce", group) == [None] * 3
        for w in learners[0].weights:
            w.fill_(7.0)
        assert await all_of(members, "broadcast", group) == [None] * 3
        assert all(t.unique().tolist() == [7.0] for x in learners for t in x.weights)
        assert [t.unique().tolist() for t in learners[2].sums] == [[100.0], [200.0]]

    world(3, scenario)


@WORLDS
def test_a_member_that_does_not_come_fails_the_others_and_changes_nothing(world: World) -> None:
    async def scenario(learners: list[Numbers], members: list[Any], group: Group) -> None:
        done = await all_of([*members[:2], None], "reduce", group, 1.0)
        assert all(isinstance(e, CollectiveFailed) for e in done) and len(done) == 2
        assert learners[0].totals is None
        assert [t.unique().tolist() for x in learners for t in x.sums] == [[1.0], [2.0], [10.0], [20.0], [100.0], [200.0]]
        assert await all_of(members[:2], "reduce", replace(group, name="again", size=2)) == [None, None]
        assert learners[0].totals is not None
        assert [t.unique().tolist() for t in learners[0].totals] == [[11.0], [22.0]]

    world(3, scenario)


@WORLDS
def test_a_member_that_left_fails_the_next_collective_of_its_group(world: World) -> None:
    async def scenario(learners: list[Numbers], members: list[Any], group: Group) -> None:
        assert await all_of(members, "reduce", group) == [None] * 2
        done = await all_of([members[0], None], "broadcast", group, 1.0)
        assert isinstance(done[0], CollectiveFailed)
        assert [t.unique().tolist() for t in learners[1].weights] == [[1.0], [2.0]]

    world(2, scenario)
