"""What is trained: the case table of calls, draws of trajectories, splitting, flat arrays."""

from __future__ import annotations

from array import array
from collections import Counter
from math import isnan, nan
from random import Random

import pytest

from gyre.trajectory.flatten import CallSpan, flatten
from gyre.trajectory.select import LeftOut, left_out, select, trainable_calls
from gyre.types import CallRecord, CallStatus, GraphNode, LeafClass, TrajectoryMeta


def call(call_id: str, prompt_node: int, node: int, leaf_class: LeafClass = LeafClass.MAIN, status: CallStatus = CallStatus.COMPLETE) -> CallRecord:
    return CallRecord(call_id, prompt_node, node, status, "stop", leaf_class, "cell0", 0.0, 1.0, 1, 1)


CHAIN = [GraphNode(-1, 4), GraphNode(0, 3, "a"), GraphNode(1, 2), GraphNode(2, 5, "b")]


def test_a_conversation_is_one_trajectory() -> None:
    (t,) = select(CHAIN, [call("a", 0, 1), call("b", 2, 3)], {"a"}, 4, Random(1))
    assert t == TrajectoryMeta(index=0, leaf_class=LeafClass.MAIN, nodes=[0, 1, 2, 3], trainable=[1, 3], n_tokens=14, n_trainable=8)


@pytest.mark.parametrize(
    ("calls", "adopted", "trained"),
    [
        ([call("a", 0, 1), call("b", 0, 2)], {"a"}, {"a"}),  # identical retry: the one whose reply reappears
        ([call("a", 0, 1), call("b", 0, 2)], {"b"}, {"b"}),
        ([call("a", 0, 1), call("b", 0, 2)], set(), {"b"}),  # the final answer
        ([call("a", 0, 1), call("b", 0, 2)], {"a", "b"}, {"a", "b"}),  # both were gone on with
        ([call("a", 0, 1), call("b", 0, 2, status=CallStatus.ABORTED)], set(), {"a"}),
        ([call("a", 0, 1, LeafClass.SIDE)], {"a"}, set()),
        ([call("a", -1, -1, status=CallStatus.ERROR)], set(), set()),
        ([call("a", 0, 1), call("b", 3, 4)], set(), {"a", "b"}),  # edited history: the original stays trainable
    ],
)
def test_trainable_calls(calls: list[CallRecord], adopted: set[str], trained: set[str]) -> None:
    assert trainable_calls(calls, adopted) == trained


def test_a_path_that_ends_in_an_aborted_call_is_no_candidate() -> None:
    nodes = [*CHAIN, GraphNode(2, 9, "x")]
    calls = [call("a", 0, 1), call("b", 2, 3), call("x", 2, 4, status=CallStatus.ABORTED)]
    for seed in range(20):
        (t,) = select(nodes, calls, {"a"}, 4, Random(seed))
        assert t.nodes == [0, 1, 2, 3]


FORK = [GraphNode(-1, 4), GraphNode(0, 10, "a"), GraphNode(1, 2), GraphNode(2, 30, "b"), GraphNode(1, 2), GraphNode(4, 10, "c")]
FORK_CALLS = [call("a", 0, 1), call("b", 2, 3), call("c", 4, 5)]


def test_a_shared_target_is_trained_once() -> None:
    first, second = select(FORK, FORK_CALLS, {"a"}, 8, Random(0))
    assert sorted([*first.trainable, *second.trainable]) == [1, 3, 5]
    assert 1 in first.trainable and 1 in second.nodes and 1 not in second.trainable


def test_leaves_are_drawn_in_proportion_to_their_unmasked_tokens() -> None:
    drawn = Counter(select(FORK, FORK_CALLS, {"a"}, 1, Random(seed))[0].nodes[-1] for seed in range(3000))
    assert drawn[3] / 3000 == pytest.approx(40 / 60, abs=0.04)
    assert select(FORK, FORK_CALLS, {"a"}, 2, Random(5)) == select(FORK, FORK_CALLS, {"a"}, 2, Random(5))


