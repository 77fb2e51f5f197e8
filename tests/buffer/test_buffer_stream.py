"""A real buffer through which hundreds of megabytes pass. `python tests/bench/buffer_rate.py memory` is the same with ten gigabytes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from buffer_rate import passing

from gyre.net.sockets import mint
from gyre.wire import messages as w

MB = 1_000_000
ROLLOUTS, STEPS = 32, 10


@pytest.mark.pain(10)
def test_memory_and_disk_are_flat_while_rollouts_pass(tmp_path: Path) -> None:
    """Of 320 MB it holds in memory what is under way, on disk what a core may still go back to."""
    memory, disk = [], []

    async def stream() -> None:
        async with passing(tmp_path, ROLLOUTS, STEPS + 1, MB, 8, 'run.keep_payloads="needed"', "train.keep_checkpoints=2") as buffer:
            for _ in range(STEPS):
                await buffer.take(ROLLOUTS)
                await buffer.give()
                memory.append(buffer.rss())
                disk.append(sum(f.stat().st_size for f in buffer.payload.iterdir()))
            buffer.step = STEPS - 1
            buffer.term = (await buffer.ask(w.AcquireTerm(id=mint(), cell="a", step=buffer.step))).term
            await buffer.give()  # of the oldest checkpoint's next step every rollout is there
            refused = await buffer.ask(w.AcquireTerm(id=mint(), cell="a", step=2))
            assert isinstance(refused, w.Refuse) and "keep_payloads" in refused.reason

    asyncio.run(stream())
    assert max(disk) < 6 * ROLLOUTS * MB, disk
    assert max(memory[5:]) < max(memory[:5]) + 30 * MB, memory
