"""3,000 random executions against a brute force that keeps one node for each token: the graph, the choice of trajectories, and what they train.

The oracle knows no radix tree: it walks token by token, and finds leaves, weights and paths by looking at everything. Seeds are printed.
"""

from __future__ import annotations

from array import array
from random import Random
from typing import Any

import msgspec
import pytest

from gyre.trajectory.flatten import flatten
from gyre.trajectory.graph import PrefixGraph
from gyre.trajectory.select import PRIORITY, select
from gyre.types import CallRecord, CallStatus, LeafClass

TREES, BATCHES = 3000, 6


class Token:
    """One token of the oracle's tree; `call` sampled it."""

    def __init__(self, parent: Token | None, value: int, call: str | None) -> None:
        self.parent, self.value, self.call = parent, value, call
        self.children: list[Token] = []

    def add(self, value: int, call: str | None = None) -> Token:
        self.children.append(Token(self, value, call))
        return self.children[-1]

    def path(self) -> list[Token]:
        up, at = [], self
        while at.parent is not None:
            up.append(at)
            at = at.parent
        return up[::-1]


class Tree:
    """All calls of an execution, a token at a time. Prompts share what they can; a prompt that could share with several completions that begin alike
    is not made: which of them is the graph's choice."""

    def __init__(self) -> None:
        self.root = Token(None, -1, None)
        self.ends: dict[str, tuple[Token, Token]] = {}

    def is_ambiguous(self, prompt: list[int], after: str | None) -> bool:
        reached = [self.root if after is None else self.ends[after][1]]
        for value in prompt[len(reached[0].path()) :]:
            reached = [c for t in reached for c in t.children if c.value == value]
            if len(reached) > 1:
                return True
        return False

    def insert(self, call: str, prompt: list[int], sampled: list[int], after: str | None) -> None:
        at = self.root if after is None else self.ends[after][1]
        for value in prompt[len(at.path()) :]:
            at = next((c for c in at.children if c.value == value), None) or at.add(value)
        end = at
        for value in sampled:
            end = end.add(value, call)
        self.ends[call] = (at, end)


def execution(random: Random) -> tuple[Tree, PrefixGraph, list[CallRecord], set[str]]:
    """Fresh prompts, bridges, retries, cut histories, edits; some calls aborted, some side calls, some replies gone on with."""
    tree, graph = Tree(), PrefixGraph()
    rows: list[CallRecord] = []
    adopted: set[str] = set()
    histories: dict[str, list[int]] = {}
    prompts: list[list[int]] = []
    for n in range(random.randint(1, 9)):
        call, after = f"c{n}", None
        new = [random.randrange(4) for _ in range(random.randint(0, 4))]
        kind = random.choice(["fresh", "bridge", "bridge", "retry", "cut", "edit"]) if histories else "fresh"
        if kind == "bridge":
            after = random.choice(list(histories))
            prompt = histories[after] + new
        elif kind == "retry":
            prompt = random.choice(prompts)
        elif kind in ("cut", "edit"):
            prompt = list(random.choice(list(histories.values())))
            prompt = prompt[: random.randint(0, len(prompt))] + new
        else:
            prompt = new
        prompt = prompt or [0]
        if tree.is_ambiguous(prompt, after):
            continue
        sampled = [random.randrange(4) for _ in range(random.randint(1, 4))]
        tree.insert(call, prompt, sampled, after)
        graph.insert(call, array("i", prompt), array("i", sampled), array("f", [-0.5] * len(sampled)), array("i", [n] * len(sampled)), after)
        if after is not None:
            adopted.add(after)
        prompts.append(prompt)
        histories[call] = prompt + sampled
        status = random.choice([CallStatus.COMPLETE] * 5 + [CallStatus.ABORTED])
        leaf_class = random.choice([*PRIORITY, LeafClass.SIDE])
        rows.append(CallRecord(call, 0, 0, status, "stop", leaf_class, "cell", 0.0, 1.0, len(prompt), len(sampled)))
    placed = graph.export().calls
    rows = [msgspec.structs.replace(r, prompt_node=placed[r.call_id].prompt_node, node=placed[r.call_id].node) for r in rows]
    return tree, graph, rows, adopted


