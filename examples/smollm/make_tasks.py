"""Write the tasks as Harbor task directories, and what a demonstrator says on some of them.

    python make_tasks.py --out DIR [--base IMAGE] [--demonstrated 48] [--train 48] [--heldout 24] [--seed 0]

DIR/demonstrated, DIR/train and DIR/heldout are sets of tasks; DIR/demonstrations.jsonl is a script for gyre's scripted engine: on the tasks of the
first set it makes the right calls of pi's tools. What is asked, and the verifier, are the quick start's; the files and functions of held-out tasks
have names that occur in no other. `--base` is the image that the Dockerfiles start from: it must have python3, and libstdc++ for Node.

The same arguments give the same bytes. An existing DIR is replaced.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

QUICKSTART = Path(__file__).resolve().parent.parent / "quickstart"
sys.path.insert(0, str(QUICKSTART))

from kinds import Task, ToolCall, make_task
from make_tasks import put, shell

KINDS = ("create", "append", "count", "rename", "fix", "func")
FAREWELL = "Done."
TOML = """version = "1.0"

[task]
name = "gyre-smollm/{id}"

[metadata]
kind = "{kind}"

[agent]
timeout_sec = 240.0

[verifier]
timeout_sec = 30.0

[environment]
memory_mb = 512
storage_mb = 16
workdir = "/work"
"""
DOCKERFILE = """FROM {base}
WORKDIR /work
COPY workspace/ /work/
"""
SYSTEM = """You are a coding agent. You work in a folder with tools. You call a tool like this:
<tool_call>
{"name": "bash", "arguments": {"command": "ls"}}
</tool_call>
When the task is done you say Done.
"""
"""pi takes a project's own system prompt from .pi/SYSTEM.md. Its built-in one is several times as long as all the rest of an execution."""


def speech(call: ToolCall) -> str:
    """A call of the quick start's tools as one of pi's, in the words of the chat template."""
    arguments = {"command": call.arguments["cmd"]} if call.name == "bash" else call.arguments
    name = "bash" if call.name == "bash" else "write"
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def script(task: Task) -> Iterator[dict[str, str]]:
    """Lines for the scripted engine: what is said to a prompt that has the instruction, and as many answers of tools. The last turn first."""
    said = [*map(speech, task.right), FAREWELL]
    for turn in reversed(range(len(said))):
        yield {"match": "(?s)" + re.escape(f"<|im_start|>user\n{task.instruction}") + r".*<\|im_start\|>tool" * turn, "text": said[turn]}


def write_task(task: Task, folder: Path, base: str) -> None:
    """One Harbor task directory."""
    put(folder / "task.toml", TOML.format(id=folder.name, kind=task.kind))
    put(folder / "instruction.md", task.instruction + "\n")
    put(folder / "environment" / "Dockerfile", DOCKERFILE.format(base=base))
    for path, content in {**task.start, ".pi/SYSTEM.md": SYSTEM}.items():
        put(folder / "environment" / "workspace" / path, content)
    put(folder / "solution" / "solve.sh", '#!/bin/sh\nset -e\ncd "${GYRE_WORK:-/work}"\n' + "".join(map(shell, task.right)), executable=True)
    put(folder / "tests" / "test.sh", (QUICKSTART / "verifier.py").read_text(encoding="utf-8"), executable=True)
    outputs = None
    if task.function is not None:
        path, function, inputs, outputs = task.function
        put(folder / "tests" / "calls.py", repr({"path": path, "function": function, "inputs": inputs}) + "\n")
    put(folder / "tests" / "expected.py", repr({"files": task.files, "outputs": outputs}) + "\n")


def draw(seed: int, name: str, number: int) -> list[Task]:
    """The tasks of a set, kinds in turn."""
    split = "heldout" if name == "heldout" else "train"
    return [make_task(random.Random(f"{seed}/smollm/{name}/{i}"), split, KINDS[i % len(KINDS)]) for i in range(number)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the tasks as Harbor task directories, and demonstrations as a script.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write them in")
    parser.add_argument("--base", default="python:3.12-slim", help="image that the tasks' Dockerfiles start from (default python:3.12-slim)")
    parser.add_argument("--demonstrated", type=int, default=48, help="tasks with a demonstration (default 48)")
    parser.add_argument("--train", type=int, default=48, help="tasks to train on (default 48)")
    parser.add_argument("--heldout", type=int, default=24, help="tasks held out (default 24)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices (default 0)")
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    for name in ("demonstrated", "train", "heldout"):
        tasks = draw(options.seed, name, getattr(options, name))
        for i, task in enumerate(tasks):
            write_task(task, options.out / name / f"{task.kind}-{i:03d}", options.base)
        if name == "demonstrated":
            put(options.out / "demonstrations.jsonl", "".join(json.dumps(line) + "\n" for task in tasks for line in script(task)))


if __name__ == "__main__":
    main()
