"""Several ranks as one learner: the same gradients, norms, weights and checkpoints as a plain one, and they end together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from ranked import Script, Step, command_of, play, take
from ranked import weights as published
from safetensors.torch import load_file

from gyre.config import Config, Model, Train, TrajectoryTable
from gyre.errors import WorkFailed
from gyre.train import checkpoint
from gyre.train.group import host_and_port, open_store
from gyre.train.model import Policy
from gyre.train.optimizer import Learner
from gyre.train.processes import find_leader
from gyre.train.protocols import Group
from gyre.train.shards import divide

MakeMicroStep = Callable[..., Any]
DEADLINE_S = 180.0
PROGRAM = Path(__file__).parent / "ranked.py"
Found = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied embeddings, and sizes that neither 2 nor 4 divide: some rank has no row of some parameter."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=33, hidden_size=18, intermediate_size=30, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1, head_dim=6,
        max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("ranks") / "model"
    whole: Any = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]
    whole.float().save_pretrained(directory)
    return directory


def config_of(model: Path, ranks: int, dtype: str = "float32", **train: Any) -> Config:
    table = {"lr": 1e-2, "ratio_low": 1e-6, "ratio_high": 1e6, "weight_decay": 0.1, "clip_norm": 0.5, "micro_step_tokens": 40, "threads": 1}
    return Config(model=Model(path=str(model), device="cpu", dtype=dtype), train=Train(**{**table, "ranks": ranks, **train}))  # type: ignore[arg-type]


def plain(config: Config, source: Path | None = None) -> Learner:
    return Learner(Policy.load(source or Path(config.model.path), config.model, config.rollout.temperature), config.train, 10)


def row(seed: int, length: int, trainable: int, advantage: float) -> tuple[Any, ...]:
    ids = torch.randint(2, 33, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids, [0] * (length - trainable) + [1] * trainable, advantage, max(1, trainable), None, 0


@pytest.fixture(scope="module")
def steps(micro_step: MakeMicroStep) -> list[Step]:
    def step(n: int, executions: int, *micro_steps: list[tuple[Any, ...]]) -> Step:
        return Step(f"step {n}", n, executions, [command_of(micro_step(*rows)) for rows in micro_steps])

    many = [row(i, 6 + 2 * i, 2 + i % 3, (-1.0) ** i * (1 + i)) for i in range(9)]
    return [
        step(1, 9, many),
        step(2, 12, many[:1], many[1:4], many[4:6], [row(20, 12, 3, 1.0), row(21, 8, 0, -1.0)], [row(22, 9, 0, 1.0)]),  # fewer than ranks, or none
        step(3, 4, [row(30, 14, 5, 0.0), row(31, 7, 2, 0.7), row(32, 20, 4, 0.0), row(33, 5, 2, 0.0)]),
        step(4, 3, [row(40, 14, 5, 0.0), row(41, 9, 2, 0.0)]),  # nothing to learn from
        step(5, 9, many[4:], many[:4]),
    ]


STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    """A test that fails leaves no ranks behind that eat the machine: they end when their leader does."""
    yield
    for process in STARTED:
        if process.poll() is None:
            process.kill()
            process.wait(DEADLINE_S)
        assert process.stdout is not None
        process.stdout.close()
    STARTED.clear()


def run(script: Script, out: Path, **env: str) -> subprocess.Popen[str]:
    out.mkdir(parents=True, exist_ok=True)
    (out / "script").write_bytes(msgspec.msgpack.encode(script))
    argv = [sys.executable, str(PROGRAM), str(out / "script"), str(out)]
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1", **env}
    STARTED.append(subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    return STARTED[-1]


def finished(process: subprocess.Popen[str], out: Path) -> Found:
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, said
    return load_file(out / "found.safetensors")


def same(expected: Found, found: Found, **tolerance: float) -> None:
    assert expected and expected.keys() == found.keys(), sorted(expected.keys() ^ found.keys())[:5]
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, **(tolerance or {"rtol": 1e-4, "atol": 1e-5}), msg=lambda m, n=name: f"{n}: {m}")


class Played:
    """The script of three steps, saved, then continued from that and from the other's checkpoints."""

    def __init__(self, found: Found, saved: Path) -> None:
        self.found, self.saved = found, saved


