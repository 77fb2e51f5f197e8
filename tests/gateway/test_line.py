"""The lines in which calls wait for an engine."""

from __future__ import annotations

import asyncio

from gyre.sandbox.gateway.line import Lines
from gyre.types import Version

V0, V1 = Version(1, 0), Version(1, 3)


def test_first_come_first_served_but_the_returned_first() -> None:
    async def story() -> list[str]:
        lines, served = Lines(), []
        left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        go = asyncio.Event()

        async def call(name: str, wanted: Version, returned: bool = False) -> None:
            async with lines.turn(wanted, left, asyncio.get_running_loop().time() + 30, returned=returned):
                await go.wait()
                served.append(name)

        tasks = []
        for name, wanted, returned in [("a", V0, False), ("b", V0, False), ("x", V1, False), ("r", V0, True), ("s", V0, True), ("c", V0, False)]:
            tasks.append(asyncio.create_task(call(name, wanted, returned)))
            await asyncio.sleep(0)
        go.set()
        async with asyncio.timeout(30):
            await asyncio.gather(*tasks)
        return served

    served = asyncio.run(story())
    assert [n for n in served if n != "x"] == ["a", "r", "s", "b", "c"]
    assert served.index("x") <= 2  # another version's line does not wait for this one


def test_who_leaves_lets_the_others_pass() -> None:
    async def story() -> None:
        lines, loop = Lines(), asyncio.get_running_loop()
        stay, gone = loop.create_future(), loop.create_future()
        release, passed = asyncio.Event(), asyncio.Event()

        async def head() -> None:
            async with lines.turn(V0, stay, loop.time() + 30):
                await release.wait()

        async def leaver() -> None:
            async with lines.turn(V0, gone, loop.time() + 30):
                assert gone.done()

        async def late() -> None:
            async with lines.turn(V0, stay, loop.time() - 1):
                pass  # its deadline has passed: it does not wait

        async def last() -> None:
            async with lines.turn(V0, stay, loop.time() + 30):
                passed.set()

        async with asyncio.timeout(30):
            tasks = []
            for story in (head, leaver, late, last):
                tasks.append(asyncio.create_task(story()))
                await asyncio.sleep(0)
            gone.set_result(None)
            await tasks[1]
            await tasks[2]
            assert not passed.is_set()
            release.set()
            await asyncio.gather(*tasks)
        assert passed.is_set() and not lines._lines

    asyncio.run(story())
