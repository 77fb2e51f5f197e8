"""`run.deterministic`: a run in which processes are killed at random moments ends as one in which none was.

    GYRE_KILLS=20 GYRE_GUARANTEES=write pytest tests/e2e/test_exact_resume.py -s

kills each kind twenty times, not three, shows what happened, and writes it into the table of docs/guarantees.md: the rows of those kinds that ran.

A real engine samples, the harness writes what was sampled into a file, and the verifier's reward follows from its bytes: another draw, another policy
or another order anywhere gives other tokens from there on.
"""

from __future__ import annotations

import os
import random
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from whole_run import Run

KILLS = int(os.environ.get("GYRE_KILLS", "3"))
STEPS = 2 * KILLS + 4
KINDS = ("train", "rollout", "buffer", "sandbox")
GUARANTEES = Path(__file__).parents[2] / "docs" / "guarantees.md"
ROWS = re.compile(r"(?<=\n)(?:\| gyre-.*\n)*(?=<!-- /kills -->)")

HARNESS = """import http.client, json, os, socket

class Model(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(os.environ["GYRE_MODEL_SOCKET"])

messages = [{"role": "user", "content": open(os.environ["GYRE_INSTRUCTION"]).read()}]
for turn in range(2):
    model = Model("model")
    model.request("POST", "/v1/chat/completions", json.dumps({"messages": messages}))
    said = json.loads(model.getresponse().read())["choices"][0]["message"].get("content") or ""
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]
    with open("said.txt", "a") as file:
        file.write(said)
"""
VERIFIER = "#!/bin/sh\necho $(( $(cksum < said.txt | cut -d' ' -f1) % 2 )) > /logs/verifier/reward.txt\n"


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory, tasks: Path) -> Path:
    """Tasks whose reward is a bit of the checksum of what was said."""
    out = tmp_path_factory.mktemp("said") / "tasks"
    for task in sorted(tasks.iterdir()):
        for file in ("task.toml", "instruction.md", "tests/test.sh"):
            there = out / task.name / file
            there.parent.mkdir(parents=True, exist_ok=True)
            there.write_text(VERIFIER if file.endswith(".sh") else (task / file).read_text())
            there.chmod((task / file).stat().st_mode)
    return out


# Executions of a group begin with the same prompt and their advantages add up to 0, so at the first token the gradient of whatever none of them
# sampled is 0 but for rounding, which differs with the requests that an engine happened to compute together. AdamW makes whole steps of it; an
# epsilon of 1 makes it plain descent with momentum.


def prepare(folder: Path, model: Path, said: Path) -> Run:
    folder.mkdir()
    run = Run(folder, model, said)
    (folder / "agent" / "harness.py").write_text(HARNESS)
    text = run.config.read_text()
    for old, new in (
        ("[system]", "[run]\ndeterministic = true\nmax_infra_failures = 1000\nseed = 7\n[system]\ntarget_staleness = 0.0"),
        ('engine = "scripted"\nscript = "script.jsonl"\nmax_tokens = 64', 'engine = "torch"\nmax_tokens = 12'),
        ("lease_ttl_s = 3", 'lease_ttl_s = 2\nreissues = 1000\nharness = "python3 -I /harness/harness.py"'),
        ("steps = 4\nlr = 1e-4", f"steps = {STEPS}\nlr = 0.3\neps = 1.0"),
    ):
        assert old in text, old
        text = text.replace(old, new)
    run.config.write_text(text)
    return run


def ended_as(run: Run) -> dict[str, Any]:
    """What a run came to: its steps, what they trained, and the last checkpoint."""
    names = ("rollout_id", "index", "step", "token_ids", "loss_mask", "reward", "advantage", "versions")
    trained = sorted((tuple(str(t[n]) for n in names) for t in run.dump()), key=lambda t: (int(t[2]), t))
    last = run.dir / "checkpoints" / f"step-{STEPS}"
    tensors = {f"{f.stem} {n}": x for f in sorted(last.glob("*.safetensors")) for n, x in load_file(f).items()}
    return {"steps": [s["step"] for s in run.dump("--kind", "steps")], "trained": trained, "tensors": tensors}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, said: Path) -> dict[str, Any]:
    """A run in which nothing is killed."""
    run = prepare(tmp_path_factory.mktemp("whole") / "run", tiny_model, said)
    try:
        run.start_all()
        run.finish()
        return ended_as(run)
    finally:
        stop(run)


def stop(run: Run) -> None:
    for process in run.processes.values():
        if process.poll() is None:
            process.kill()
            process.wait(30)


@pytest.fixture
def torn(tmp_path: Path, tiny_model: Path, said: Path) -> Iterator[Run]:
    run = prepare(tmp_path / "torn", tiny_model, said)
    yield run
    stop(run)