def trained_calls(tree: Tree, rows: list[CallRecord], adopted: set[str]) -> set[str]:
    """By the case table: complete and no side call; of those with one prompt, the ones that were gone on with, else the last."""
    able = [r.call_id for r in rows if r.status is CallStatus.COMPLETE and r.leaf_class is not LeafClass.SIDE]
    out = set()
    for call in able:
        twins = [c for c in able if tree.ends[c][0] is tree.ends[call][0]]
        gone_on = [c for c in twins if c in adopted]
        if call in gone_on or (not gone_on and call == twins[-1]):
            out.add(call)
    return out


def brute_force(tree: Tree, trained: set[str], classes: dict[str, LeafClass], ends: list[Token], j_max: int, random: Random) -> list[set[Token]]:
    """The tokens that each trajectory trains. `ends` are the last tokens of the graph's segments in its order: a draw is over those."""
    free = {t for _, end in tree.ends.values() for t in end.path() if t.call in trained}

    def below(token: Token) -> bool:
        return any(c.call in trained or below(c) for c in token.children)

    leaves = [t for t in ends if t.call in trained and not below(t)]
    out: list[set[Token]] = []
    while len(out) < j_max:
        weights = {t: sum(u in free for u in t.path()) for t in leaves}
        left = [t for t in leaves if weights[t]]
        if not left:
            break
        best = min(PRIORITY.index(classes[t.call or ""]) for t in left)
        left = [t for t in left if classes[t.call or ""] is PRIORITY[best]]
        leaf = random.choices(left, [weights[t] for t in left])[0]
        out.append({t for t in leaf.path() if t in free})
        free -= out[-1]
    return out


def check(seed: int) -> tuple[int, int]:
    random = Random(seed)
    tree, graph, rows, adopted = execution(random)
    out = graph.export()
    starts = [0]
    for node in out.nodes:
        starts.append(starts[-1] + node.n_tokens)
    tokens: dict[int, list[Token]] = {}  # of each node: found by walking from the calls up, in the oracle and in the graph at once
    for call, (prompt_end, end) in tree.ends.items():
        for node, token in ((out.calls[call].prompt_node, prompt_end), (out.calls[call].node, end)):
            path = token.path()
            while node >= 0:
                n = out.nodes[node].n_tokens
                mine, path = path[-n:], path[:-n]
                assert out.token_ids[starts[node] : starts[node + 1]].tolist() == [t.value for t in mine]
                assert {t.call for t in mine} == {out.nodes[node].call_id}
                assert tokens.setdefault(node, mine) == mine, "one node, two places"
                node = out.nodes[node].parent
            assert not path
    everything = {t for _, end in tree.ends.values() for t in end.path()}
    assert len(tokens) == len(out.nodes) and sum(map(len, tokens.values())) == len(everything), "something is twice in the graph"
    j_max, choice = random.randint(1, 5), random.getrandbits(32)
    classes = {r.call_id: r.leaf_class for r in rows}
    trained = trained_calls(tree, rows, adopted)
    expected = brute_force(tree, trained, classes, [tokens[i][-1] for i in range(len(out.nodes))], j_max, Random(choice))
    got = select(out.nodes, rows, adopted, j_max, Random(choice))
    assert [{t for i in trajectory.trainable for t in tokens[i]} for trajectory in got] == expected
    for trajectory in got:
        flat: Any = flatten(out.nodes, trajectory, out.arrays())
        path = tokens[trajectory.nodes[-1]][-1].path()
        assert flat.token_ids.tolist() == [t.value for t in path]
        assert flat.versions.tolist() == [-1 if t.call is None else int(t.call[1:]) for t in path]
        assert [t for t, bears in zip(path, flat.loss_mask, strict=True) if bears] == [t for t in path if t in expected[trajectory.index]]
    return len(rows), len(got)


@pytest.mark.pain(21)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_executions(batch: int) -> None:
    n_calls = n_trajectories = 0
    for seed in range(batch, TREES, BATCHES):
        try:
            calls, trajectories = check(seed)
        except AssertionError as e:
            raise AssertionError(f"seed {seed}: {e}") from e
        n_calls += calls
        n_trajectories += trajectories
    assert n_calls > 3 * TREES // BATCHES and n_trajectories > TREES // BATCHES  # they are not empty
