"""Checkpoints: a model directory that continues bit for bit, and what is done about a torn one."""

from __future__ import annotations

import json
import logging
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gyre.config import Model, Train
from gyre.errors import WorkFailed
from gyre.train import checkpoint
from gyre.train.model import Policy
from gyre.train.optimizer import Learner

MakeMicroStep = Callable[..., Any]


def load(directory: Path, dtype: str = "float32") -> Learner:
    policy = Policy.load(directory, Model(dtype=dtype, device="cpu"), 1.0)  # type: ignore[arg-type]
    return Learner(policy, Train(lr=1e-2, weight_decay=0.1, lr_schedule="cosine"), 10)


def data(micro_step: MakeMicroStep, step: int) -> Any:
    ids = torch.randint(2, 32, (10,), generator=torch.Generator().manual_seed(step)).tolist()
    return micro_step((ids, [0] * 5 + [1] * 5, 1.0, 5, None, step - 1))


def advance(learner: Learner, micro_step: MakeMicroStep, step: int) -> float:
    learner.zero()
    learner.accumulate(data(micro_step, step), step - 1)
    return learner.update(step, 1).lr


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_next_update_after_resume_is_bit_equal(tiny_model: Path, micro_step: MakeMicroStep, tmp_path: Path, dtype: str) -> None:
    one = load(tiny_model, dtype)
    for step in (1, 2, 3):
        lr = advance(one, micro_step, step)
    path = checkpoint.save(tmp_path, one, term=7, step=3, lr=lr, keep=2)
    assert path == tmp_path / "step-3"
    random_before = torch.get_rng_state()
    torch.rand(3)

    found = checkpoint.last_good(tmp_path)
    assert found is not None
    assert (found.state.term, found.state.step, found.state.lr) == (7, 3, lr)
    two = load(found.path, dtype)
    two.read(found.path)
    assert torch.equal(torch.get_rng_state(), random_before)
    for step in (4, 5):
        assert advance(one, micro_step, step) == advance(two, micro_step, step)
    for name, p in one.parameters.items():
        assert torch.equal(p, two.parameters[name]), name
        assert torch.equal(one.masters[name], two.masters[name]), name


def test_is_a_model_directory(tiny_model: Path, tmp_path: Path) -> None:
    one = load(tiny_model)
    path = checkpoint.save(tmp_path, one, term=1, step=0, lr=0.0, keep=1)
    names = {p.name for p in path.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "optimizer.safetensors", "gyre.json"} <= names
    assert not [n for n in names if n.endswith((".bin", ".pt", ".pkl"))]
    again = checkpoint.save(tmp_path / "second", load(path), term=1, step=0, lr=0.0, keep=1)  # files of the tokenizer travel on
    assert (again / "chat_template.jinja").read_text() == "{{ messages }}"


def test_the_tokenizer_outlives_the_checkpoint_that_was_resumed_from(tiny_model: Path, tmp_path: Path) -> None:
    first = checkpoint.save(tmp_path, load(tiny_model), term=1, step=1, lr=0.0, keep=1)
    resumed = Learner(Policy.load(first, Model(path=str(tiny_model), device="cpu"), 1.0), Train(), 10)
    for step in (2, 3):  # the first of them removes the checkpoint it came from
        path = checkpoint.save(tmp_path, resumed, term=2, step=step, lr=0.0, keep=1)
        assert not first.exists() and (path / "chat_template.jinja").is_file() and (path / "tokenizer.json").is_file()