def test_better_classes_come_first_and_j_max_holds() -> None:
    calls = [call("a", 0, 1, LeafClass.SUB_AGENT), call("b", 2, 3, LeafClass.SUB_AGENT), call("c", 4, 5)]
    for seed in range(10):
        first, second = select(FORK, calls, {"a"}, 2, Random(seed))
        assert (first.nodes[-1], first.leaf_class) == (5, LeafClass.MAIN)
        assert (second.nodes[-1], second.leaf_class) == (3, LeafClass.SUB_AGENT)
        assert second.n_trainable == 30
        assert len(select(FORK, calls, {"a"}, 1, Random(seed))) == 1


def test_nothing_to_train() -> None:
    assert select([], [], set(), 4, Random(0)) == []
    assert select(CHAIN, [call("a", 0, 1, LeafClass.SIDE), call("b", 2, 3, LeafClass.SIDE)], set(), 4, Random(0)) == []


def test_greedy_takes_the_most_whatever_its_class_and_what_is_left_out_is_told() -> None:
    calls = [call("a", 0, 1, LeafClass.SUB_AGENT), call("b", 2, 3, LeafClass.SUB_AGENT), call("c", 4, 5)]
    (best,) = select(FORK, calls, {"a"}, 1, Random(0))
    (most,) = select(FORK, calls, {"a"}, 1, Random(0), greedy=True)
    assert (best.nodes[-1], best.n_trainable, most.nodes[-1], most.n_trainable) == (5, 20, 3, 40)
    assert left_out(FORK, calls, {"a"}, [best]) == LeftOut(30, 1)
    assert left_out(FORK, calls, {"a"}, [most]) == LeftOut(10, 1)
    assert left_out(FORK, calls, {"a"}, []) == LeftOut(50, 2)
    assert left_out(FORK, calls, {"a"}, select(FORK, calls, {"a"}, 2, Random(0), greedy=True)) == LeftOut(0, 0)


def test_flatten() -> None:
    arrays = {
        "token_ids": array("i", range(14)),
        "logprobs": array("f", [nan] * 4 + [-1.0] * 3 + [nan] * 2 + [-2.0] * 5),
        "versions": array("i", [-1] * 4 + [7] * 3 + [-1] * 2 + [8] * 5),
    }
    meta = TrajectoryMeta(0, LeafClass.MAIN, [0, 1, 2, 3], [3], 14, 5)
    views = {k: memoryview(v.tobytes()).cast(v.typecode) for k, v in arrays.items()}
    for given in (arrays, views):
        flat = flatten(CHAIN, meta, given)
        assert flat.token_ids.tolist() == list(range(14))
        assert flat.loss_mask.tolist() == [0] * 9 + [1] * 5
        assert flat.versions.tolist() == [-1] * 4 + [7] * 3 + [-1] * 2 + [8] * 5
        assert [isnan(x) for x in flat.logprobs] == [True] * 4 + [False] * 3 + [True] * 2 + [False] * 5
        assert flat.calls == [CallSpan("a", 4, 7), CallSpan("b", 9, 14)]
    with pytest.raises(ValueError, match="hangs below"):
        flatten(CHAIN, TrajectoryMeta(0, LeafClass.MAIN, [0, 2], [], 6, 0), arrays)
    with pytest.raises(ValueError, match="add up"):
        flatten(CHAIN, TrajectoryMeta(0, LeafClass.MAIN, [0, 1], [1], 7, 2), arrays)
    with pytest.raises(ValueError, match="elements"):
        flatten(CHAIN, meta, {**arrays, "versions": array("i")})
    empty = flatten([], TrajectoryMeta(0, LeafClass.MAIN, [], [], 0, 0), {k: v[:0] for k, v in arrays.items()})
    assert len(empty.token_ids) == 0
