"""The prefix graph of one rollout: all its calls as a radix tree over token ids.

Invariants
- The ids of the ancestors of a call's sampled tokens, concatenated, are exactly the prompt that was sent for it. Asserted at every insertion.
- A call's completion is always a new node with its log-probs, versions and call id, however its text looks; prompts share what they have in common.
- A node is never longer than what all that pass through it share: an edge is split where a prompt leaves it. Both halves of split sampled tokens keep
  their call id; a call's `node` is the deepest of them.
- Memory is 4 bytes per context token and 12 per sampled one, plus a constant per node. No step of an insertion loops over tokens in Python: segments
  are bytes, compared and joined whole.

What is trained is `select`'s business; nothing here judges.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import takewhile
from typing import Final, NamedTuple

from gyre.types import GraphNode

_NAN: Final = array("f", [float("nan")]).tobytes()
_NONE: Final = array("i", [-1]).tobytes()


class _Node:
    """A segment. `ids`, `logprobs` and `versions` are native 4-byte elements; the latter two are empty where nothing was sampled."""

    __slots__ = ("call_id", "children", "end", "ids", "logprobs", "parent", "versions")

    def __init__(self, parent: _Node | None, ids: bytes, call_id: str | None = None, logprobs: bytes = b"", versions: bytes = b"") -> None:
        self.parent = parent
        self.ids = ids
        self.end: int = (parent.end if parent else 0) + len(ids)  # bytes from the root to the end of this node
        self.call_id = call_id
        self.logprobs = logprobs
        self.versions = versions
        self.children: dict[bytes, list[_Node]] = {}  # by first token; several only where completions begin alike

    def adopt(self, child: _Node) -> None:
        self.children.setdefault(child.ids[:4], []).append(child)


class Placed(NamedTuple):
    """Where a call is in the exported graph: the node its prompt ends at and the deepest node of its sampled tokens; -1 for none."""

    prompt_node: int
    node: int


class Exported(NamedTuple):
    """A graph in wire form: nodes (parents first), calls, and arrays over all nodes' tokens in node order."""

    nodes: list[GraphNode]
    calls: dict[str, Placed]
    token_ids: array[int]
    logprobs: array[float]
    versions: array[int]

    def arrays(self) -> dict[str, array[int] | array[float]]:
        return {"token_ids": self.token_ids, "logprobs": self.logprobs, "versions": self.versions}


class PrefixGraph:
    """All calls of a rollout that sampled tokens."""

    def __init__(self) -> None:
        self._root = _Node(None, b"")
        self._calls: dict[str, tuple[_Node, _Node]] = {}  # call id: the nodes its prompt and its completion end at

    def __contains__(self, call_id: str) -> bool:
        return call_id in self._calls

    def insert(
        self, call_id: str, prompt: array[int], token_ids: array[int], logprobs: array[float], versions: array[int], after: str | None = None
    ) -> None:
        """Record a call that sampled at least one token. `after` names the call whose prompt and completion this prompt begins with.

        A call without tokens is no part of the graph: do not insert it.
        """
        assert call_id not in self._calls, f"call {call_id} is recorded twice"
        assert len(token_ids) == len(logprobs) == len(versions) > 0, f"call {call_id}: arrays of different lengths, or empty"
        sent = prompt.tobytes()
        start = self._calls[after][1] if after is not None else self._root
        at = self._descend(start, sent)
        self._assert_path(call_id, at, sent)
        node = _Node(at, token_ids.tobytes(), call_id, logprobs.tobytes(), versions.tobytes())
        at.adopt(node)
        self._calls[call_id] = (at, node)

    def history(self, call_id: str) -> array[int]:
        """The prompt of a recorded call with its completion behind it, as sent and as sampled."""
        return _ids(self._calls[call_id][1], self._root)

    def completion(self, call_id: str) -> array[int]:
        """The tokens that a recorded call sampled."""
        prompt, node = self._calls[call_id]
        return _ids(node, prompt)

    def export(self) -> Exported:
        """The graph in wire form, in the order of a walk from the root, first children first."""
        nodes: list[GraphNode] = []
        index: dict[_Node, int] = {self._root: -1}
        ids: list[bytes] = []
        logprobs: list[bytes] = []
        versions: list[bytes] = []
        stack = _below(self._root)
        while stack:
            node = stack.pop()
            assert node.parent is not None
            n = len(node.ids) // 4
            index[node] = len(nodes)
            nodes.append(GraphNode(parent=index[node.parent], n_tokens=n, call_id=node.call_id))
            ids.append(node.ids)
            logprobs.append(node.logprobs or _NAN * n)
            versions.append(node.versions or _NONE * n)
            stack.extend(_below(node))
        calls = {call_id: Placed(index[prompt], index[node]) for call_id, (prompt, node) in self._calls.items()}
        return Exported(nodes, calls, array("i", b"".join(ids)), array("f", b"".join(logprobs)), array("i", b"".join(versions)))

    def _descend(self, node: _Node, sent: bytes) -> _Node:
        """The node at which the path of `sent` ends, made if it is missing; the search starts below `node`, which it must pass through."""
        while node.end < len(sent):
            best, length = None, 0
            for child in node.children.get(sent[node.end : node.end + 4], ()):
                shared = _common(sent, node.end, child.ids)
                if shared > length or (shared == length and best is not None and child.children and not best.children):
                    best, length = child, shared
            if best is None:
                child = _Node(node, sent[node.end :])
                node.adopt(child)
                return child
            node = best if length == len(best.ids) else self._split(best, length)
        return node

    @staticmethod
    def _split(node: _Node, length: int) -> _Node:
        """Cut a node's first `length` bytes off into a new parent. The lower half stays the same object: calls and children point to it."""
        parent = node.parent
        assert parent is not None
        upper = _Node(parent, node.ids[:length], node.call_id, node.logprobs[:length], node.versions[:length])
        siblings = parent.children[node.ids[:4]]
        siblings[siblings.index(node)] = upper
        node.parent = upper
        node.ids, node.logprobs, node.versions = node.ids[length:], node.logprobs[length:], node.versions[length:]
        upper.adopt(node)
        return upper

    @staticmethod
    def _assert_path(call_id: str, node: _Node, sent: bytes) -> None:
        at = len(sent)
        assert node.end == at, f"call {call_id}: its path has {node.end // 4} tokens, its prompt {at // 4}"
        for piece in _ancestry(node):
            at -= len(piece.ids)
            assert sent.startswith(piece.ids, at), f"call {call_id}: the graph differs from the prompt sent, near token {at // 4}"


def _ancestry(node: _Node) -> Iterator[_Node]:
    """The node and what is above it, up to but without the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def _ids(node: _Node, above: _Node) -> array[int]:
    """The tokens from behind `above` to the end of a node."""
    segments = [piece.ids for piece in takewhile(lambda piece: piece is not above, _ancestry(node))]
    return array("i", b"".join(reversed(segments)))


def _below(node: _Node) -> list[_Node]:
    """A node's children, last first: what a stack wants."""
    return [child for siblings in node.children.values() for child in siblings][::-1]


def _common(sent: bytes, at: int, ids: bytes) -> int:
    """Bytes, in whole tokens, that `sent` from `at` and `ids` have in common. Halving costs as much as comparing once or twice."""
    if sent.startswith(ids, at):
        return len(ids)
    low, high = 0, min(len(sent) - at, len(ids)) // 4
    while low < high:
        mid = (low + high + 1) // 2
        if sent[at + 4 * low : at + 4 * mid] == ids[4 * low : 4 * mid]:
            low = mid
        else:
            high = mid - 1
    return 4 * low
