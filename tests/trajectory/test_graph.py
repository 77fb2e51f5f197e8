"""The prefix graph: invariants under arbitrary insertions, the case table, size and speed of a very long rollout."""

from __future__ import annotations

import sys
import tracemalloc
from array import array
from math import isnan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.trajectory.flatten import offsets
from gyre.trajectory.graph import Exported, PrefixGraph


def i32(*values: int) -> array[int]:
    return array("i", values)


def insert(graph: PrefixGraph, call_id: str, prompt: array[int], tokens: array[int], after: str | None = None, version: int = 0) -> None:
    n = len(tokens)
    graph.insert(call_id, prompt, tokens, array("f", [-0.5] * n), array("i", [version] * n), after)


def path_ids(out: Exported, node: int) -> list[int]:
    starts = offsets(out.nodes)
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = out.nodes[node].parent
    return [i for n in path[::-1] for i in out.token_ids[starts[n] : starts[n + 1]]]


def test_bridged_calls_are_a_chain() -> None:
    g = PrefixGraph()
    insert(g, "a", i32(1, 2), i32(3, 4))
    insert(g, "b", i32(1, 2, 3, 4, 9), i32(5), after="a")
    assert g.history("b").tolist() == [1, 2, 3, 4, 9, 5]
    assert g.completion("a").tolist() == [3, 4]
    out = g.export()
    assert [(n.parent, n.n_tokens, n.call_id) for n in out.nodes] == [(-1, 2, None), (0, 2, "a"), (1, 1, None), (2, 1, "b")]
    assert out.versions.tolist() == [-1, -1, 0, 0, -1, 0]
    assert [isnan(x) for x in out.logprobs] == [True, True, False, False, True, False]


def test_identical_retries_are_siblings_even_with_equal_tokens() -> None:
    g = PrefixGraph()
    insert(g, "a", i32(1, 2), i32(3, 4))
    insert(g, "b", i32(1, 2), i32(3, 4))
    insert(g, "c", i32(1, 2, 3, 4, 7), i32(8), after="b")
    out = g.export()
    assert out.calls["a"].prompt_node == out.calls["b"].prompt_node
    assert out.calls["a"].node != out.calls["b"].node
    assert out.nodes[out.calls["c"].prompt_node].parent == out.calls["b"].node


def test_a_break_branches_at_the_common_prefix_inside_sampled_tokens() -> None:
    g = PrefixGraph()
    insert(g, "a", i32(1, 2), i32(3, 4, 5), version=6)
    insert(g, "b", i32(1, 2, 3, 9), i32(7))
    out = g.export()
    halves = [(n.n_tokens, n.call_id) for n in out.nodes if n.call_id == "a"]
    assert halves == [(1, "a"), (2, "a")]
    assert path_ids(out, out.calls["a"].node) == [1, 2, 3, 4, 5]
    assert path_ids(out, out.calls["b"].prompt_node) == [1, 2, 3, 9]
    assert out.versions.tolist().count(6) == 3
    assert g.completion("a").tolist() == [3, 4, 5]


def test_sampled_text_reused_elsewhere_is_context_there() -> None:
    g = PrefixGraph()
    insert(g, "a", i32(1, 2), i32(30, 31))
    insert(g, "b", i32(5, 30, 31, 6), i32(7))
    out = g.export()
    assert [out.nodes[out.calls["b"].prompt_node].call_id, out.nodes[out.calls["b"].prompt_node].parent] == [None, -1]


def test_a_prompt_that_is_not_the_history_is_a_bug() -> None:
    g = PrefixGraph()
    insert(g, "a", i32(1, 2), i32(3, 4))
    with pytest.raises(AssertionError, match="call b"):
        insert(g, "b", i32(1, 2, 3, 5, 9), i32(5), after="a")
    with pytest.raises(AssertionError, match="call c"):
        insert(g, "c", i32(1, 2, 3), i32(5), after="a")


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@pytest.mark.pain(21)
@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.booleans(), tokens, tokens, st.integers(0, 6)), min_size=1, max_size=12))
def test_ancestors_are_the_prompt_whatever_is_inserted(steps: list[tuple[int, bool, list[int], list[int], int]]) -> None:
    """Fresh prompts, bridges, and histories cut at arbitrary points; few token values, so that prefixes collide."""
    g = PrefixGraph()
    sent: dict[str, tuple[list[int], list[int]]] = {}
    for n, (pick, bridged, new, sampled, cut) in enumerate(steps):
        known = list(sent)
        after = known[pick % len(known)] if known and bridged else None
        if after is not None:
            prompt = g.history(after).tolist() + (new if cut else [])
        elif known:
            history = g.history(known[pick % len(known)]).tolist()
            prompt = history[: max(0, len(history) - cut)] + new
        else:
            prompt = new
        insert(g, f"c{n}", i32(*prompt), i32(*sampled), after, version=n)
        sent[f"c{n}"] = (prompt, sampled)
    out = g.export()
    starts = offsets(out.nodes)
    assert starts[-1] == len(out.token_ids) == len(out.logprobs) == len(out.versions)
    assert all(node.parent < i for i, node in enumerate(out.nodes))
    assert all(node.n_tokens > 0 for node in out.nodes)
    for n, (call_id, (prompt, sampled)) in enumerate(sent.items()):
        placed = out.calls[call_id]
        assert path_ids(out, placed.prompt_node) == prompt
        assert path_ids(out, placed.node) == prompt + sampled
        assert g.history(call_id).tolist() == prompt + sampled
        assert g.completion(call_id).tolist() == sampled
        own = [i for i, node in enumerate(out.nodes) if node.call_id == call_id]
        assert sum(out.nodes[i].n_tokens for i in own) == len(sampled)
        assert all(out.versions[t] == n for i in own for t in range(starts[i], starts[i + 1]))
    context = {}  # radix: no two context siblings begin alike
    for i, node in enumerate(out.nodes):
        if node.call_id is None:
            key = (node.parent, out.token_ids[starts[i]])
            assert context.setdefault(key, i) == i


@pytest.mark.pain(10)
def test_a_million_tokens_in_500_calls_take_bounded_memory() -> None:
    """pains 10: bytes per token are bounded, and no call costs more than its prompt's bytes joined and compared."""
    calls, new = 500, 2000
    fresh = array("i", range(new // 2))
    sampled, logprobs, versions = array("i", range(new // 2)), array("f", [-1.0] * (new // 2)), array("i", [3] * (new // 2))
    tracemalloc.start()
    g = PrefixGraph()
    prompt, after = array("i", fresh), None
    for n in range(calls):
        g.insert(f"c{n}", prompt, sampled, logprobs, versions, after)
        after = f"c{n}"
        prompt = g.history(after) + fresh
    del prompt
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    total = calls * new
    assert held / total < 16, f"{held / total:.1f} bytes per token"
    out = g.export()
    assert len(out.token_ids) == total
    assert sys.getsizeof(out.token_ids) + sys.getsizeof(out.logprobs) + sys.getsizeof(out.versions) < 13 * total
