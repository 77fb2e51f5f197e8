"""What cells do together: one contract for torch's groups, with sockets, and for the collective in memory that other tests use."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import MemoryCollective

from gyre.config import Train
from gyre.errors import UsageError
from gyre.train.group import TorchCollective, buckets
from gyre.train.protocols import CollectiveFailed, Group

DEADLINE_S = 30.0


class Tensors:
    """As much of a learner as a collective needs."""

    def __init__(self, rank: int) -> None:
        g = torch.Generator().manual_seed(rank)
        self.sums = [torch.randn(3, 4, generator=g), torch.randn(5, generator=g), torch.randn((), generator=g)]
        self.weights = [torch.full((7,), float(rank), dtype=torch.bfloat16), torch.full((2, 2), float(rank))]
        self.totals: list[torch.Tensor] | None = None


class Members:
    """`size` members, rank 0 the core."""

    def __init__(self, kind: str, size: int) -> None:
        self.learners = [Tensors(r) for r in range(size)]
        self.pools = [ThreadPoolExecutor(1) for _ in range(size)]
        place: dict[str, Any] = {}
        self.members: list[Any] = [
            TorchCollective(learner, self.compute(pool), "gloo") if kind == "torch" else MemoryCollective(learner, place)
            for learner, pool in zip(self.learners, self.pools, strict=True)
        ]
        self.store = self.members[0].open_store("127.0.0.1") if kind == "torch" else ""

    @staticmethod
    def compute(pool: ThreadPoolExecutor) -> Callable[..., Any]:
        async def run(function: Callable[..., Any], *args: Any) -> Any:
            return await asyncio.get_running_loop().run_in_executor(pool, function, *args)

        return run

    async def all(self, operation: str, name: str, ranks: list[int] | None = None, deadline_s: float = DEADLINE_S) -> list[Any]:
        size = len(self.members)
        calls = [getattr(self.members[r], operation)(Group(name, self.store, r, size), deadline_s) for r in (range(size) if ranks is None else ranks)]
        return await asyncio.gather(*calls, return_exceptions=True)

    def close(self) -> None:
        for member, pool in zip(self.members, self.pools, strict=True):
            if isinstance(member, TorchCollective):
                member.close()
            pool.shutdown()


@pytest.fixture(params=["torch", "memory"])
def members(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Members]]:
    made: list[Members] = []

    def make(size: int) -> Members:
        made.append(Members(request.param, size))
        return made[-1]

    yield make
    for m in made:
        m.close()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_core_has_the_sum_and_accumulators_stay(members: Callable[[int], Members], size: int) -> None:
    """Out of place, twice in one group: a reduction that is done again finds the same accumulators."""
    m = members(size)
    before = [[t.clone() for t in x.sums] for x in m.learners]
    for _ in range(2):
        assert asyncio.run(m.all("reduce", "g")) == [None] * size
        assert m.learners[0].totals is not None
        for i, total in enumerate(m.learners[0].totals):
            torch.testing.assert_close(total, torch.stack([x[i] for x in before]).sum(0))
            assert total.dtype == torch.float32
    for learner, was in zip(m.learners, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(learner.sums, was, strict=True))
    assert all(x.totals is None for x in m.learners[1:])


@pytest.mark.parametrize("size", [2, 4])
def test_weights_are_the_cores_bit_for_bit(members: Callable[[int], Members], size: int) -> None:
    m = members(size)
    assert asyncio.run(m.all("broadcast", "g")) == [None] * size
    for learner in m.learners:
        assert all(torch.equal(a, b) for a, b in zip(learner.weights, Tensors(0).weights, strict=True))


def test_who_does_not_come_fails_the_others(members: Callable[[int], Members]) -> None:
    """Within the deadline, with accumulators intact; a new group of those who are there works."""
    m = members(3)
    before = [t.clone() for t in m.learners[1].sums]
    answers = asyncio.run(m.all("reduce", "g", ranks=[0, 1], deadline_s=1.0))
    assert all(isinstance(a, CollectiveFailed) for a in answers), answers
    assert m.learners[0].totals is None and all(torch.equal(a, b) for a, b in zip(m.learners[1].sums, before, strict=True))

    async def two() -> None:
        await asyncio.gather(*(m.members[r].reduce(Group("g2", m.store, r, 2), DEADLINE_S) for r in (0, 1)))

    asyncio.run(two())
    assert m.learners[0].totals is not None


DIES = """
import asyncio, os, sys, time
import torch
from gyre.train.group import TorchCollective
from gyre.train.protocols import Group

class Dying:
    totals = None
    weights = []
    @property
    def sums(self):
        os.kill(os.getpid(), 9)

async def compute(f, *args):
    return f(*args)

asyncio.run(TorchCollective(Dying(), compute, "gloo").reduce(Group("g", sys.argv[1], 2, 3), 60.0))
"""


def test_a_member_killed_in_the_reduction_fails_it_long_before_the_deadline() -> None:
    """It has met the others. Each of them fails as soon as one connection breaks, since who fails closes its own."""
    m = Members("torch", 3)
    dying = subprocess.Popen([sys.executable, "-c", DIES, m.store])
    loop_s = 50.0

    async def survivors() -> list[Any]:
        async with asyncio.timeout(loop_s):
            return await m.all("reduce", "g", ranks=[0, 1], deadline_s=2 * loop_s)

    answers = asyncio.run(survivors())
    assert all(isinstance(a, CollectiveFailed) for a in answers), answers
    assert dying.wait(30) == -9
    m.close()


def test_buckets_keep_order_and_bounds() -> None:
    tensors = [
        torch.zeros(n, dtype=d) for n, d in ((3, torch.float32), (4, torch.float32), (100, torch.float32), (2, torch.bfloat16), (1, torch.float32))
    ]
    packed = list(buckets(tensors, limit=32))
    assert [[len(t) for t in b] for b in packed] == [[3, 4], [100], [2], [1]]
    assert all(len({t.dtype for t in b}) == 1 for b in packed)


def test_the_store_is_out_of_others_reach() -> None:
    m = Members("torch", 1)
    port = int(m.store.rpartition(":")[2])
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    assert [x[1] for x in listening if x[3] == "0A" and int(x[1].partition(":")[2], 16) == port] == [f"0100007F:{port:04X}"]
    m.close()


def test_nccl_without_a_gpu_is_one_line() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UsageError, match=r"train\.backend"):
        TorchCollective(Tensors(0), Members.compute(ThreadPoolExecutor(1)), "nccl")
    assert Train().backend == "auto"
