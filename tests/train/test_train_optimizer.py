"""Gradients and updates on a tiny model: what may and what may not change them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from gyre.config import Model, Train
from gyre.errors import UsageError, WorkFailed
from gyre.train.metrics import Tally, merged, step_metrics
from gyre.train.model import Policy, micro_batches
from gyre.train.objective import OBJECTIVES
from gyre.train.optimizer import Learner, learning_rate
from gyre.types import Version
from gyre.wire.messages import StepStats

MakeMicroStep = Callable[..., Any]


def learner(directory: Path, temperature: float = 1.0, dtype: str = "float32", **train: Any) -> Learner:
    policy = Policy.load(directory, Model(dtype=dtype, device="cpu"), temperature)  # type: ignore[arg-type]
    return Learner(policy, Train(**{"lr": 1e-2, "ratio_low": 1e-6, "ratio_high": 1e6, **train}), 10)


def row(seed: int, length: int, trainable: int, advantage: float, execution: int | None = None, version: int = 0) -> tuple[Any, ...]:
    """A trajectory whose last `trainable` tokens bear loss."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 32, (length,), generator=g).tolist()
    mask = [0] * (length - trainable) + [1] * trainable
    return ids, mask, advantage, trainable if execution is None else execution, None, version


def gradient(directory: Path, *micro_steps: Any, executions: int, **train: Any) -> dict[str, torch.Tensor]:
    one = learner(directory, **train)
    one.zero()
    for m in micro_steps:
        one.accumulate(m, 0)
    return divided(one, executions)


def divided(one: Learner, executions: int) -> dict[str, torch.Tensor]:
    return {n: s / executions for n, s in zip(one.masters, one.sums, strict=True)}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert any(float(t.abs().max()) > 1e-4 for t in a.values()), "a gradient that is 0 proves nothing"
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6)


def test_logprobs_are_those_of_a_plain_forward_pass(tiny_model: Path, micro_step: MakeMicroStep) -> None:
    """Whatever the padding, the chunk of logits and the temperature."""
    rows = [row(1, 9, 4, 1.0), row(2, 14, 6, -1.0), row(3, 5, 2, 0.5)]
    data = micro_step(*rows)
    policy = learner(tiny_model, temperature=0.7).policy
    small = Policy(policy.model, tiny_model, 0.7, logits_at_once=3 * 32)
    expected: dict[int, list[float]] = {}
    for ids, mask, *_ in rows:
        with torch.no_grad():
            logprobs = torch.log_softmax(policy.model(input_ids=torch.tensor([ids])).logits[0] / 0.7, -1)
        expected[len(ids)] = [float(logprobs[i - 1, ids[i]]) for i in range(len(ids)) if mask[i]]
    for tokens in (10, 1000):
        for p in (policy, small):
            got = torch.cat([p.token_stats(b).logprobs_N for b in micro_batches(data, tokens, p.device)]).tolist()
            assert got == pytest.approx([v for n in (5, 9, 14) for v in expected[n]], abs=1e-5)


@pytest.mark.parametrize("tree", [False, True], ids=["rows", "tree"])
def test_a_long_row_keeps_its_layers_inputs_alone(tiny_model: Path, micro_step: MakeMicroStep, tree: bool) -> None:
    """The gradient is that of a row whose activations are all kept; what is kept is a small part of them."""
    ids, mask, advantage, *_ = row(1, 60, 30, 1.0)
    data = micro_step((ids, mask, advantage, 60, None, 0), (ids[:50] + [7] * 10, mask, advantage, 60, None, 0))
    data = replace(data, trajectories=[msgspec.structs.replace(t, rollout_id="r") for t in data.trajectories])
    one = learner(tiny_model)
    kept, gradients = [], []
    for kept_bytes in (0, 1):
        policy = Policy(one.policy.model, tiny_model, 1.0, kept_bytes=kept_bytes, tree=tree)
        (batch,) = micro_batches(data, 1000, policy.device, tree=tree)
        assert (batch.tree is not None) == tree and (batch.ids_RT.numel() > policy.fits) == (kept_bytes == 1)
        storages: dict[int, int] = {}

        def pack(x: torch.Tensor, storages: dict[int, int] = storages) -> torch.Tensor:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            stats = policy.token_stats(batch)
        kept.append(sum(storages.values()))
        loss = (stats.logprobs_N * batch.advantages_N).sum()
        gradients.append(dict(zip(one.parameters, torch.autograd.grad(loss, list(one.parameters.values())), strict=True)))
    same(*gradients)
    assert kept[1] < 0.5 * kept[0], kept