@pytest.fixture(scope="module")
def one(model: Path, steps: list[Step], tmp_path_factory: pytest.TempPathFactory) -> Played:
    """The plain learner: what all others are held against."""
    out, learner = tmp_path_factory.mktemp("one"), plain(config_of(model, 1))
    found = play(learner, Script(config_of(model, 1), str(model), steps=steps[:3], save=str(out)))
    for s in steps[3:]:
        found |= take(learner, s, "more:")
    return Played(found, out / "step-3")


@pytest.fixture(scope="module")
def two(model: Path, steps: list[Step], one: Played, tmp_path_factory: pytest.TempPathFactory) -> Played:
    out = tmp_path_factory.mktemp("two")
    script = Script(config_of(model, 2), str(model), steps=steps[:3], save=str(out), resume=[("1", str(one.saved))], after=steps[3:])
    return Played(finished(run(script, out), out), out / "step-3")


@pytest.fixture(scope="module")
def four(model: Path, steps: list[Step], two: Played, one: Played, tmp_path_factory: pytest.TempPathFactory) -> Played:
    out, resume = tmp_path_factory.mktemp("four"), [("1", str(one.saved)), ("2", str(two.saved))]
    script = Script(config_of(model, 4), str(model), steps=steps[:3], save=str(out), resume=resume, after=steps[3:])
    return Played(finished(run(script, out), out), out / "step-3")


def part(found: Found, prefix: str) -> Found:
    return {n.removeprefix(prefix): t for n, t in found.items() if n.startswith(prefix)}


def test_trees_on_two_ranks_are_rows_on_one(model: Path, micro_step: MakeMicroStep, tmp_path: Path) -> None:
    """Executions of two and three trajectories that share 8 and 6 tokens."""
    shared = [row(50, 8, 3, 1.0), row(51, 6, 2, -0.5)]
    rows = [*shared]
    for i, (n, origin) in enumerate([(5, 0), (4, 1), (7, 1)]):
        ids, _, advantage, _, _, version = shared[origin]
        rows.append((ids + row(60 + i, n, 0, 0.0)[0], [0] * len(ids) + [1] * n, advantage, 9, None, version))
    data = micro_step(*rows)
    named = [msgspec.structs.replace(t, rollout_id=f"e{e}") for t, e in zip(data.trajectories, [0, 1, 0, 1, 1], strict=True)]
    steps = [Step("step 1", 1, 2, [command_of(replace(data, trajectories=named))])]
    expected = play(plain(config_of(model, 1)), Script(config_of(model, 1), str(model), steps=steps))
    config = msgspec.structs.replace(config_of(model, 2), trajectory=TrajectoryTable(max_per_execution=5))
    process = run(Script(config, str(model), steps=steps), tmp_path)
    same(expected, finished(process, tmp_path))


@pytest.mark.pain(18)
@pytest.mark.parametrize("ranks", ["two", "four"])
def test_the_same_step_with_any_number_of_ranks(one: Played, ranks: str, request: pytest.FixtureRequest) -> None:
    """pains 18: one or many micro-steps, more or fewer trajectories than ranks, none trainable on a rank, none at all."""
    found = request.getfixturevalue(ranks).found
    for n in (1, 2, 3):
        expected = part(one.found, f"step {n}/")
        assert expected["update"][0] == 1 and any(float(t.abs().max()) > 1e-3 for m, t in expected.items() if m.startswith("gradient/"))
        same(expected, part(found, f"step {n}/"))


@pytest.mark.parametrize(("saved", "ranks"), [("1", "two"), ("1", "four"), ("2", "four")])
def test_a_checkpoint_goes_on_with_another_number_of_ranks(one: Played, saved: str, ranks: str, request: pytest.FixtureRequest) -> None:
    found = request.getfixturevalue(ranks).found
    expected = part(one.found, "more:")
    assert expected["step 4/update"][0] == 0 and expected["step 5/update"][0] == 1
    same(expected, part(found, f"{saved}:"))


@pytest.mark.parametrize("ranks", ["two", "four"])
def test_a_checkpoint_of_several_goes_on_with_one(model: Path, one: Played, steps: list[Step], ranks: str, request: pytest.FixtureRequest) -> None:
    saved: Path = request.getfixturevalue(ranks).saved
    found = checkpoint.last_good(saved.parent)
    assert found is not None and found.path == saved and not list(saved.rglob("*.pt")) + list(saved.rglob(".metadata"))
    learner = plain(config_of(model, 1), saved)
    learner.read(found.path)
    same(part(one.found, "more:"), {n: t for s in steps[3:] for n, t in take(learner, s).items()})


