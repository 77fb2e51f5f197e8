"""Whole runs that go well: coordinated, by hand, with either engine; and what they leave in the run directory."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from whole_run import DEADLINE_S, QUICKSTART, ROOT, Run, backend

from gyre.net.keys import load
from gyre.wire.speakers import KINDS

FIELDS = """
    schema run_id query_id group_id rollout_id trajectory_id step epoch index n_trajectories leaf_class ending reward advantage rewards
    version_at_dispatch version_at_consumption staleness harness cells token_ids loss_mask logprobs versions calls n_tokens n_trainable
    dispatched_at ended_at
""".split()  # noqa: SIM905


@pytest.mark.pain(1, 5, 21, 32)
def test_coordinated(run: Run) -> None:
    """A very fast environment: every process ends with 0, bounded; the run directory and the interfaces are as documented."""
    done = run.coord()
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{run.dir}\n"
    assert "step 4: reward 0.5" in done.stderr and "finished: 32 consumed" in done.stderr
    assert run.left_behind() == []
    for name in ("run.toml", "ledger.db", "payload", "events.jsonl", "checkpoints/step-4", "tensorboard", "logs/core.log"):
        assert (run.dir / name).exists(), name
    again = run.coord()
    assert again.returncode == 2 and "holds a run; give --resume" in again.stderr

    report = run.report()
    assert report["steps"] == 4 and report["reward"] == {"first": 0.5, "last": 0.5, "first_steps": 4, "last_steps": 4}
    assert {"predicted", "mean", "p95", "max"} <= report["staleness"].keys() and report["seconds"]["total"] > 0  # type: ignore[attr-defined,index]
    figures = dict(report["figures"])  # type: ignore[call-overload]
    assert figures["staleness"]["trained"]["discrete"]["mean"] == report["staleness"]["mean"], "the event log and the ledger say the same"  # type: ignore[index]
    assert [(c["cell"], c["train_fraction"]) for c in figures["cells"]] == [("core", 1.0), ("cell0", 0.0)]
    counts = dict(report["counts"])  # type: ignore[call-overload]
    assert counts.pop("admitted") == sum(counts.values()) == counts["consumed"] == 4 * 2 * 4
    assert report["eval"]["before"]["version"] == 0 and report["eval"]["after"]["version"] == 4  # type: ignore[index]
    check_trajectories(run)
    check_events(run)


def check_trajectories(run: Run) -> None:
    trajectories, calls = run.dump(), {(c["rollout_id"], c["call_id"]): c for c in run.dump("--kind", "calls")}
    assert len(trajectories) == 32
    for t in trajectories:
        assert list(t) == FIELDS
        n = t["n_tokens"]
        assert n == len(t["token_ids"]) == len(t["loss_mask"]) == len(t["logprobs"]) == len(t["versions"])  # type: ignore[arg-type]
        assert t["n_trainable"] == sum(t["loss_mask"]) > 0  # type: ignore[arg-type]
        assert t["reward"] == (1.0 if str(t["rollout_id"])[-1] in "01" else 0.0) and t["advantage"] == (0.5 if t["reward"] else -0.5)
        for c in t["calls"]:  # type: ignore[attr-defined]
            span, engine = slice(c["start"], c["end"]), calls[t["rollout_id"], c["call_id"]]
            for name in ("token_ids", "logprobs", "versions"):
                assert t[name][span] == engine[name], "a trainable token's log-prob is the one the engine reported"  # type: ignore[index]
            assert t["token_ids"][: c["start"]] == engine["prompt_ids"]  # type: ignore[index]
        for mask, logprob, version in zip(t["loss_mask"], t["logprobs"], t["versions"], strict=True):  # type: ignore[arg-type]
            assert (logprob is None) == (version is None) and (not mask or logprob == -0.5)
            assert version is None or t["version_at_dispatch"] <= version


def check_events(run: Run) -> None:
    events = [json.loads(line) for line in (run.dir / "events.jsonl").read_text().splitlines()]
    assert [e["seq"] for e in events] == list(range(len(events)))
    assert all(list(e)[:7] == ["schema", "seq", "t_wall", "t_mono", "proc", "cause", "kind"] for e in events)
    steps = [e["fields"]["step"] for e in events if e["kind"] == "step"]
    assert steps == [1, 2, 3, 4]


@pytest.mark.pain(28)
def test_the_checkpoint_is_a_model(run: Run) -> None:
    """What a run leaves is a Hugging Face directory that another run can start from."""
    assert run.coord("--steps", "2").returncode == 0
    saved = run.dir / "checkpoints" / "step-2"
    run.config.write_text(run.config.read_text().replace('engine = "scripted"', 'engine = "torch"'))
    run.dir = run.folder / "second"
    done = run.coord("--steps", "1", "--set", f"model.path={saved}")
    assert done.returncode == 0, done.stderr
    report = run.report()
    assert report["logprob_diff"]["max"] < 1e-3  # type: ignore[index]
    for t in run.dump():
        assert all(x is None or (math.isfinite(x) and x <= 0) for x in t["logprobs"])  # type: ignore[attr-defined]


def test_by_hand(tmp_path: Path, tiny_model: Path) -> None:
    """examples/by_hand.sh: each process with flags only, three steps, on the quick start's tasks and the real engine."""
    argv = [sys.executable, str(QUICKSTART / "make_tasks.py"), "--out", str(tmp_path / "tasks"), "--train", "8", "--heldout", "1"]
    subprocess.run(argv, check=True, timeout=DEADLINE_S, capture_output=True)
    flags = [] if backend() == "bubblewrap" else ["--set", "sandbox.backend=process", "--set", "sandbox.unsafe=true"]
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    argv = [str(ROOT / "examples" / "by_hand.sh"), str(tiny_model), str(tmp_path / "tasks" / "train"), str(tmp_path / "run"), *flags]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert "3 of 3 steps" in done.stdout
    run = Run(tmp_path, tiny_model, tmp_path / "tasks")
    assert run.report()["tokens"]["trainable"] > 0  # type: ignore[index]