def test_batches_are_bounded_and_lose_nothing(micro_step: MakeMicroStep) -> None:
    data = micro_step(*[row(i, 5 + i, 2, 1.0) for i in range(10)], row(99, 40, 3, 0.0), row(98, 6, 0, 1.0))
    batches = list(micro_batches(data, 30, torch.device("cpu")))
    assert sum(len(b.targets_N) for b in batches) == 23
    assert all(b.ids_RT.numel() <= 30 or len(b.ids_RT) == 1 for b in batches)
    assert [b.learns for b in batches].count(False) == 1  # the row without advantage is alone


@pytest.mark.pain(17)
@pytest.mark.parametrize("objective", ["dis", "grpo", "dapo", "dr_grpo", "cispo", "tis"])
def test_split_of_an_execution_changes_no_gradient(tiny_model: Path, micro_step: MakeMicroStep, objective: str) -> None:
    """pains 17: execution A as one trajectory of 6 trainable tokens, or as k = 2 and 3 that share its path; B stays."""
    ids, mask, advantage, n, _, version = row(1, 12, 6, 0.5)
    other = row(2, 9, 3, -0.5)

    def part(keep: range) -> tuple[Any, ...]:
        end = 6 + keep.stop
        return ids[:end], [int(i - 6 in keep) for i in range(end)], advantage, n, None, version

    whole = gradient(tiny_model, micro_step((ids, mask, advantage, n, None, version), other), executions=2, objective=objective)
    for cuts in ([range(4), range(4, 6)], [range(1), range(1, 3), range(3, 6)]):
        same(whole, gradient(tiny_model, micro_step(*map(part, cuts), other), executions=2, objective=objective))


@pytest.mark.pain(17)
def test_a_sequence_level_ratio_is_the_exception(tiny_model: Path, micro_step: MakeMicroStep) -> None:
    """Under gspo the halves of an execution have ratios of their own, and the gradient says so."""
    ids, mask, advantage, n, _, version = row(1, 12, 6, 0.5)
    whole = gradient(tiny_model, micro_step((ids, mask, advantage, n, None, version)), executions=1, objective="gspo")
    halves = [(ids[:9], mask[:9], advantage, n, None, version), (ids, [0] * 9 + mask[9:], advantage, n, None, version)]
    split = gradient(tiny_model, micro_step(*halves), executions=1, objective="gspo")
    assert any(not torch.allclose(whole[k], split[k], rtol=1e-2) for k in whole)


@pytest.mark.pain(18)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_update_is_the_same_whoever_adds(tiny_model: Path, micro_step: MakeMicroStep, objective: str) -> None:
    """One cell alone, or two that share the micro-steps unevenly and sum: the core divides once, by the whole step's counts."""
    rows = [row(i, 6 + i, 2 + i % 3, (-1.0) ** i) for i in range(5)]
    alone, core, satellite = (learner(tiny_model, objective=objective, clip_norm=0.0) for _ in range(3))
    alone.accumulate(micro_step(*rows), 0)
    core.accumulate(micro_step(*rows[3:]), 0)
    satellite.accumulate(micro_step(*rows[:3]), 0)
    core.totals = [a + b for a, b in zip(core.sums, satellite.sums, strict=True)]
    raw_norm = float(torch.linalg.vector_norm(torch.cat([s.flatten() for s in core.totals])))
    trainable = merged([core.tally, satellite.tally]).trainable
    assert trainable == alone.tally.trainable == 14
    norms = [alone.update(1, 7).grad_norm, core.update(1, 7, trainable).grad_norm]  # two more executions had no trainable token
    assert norms[0] == pytest.approx(norms[1], rel=1e-4) and norms[0] > 1e-4
    raw = {"executions": 7, "tokens": 14, "constant": 7 * Train().constant_tokens}[OBJECTIVES[objective].denominator]
    assert norms[0] * raw == pytest.approx(raw_norm, rel=1e-4)


