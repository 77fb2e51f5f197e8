"""From a recorded prefix graph to rectangles in rows and columns. Pure: no files, no drawing.

Invariants
- A *segment* is a longest run of nodes without a branch in which the same trajectories pass: nothing inside it differs, so it can be one rectangle.
- Each segment is one column right of its parent, in the row of its first child; the other children lie below, each below all of the one before.
- What an agent or a dump says is made plain here: no control sequence, no invisible or direction-changing character gets further.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from gyre.report.figures import plain

_WORDS: Final = 600  # characters kept of a message


class Message(msgspec.Struct):
    role: str
    n_tokens: int = 0
    text: str = ""


class Node(msgspec.Struct):
    parent: int
    n_tokens: int
    call_id: str | None = None
    messages: list[Message] = []


class Call(msgspec.Struct):
    call_id: str
    node: int
    status: str = "complete"
    leaf_class: str = ""


class Chosen(msgspec.Struct):
    index: int
    leaf_class: str
    nodes: list[int]
    trainable: list[int]
    n_tokens: int = 0
    n_trainable: int = 0


class Recorded(msgspec.Struct):
    """What is read of a "gyre.graph/1"."""

    schema: str
    rollout_id: str
    nodes: list[Node] = []
    calls: list[Call] = []
    trajectories: list[Chosen] = []
    ending: str | None = None
    reward: float | None = None

    def __post_init__(self) -> None:
        """Raises ValueError (which msgspec reports with the line) where numbers point nowhere."""
        n = len(self.nodes)
        if not all(-1 <= node.parent < i and node.n_tokens >= 0 for i, node in enumerate(self.nodes)):
            raise ValueError("a node's parent does not come before it")
        if not all(-1 <= c.node < n for c in self.calls) or not all(0 <= i < n for t in self.trajectories for i in (*t.nodes, *t.trainable)):
            raise ValueError("a call or a trajectory names a node that is not there")


@dataclass
class Segment:
    """A rectangle. `parent`: a segment's number, -1 for none. `through`: trajectories that pass; `trained`: tokens that bear loss in one of them."""

    parent: int
    through: tuple[int, ...]
    column: int = 0
    row: int = 0
    n_tokens: int = 0
    n_sampled: int = 0
    n_trained: int = 0
    n_calls: int = 0
    children: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # leaf classes and what became of calls, each once
    messages: list[tuple[str, str]] = field(default_factory=list)  # role, text

    def head(self) -> str:
        calls = f" · {self.n_calls} call{'s' if self.n_calls != 1 else ''}" if self.n_calls else ""
        return f"{self.n_tokens:,} token{'s' if self.n_tokens != 1 else ''}{calls}"


@dataclass(frozen=True)
class Layout:
    title: str
    facts: str
    segments: list[Segment]
    chosen: list[tuple[int, str]]  # each trajectory's number and what is said of it
    roots: list[int]


def clean(text: str) -> str:
    """One line without anything that a terminal, or an eye, would take for more than text."""
    return " ".join("".join(c if c.isprintable() else " " for c in plain(text)).split())


def arrange(g: Recorded) -> Layout:
    """The layout of one execution's graph."""
    segments = _segments(g)
    roots = [i for i, s in enumerate(segments) if s.parent < 0]
    row, stack = -1, [(i, -1) for i in reversed(roots)]
    while stack:  # first children first, so all of a subtree has its rows before the next sibling
        i, beside = stack.pop()
        s = segments[i]
        row += beside < 0
        s.row = row if beside < 0 else beside
        s.column = segments[s.parent].column + 1 if s.parent >= 0 else 0
        stack += [(child, s.row if n == 0 else -1) for n, child in reversed(list(enumerate(s.children)))]
    sampled, trained = sum(s.n_sampled for s in segments), sum(s.n_trained for s in segments)
    ending = f"{clean(g.ending)}, " if g.ending else ""
    reward = f"reward {g.reward:.3g}, " if g.reward is not None else ""
    chosen = [(t.index, f"{clean(t.leaf_class)}, {t.n_tokens:,} tokens, {t.n_trainable:,} trained") for t in g.trajectories]
    size = f"{sum(s.n_tokens for s in segments):,} tokens in {_counted(len(segments), 'segment')}, {_counted(len(g.calls), 'call')}"
    trains = "trajectory trains" if len(chosen) == 1 else "trajectories train"
    facts = f"{ending}{reward}{size}; {len(chosen)} {trains} {trained:,} of {sampled:,} sampled tokens"
    return Layout(clean(g.rollout_id), facts, segments, chosen, roots)


def _segments(g: Recorded) -> list[Segment]:
    """Nodes joined, in the order of their first node; children in the order of the recording."""
    n_children = [0] * len(g.nodes)
    for node in g.nodes:
        if node.parent >= 0:
            n_children[node.parent] += 1
    through: list[tuple[int, ...]] = [()] * len(g.nodes)
    for t in g.trajectories:
        for i in t.nodes:
            through[i] += (t.index,)
    trained = {i for t in g.trajectories for i in t.trainable}
    segments: list[Segment] = []
    of: list[int] = []  # the segment of each node
    for i, node in enumerate(g.nodes):
        up = node.parent
        if up >= 0 and n_children[up] == 1 and through[up] == through[i]:
            of.append(of[up])
        else:
            of.append(len(segments))
            segments.append(Segment(of[up] if up >= 0 else -1, through[i]))
            if up >= 0:
                segments[of[up]].children.append(of[i])
        s = segments[of[i]]
        s.n_tokens += node.n_tokens
        s.n_sampled += node.n_tokens if node.call_id is not None else 0
        s.n_trained += node.n_tokens if i in trained else 0
        _take(s, node.messages)
    for call in g.calls:
        if call.node >= 0:
            s = segments[of[call.node]]
            s.n_calls += 1
            s.notes += [w for w in (clean(call.leaf_class), clean(call.status)) if w not in ("", "complete", *s.notes)]
    for s in segments:
        s.messages = [(role, words) for role, text in s.messages if (words := clean(text)[:_WORDS])]
    return segments


def _take(s: Segment, messages: Sequence[Message]) -> None:
    """Add what is said; parts of one message, which nodes cut, are one again."""
    for m in messages:
        if not m.text.strip():
            continue
        role = m.role if m.role.isalpha() else ""
        if s.messages and s.messages[-1][0] == role:
            s.messages[-1] = (role, s.messages[-1][1] + m.text[: 4 * _WORDS] if len(s.messages[-1][1]) < 4 * _WORDS else s.messages[-1][1])
        else:
            s.messages.append((role, m.text[: 4 * _WORDS]))


def _counted(n: int, what: str) -> str:
    return f"{n:,} {what}{'s' * (n != 1)}"
