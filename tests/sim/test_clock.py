"""The virtual loop: time jumps, processes stop, wake and die, a stuck world says who waits where."""

from __future__ import annotations

import asyncio
import time

import pytest
from theorem.clock import Life, Process, Stuck, VirtualLoop, run


def test_time_jumps_to_the_next_timer() -> None:
    async def main(loop: VirtualLoop) -> list[tuple[str, float]]:
        heard: list[tuple[str, float]] = []

        async def say(what: str, after_s: float) -> None:
            await asyncio.sleep(after_s)
            heard.append((what, loop.time()))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(say("later", 3600.0))
            tasks.create_task(say("soon", 0.25))
        return heard

    started = time.monotonic()
    assert run(main) == [("soon", 0.25), ("later", 3600.0)]
    assert time.monotonic() - started < 60


def test_a_deadline_is_virtual_too() -> None:
    async def main(loop: VirtualLoop) -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(500.0):
                await asyncio.Event().wait()
        return loop.time()

    assert run(main) == 500.0


def test_nothing_left_to_happen_names_who_waits() -> None:
    async def main(loop: VirtualLoop) -> None:
        async def waits_for_ever() -> None:
            await asyncio.Event().wait()

        await Process(loop, "lonely").spawn(waits_for_ever())

    with pytest.raises(Stuck, match=r"nothing is scheduled.*lonely:main at wait:\d+"):
        run(main)


def test_the_end_of_time_names_who_waits() -> None:
    async def main(loop: VirtualLoop) -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(1.0)

    with pytest.raises(Stuck, match=r"not done at 1[01]\.000 s"):
        run(main, end_s=10.0)


async def _tick(loop: VirtualLoop, seen: list[float], closed: list[bool]) -> None:
    try:
        while True:
            await asyncio.sleep(1.0)
            seen.append(loop.time())
    finally:
        closed.append(True)


def test_a_stopped_process_runs_no_turn_and_goes_on_when_woken() -> None:
    async def main(loop: VirtualLoop) -> list[float]:
        seen: list[float] = []
        process = Process(loop, "p")
        process.spawn(_tick(loop, seen, []))
        await asyncio.sleep(2.5)
        process.stop()
        await asyncio.sleep(10.0)
        assert seen == [1.0, 2.0]
        process.wake()
        await asyncio.sleep(1.2)
        return seen

    assert run(main) == [1.0, 2.0, 12.5, 13.5]


def test_a_killed_process_runs_no_finally_block_while_the_world_lasts() -> None:
    closed: list[bool] = []

    async def main(loop: VirtualLoop) -> list[float]:
        seen: list[float] = []
        process = Process(loop, "p")
        process.spawn(_tick(loop, seen, closed))
        await asyncio.sleep(1.5)
        process.kill()
        process.wake()
        await asyncio.sleep(10.0)
        assert process.life is Life.DEAD
        assert closed == []
        return list(seen)

    assert run(main) == [1.0]
    assert closed == [True], "and nothing is left for the interpreter"


def test_what_a_process_starts_belongs_to_it() -> None:
    async def main(loop: VirtualLoop) -> list[float]:
        seen: list[float] = []
        process = Process(loop, "p")

        async def parent() -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_tick(loop, seen, []))
                loop.call_later(1.5, seen.append, -1.0)

        process.spawn(parent())
        await asyncio.sleep(0.5)
        process.kill()
        await asyncio.sleep(5.0)
        return list(seen)

    assert run(main) == []


@pytest.mark.parametrize("turn", range(1, 6))
def test_a_process_dies_at_any_turn(turn: int) -> None:
    async def main(loop: VirtualLoop) -> int:
        steps: list[int] = []
        process = Process(loop, "p")
        process.at_turn(turn, process.kill)

        async def work() -> None:
            for i in range(10):
                steps.append(i)
                await asyncio.sleep(0)

        process.spawn(work())
        await asyncio.sleep(1.0)
        return len(steps)

    assert run(main) == turn - 1


def test_an_exception_that_nobody_caught_fails_the_world() -> None:
    async def main(loop: VirtualLoop) -> None:
        loop.call_soon(lambda: [][0])
        await asyncio.sleep(1.0)

    with pytest.raises(AssertionError, match="IndexError"):
        run(main)
