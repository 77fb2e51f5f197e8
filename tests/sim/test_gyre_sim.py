"""The command: output, bad input, replay of a run's events."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from commands.sim import main
from gyre.events import Event, encode
from gyre.rules.workload import load
from gyre.sim import compare

WORKLOADS = Path(__file__).parents[2] / "examples" / "workloads"
NL2 = str(WORKLOADS / "nl2repo-122b.toml")
SMALL = ["--set", "workload.bursts=2", "--set", "system.groups_per_step=2", "--set", "system.target_staleness=1.0", "--cells", "3"]


def sim(*args: str) -> Result:
    return CliRunner().invoke(main, list(args))


def test_json_has_the_fields() -> None:
    result = sim("--workload", NL2, *SMALL, "--rule", "elastic", "--rule", "async", "--format", "json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [r["rule"] for r in rows] == ["elastic", "async"]
    for r in rows:
        assert set(r) == {
            "rule", "target_staleness", "hours", "staleness", "train_fraction", "idle_fraction", "bound_ratio", "speedup", "split", "digest",
        }  # fmt: skip
        assert set(r["staleness"]) == {"predicted", "mean", "p95", "max", "interpolated_mean"}
        assert set(r["idle_fraction"]) == {"rollout", "train"} and len(r["train_fraction"]) == 3
    assert rows[0]["speedup"]["async"] == pytest.approx(rows[1]["hours"] / rows[0]["hours"])
    assert rows[1]["split"] in (1, 2) and rows[0]["split"] is None
    assert result.stdout == sim("--workload", NL2, *SMALL, "--rule", "elastic", "--rule", "async", "--format", "json").stdout


def test_table() -> None:
    result = sim("--workload", NL2, *SMALL, "--rule", "elastic", "--rule", "async:1+stream")
    assert result.exit_code == 0 and "elastic" in result.stdout and "times as fast as async:1+stream" in result.stdout


def test_the_table_fits_and_says_which_is_faster() -> None:
    nothing = compare.Staleness(1.0, 0.5, 1.0, 2.0, None)
    of = (("elastic", 16.07, "async", None), ("async", 8.035, "elastic", 4))
    rows = [
        compare.Row(rule, target, hours, nothing, [0.25, 0.75], compare.Idle(0.0, 0.01), None, {than: 0.5}, split, "")
        for target in (1.0, 1.5)
        for rule, hours, than, split in of
    ]
    for width in (40, 80, 120):
        text = compare.table(rows, width)
        assert max(map(len, text.splitlines())) <= width, text
        for words in ("target,", "steps", "16.07", "staleness, steps", "cells train,", "of the time", "25% to 75%", "async (4)"):
            assert words in text, (words, text)
        assert "at target 1.5: elastic is 0.50 times as fast as async" in " ".join(text.split())
    assert "at target" not in compare.table(rows[:2], 80) and "elastic is 0.50 times as fast as async" in compare.table(rows[:2], 80)
    assert len(compare.table(rows[:2], 80).splitlines()) == 7, "one block"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ("--workload", "--replay")),
        (["--workload", "nowhere.toml"], ("nowhere.toml", "no such file")),
        (["--workload", NL2, "--rule", "best"], ("'best'", "elastic, lookahead")),
        (["--workload", NL2, "--rule", "async:8"], ("async:8", "at most async:7")),
        (["--workload", NL2, "--set", "system.cell=4"], ("system.cell", "did you mean system.cells")),
        (["--workload", NL2, "--set", "system.cells=many"], ("system.cells", "expected `int`".replace("`", ""))),
        (["--workload", NL2, "--set", "system.cells"], ("table.key=value",)),
        (["--workload", NL2, "--set", "system.target_staleness=0.2"], ("0.2", "the smallest is 1")),
        (["--workload", NL2, "--set", "workload.model=shared"], ("workload.shared", "missing")),
        (["--workload", NL2, "--set", "workload.execution_h.sigma=-1"], ("workload.execution_h.sigma",)),
        (["--workload", NL2, "--set", "workload.seeds=[]"], ("workload.seeds",)),
        (["--workload", NL2, "--set", "system.dispatch=sometimes"], ("system.dispatch",)),
        (["--workload", NL2, "--set", "workload.replayed_s=[[1.0]]"], ("workload.replayed_s", "--replay")),
        (["--workload", "/dev/zero"], ("/dev/zero", "longer than 64 MiB")),
        (["--replay", str(WORKLOADS)], ("events.jsonl", "give the directory of a run")),
    ],
)
def test_bad_input_is_one_line(args: list[str], words: tuple[str, ...]) -> None:
    result = sim(*args)
    assert result.exit_code == 2, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and all(w in lines[0] for w in words), result.stderr


@pytest.mark.parametrize("text", ["[system", "[system]\ncells = 4\n", "[extra]\na = 1\n", "system = 3\n", "\x00"])
def test_files_that_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "w.toml").write_text(text)
    result = sim("--workload", str(tmp_path / "w.toml"))
    assert result.exit_code == 2 and "w.toml" in result.stderr and len(result.stderr.strip().splitlines()) == 1


def test_cells_that_die_quicker_than_they_work_end_it() -> None:
    """Not a simulation without an end."""
    result = sim("--workload", NL2, *SMALL, "--rule", "elastic", "--set", "workload.faults.cell_mtbf_h=1e-9")
    assert result.exit_code == 1 and "cell_mtbf_h" in result.stderr and "Traceback" not in result.stderr, result.output


def test_examples_are_read() -> None:
    assert load(WORKLOADS / "nl2repo-122b.toml").system.targets == [1.0, 1.5]
    assert load(WORKLOADS / "shared-rate.toml").workload.model == "shared"


def events(tmp_path: Path) -> Path:
    """A run: 4 groups of 2 in two steps, 100 and 200 s per execution, one satellite turned."""
    lines: list[str] = []

    def log(t: float, kind: str, **fields: object) -> None:
        lines.append(encode(Event(seq=len(lines), t_wall=t, t_mono=t - 50, proc="buffer", cause="", kind=kind, fields=fields)))

    log(50, "buffer_started", groups_per_step=2, rollouts_per_group=2, steps_per_burst=1, staleness_target=0.0, dispatch="boundary")
    log(50, "term", term=1, step=0, cell="a-train")
    log(50, "publication", number=0, step=0, cells=["a-rollout", "b-rollout", "c-rollout"], seconds=9.0)
    log(50, "eval_issued", eval="e", version=0, n=1)
    for g in range(4):
        log(50, "admitted", group=f"g{g}", version=0, rollouts=2)
    log(50, "leased", holder="box", rollouts=["e.0", *(f"g{g}.{i}" for g in range(4) for i in range(2))])
    for i in range(2):
        for g in range(4):
            log(150 + 100 * i, "rollout_ended", rollout=f"g{g}.{i}", group=f"g{g}", purpose="train", ending="finished", state="waiting")
    log(260, "rollout_ended", rollout="e.0", group="e", purpose="eval", ending="finished", state="consumed")
    log(300, "role", **{"from": "rollout"}, cell="b", phase="to_train")
    log(312, "role", **{"from": "to_train"}, cell="b", phase="train")
    entries = [{"cell": f"{cell}-train", "micro_steps": ["m"]} for cell in "ab"]
    log(396, "update", step=1, seconds=4.0)
    log(400, "step", step=1, metrics={"seconds_compute": 30.0}, groups=["g0", "g1"], entries=entries)
    log(405, "publication", number=1, step=1, cells=["a-rollout", "c-rollout"], seconds=3.0)
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "run.toml").write_text("[rollout]\nslots = 8\n")
    return tmp_path


def test_replay(tmp_path: Path) -> None:
    from gyre.sim.replay import from_run

    w = from_run(events(tmp_path))
    assert (w.system.cells, w.system.slots_per_cell, w.system.groups_per_step) == (3, 8, 2)
    assert (w.system.to_train_s, w.system.to_rollout_s, w.system.update_s, w.system.publish_s) == (12.0, 0.0, 4.0, 3.0)
    assert w.workload.train_cell_h_per_group * 3600 == pytest.approx(30.0 * 2 / 2)
    assert w.workload.replayed_s == ((100.0, 200.0),) * 4
    result = sim(
        "--replay", str(tmp_path), "--cells", "4", "--rule", "elastic", "--rule", "colocate", "--set", "workload.bursts=3", "--format", "json"
    )
    assert result.exit_code == 0, result.output
    colocate = json.loads(result.stdout)[1]
    assert colocate["hours"] * 3600 == pytest.approx(3 * (200 + 12 + 15 + 4 + 3))  # four micro-steps of 15 s on four cells


def test_replay_of_a_run_without_its_configuration(tmp_path: Path) -> None:
    (events(tmp_path) / "run.toml").unlink()
    assert "rollout.slots" not in sim("--replay", str(tmp_path), "--rule", "elastic", "--set", "system.slots_per_cell=8").stderr
    refused = sim("--replay", str(tmp_path), "--rule", "elastic")
    assert refused.exit_code == 2 and "run.toml: no such file; give --set system.slots_per_cell=N" in refused.stderr


def test_replay_of_what_is_no_run(tmp_path: Path) -> None:
    whole = (events(tmp_path) / "events.jsonl").read_text()
    (tmp_path / "events.jsonl").write_text(whole.replace("staleness_target", "other"))
    assert "does not say the run's staleness_target" in sim("--replay", str(tmp_path)).stderr
    (tmp_path / "events.jsonl").write_text("{}\n")
    assert "at least one step" in sim("--replay", str(tmp_path)).stderr, "a damaged line is left out"
    (tmp_path / "events.jsonl").write_text("")
    assert "at least one step" in sim("--replay", str(tmp_path)).stderr
