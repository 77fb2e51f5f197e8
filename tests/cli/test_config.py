"""Configuration: precedence, origins, and one line for every mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre import config
from gyre.errors import UsageError


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_precedence_and_origins(tmp_path: Path) -> None:
    file = write(tmp_path, "[train]\nlr = 1e-3\nsteps = 5\n[system]\ngroups_per_step = 3\n")
    r = config.load(file, ["train.lr=2e-3", "train.steps=6"], {"train.steps": 7, "train.threads": None})
    assert (r.config.train.lr, r.config.train.steps, r.config.system.groups_per_step, r.config.train.threads) == (2e-3, 7, 3, 0)
    assert r.origins["train.steps"] == "flag" and r.origins["train.lr"] == "--set"
    assert r.origins["system.groups_per_step"] == str(file) and r.origins["run.seed"] == "default"


def test_written_and_read_back(tmp_path: Path) -> None:
    first = config.load(None, ["model.path=m", 'sandbox.harness=sh -c "a\\tb"', "train.lr=3e-4", "run.coord_grace_s=inf", "train.lr_min=1e-9"])
    again = config.load(write(tmp_path, first.toml()))
    assert again.config == first.config
    assert config.load(write(tmp_path, first.toml(with_origins=True))).config == first.config


def test_paths_are_relative_to_their_file(tmp_path: Path) -> None:
    sub = tmp_path / "conf"
    sub.mkdir()
    r = config.load(write(sub, '[model]\npath = "../model"\n[tasks]\ntrain = "/abs"\n'))
    assert r.config.model.path == str(tmp_path / "model") and r.config.tasks.train == "/abs" and r.config.tasks.heldout == ""


@pytest.mark.pain(40)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nlrr = 1", r"run.toml: train.lrr: unknown key; did you mean train.lr\?"),
        ("[trian]\nlr = 1", r"run.toml: trian: unknown table; did you mean \[train\]\?"),
        ('[train]\nlr = "fast"', r"run.toml: train.lr: expected .*; give number"),
        ("[train]\nsteps = 0", r"run.toml: train.steps: expected .*>= 1.*; give integer"),
        ('[system]\ndispatch = "later"', r"system.dispatch: invalid enum value 'later'; give boundary \| continuous"),
        ("train = 3", r"run.toml: train: not a table; write \[train\]"),
        ("[train", r"run.toml: not TOML: .*; mend that line"),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as e:
        config.load(write(tmp_path, text))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("item", "message"), [("train.lr", "not of the form"), ("lr=1", "--set: lr: unknown key"), ("train.steps=x", "train.steps: expected")]
)
def test_mistakes_in_set(item: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        config.load(None, [item])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none.toml: no such file; give the path"):
        config.load(tmp_path / "none.toml")


def test_every_key_is_described_and_read_somewhere() -> None:
    root = Path(config.__file__).parent
    code = "\n".join(p.read_text() for p in root.rglob("*.py") if p.name != "config.py")
    for key in config.all_keys():
        assert key.description.endswith("."), key.dotted
        assert f".{key.name}" in code or f'"{key.name}"' in code, f"nothing reads {key.dotted}"


def test_a_workloads_system_counts_below_the_file(tmp_path: Path) -> None:
    workload = Path(__file__).resolve().parents[2] / "examples" / "workloads" / "nl2repo-122b.toml"
    file = tmp_path / "run.toml"
    file.write_text(f'[run]\nworkload = "{workload}"\n[system]\ngroups_per_step = 4\n')
    resolved = config.load(file)
    system = resolved.config.system
    assert (system.groups_per_step, system.rollouts_per_group, system.target_staleness, resolved.config.rollout.slots) == (4, 16, 1.0, 140)
    assert resolved.origins["system.groups_per_step"] == str(file) and resolved.origins["rollout.slots"] == str(workload)
    (tmp_path / "bad.toml").write_text("[system]\ncels = 8\n")
    with pytest.raises(UsageError, match=r"bad\.toml"):
        config.load(None, [f'run.workload="{tmp_path / "bad.toml"}"'])