def test_a_checkpoint_of_four_is_started_from_with_two(model: Path, one: Played, four: Played, steps: list[Step], tmp_path: Path) -> None:
    found = finished(run(Script(config_of(model, 2), str(four.saved), read=True, steps=steps[3:]), tmp_path), tmp_path)
    same(part(one.found, "more:"), found)


def test_another_models_optimizer_is_refused(tiny_model: Path, model: Path, two: Played) -> None:
    with pytest.raises(WorkFailed, match="does not fit"):
        plain(config_of(tiny_model, 1)).read(two.saved)


def test_bfloat16_and_cells_that_meet(model: Path, steps: list[Step], tmp_path: Path) -> None:
    """Gathered in bfloat16, summed in fp32: as the plain learner, up to bfloat16. And what it saves, one rank reads."""
    found = finished(run(Script(config_of(model, 2, "bfloat16"), str(model), steps=steps[:2], save=str(tmp_path)), tmp_path), tmp_path)
    learner = plain(config_of(model, 1, "bfloat16"))
    expected = play(learner, Script(config_of(model, 1, "bfloat16"), str(model), steps=steps[:2]))
    same(part(expected, "step 1/gradient/"), part(found, "step 1/gradient/"), rtol=0.1, atol=0.02)
    weights = part(found, "step 2/weight/")
    assert all(w.dtype == torch.bfloat16 for w in weights.values())
    same(part(expected, "step 2/weight/"), weights, rtol=0.1, atol=0.03)
    resumed = plain(config_of(model, 1, "bfloat16"), tmp_path / "step-3")
    resumed.read(tmp_path / "step-3")
    same(weights, published(resumed), rtol=0, atol=0)
    assert all(m.dtype == torch.float32 and torch.equal(m.bfloat16(), resumed.parameters[n]) for n, m in resumed.masters.items())
    assert any(not torch.equal(m, resumed.parameters[n].float()) for n, m in resumed.masters.items()), "masters keep what bfloat16 cannot"


@pytest.mark.pain(18)
def test_cells_reduce_and_broadcast_rank_by_rank(model: Path, steps: list[Step], tmp_path: Path) -> None:
    """Two cells of two ranks, each with every other micro-step of a step: the core's update is that of one learner; both have its weights."""
    _store, address = open_store("127.0.0.1")
    cells = []
    for rank in range(2):
        meeting = Group("attempt 1", address, rank, 2)
        cells.append(run(Script(config_of(model, 2), str(model), after=steps[1:2], meeting=meeting), tmp_path / str(rank)))
    core, satellite = (finished(p, tmp_path / str(rank)) for rank, p in enumerate(cells))
    expected = take(plain(config_of(model, 1)), Step("s", 1, steps[1].executions, steps[1].micro_steps))
    assert core["reduced/norm"].item() == pytest.approx(expected["s/update"][1].item(), rel=1e-4)
    same(part(expected, "s/weight/"), part(core, "reduced/weight/"))
    same(part(core, "reduced/weight/"), part(satellite, "reduced/weight/"), rtol=0, atol=0)


def wait_for(condition: Callable[[], bool], what: str, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, f"gave up waiting for {what}"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def all_gone(pids: list[int], within_s: float) -> bool:
    end = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, pids))


def started(script: Script, out: Path) -> tuple[subprocess.Popen[str], list[int]]:
    process = run(script, out)
    wait_for(lambda: (out / "pids").exists() and (out / "pids").read_text() != "", "the followers", process)
    return process, [int(p) for p in (out / "pids").read_text().split()]


@pytest.mark.parametrize(("doing", "ranks"), [("idle", 2), ("busy", 3)])
def test_a_follower_killed_ends_the_leader(model: Path, steps: list[Step], tmp_path: Path, doing: str, ranks: int) -> None:
    process, followers = started(Script(config_of(model, ranks), str(model), steps=steps[:1], finally_=doing), tmp_path)
    os.kill(followers[0], signal.SIGKILL)
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert said.splitlines()[-1].startswith("error: this cell lost a rank: rank 1 was killed by signal 9"), said
    assert all_gone(followers, 0.0)


