"""Write the budget study's tasks: Harbor directories that ask for several of the quick start's things at once.

    python make_budget_tasks.py --out DIR [--number 200] [--things 6] [--seed 0]

The same arguments give the same bytes. An existing DIR is replaced. Kinds are those whose result is files alone.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import random
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "quickstart"))

from kinds import Task, make_task
from make_tasks import put, shell

KINDS = ("create", "rename", "append", "count")
TOML = """version = "1.0"

[task]
name = "gyre-budget/{id}"

[metadata]
kind = "compound"

[agent]
timeout_sec = 300.0

[verifier]
timeout_sec = 20.0

[environment]
memory_mb = 512
storage_mb = 16
workdir = "/work"
"""


def draw(rng: random.Random, n: int) -> list[Task]:
    """`n` things that touch no file of each other."""
    chosen: list[Task] = []
    used: set[str] = set()
    while len(chosen) < n:
        task = make_task(rng, "train", KINDS[len(chosen) % len(KINDS)])
        paths = set(task.files) | set(task.start)
        if not paths & used:
            chosen.append(task)
            used |= paths
    return chosen


def write_task(things: list[Task], folder: Path) -> None:
    put(folder / "task.toml", TOML.format(id=folder.name))
    put(folder / "instruction.md", "".join(f"{t.instruction}\n" for t in things))
    for thing in things:
        for path, content in thing.start.items():
            put(folder / "environment" / "workspace" / path, content)
    copy = "COPY workspace/ /work/\n"
    put(folder / "environment" / "Dockerfile", f"FROM debian:bookworm-slim\nRUN apt-get update && apt-get install -y python3\nWORKDIR /work\n{copy}")
    script = '#!/bin/sh\nset -e\ncd "${GYRE_WORK:-/work}"\n' + "".join(shell(call) for t in things for call in t.right)
    put(folder / "solution" / "solve.sh", script, executable=True)
    put(folder / "tests" / "test.sh", (HERE / "verifier.py").read_text(encoding="utf-8"), executable=True)
    put(folder / "tests" / "expected.py", repr([t.files for t in things]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the budget study's tasks as Harbor task directories.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the tasks in")
    parser.add_argument("--number", type=int, default=200, help="number of tasks (default 200)")
    parser.add_argument("--things", type=int, default=6, help="things that a task asks for (default 6)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices (default 0)")
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    for i in range(options.number):
        write_task(draw(random.Random(f"{options.seed}/budget/{i}"), options.things), options.out / f"compound-{i:04d}")


if __name__ == "__main__":
    main()
