"""The deterministic network: order within a connection, loss and doubling made up for by repetition, servers that restart, cuts."""

from __future__ import annotations

import asyncio

import pytest
from theorem.clock import Process, VirtualLoop, run
from theorem.network import Client, Network, Peer, Server, Weather

from gyre.errors import DeadlineExceeded
from gyre.wire.codec import Arrays
from gyre.wire.messages import Ack, FromBuffer, Message, Note, ToBuffer


class Echo:
    """Acknowledges, and remembers what it heard."""

    def __init__(self, network: Network, process: Process) -> None:
        self.heard: list[str] = []
        self._server = Server(network, process, "buffer", ToBuffer, self._hear)

    def _hear(self, peer: Peer, message: Message, arrays: Arrays) -> None:
        self.heard.append(message.id)
        self._server.send(peer, Ack(id=f"a{len(self.heard)}", cause=message.id))


def connect(network: Network, process: Process) -> Client:
    return Client(network, process, "buffer", FromBuffer, kind="train", name=process.name, incarnation="1", resend_s=1.0)


async def ask(client: Client, id: str) -> str:
    answer, _ = await client.request(Note(id=id, event="e"), deadline_s=60.0, what="an echo")
    return answer.cause


def test_order_is_kept_within_a_connection_however_late_its_messages() -> None:
    async def main(loop: VirtualLoop) -> list[str]:
        network = Network(loop, Weather(late=0.5, late_s=5.0), 0, lambda *_: None)
        echo = Echo(network, Process(loop, "b"))
        client = connect(network, Process(loop, "c"))
        for i in range(50):
            client.send(Note(id=str(i), event="e"))
        await asyncio.sleep(600.0)
        return echo.heard

    assert run(main) == [str(i) for i in range(50)]


def test_what_a_new_connection_carries_may_overtake() -> None:
    async def main(loop: VirtualLoop) -> list[str]:
        network = Network(loop, Weather(late=0.5, late_s=5.0, broken=0.5), 0, lambda *_: None)
        echo = Echo(network, Process(loop, "b"))
        client = connect(network, Process(loop, "c"))
        for i in range(50):
            client.send(Note(id=str(i), event="e"))
        await asyncio.sleep(600.0)
        return echo.heard

    heard = run(main)
    assert sorted(heard, key=int) == [str(i) for i in range(50)]
    assert heard != sorted(heard, key=int)


@pytest.mark.parametrize("seed", range(5))
def test_requests_are_repeated_through_loss_and_doubling(seed: int) -> None:
    async def main(loop: VirtualLoop) -> tuple[list[str], list[str]]:
        network = Network(loop, Weather(lost=0.4, doubled=0.3), seed, lambda *_: None)
        echo = Echo(network, Process(loop, "b"))
        client = connect(network, Process(loop, "c"))
        return [await ask(client, str(i)) for i in range(20)], echo.heard

    answers, heard = run(main)
    assert answers == [str(i) for i in range(20)]
    assert len(heard) > 20


def test_a_server_that_comes_back_is_asked_again() -> None:
    async def main(loop: VirtualLoop) -> list[str]:
        network = Network(loop, Weather(), 0, lambda *_: None)
        first = Process(loop, "b")
        Echo(network, first)
        first.kill()
        asking = asyncio.ensure_future(ask(connect(network, Process(loop, "c")), "x"))
        await asyncio.sleep(5.5)
        echo = Echo(network, Process(loop, "b"))
        await asking
        return echo.heard

    assert run(main) == ["x"]


def test_a_request_gives_up_and_says_for_whom_it_waited() -> None:
    async def main(loop: VirtualLoop) -> float:
        network = Network(loop, Weather(), 0, lambda *_: None)
        with pytest.raises(DeadlineExceeded, match="an echo at buffer"):
            await ask(connect(network, Process(loop, "c")), "x")
        return loop.time()

    assert run(main) == 60.0


def test_a_cut_loses_everything_of_one_client_until_it_ends() -> None:
    async def main(loop: VirtualLoop) -> tuple[float, float]:
        network = Network(loop, Weather(), 0, lambda *_: None)
        Echo(network, Process(loop, "b"))
        cut, other = connect(network, Process(loop, "cut")), connect(network, Process(loop, "other"))
        network.cut("cut", 10.0)
        await ask(other, "o")
        between = loop.time()
        await ask(cut, "c")
        return between, loop.time()

    between, after = run(main)
    assert between < 1.0
    assert 10.0 <= after < 12.0