def committed(run: Run) -> int:
    """The last committed step, as others may read it."""
    try:
        with sqlite3.connect(f"file:{run.dir / 'ledger.db'}?mode=ro", uri=True, timeout=10) as db:
            return int(db.execute("select max(step) from steps where state = 'committed'").fetchone()[0] or 0)
    except sqlite3.OperationalError:  # not there yet
        return 0


def kill(run: Run, kinds: tuple[str, ...]) -> None:
    """-9, and start anew."""
    for kind in kinds:
        run.processes[kind].kill()
    for kind in kinds:
        run.processes[kind].wait(30)
    for kind in kinds:
        cells = ["--cells", str(run.folder / "hosts.txt")] if kind == "coord" else []
        run.start(kind, *cells, *(["--resume"] if kind in ("train", "buffer", "coord") else []))


@pytest.mark.pain(24)
@pytest.mark.parametrize("kinds", [(k,) for k in KINDS] + [KINDS], ids=lambda kinds: "+".join(kinds))
def test_killed_at_random_moments_it_ends_as_if_it_had_not_been(torn: Run, whole: dict[str, Any], kinds: tuple[str, ...]) -> None:
    torn.start_all()
    kills = through(torn, kinds)
    torn.finish()
    tell(kinds, kills, *check(torn, whole))


def test_a_coordinator_killed_at_random_moments(torn: Run, whole: dict[str, Any]) -> None:
    """Its workers work on; the next one takes them over."""
    torn.start("coord", "--cells", str(torn.folder / "hosts.txt"))
    kills = through(torn, ("coord",))
    torn.wait("coord")
    tell(("coord",), kills, *check(torn, whole))


def through(run: Run, kinds: tuple[str, ...]) -> int:
    """Kill processes of these kinds, all at once, and start them anew, again and again; how often."""
    seed = sum(map(ord, "".join(kinds)))
    draw = random.Random(seed)
    kills = 0
    for at in sorted(draw.sample(range(STEPS - 3), KILLS)):
        run.until(lambda at=at: committed(run) >= at, f"step {at}")  # type: ignore[misc]
        time.sleep(draw.uniform(0, 1.0))
        if any(run.processes[kind].poll() is not None for kind in kinds):
            break  # the run is over
        kill(run, kinds)
        kills += 1
    print(f"\nseed {seed}: {' and '.join(kinds)} killed {kills} times in {STEPS} steps")
    assert kills > 0
    return kills


def tell(kinds: tuple[str, ...], kills: int, lost: int, doubled: int, again: str, worst: float) -> None:
    """Write what a kind's kills came to into the table of docs/guarantees.md, where that is wanted."""
    row = f"| {' + '.join(f'gyre-{k}' for k in kinds)} | {kills} | {STEPS} | {lost} | {doubled} | {again} | {worst:.0e} |\n"
    if os.environ.get("GYRE_GUARANTEES") == "write":
        text = GUARANTEES.read_text(encoding="utf-8")
        rows = ROWS.search(text)
        assert rows is not None, f"{GUARANTEES} has no place for the table"
        others = [line for line in rows[0].splitlines(keepends=True) if line.split("|")[1] != row.split("|")[1]]
        GUARANTEES.write_text(ROWS.sub("".join(sorted([*others, row])), text, count=1), encoding="utf-8")


def check(run: Run, whole: dict[str, Any]) -> tuple[int, int, str, float]:
    """Compare with the undisturbed run. Trajectories lost and doubled, what was done again, and how far tensors differ."""
    found = ended_as(run)
    events = run.dump("--kind", "events")
    again = sum(e["kind"] == "reissued" for e in events)
    replayed = sum(e["fields"]["steps_replayed"] for e in events if e["kind"] == "term")  # type: ignore[index]
    assert found["steps"] == whole["steps"] == list(range(1, STEPS + 1))
    wanted, got = (Counter(t[:2] for t in x["trained"]) for x in (whole, found))
    lost, doubled = (wanted - got).total(), (got - wanted).total()
    assert found["trained"] == whole["trained"], f"{lost} lost, {doubled} doubled"
    assert {t[5] for t in found["trained"]} == {"0.0", "1.0"}, "both rewards, or nothing would be learned"
    assert found["tensors"].keys() == whole["tensors"].keys()
    first = load_file(Path(run.config.read_text().split('path = "')[1].split('"')[0]) / "model.safetensors")
    worst = 0.0
    for n, x in whole["tensors"].items():
        if x.is_floating_point():
            size = float((x - first.get(n.removeprefix("model "), torch.zeros(()))).norm())  # how far weights have come; how large moments are
            worst = max(worst, float((found["tensors"][n] - x).norm()) / size if size else float(found["tensors"][n].norm()))
    print(f"{again} executions and {replayed} steps done again; tensors differ by {worst:.1e} of their way at most")
    assert any(not torch.equal(x, found["tensors"][f"model {n}"]) for n, x in first.items()), "it learned nothing"
    assert worst < 1e-2
    run.until(lambda: run.left_behind() == [], "the end of all processes")
    return lost, doubled, f"{again} executions, {replayed} steps", worst