def test_by_hand_over_tcp_with_keys(run: Run) -> None:
    """Each process has its kind's keys and the addresses of others; no secret is in a log or the run directory."""
    keys = run.folder / "keys"
    subprocess.run([sys.executable, "-m", "gyre_commands.keys", str(keys)], check=True, timeout=DEADLINE_S, capture_output=True)
    at = {}
    for kind in ("buffer", "train", "rollout"):
        with socket.create_server(("127.0.0.1", 0)) as free:
            at[kind] = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    knows = {"buffer": (), "train": ("buffer",), "rollout": ("train",), "sandbox": ("buffer", "rollout")}
    for kind, others in knows.items():
        flags = [word for other in others for word in (f"--{other}", at[other])] + (["--bind", at[kind]] if kind in at else [])
        run.start(kind, "--set", f"net.keys={keys}", *flags)
    run.finish()
    assert run.report()["counts"]["consumed"] == 32  # type: ignore[index]
    secrets = [load(keys, kind).secret for kind in KINDS]
    logs = [run.folder / f"{kind}.log" for kind in knows]
    for file in [*logs, *(f for f in run.dir.rglob("*") if f.is_file())]:
        assert not any(secret in file.read_bytes() for secret in secrets), file


@pytest.mark.pain(30)
@pytest.mark.parametrize("mu", [2, 3])
def test_sizes_that_do_not_divide(run: Run, mu: int) -> None:
    """mu that does not divide the steps, three rollouts in a group, one group in a step."""
    sets = ["system.rollouts_per_group=3", "system.groups_per_step=1", f"system.steps_per_burst={mu}", "system.target_staleness=1.5"]
    done = run.coord("--steps", "4", *(word for s in sets for word in ("--set", s)))
    assert done.returncode == 0, done.stderr
    assert [s["step"] for s in run.dump("--kind", "steps")] == [1, 2, 3, 4]
    assert run.report()["counts"]["consumed"] == 12  # type: ignore[index]


def test_a_closed_pipe_is_quiet_and_follow_ends(run: Run) -> None:
    run.start("buffer")
    run.until(lambda: (run.dir / "ledger.db").exists(), "the ledger")
    argv = [sys.executable, "-m", "gyre_commands.dump", str(run.dir), "--follow", "--no-tokens"]
    follower = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for command in ("train", "rollout", "sandbox"):
        run.start(command)
    run.finish()
    out, err = follower.communicate(timeout=DEADLINE_S)
    assert follower.returncode == 0 and err == b"", err
    records = [json.loads(line) for line in out.splitlines()]
    assert len(records) == 32 and [r["step"] for r in records] == sorted(r["step"] for r in records)
    script = f"{sys.executable} -m gyre_commands.dump {run.dir} | head -1 | {sys.executable} -m json.tool > /dev/null"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", script], capture_output=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    unpack = f"{sys.executable} -m gyre_commands.dump {run.dir} --format msgpack | {sys.executable} -c "
    unpack += "'import msgpack,sys; print(sum(1 for _ in msgpack.Unpacker(sys.stdin.buffer)))'"
    assert subprocess.run(["sh", "-c", unpack], capture_output=True, timeout=DEADLINE_S, check=True).stdout == b"32\n"