@pytest.mark.parametrize("damage", ["cut", "flip", "missing", "no state", "torn state", "older", "../step-2/model.safetensors", "absolute"])
def test_torn_checkpoint_is_skipped(tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    one = load(tiny_model)
    checkpoint.save(tmp_path, one, term=1, step=2, lr=0.1, keep=5)
    last = checkpoint.save(tmp_path, one, term=1, step=10, lr=0.1, keep=5)
    weights, state = last / "model.safetensors", last / "gyre.json"
    match damage:
        case "cut":
            weights.write_bytes(weights.read_bytes()[:-1])
        case "flip":
            raw = bytearray(weights.read_bytes())
            raw[-1] ^= 1
            weights.write_bytes(raw)
        case "missing":
            (last / "optimizer.safetensors").unlink()
        case "no state":
            state.unlink()
        case "torn state":
            state.write_text(state.read_text()[:40])
        case "older":
            state.write_text(state.read_text().replace("gyre.checkpoint/2", "gyre.checkpoint/1").replace("xxh3", "blake2b"))
        case _:  # the very same bytes, but not its own file
            elsewhere = tmp_path / "step-2" / "model.safetensors"
            name = str(elsewhere) if damage == "absolute" else damage
            state.write_text(state.read_text().replace('"model.safetensors"', json.dumps(name)))
            assert (last / name).samefile(elsewhere)
    with caplog.at_level(logging.WARNING):
        found = checkpoint.last_good(tmp_path)
    assert found is not None and found.state.step == 2
    assert "step-10 skipped" in caplog.text
    assert damage != "older" or "written as gyre.checkpoint/1, this gyre reads gyre.checkpoint/2" in caplog.text
    # the next one that is saved supersedes it, and the good one is not thrown away for it
    checkpoint.save(tmp_path, one, term=2, step=3, lr=0.1, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-3"]


def test_no_whole_checkpoint_is_no_reason_to_begin_again(tiny_model: Path, tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, load(tiny_model), term=1, step=5, lr=0.1, keep=2)
    (path / "optimizer.safetensors").unlink()
    with pytest.raises(WorkFailed, match=r"no checkpoint in .* is whole; mend one, or move them away"):
        checkpoint.last_good(tmp_path)
    assert path.exists()


def test_a_core_that_was_replaced_writes_no_checkpoint(tiny_model: Path, tmp_path: Path) -> None:
    one = load(tiny_model)
    checkpoint.save(tmp_path, one, term=1, step=3, lr=0.1, keep=2)
    checkpoint.save(tmp_path, one, term=2, step=1, lr=0.1, keep=2)
    with pytest.raises(WorkFailed, match="a newer core exists"):
        checkpoint.save(tmp_path, one, term=1, step=4, lr=0.1, keep=2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]
    older = checkpoint.last_good(tmp_path, before=1)
    assert older is None


def test_unfinished_one_does_not_count(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / ".step-4.tmp").mkdir(parents=True)
    assert checkpoint.last_good(tmp_path) is None
    assert checkpoint.last_good(tmp_path / "none") is None
    checkpoint.save(tmp_path, load(tiny_model), term=1, step=5, lr=0.1, keep=2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-5"]


def test_last_k_are_kept_and_a_step_is_replaced(tiny_model: Path, tmp_path: Path) -> None:
    one = load(tiny_model)
    for term, step in ((1, 1), (1, 2), (1, 12), (2, 12)):
        checkpoint.save(tmp_path, one, term=term, step=step, lr=0.1, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-12", "step-2"]
    assert json.loads((tmp_path / "step-12" / "gyre.json").read_text())["term"] == 2


def test_another_models_optimizer_is_refused(tiny_model: Path, micro_step: MakeMicroStep, tmp_path: Path) -> None:
    one = load(tiny_model)
    advance(one, micro_step, 1)
    found = checkpoint.Checkpoint(checkpoint.save(tmp_path, one, term=1, step=1, lr=0.1, keep=1), checkpoint.State(term=1, step=1, lr=0.1))
    two = load(tiny_model)
    del two.masters[next(iter(two.masters))]
    with pytest.raises(WorkFailed, match="does not fit"):
        two.read(found.path)


def test_disk_that_cannot_be_written(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file in the way")
    with pytest.raises(WorkFailed, match="could not be written"):
        checkpoint.save(tmp_path / "checkpoints", load(tiny_model), term=1, step=1, lr=0.1, keep=1)


def test_a_full_disk_is_said_and_leaves_nothing_half_written(tiny_model: Path, tmp_path: Path) -> None:
    learner = load(tiny_model)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write beyond the limit fails with an errno, like one on a full disk
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        with pytest.raises(WorkFailed, match="could not be written"):
            checkpoint.save(tmp_path, learner, term=1, step=1, lr=0.1, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []
