"""Pure parts of the buffer and the rules it stands on: quotas, staleness, advantage, packing, queries."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.buffer.advantage import advantages, uniform
from gyre.buffer.pack import pack
from gyre.buffer.queries import QueryStream, Task, derive_seed, load_task_set
from gyre.errors import UsageError
from gyre.rules import admission, staleness
from gyre.wire.rows import Item


@pytest.mark.parametrize(
    ("dispatch", "target", "b", "mu", "groups", "predicted"),
    [
        ("boundary", 0.0, 8, 1, 8, 0.0),
        ("boundary", 1.0, 8, 1, 16, 1.0),
        ("boundary", 1.0, 8, 3, 24, 1.0),
        ("boundary", 2.5, 8, 2, 32, 2.5),
        ("boundary", 0.3, 5, 1, 7, 0.4),  # 6.5 is rounded up
        ("continuous", 1.0, 8, 1, 8, 1.0),
        ("continuous", 0.125, 8, 1, 1, 0.125),
        ("continuous", 2.0, 8, 3, 8, 2.0),
        ("continuous", 1.06, 8, 1, 8, 1.0),
    ],
)
def test_quota_follows_from_the_target(dispatch, target, b, mu, groups, predicted):
    q = admission.quota(dispatch, target, b, mu)
    assert (q.groups, q.predicted) == (groups, pytest.approx(predicted))
    assert q.rounding == pytest.approx(predicted - target)


@pytest.mark.parametrize(
    ("dispatch", "target", "mu", "smallest"), [("boundary", 0.9, 3, "1"), ("continuous", 0.1, 1, "0.125"), ("continuous", 1, 3, "1.125")]
)
def test_an_infeasible_target_names_the_smallest(dispatch, target, mu, smallest):
    with pytest.raises(UsageError, match=rf"system\.target_staleness.*the smallest is {smallest}$"):
        admission.quota(dispatch, target, 8, mu)


@given(st.sampled_from(["boundary", "continuous"]), st.integers(1, 40), st.integers(1, 6), st.floats(0, 20))
def test_rounding_is_at_most_half_a_group(dispatch, b, mu, above):
    target = admission.smallest_target(dispatch, b, mu) + above
    q = admission.quota(dispatch, target, b, mu)
    assert abs(q.rounding) <= 0.5 / b + 1e-9
    assert q.groups >= (mu * b if dispatch == "boundary" else 1)


@pytest.mark.pain(25)
@given(st.integers(0, 99), st.integers(0, 99), st.integers(-9, 99), st.none() | st.integers(0, 99))
def test_never_more_than_quota_need_or_queries(quota, inside, needed, left):
    n = admission.admit(quota, inside, needed, left)
    assert n >= 0
    if n:
        assert inside + n <= quota and n <= needed and (left is None or n <= left)


def test_staleness_of_the_contract():
    assert staleness.discrete(3, 0) == 3
    assert staleness.interpolated(3, 0, 1, 0.5) == 2.5
    assert staleness.fraction_of_interval(15.0, 10.0, 20.0) == 0.5
    assert staleness.discrete(2, 5) == 0 and staleness.interpolated(2, 5, 6, 0.5) == 0.0


def test_summary_has_the_tail():
    s = staleness.summarize([1.0] * 19 + [30.0])
    assert (s.n, s.mean, s.p95, s.max) == (20, 2.45, 1.0, 30.0)
    assert staleness.summarize([]) == staleness.Summary(0, None, None, None)


@pytest.mark.pain(15)
def test_golden_advantages():
    assert advantages([1.0, 0.0], "mean") == [0.5, -0.5]
    assert advantages([1.0, 0.0], "grpo") == [1.0, -1.0]
    assert advantages([5.0, 5.0, 5.0], "mean") == advantages([0.1, 0.1, 0.1], "grpo") == [0.0, 0.0, 0.0]
    assert advantages([0.0, 0.0, 0.0, 4.0], "grpo") == pytest.approx([-1 / math.sqrt(3)] * 3 + [math.sqrt(3)])
    assert advantages([1.0, 0.0, 0.0], "rloo") == pytest.approx([1.0, -0.5, -0.5])
    assert advantages([], "mean") == [] and uniform([])
    assert advantages([3.0], "rloo") == [0.0]
    with pytest.raises(ValueError, match="finite"):
        advantages([1.0, math.nan], "mean")


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=16), st.sampled_from(["mean", "grpo", "rloo"]))
def test_advantages_sum_to_zero(rewards, rule):
    scale = max(1.0, *(abs(a) for a in advantages(rewards, rule)))
    assert math.fsum(advantages(rewards, rule)) == pytest.approx(0.0, abs=1e-6 * scale)


def items(*sizes):
    return [Item("r", i, n, 1) for i, n in enumerate(sizes)]


def test_packs_are_final_when_the_next_does_not_fit():
    a, b, c, d = items(6, 3, 5, 30)
    assert pack([a, b], 10, False) == ([], [a, b])
    assert pack([a, b, c], 10, False) == ([[a, b]], [c])
    assert pack([a, b, c, d], 10, True) == ([[a, b], [c], [d]], [])
    assert pack([d], 10, False) == ([[d]], [])  # longer than the budget: its own micro-step


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 60), st.lists(st.integers(0, 40), max_size=5))
def test_packing_in_pieces_is_packing_at_once(sizes, budget, cuts):
    all_items = items(*sizes)
    packs, rest, at = [], [], 0
    for cut in sorted(min(c, len(sizes)) for c in cuts):
        more, rest = pack([*rest, *all_items[at:cut]], budget, False)
        packs, at = packs + more, cut
    more, rest = pack([*rest, *all_items[at:]], budget, True)
    assert (packs + more, rest) == pack(all_items, budget, True)
    assert [i for p in packs + more for i in p] == all_items
    assert all(sum(i.n_tokens for i in p) <= budget or len(p) == 1 for p in packs + more)


@given(st.lists(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 20)), min_size=1, max_size=5), max_size=12), st.integers(1, 120))
def test_executions_are_packed_whole_and_what_they_share_counts_once(sizes, budget):
    pending = [
        Item(f"r{r}", i, n + shared if i else n, 1, "", n) for r, trajectories in enumerate(sizes) for i, (n, shared) in enumerate(trajectories)
    ]
    packs, rest = pack(pending, budget, True, whole=True)
    assert [i for p in packs for i in p] == pending and rest == []
    executions = [{i.rollout_id for i in p} for p in packs]
    assert sum(map(len, executions)) == len(sizes)
    assert all(sum(i.n_own for i in p) <= budget or len(e) == 1 for p, e in zip(packs, executions, strict=True))


@pytest.mark.pain(16)
def test_each_epoch_is_its_own_permutation():
    tasks = tuple(Task(str(i)) for i in range(20))
    stream = QueryStream(tasks, 7, 3)
    drawn = [stream.query(i) for i in range(60)]
    epochs = [[t.path for t, e in drawn if e == k] for k in range(3)]
    assert all(sorted(e) == sorted(t.path for t in tasks) for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert stream.query(5) == drawn[5]  # in any order
    assert (stream.total, stream.left(58), QueryStream(tasks, 7, 0).left(10**6)) == (60, 2, None)
    assert QueryStream(tasks, 8, 3).query(0)[0] != drawn[0][0] or QueryStream(tasks, 8, 3).query(1)[0] != drawn[1][0]
    assert derive_seed(1, "a", 2) != derive_seed(1, "a", 3) and 0 <= derive_seed("x") < 2**63


def test_a_task_set_names_what_is_missing(tmp_path):
    with pytest.raises(UsageError, match=r"tasks\.train"):
        load_task_set("", "", 0)
    task = tmp_path / "a"
    task.mkdir()
    with pytest.raises(UsageError, match="holds no task"):
        load_task_set(str(tmp_path), "", 0)
    (task / "task.toml").write_text('[metadata]\nkind = "edit"\n')
    (task / "instruction.md").write_text("x")
    with pytest.raises(UsageError, match=r"has no tests/test\.sh"):
        load_task_set(str(tmp_path), "", 0)
    (task / "tests").mkdir()
    (task / "tests" / "test.sh").write_text("")
    assert load_task_set(str(tmp_path), str(task), 1).train == (Task(str(task), "edit"),)
    (tmp_path / "list.jsonl").write_text('{"path": "a"}\n{"path": "a"}\n')
    assert load_task_set(str(tmp_path / "list.jsonl"), "", 0).train == (Task(str(task), "edit"),) * 2
    (task / "task.toml").write_text("[metadata")
    with pytest.raises(UsageError, match=r"task\.toml: not TOML"):
        load_task_set(str(tmp_path), "", 0)


def test_held_out_tasks_are_taken_evenly_over_their_names(tmp_path: Path) -> None:
    for kind in ("a", "b"):
        for n in range(4):
            directory = tmp_path / f"{kind}{n}"
            (directory / "tests").mkdir(parents=True)
            (directory / "instruction.md").write_text("do it")
            (directory / "task.toml").write_text("")
            (directory / "tests" / "test.sh").write_text("true")
    names = [[Path(t.path).name for t in load_task_set(str(tmp_path), str(tmp_path), n).heldout] for n in (0, 2, 4, 99)]
    assert names[1:3] == [["a0", "b0"], ["a0", "a2", "b0", "b2"]] and names[0] == names[3] and len(names[0]) == 8
