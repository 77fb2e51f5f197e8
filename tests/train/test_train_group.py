"""torch's groups of cells, beyond the contract of every collective (tests/sim/test_collective.py): a member killed, buckets, the store."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from gyre.config import Train
from gyre.errors import UsageError
from gyre.train.group import TorchCollective, buckets, open_store
from gyre.train.protocols import CollectiveFailed, Group


class Tensors:
    """As much of a learner as a collective needs."""

    def __init__(self) -> None:
        self.totals: list[torch.Tensor] | None = None
        self.sums, self.weights = [torch.ones(3, 4)], [torch.ones(2)]


def thread() -> Callable[..., Any]:
    pool = ThreadPoolExecutor(1)

    async def run(function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, function, *args)

    return run


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
    members = [TorchCollective(Tensors(), thread(), "gloo") for _ in range(2)]
    store = members[0].open_store("127.0.0.1")
    dying = subprocess.Popen([sys.executable, "-c", DIES, store])
    loop_s = 50.0

    async def survivors() -> list[Any]:
        async with asyncio.timeout(loop_s):
            return await asyncio.gather(*(m.reduce(Group("g", store, r, 3), 2 * loop_s) for r, m in enumerate(members)), return_exceptions=True)

    answers = asyncio.run(survivors())
    assert all(isinstance(a, CollectiveFailed) for a in answers), answers
    assert dying.wait(30) == -9


def test_buckets_keep_order_and_bounds() -> None:
    tensors = [
        torch.zeros(n, dtype=d) for n, d in ((3, torch.float32), (4, torch.float32), (100, torch.float32), (2, torch.bfloat16), (1, torch.float32))
    ]
    packed = list(buckets(tensors, limit=32))
    assert [[len(t) for t in b] for b in packed] == [[3, 4], [100], [2], [1]]
    assert all(len({t.dtype for t in b}) == 1 for b in packed)


def test_the_store_is_out_of_others_reach() -> None:
    _store, address = open_store("127.0.0.1")
    port = int(address.rpartition(":")[2])
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    assert [x[1] for x in listening if x[3] == "0A" and int(x[1].partition(":")[2], 16) == port] == [f"0100007F:{port:04X}"]


def test_nccl_without_a_gpu_is_one_line() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UsageError, match=r"train\.backend"):
        TorchCollective(Tensors(), None, "nccl")
    assert Train().backend == "auto"
