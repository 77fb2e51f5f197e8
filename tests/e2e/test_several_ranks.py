"""Runs whose trainer has two ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from alone import check_against_alone, check_counted_once
from whole_run import DEADLINE_S, RIGHT, WRONG, Run


def followers(run: Run, trainer: int) -> list[int]:
    """Processes of this run's trainers, but `trainer`."""
    found = []
    for pid in (int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if pid != trainer and state != "Z" and "gyre_commands.train" in line and str(run.dir) in line:
            found.append(pid)
    return found


def learn_from_a_script(run: Run) -> None:
    """Six steps that change the weights, though what the scripted engine says of its tokens' log-probs is far off."""
    text = run.config.read_text().replace("steps = 4", "steps = 6").replace("[train]\n", "[train]\nratio_low = 0.0\nratio_high = 1e9\n")
    run.config.write_text(text)


def test_two_ranks_coordinated(run: Run) -> None:
    learn_from_a_script(run)
    done = run.coord("--steps", "2", "--set", "train.ranks=2")
    assert done.returncode == 0, done.stderr
    assert "step 2: reward 0.5" in done.stderr and followers(run, 0) == []
    assert len(list((run.dir / "checkpoints" / "step-2" / "optimizer").iterdir())) == 2


def test_a_cell_of_two_hosts(run: Run) -> None:
    """Two hosts, both this one, with two ranks each; one of the further host's is killed, and the whole cell is started again."""
    learn_from_a_script(run)
    run.script(RIGHT, WRONG, delay_s=0.01)
    hosts = run.folder / "hosts.txt"
    hosts.write_text(hosts.read_text().replace("train-cell localhost", "train-cell localhost,localhost ranks=4"))
    with subprocess.Popen(run.argv("coord", "--cells", str(hosts)), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as coord:
        try:
            run.until((run.dir / "checkpoints" / "step-2").is_dir, "the first checkpoint")
            pids = {f: int((run.dir / "node" / f / "pid").read_text()) for f in ("core", "core.1")}
            assert len(followers(run, 0)) == 4
            os.kill(pids["core.1"], signal.SIGKILL)
            assert coord.stderr is not None
            text = coord.stderr.read()
            assert coord.wait(DEADLINE_S) == 0, text
        finally:
            coord.kill()
    assert "core.1 was killed by signal 9" in text and "core is started again" in text
    assert [s["step"] for s in run.dump("--kind", "steps")] == [1, 2, 3, 4, 5, 6] and followers(run, 0) == []
    assert len(list((run.dir / "checkpoints" / "step-6" / "optimizer").iterdir())) == 4


def test_two_ranks_lost_and_found(run: Run) -> None:
    """`gyre-train --ranks 2`: a follower killed ends it with a reason, the leader killed ends the follower; then one rank goes on to the end."""
    run.script(RIGHT, WRONG, delay_s=0.01)
    learn_from_a_script(run)
    run.start("buffer")
    first = run.start("train", "--ranks", "2")
    run.start("rollout")
    run.start("sandbox")
    saved = run.dir / "checkpoints" / "step-2"
    run.until(saved.is_dir, "the first checkpoint")
    (follower,) = followers(run, first.pid)
    os.kill(follower, signal.SIGKILL)
    run.wait("train", 1)
    assert run.log("train").splitlines()[-1].startswith("error: this cell lost a rank: rank 1 was killed by signal 9")

    second = run.start("train", "--ranks", "2", "--resume")
    run.until(lambda: "core of term 2" in run.log("train"), "the core's second life")
    second.kill()
    second.wait(30)
    end = time.monotonic() + 20
    while followers(run, second.pid):
        assert time.monotonic() < end, "a follower outlived its leader"
        time.sleep(0.05)

    run.start("train", "--resume")
    run.finish()
    assert [s["step"] for s in run.dump("--kind", "steps")] == [1, 2, 3, 4, 5, 6]
    assert (run.dir / "checkpoints" / "step-6" / "optimizer.safetensors").is_file()
    assert followers(run, 0) == []


def test_two_cells_of_two_ranks(run: Run) -> None:
    """A core and a satellite, two ranks each: rank r reduces with rank r, and the weights are those of one process alone."""
    text = run.config.read_text().replace("steps = 4", "steps = 3\nmicro_step_tokens = 1\nratio_low = 1e-9\nratio_high = 1e9\nranks = 2")
    run.config.write_text(text)
    run.script(RIGHT, WRONG, delay_s=0.03)
    run.start("buffer")
    run.start("rollout")
    run.start("train", "--cell", "core")
    run.start("train", "--role", "satellite", "--cell", "sat", name="sat")
    log = run.dir / "events.jsonl"
    run.until(lambda: log.exists() and '"joined"' in log.read_text(), "the satellite to join")
    run.start("sandbox")
    for name in ("train", "sat", "sandbox", "buffer"):
        run.wait(name)
    assert {e["cell"] for s in check_counted_once(run, 3) for e in s["entries"]} == {"core", "sat"}
    check_against_alone(run)
    run.processes["rollout"].send_signal(signal.SIGTERM)
    run.wait("rollout", 143)
    assert followers(run, 0) == []
