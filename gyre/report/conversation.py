"""From token ids back to messages: who speaks where in a recorded prompt, and what the text says.

Invariants
- A message begins where the chat template's own token opens one. The gateway never lets that token come from a file or a tool, so what an agent read
  cannot pose as a message; what the policy sampled is one piece and opens none.
- A left-out token is -1: lengths and offsets of all arrays stay what they were.

Families: ChatML (Qwen, Hermes) and Llama 3. In others the roles are unknown, text is had all the same, and nothing can be left out.
Needs `tokenizers`, imported when a `Conversations` is made. Tool calls are not parsed here.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from gyre.errors import UsageError
from gyre.trajectory.flatten import offsets
from gyre.types import GraphNode

LEFT_OUT: Final = -1
_HEADER: Final = 12  # tokens at most


class _Family(NamedTuple):
    opening: str  # one token
    header: re.Pattern[str]
    close: re.Pattern[str]


_FAMILIES: Final = (
    _Family("<|im_start|>", re.compile(r"<\|im_start\|>(\w+)\n"), re.compile(r"<\|im_end\|>\s*\Z")),
    _Family("<|start_header_id|>", re.compile(r"<\|start_header_id\|>(\w+)<\|end_header_id\|>"), re.compile(r"\A\n\n|<\|e[oO][tm]_id\|>\s*\Z")),
)


class Piece(NamedTuple):
    """Tokens [start, end) of one message, its control tokens among them. `body`: where its words begin. `role` is "" where nothing tells it; one
    that begins with the opening token is the part of a header that a branch cut off, which the next piece reads on."""

    role: str
    start: int
    end: int
    body: int


class Conversations:
    """A model's tokenizer, as a reader of what was recorded."""

    def __init__(self, model: Path) -> None:
        """Raises `UsageError` when the model has no tokenizer.json, `ModuleNotFoundError` without the package `tokenizers`."""
        from tokenizers import Tokenizer

        file = model / "tokenizer.json"
        if not file.is_file():
            raise UsageError(str(file), "no such file", "the tokenizer of the run's model is needed for text; put it back where run.toml says")
        self._tokenizer: Any = Tokenizer.from_file(str(file))
        known = [(opening, f) for f in _FAMILIES if (opening := self._tokenizer.token_to_id(f.opening)) is not None]
        self._open: int = known[0][0] if known else LEFT_OUT
        self._family = known[0][1] if known else None

    @property
    def knows_roles(self) -> bool:
        return self._family is not None

    def decode(self, ids: Sequence[int]) -> str:
        """Text, control tokens spelled out; nothing for what was left out."""
        return str(self._tokenizer.decode([i for i in ids if i != LEFT_OUT], skip_special_tokens=False))

    def text(self, ids: Sequence[int], piece: Piece, most: int | None = None) -> str:
        """What a piece says, without header and end mark; of its first `most` tokens."""
        words = self.decode(ids[piece.body : piece.end if most is None else min(piece.end, piece.body + most)])
        return self._family.close.sub("", words) if self._family else words

    def pieces(self, ids: Sequence[int], start: int, end: int, role: str = "") -> Iterator[Piece]:
        """The messages in tokens [start, end) that nobody sampled; the first may have begun before, as `role`'s."""
        while start < end:
            opens = self._family is not None and ids[start] == self._open
            body = start
            if self._family and (opens or role.startswith(self._family.opening)):
                role, body = self._read_header(self._family, ids, start, end, "" if opens else role)
            stop = self._next(ids, max(start + opens, body), end)
            yield Piece(role, start, stop, body)
            start = stop

    def _next(self, ids: Sequence[int], at: int, end: int) -> int:
        """Where the next message opens."""
        try:
            return ids.index(self._open, at, end) if self._family else end
        except ValueError:
            return end

    def _read_header(self, family: _Family, ids: Sequence[int], at: int, end: int, before: str) -> tuple[str, int]:
        """The role and where the words begin; `before` is the part of the header that was read already."""
        for stop in range(at + 1, min(end, at + _HEADER) + 1):
            text = before + self.decode(ids[at:stop])
            if found := family.header.match(text):
                return found[1], stop
        return (text, end) if end - at < _HEADER else ("", at)


def roles(c: Conversations, nodes: Sequence[GraphNode], ids: Sequence[int]) -> list[list[Piece]]:
    """For each node of a prefix graph its pieces; of one that was sampled there is one, the assistant's."""
    starts, known, last = offsets(nodes), [], {-1: ""}
    for i, node in enumerate(nodes):
        if node.call_id is not None:
            found = [Piece("assistant", starts[i], starts[i + 1], starts[i])]
        else:
            found = list(c.pieces(ids, starts[i], starts[i + 1], last[node.parent]))
        known.append(found)
        last[i] = found[-1].role if found else last[node.parent]
    return known


def without_system(c: Conversations, nodes: Sequence[GraphNode], arrays: Mapping[str, Any]) -> dict[str, Any]:
    """A graph's arrays with the words of system messages left out, and what no role is known of; headers stay, so roles can be read.
    Raises `UsageError`."""
    if not c.knows_roles:
        raise UsageError("--redact-system", "the model's chat template has no tokens that tell system messages", "dump with --no-tokens")
    ids = array("i", arrays["token_ids"])
    for piece in (p for found in roles(c, nodes, ids) for p in found if p.role in ("", "system", "developer")):
        ids[piece.body : piece.end] = array("i", [LEFT_OUT]) * (piece.end - piece.body)
    return {**arrays, "token_ids": ids}