@pytest.mark.parametrize("objective", ["dis", "gspo"])
def test_tokens_beyond_the_version_cap_bear_no_loss_and_are_counted(tiny_model: Path, micro_step: MakeMicroStep, objective: str) -> None:
    """Of a trajectory sampled at versions 3, 3, 5, 6 under weights of 8: with a lag of 3 the first two are left out, and stay in the denominator."""
    ids, mask, advantage, n, _, _ = row(1, 10, 4, 1.0)
    data = micro_step((ids, mask, advantage, n, None, 5), row(2, 8, 3, -1.0, version=8))
    data.versions_S[6:10] = torch.tensor([3, 3, 5, 6])
    capped = learner(tiny_model, objective=objective, max_version_lag=3)
    capped.accumulate(data, 8)
    assert (capped.tally.too_old, capped.tally.trainable) == (2, 7)
    assert Tally.of(capped.tally.numbers()) == capped.tally
    masked = micro_step((ids, [0] * 8 + mask[8:], advantage, n, None, 5), row(2, 8, 3, -1.0, version=8))
    other = learner(tiny_model, objective=objective)
    other.accumulate(masked, 8)
    same(divided(capped, 2), divided(other, 2))
    assert step_metrics(capped.tally, stats_of(2), updated=True, grad_norm=1.0, lr=0.1, seconds={})["too_old_tokens"] == 2.0


@pytest.mark.pain(18)
def test_one_or_many_micro_steps(tiny_model: Path, micro_step: MakeMicroStep) -> None:
    """pains 18, in part: the same trajectories in one micro-step or in many, in large or small batches."""
    rows = [row(i, 6 + i, 2 + i % 3, (-1.0) ** i) for i in range(7)]
    one = gradient(tiny_model, micro_step(*rows), executions=7)
    same(one, gradient(tiny_model, *[micro_step(r) for r in reversed(rows)], executions=7))
    same(one, gradient(tiny_model, micro_step(*rows[:3]), micro_step(*rows[3:]), executions=7, micro_step_tokens=12))


@pytest.mark.pain(17)
def test_longer_execution_has_no_more_weight(tiny_model: Path, micro_step: MakeMicroStep) -> None:
    """The loss at ratio 1 is the mean over executions of -A·(mean log-prob), not over tokens."""
    one = learner(tiny_model)
    rows = [row(1, 20, 15, 1.0), row(2, 6, 1, 1.0)]
    stats = [one.policy.token_stats(next(iter(micro_batches(micro_step(r), 99, one.policy.device)))).logprobs_N.detach() for r in rows]
    own = [(r[0], r[1], r[2], r[3], [float("nan")] * (len(r[0]) - len(s)) + s.tolist(), 0) for r, s in zip(rows, stats, strict=True)]
    one.accumulate(micro_step(*own), 0)
    assert one.tally.loss_numerator == pytest.approx(-sum(float(s.mean()) for s in stats), rel=1e-4)
    assert one.tally.all_versions.max == pytest.approx(0.0, abs=1e-5)


@pytest.mark.pain(28)
def test_trainer_and_engine_differ(tiny_model: Path, micro_step: MakeMicroStep) -> None:
    """pains 28: mean and max, over all tokens and over those of the current version."""
    one = learner(tiny_model)
    rows = [row(1, 8, 3, 1.0, version=4), row(2, 8, 3, 1.0, version=2)]
    stats = [one.policy.token_stats(next(iter(micro_batches(micro_step(r), 99, one.policy.device)))).logprobs_N.tolist() for r in rows]
    off = [[0.01, -0.03, 0.02], [0.5, 0.0, 0.1]]
    made = [
        (r[0], r[1], r[2], r[3], [float("nan")] * 5 + [a + b for a, b in zip(s, o, strict=True)], r[5])
        for r, s, o in zip(rows, stats, off, strict=True)
    ]
    one.accumulate(micro_step(*made), 4)
    assert one.tally.current_version.tokens == 3
    assert one.tally.current_version.mean == pytest.approx(0.02, abs=1e-4)
    assert one.tally.current_version.max == pytest.approx(0.03, abs=1e-4)
    assert one.tally.all_versions.mean == pytest.approx(0.11, abs=1e-4)
    assert one.tally.all_versions.max == pytest.approx(0.5, abs=1e-4)


