"""gyre-top's sources: a coordinator behind keys, and run directories."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gyre.coord.launch import Plan
from gyre.coord.window import Window
from gyre.errors import DeadlineExceeded, Refused, UsageError
from gyre.events import Event, encode
from gyre.net import keys
from gyre.net.sockets import Peer, Server
from gyre.report import stall, watch
from gyre.types import Version
from gyre.wire.codec import Arrays
from gyre.wire.messages import AskStatus, Message, ToCoord


def event(seq: int, kind: str, **fields: Any) -> Event:
    return Event(seq=seq, t_wall=1e9 + seq, t_mono=0.0, proc="buffer", cause="", kind=kind, fields=fields)


EVENTS = [
    event(0, "buffer_started", staleness_predicted=1.5),
    event(1, "admitted", group="g0"),
    event(2, "step", step=1, stats={"reward_mean": 0.25}, metrics={}),
    event(3, "step", step=2, stats={"reward_mean": 0.75}, metrics={}),
]


def with_coordinator(held: keys.Keys, test: Coroutine[Any, Any, None] | Any) -> None:
    """Run `test(address)` beside a coordinator's window behind `held`."""

    async def run() -> None:
        window = Window("mine")
        window.show(Plan("eng", "rollout", [], {}, "", cell="c1"), "working", gauges={"tokens_s": 77.0}, version=Version(1, 2))
        for e in EVENTS:
            window.take(e)
        server = Server.bind("tcp://127.0.0.1:0", ToCoord, kind="coord", name="coord", run_id="mine", keys=held)

        def answer(peer: Peer, message: Message, arrays: Arrays) -> None:
            if isinstance(message, AskStatus):
                server.send(peer, window.status(message, {"c1": "rollout"}))

        serving = asyncio.create_task(server.serve(answer))
        try:
            await test(server.address, window)
        finally:
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving
            server.close()

    asyncio.run(asyncio.wait_for(run(), 60.0))


def picture(source: watch.Watch) -> str:
    out = io.StringIO()
    Console(file=out, width=100, height=40, force_terminal=False).print(source.view)
    return out.getvalue()


def test_an_observer_sees_the_run_and_nobody_else_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys.make(tmp_path / "keys")
    monkeypatch.setattr(watch, "_ANSWER_S", (2.0, 2.0))

    async def test(address: str, window: Window) -> None:
        source = watch.Watch(None, address, keys.load(tmp_path / "keys", "observer"))
        await source.look()
        assert source.view.rewards == [0.25, 0.75]
        window.take(event(4, "step", step=3, stats={"reward_mean": 1.0}, metrics={}))
        window.take(event(5, "eval_issued", eval="e1.3", version=3, n=100))
        await source.look()
        assert source.view.issued == {"e1.3": (3, 100)}
        source.close()
        assert source.view.rewards == [0.25, 0.75, 1.0], "each event once"
        assert "gyre mine" in (text := picture(source)) and "c1" in text and "77" in text
        stranger = watch.Watch(None, address)
        with pytest.raises(DeadlineExceeded, match="the coordinator's word on the run"):
            await stranger.look()
        stranger.close()
        other = watch.Watch(None, address, keys.load(tmp_path / "keys", "sandbox"))
        with pytest.raises(Refused, match="shows the key of sandbox"):
            await other.look()
        other.close()

    with_coordinator(keys.load(tmp_path / "keys", "coord"), test)


def test_a_directory_has_all_events_and_the_coordinator_the_rest(tmp_path: Path) -> None:
    keys.make(tmp_path / "keys")
    earlier = event(0, "step", step=0, stats={"reward_mean": 0.5}, metrics={})
    (tmp_path / "events.jsonl").write_text("".join(f"{encode(e)}\n" for e in [earlier, *EVENTS]))

    async def test(address: str, window: Window) -> None:
        source = watch.Watch(tmp_path, address, keys.load(tmp_path / "keys", "observer"))
        await source.look()
        source.close()
        assert source.view.rewards == [0.5, 0.25, 0.75] and source.view.processes.keys() == {"eng"}

    with_coordinator(keys.load(tmp_path / "keys", "coord"), test)


def test_a_directory_alone(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no run"):
        watch.Watch(tmp_path, None)
    (tmp_path / "events.jsonl").write_text("".join(f"{encode(e)}\n" for e in EVENTS))
    source = watch.Watch(tmp_path, None)
    asyncio.run(source.look())
    assert "no coordinator runs" in picture(source) and source.view.rewards == [0.25, 0.75]


@pytest.mark.pain(4)
def test_a_stall_says_who_and_shows_words_as_words() -> None:
    waits = [{"who": "core/1", "for": "step 1 has 0 of 2 groups", "since_s": 301.4}, {"who": "buffer", "for": "micro-steps of c1/i", "since_s": None}]
    told = event(
        5, "stall", idle_s=300.2, counts={"running": 3, "queued": 0}, step=7, term=1, groups_open=2, groups_ready=0, groups_taken=1, waits=waits,
        cells=["cell c1 (to_train) waits for eng to be asleep, for 299 s"], processes={"eng": "working \x1b[2Jhere", "core": "working"},
        stacks={"eng": 'Thread 0x1 (most recent call first):\n  File "x.py", line 3 in [bold]stuck', "core": ""},
    )  # fmt: skip
    out = io.StringIO()
    for part in stall.drawing(told, 100):
        Console(file=out, width=100, force_terminal=False).print(part)
    text = out.getvalue()
    for shown in ("nothing progressed for 300 s", "3 running", "2 open", "core/1", "step 1 has 0 of 2 groups", "301 s", "waits for eng to be asleep",
                  "in [bold]stuck", "core working", "did not answer"):  # fmt: skip
        assert shown in text, (shown, text)
    assert "\x1b" not in text
