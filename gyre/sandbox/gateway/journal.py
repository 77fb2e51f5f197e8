"""What a rollout's gateway was asked: a row for each call, from its start to its end, and what is trained of them all.

Invariants
- A call's row is there from its start, whatever becomes of the call.
- A reply is adopted when a later request continues it, or has its text in a new message.

The tokens are in the graph; clocks and engines are the session's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import takewhile
from random import Random
from typing import Any, Final

import msgspec

from gyre.sandbox.gateway.parse import Offered
from gyre.sandbox.gateway.render import Before
from gyre.trajectory.classes import Origin, classify, quotable
from gyre.trajectory.graph import Exported, Placed
from gyre.trajectory.match import Message, fingerprint
from gyre.trajectory.select import LeftOut, left_out, select
from gyre.types import CallRecord, CallStatus, LeafClass, TrajectoryMeta

_QUOTES: Final = 8  # replies that are looked for in new messages
_QUOTE_CHARS: Final = 20  # shorter ones stand anywhere


class Call(msgspec.Struct):
    """One row of the journal."""

    call_id: str
    started_s: float
    api: str
    asked: dict[str, bool | int | float | str]
    family: bytes
    offered: Offered | None
    n_messages: int
    after: str | None  # the call that this one continues
    before: Before
    bridged: bool
    n_prompt: int
    told: LeafClass | None = None  # by a rule
    said: str = ""  # its reply, if that is text and was not seen again yet
    quoted_by: str | None = None
    status: CallStatus = CallStatus.ERROR
    finish: str = "error"
    ended_s: float = 0.0
    n_completion: int = 0
    cell: str = ""
    reasons: bool = False  # its reply holds reasoning
    ended: bool = False  # its completion ends with the end of the turn
    stand_in: Message | None = None  # for its reply


class Journal:
    """The calls of one rollout."""

    def __init__(self) -> None:
        self.calls: dict[str, Call] = {}  # by id, in order of arrival
        self._adopted: set[str] = set()

    def add(self, call: Call, messages: Sequence[Message]) -> None:
        """A call begins, with a request of these messages."""
        anew = call.after is None
        if call.after is not None:
            before = self.calls[call.after]
            self._adopt(before)
            messages = messages[before.n_messages + 1 :]
        silent = [c for c in self.calls.values() if c.said][-_QUOTES:]
        text = "\n".join(m["content"] for m in messages) if silent else ""
        for quoted in silent:  # new messages may hold replies as text: summaries where a conversation begins anew, else a sub-agent's answers
            if quoted.said in text:
                self._adopt(quoted)
                quoted.quoted_by = call.call_id if anew else None
        self.calls[call.call_id] = call

    def _adopt(self, call: Call) -> None:
        self._adopted.add(call.call_id)
        call.said = ""

    def says(self, call: Call, message: Message) -> None:
        """A call's reply is this."""
        text = "" if "tool_calls" in message else quotable(message["content"].strip())
        call.said = text if len(text) >= _QUOTE_CHARS else ""

    def bridges(self, call_id: str) -> Iterator[Call]:
        """This call and those before it, back to the last one whose prompt was rendered in full."""
        call = self.calls[call_id]
        yield call
        while call.bridged and call.after is not None:
            call = self.calls[call.after]
            yield call

    def choose(self, graph: Exported, at_most: int, random: Random, *, greedy: bool) -> tuple[list[CallRecord], list[TrajectoryMeta], LeftOut]:
        """All rows, the trajectories to train, and what they leave out."""
        calls = self.calls.values()
        classes = classify({c.call_id: Origin(c.family, c.offered is not None, c.n_completion, c.told, c.quoted_by) for c in calls})
        rows = [_row(c, graph, classes[c.call_id]) for c in calls]
        chosen = select(graph.nodes, rows, self._adopted, at_most, random, greedy=greedy)
        return rows, chosen, left_out(graph.nodes, rows, self._adopted, chosen)


def _row(call: Call, graph: Exported, leaf_class: LeafClass) -> CallRecord:
    placed = graph.calls.get(call.call_id, Placed(-1, -1))
    return CallRecord(
        call_id=call.call_id,
        prompt_node=placed.prompt_node,
        node=placed.node,
        status=call.status,
        finish_reason=call.finish,
        leaf_class=leaf_class,
        cell=call.cell,
        started_s=round(call.started_s, 6),
        ended_s=round(call.ended_s, 6),
        n_prompt=call.n_prompt,
        n_completion=call.n_completion,
        api=call.api,
        asked=call.asked,
    )


def offered(tools: Sequence[Any] | None) -> dict[str, Any] | None:
    """Names and parameters of a request's tools; None if it has none."""
    if not tools:
        return None
    functions = [t["function"] for t in tools if isinstance(t, dict) and isinstance(t.get("function"), dict)]
    return {f["name"]: f.get("parameters") for f in functions if isinstance(f.get("name"), str)}


def family(tools_key: bytes, messages: Sequence[Message]) -> bytes:
    """What tells agents apart: the tools and the system messages that a conversation opens with."""
    system = takewhile(lambda m: m["role"] == "system", messages)
    return blake2b(b"".join((tools_key, *map(fingerprint, system))), digest_size=16).digest()