@pytest.mark.pain(29)
@pytest.mark.parametrize("objective", ["dis", "grpo"])
def test_forced_stale_batch_is_clipped(tiny_model: Path, micro_step: MakeMicroStep, objective: str) -> None:
    """pains 29: after updates at a large rate, the batch that was fresh is stale, and the clip fraction says so."""
    one = learner(tiny_model, objective=objective, ratio_low=0.8, ratio_high=1.2, lr=0.05)
    rows = [row(i, 10, 5, (-1.0) ** i) for i in range(4)]
    with torch.no_grad():
        batches = [next(iter(micro_batches(micro_step(r), 99, one.policy.device))) for r in rows]
        own = [[float("nan")] * 5 + one.policy.token_stats(b).logprobs_N.tolist() for b in batches]
    data = micro_step(*[(r[0], r[1], r[2], r[3], o, 0) for r, o in zip(rows, own, strict=True)])
    fractions = []
    for step in (1, 2, 3):
        one.zero()
        one.accumulate(data, step - 1)
        metrics = step_metrics(one.tally, stats_of(4), updated=True, grad_norm=1.0, lr=0.1, seconds={})
        fractions.append(metrics["clip_fraction"])
        one.update(step, 4)
    assert fractions[0] == 0.0
    assert fractions[1] is not None and fractions[1] > 0
    assert fractions[2] is not None and fractions[2] > 0


def stats_of(executions: int) -> StepStats:
    return StepStats(
        groups=1, executions=executions, trajectories=executions, tokens=0, trainable_tokens=0, reward_mean=None, staleness_mean=None,
        staleness_p95=None, staleness_max=None, staleness_interpolated=None, staleness_predicted=None, discarded_groups=0, uniform_groups=0,
    )  # fmt: skip


@pytest.mark.pain(18)
def test_update_divides_once_clips_and_moves(tiny_model: Path, micro_step: MakeMicroStep) -> None:
    one = learner(tiny_model, clip_norm=1e-3)
    data = micro_step(row(1, 8, 4, 1.0), row(2, 8, 4, -0.5))
    before = {n: p.detach().clone() for n, p in one.parameters.items()}
    one.accumulate(data, 0)
    assert all(torch.equal(before[n], p) for n, p in one.parameters.items()), "weights are frozen during a step"
    norm = float(torch.sqrt(sum((g**2).sum() for g in divided(one, 5).values())))  # type: ignore[arg-type]
    update = one.update(1, 5)
    assert update.updated
    assert update.grad_norm == pytest.approx(norm, rel=1e-4)
    assert any(not torch.equal(before[n], p) for n, p in one.parameters.items())


@pytest.mark.pain(23)
def test_nothing_to_learn_from_changes_nothing(tiny_model: Path, micro_step: MakeMicroStep) -> None:
    """pains 23 at the optimizer: no graded execution, no trainable token, or no advantage (momentum must not drift)."""
    one = learner(tiny_model)
    before = {n: p.detach().clone() for n, p in one.parameters.items()}
    one.accumulate(micro_step(row(1, 8, 0, 1.0)), 0)
    assert not one.update(1, 4).updated
    one.accumulate(micro_step(row(1, 8, 2, 1.0)), 0)
    assert not one.update(2, 0).updated
    one.zero()
    one.accumulate(micro_step(row(1, 8, 2, 1.0)), 0)
    assert one.update(3, 1).updated
    before = {n: p.detach().clone() for n, p in one.parameters.items()}
    one.zero()
    one.accumulate(micro_step(row(1, 8, 2, 0.0)), 0)
    assert one.tally.trainable == 2 and one.update(4, 1).grad_norm == 0.0
    assert all(torch.equal(before[n], p) for n, p in one.parameters.items())


@pytest.mark.pain(26)
def test_gradient_that_is_not_finite_changes_nothing(tiny_model: Path, micro_step: MakeMicroStep) -> None:
    one = learner(tiny_model)
    before = {n: p.detach().clone() for n, p in one.parameters.items()}
    one.accumulate(micro_step(row(1, 8, 2, float("inf"))), 0)
    assert not one.update(1, 1).updated
    assert all(torch.equal(before[n], p) for n, p in one.parameters.items())


def test_missing_logprob_is_an_error(tiny_model: Path, micro_step: MakeMicroStep) -> None:
    ids, mask, advantage, n, _, version = row(1, 8, 2, 1.0)
    with pytest.raises(WorkFailed, match="log-prob"):
        learner(tiny_model).accumulate(micro_step((ids, mask, advantage, n, [float("nan")] * 8, version)), 0)