def test_a_follower_stopped_ends_the_leader_after_the_timeout(model: Path, steps: list[Step], tmp_path: Path) -> None:
    script = Script(config_of(model, 2, ranks_timeout_s=20.0), str(model), steps=steps[:1], finally_="busy")
    process, followers = started(script, tmp_path)
    os.kill(followers[0], signal.SIGSTOP)
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1 and "error: the ranks of this cell lost each other" in said, said
    assert all_gone(followers, 0.0)


def test_the_leader_killed_ends_the_followers(model: Path, steps: list[Step], tmp_path: Path) -> None:
    process, followers = started(Script(config_of(model, 3), str(model), steps=steps[:1], finally_="busy"), tmp_path)
    process.kill()
    assert all_gone(followers, DEADLINE_S)
    process.communicate(timeout=DEADLINE_S)


def test_ranks_without_work_outlast_the_timeout(model: Path, steps: list[Step], tmp_path: Path) -> None:
    """The leader's signs of life."""
    script = Script(config_of(model, 2, ranks_timeout_s=12.0), str(model), steps=steps[:1], finally_="sleep")
    finished(run(script, tmp_path), tmp_path)


def test_a_followers_traceback_is_shown(model: Path, micro_step: MakeMicroStep, tmp_path: Path) -> None:
    ids, mask, advantage, n, _, version = row(1, 8, 2, 1.0)
    bad = micro_step(row(2, 20, 3, 1.0), (ids, mask, advantage, n, [float("nan")] * 8, version))
    assert divide(bad, 2)[1].logprobs_S.isnan().all(), "the bad one is rank 1's"
    process = run(Script(config_of(model, 2), str(model), steps=[Step("bad", 1, 1, [command_of(bad)])]), tmp_path)
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1 and "rank 1: [rank1]: Traceback (most recent call last):" in said
    last = said.splitlines()[-1]
    assert last.startswith("error: this cell lost a rank: rank 1 ended with 1") and last.endswith("without the log-prob it was sampled with"), said


def test_torchrun(model: Path, one: Played, steps: list[Step], tmp_path: Path) -> None:
    (tmp_path / "script").write_bytes(msgspec.msgpack.encode(Script(config_of(model, 1), str(model), steps=steps[:1])))
    argv = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        str(PROGRAM),
        str(tmp_path / "script"),
        str(tmp_path),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    same(part(one.found, "step 1/"), part(load_file(tmp_path / "found.safetensors"), "step 1/"))


def test_trajectories_are_divided_evenly(micro_step: MakeMicroStep) -> None:
    data = micro_step(*[row(i, 5 + i, 2, 1.0) for i in range(11)])
    shares = divide(data, 4)
    assert sorted(t.trajectory_id for s in shares for t in s.trajectories) == sorted(t.trajectory_id for t in data.trajectories)
    loads = [len(s.token_ids_S) for s in shares]
    assert max(loads) - min(loads) <= 15 and sum(loads) == len(data.token_ids_S)
    starts = {t.trajectory_id: sum(x.n_tokens for x in data.trajectories[:i]) for i, t in enumerate(data.trajectories)}
    for s in shares:
        at = 0
        for t in s.trajectories:
            begin = starts[t.trajectory_id]
            assert torch.equal(s.token_ids_S[at : at + t.n_tokens], data.token_ids_S[begin : begin + t.n_tokens])
            at += t.n_tokens


def test_a_rank_that_comes_back_waits_for_the_next_leader() -> None:
    """The one that lost it still listens, for a while: to join it would be to wait for ever."""
    old, meet = open_store("127.0.0.1")
    host, port = host_and_port(meet)
    first = find_leader(host, port, 2, 4, 10.0)
    with ThreadPoolExecutor() as pool:
        coming = pool.submit(find_leader, host, port, 2, 4, 60.0)
        time.sleep(1.0)
        assert not coming.done()
        del first, old  # it ends
        new, _ = open_store(host, port)
        new.set("mine", "1")
        assert coming.result(DEADLINE_S).check(["mine"])
    with pytest.raises(WorkFailed, match="has lost rank 2 and did not end within 1 s"):
        find_leader(host, port, 2, 4, 1.0)
