"""Write the quick start's tasks as Harbor task directories: DIR/train/<id>/ and DIR/heldout/<id>/.

    python make_tasks.py --out DIR [--train 1000] [--heldout 140] [--seed 0]

The same arguments give the same bytes. An existing DIR/train or DIR/heldout is replaced.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from kinds import Task, ToolCall, make_split

VERIFIER = Path(__file__).with_name("verifier.py").read_text

TOML = """version = "1.0"

[task]
name = "gyre-quickstart/{id}"

[metadata]
kind = "{kind}"
split = "{split}"

[agent]
timeout_sec = 30.0

[verifier]
timeout_sec = 20.0

[environment]
memory_mb = 512
storage_mb = 16
workdir = "/work"
"""

DOCKERFILE = """FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-pytest
WORKDIR /work
"""

# Reads files only, so that no code of the agent runs inside pytest; -I and the options keep pytest from
# loading anything that lies in the workspace (conftest.py, pytest.ini, a module called pytest).
PYTEST_SH = """#!/bin/sh
tests=${GYRE_TESTS:-/tests} logs=${GYRE_LOGS:-/logs/verifier}
cd "$tests" || exit 1
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1  # halves the start, and nothing installed nearby can take part
python3 -I -m pytest -q -p no:cacheprovider --rootdir="$tests" -c /dev/null "$tests/test_files.py"
case $? in
    0) echo 1 > "$logs/reward.txt" ;;
    1) echo 0 > "$logs/reward.txt" ;;
    *) exit 1 ;;  # pytest itself failed: no reward at all, never a 0
esac
"""

PYTEST_PY = '''"""What must be in the workspace in the end; a file is compared up to its final newlines."""

import os
from pathlib import Path

import pytest

WORK = Path(os.environ.get("GYRE_WORK", "/work"))
FILES = {files!r}


@pytest.mark.parametrize("name", sorted(FILES))
def test_file(name):
    path = WORK / name
    assert path.is_file() and not path.is_symlink()
    assert path.read_text(errors="replace").rstrip("\\n") == FILES[name]
'''


def shell(call: ToolCall) -> str:
    """A tool call as a line of the oracle's script."""
    if call.name == "bash":
        return call.arguments["cmd"] + "\n"
    return f"cat > {call.arguments['path']} <<'END'\n{call.arguments['content']}END\n"


def put(path: Path, text: str, *, executable: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    if executable:
        path.chmod(0o755)


def write_task(task: Task, folder: Path, split: str) -> None:
    """One Harbor task directory."""
    put(folder / "task.toml", TOML.format(id=folder.name, kind=task.kind, split=split))
    put(folder / "instruction.md", task.instruction + "\n")
    copy = "COPY workspace/ /work/\n" if task.start else ""  # COPY of a missing folder would fail the build
    put(folder / "environment" / "Dockerfile", DOCKERFILE + copy)
    for path, content in task.start.items():
        put(folder / "environment" / "workspace" / path, content)
    script = '#!/bin/sh\nset -e\ncd "${GYRE_WORK:-/work}"\n' + "".join(map(shell, task.right))
    put(folder / "solution" / "solve.sh", script, executable=True)
    tests = folder / "tests"
    if task.kind == "follow":
        put(tests / "test.sh", PYTEST_SH, executable=True)
        put(tests / "test_files.py", PYTEST_PY.format(files=task.files))
        return
    put(tests / "test.sh", VERIFIER(encoding="utf-8"), executable=True)
    outputs = None
    if task.function is not None:
        path, function, inputs, outputs = task.function
        put(tests / "calls.py", repr({"path": path, "function": function, "inputs": inputs}) + "\n")
    put(tests / "expected.py", repr({"files": task.files, "outputs": outputs}) + "\n")


def write_split(out: Path, split: str, number: int, seed: int) -> dict[str, int]:
    """All tasks of a split; returns how many there are of each kind."""
    shutil.rmtree(out / split, ignore_errors=True)
    kinds: dict[str, int] = {}
    for i, task in enumerate(make_split(seed, split, number)):
        write_task(task, out / split / f"{task.kind}-{i:04d}", split)
        kinds[task.kind] = kinds.get(task.kind, 0) + 1
    return kinds


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the quick start's tasks as Harbor task directories.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write train/ and heldout/ in")
    parser.add_argument("--train", type=int, default=1000, help="number of training tasks (default 1000)")
    parser.add_argument("--heldout", type=int, default=140, help="number of held-out tasks (default 140)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices (default 0)")
    options = parser.parse_args()
    made = {
        split: write_split(options.out, split, number, options.seed) for split, number in (("train", options.train), ("heldout", options.heldout))
    }
    print(json.dumps(made))


if __name__ == "__main__":
    main()