def test_bfloat16_has_fp32_masters(tiny_model: Path, micro_step: MakeMicroStep) -> None:
    """A change too small for a bfloat16 weight is kept in the master."""
    one = learner(tiny_model, dtype="bfloat16", lr=1e-5)
    before = {n: p.detach().clone() for n, p in one.masters.items()}
    one.accumulate(micro_step(row(1, 8, 4, 1.0)), 0)
    assert one.update(1, 1).updated
    assert all(m.dtype == torch.float32 for m in one.masters.values())
    assert all(p.dtype == torch.bfloat16 for p in one.parameters.values())
    assert any(not torch.equal(before[n], m) for n, m in one.masters.items())


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        (Train(lr=1.0), {1: 1.0, 10: 1.0}),
        (Train(lr=1.0, warmup_steps=4), {1: 0.25, 2: 0.5, 4: 1.0, 5: 1.0, 10: 1.0}),
        (Train(lr=1.0, lr_schedule="linear", lr_min=0.1), {5: 0.55, 10: 0.1}),
        (Train(lr=1.0, lr_schedule="linear", warmup_steps=2), {1: 0.5, 2: 1.0, 6: 0.5, 10: 0.0}),
        (Train(lr=1.0, lr_schedule="cosine", lr_min=0.2), {5: 0.6, 10: 0.2}),
        (Train(lr=1.0, lr_schedule="cosine", warmup_steps=20), {10: 0.5}),
    ],
)
def test_learning_rate(train: Train, expected: dict[int, float]) -> None:
    assert {step: learning_rate(train, step, 10) for step in expected} == pytest.approx(expected)


def test_bad_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a directory"):
        Policy.load(tmp_path / "none", Model(), 1.0)
    with pytest.raises(UsageError, match=r"no config\.json"):
        Policy.load(tmp_path, Model(), 1.0)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(UsageError, match="cannot be loaded") as e:
        Policy.load(tmp_path, Model(), 1.0)
    assert "\n" not in str(e.value)


def test_truncated_weights_are_said_in_one_line(tiny_model: Path, tmp_path: Path) -> None:
    from gyre.rollout.model import load_model

    torn = tmp_path / "model"
    shutil.copytree(tiny_model, torn)
    weights = torn / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(UsageError, match="cannot be loaded"):
        Policy.load(torn, Model(), 1.0)
    with pytest.raises(UsageError, match="cannot be loaded"):
        load_model(Model(path=str(torn), device="cpu"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_learner_that_slept_goes_on_bit_for_bit(tiny_model: Path, micro_step: MakeMicroStep, dtype: str) -> None:
    """Asleep in the midst of a step, and between two: accumulator, moments and weights are as those of one that stayed awake."""
    one, other = learner(tiny_model, dtype=dtype), learner(tiny_model, dtype=dtype)
    for step in (1, 2):
        for k in range(3):
            for x in (one, other):
                x.accumulate(micro_step(row(10 * step + k, 9, 4, (-1.0) ** k)), step - 1)
            other.sleep()
            other.wake()
        assert all(torch.equal(a, b) for a, b in zip(one.sums, other.sums, strict=True))
        assert one.update(step, 3) == other.update(step, 3)
        other.sleep()
        snapshot = other.snapshot(Version(1, step))  # snapshots are lent by a core that sleeps
        other.wake()
        assert snapshot.checksum == one.snapshot(Version(1, step)).checksum
        one.zero()
        other.zero()


def test_a_snapshot_of_a_step_is_installed_bit_for_bit(tiny_model: Path, micro_step: MakeMicroStep) -> None:
    one, other = learner(tiny_model, dtype="bfloat16"), learner(tiny_model, dtype="bfloat16")
    one.accumulate(micro_step(row(1, 9, 4, 1.0)), 0)
    one.update(1, 1)
    snapshot = one.snapshot(Version(1, 1))
    other.install(snapshot.tensors, snapshot.data)
    for x in (one, other):
        x.zero()
        x.accumulate(micro_step(row(2, 9, 4, 1.0)), 1)
    assert all(torch.equal(a, b) for a, b in zip(one.weights, other.weights, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(one.sums, other.sums, strict=True))


def test_tallies_of_cells_add_up_to_the_whole_steps(tiny_model: Path, micro_step: MakeMicroStep) -> None:
    whole, parts = learner(tiny_model), [learner(tiny_model) for _ in range(3)]
    for k in range(5):
        data = micro_step(row(k, 9, 3 + k % 2, (-1.0) ** k, version=k % 2))
        whole.accumulate(data, 1)
        parts[k % 2].accumulate(data, 1)  # the third has nothing
    together = merged([Tally.of(p.tally.numbers()) for p in parts])
    for mine, theirs in zip(together.numbers(), whole.tally.numbers(), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)
    assert together.all_versions.max == whole.tally.all_versions.max and together.current_version.tokens == whole.tally.current_version.tokens
