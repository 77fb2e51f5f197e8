"""Turn source distributions that carry their own tests into Harbor tasks: a specification and an empty workspace in, a package out.

    python make_tasks.py --out DIR [--only NAME]… [--packages FILE] [--downloads DIR] [--unsafe]

Each package of packages.toml becomes DIR/NAME-VERSION, and DIR/tasks.jsonl lists them all. Sources come from the index that pip is set to, pinned
by version and sha256. Which tests count is found out by running them in a sandbox: those that the package itself passes each time, but neither an
empty workspace nor a package that answers everything with an object that equals everything. What came of it is one JSON line per task on stdout.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path
from typing import Any, Final, NamedTuple

import specification
import suite

HERE: Final = Path(__file__).resolve().parent
FETCH_S: Final = 900
RUNS: Final = 5  # of a package's own tests on itself
TOML: Final = """\
version = "1.0"

[task]
name = "nl2repo/{name}"

[metadata]
kind = "nl2repo"
package = "{name}"
version = "{version}"
licence = "{licence}"

[agent]
timeout_sec = 3600.0

[verifier]
timeout_sec = 300.0

[environment]
memory_mb = 1024
storage_mb = 64
workdir = "/work"
network_mode = "no-network"
"""
DOCKERFILE: Final = "FROM python:3.12-slim\nWORKDIR /work\n"
SOLVE: Final = '#!/bin/sh\nexec cp -R "${GYRE_SOLUTION:-/solution}/reference/." .\n'
STUB: Final = """\
class Anything:
    __slots__ = ()
    def __call__(self, *a, **k): return self
    def __getattr__(self, name): return self
    __getitem__ = __enter__ = __add__ = __radd__ = __sub__ = __neg__ = __or__ = __and__ = __call__
    def __eq__(self, other): return True
    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __exit__ = __instancecheck__ = __subclasscheck__ = __eq__
    def __exit__(self, *a): return True
    def __hash__(self): return 0
    def __iter__(self): return iter(())
    def __len__(self): return 0
    def __bool__(self): return True
    def __str__(self): return ""
    def __mro_entries__(self, bases): return ()
anything = Anything()
def __getattr__(name):
    if name.startswith("__"): raise AttributeError(name)
    return anything
"""


class Package(NamedTuple):
    """An entry of packages.toml. Paths are below the sdist's root."""

    name: str
    version: str
    sha256: str
    licence: str
    sources: list[str]  # modules and packages to be written; each lies in the workspace under its last name
    tests: list[str]  # files and directories
    documents: list[str]
    licence_file: str


def load_packages(file: Path, only: list[str]) -> list[Package]:
    table: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    if unknown := [name for name in only if name not in table]:
        sys.exit(f"{file}: no package {unknown[0]!r}; there are {', '.join(table)}")
    return [Package(name, **entry) for name, entry in table.items() if not only or name in only]


def fetch(packages: list[Package], folder: Path) -> dict[str, Path]:
    """The sdists by sha256; pip gets those that are not in `folder` yet, and refuses any other bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [p for p in packages if p.sha256 not in _sdists(folder)]
    if missing:
        wanted = folder / "requirements.txt"
        wanted.write_text("".join(f"{p.name}=={p.version} --hash=sha256:{p.sha256}\n" for p in missing))
        from_source = ",".join(p.name for p in missing)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps", "--no-binary", from_source]
        done = subprocess.run([*pip, "--require-hashes", "-r", str(wanted), "-d", str(folder)], check=False, timeout=FETCH_S, stdout=sys.stderr)
        if done.returncode != 0:
            sys.exit(f"pip cannot fetch {from_source}: what it said is above; {wanted} has versions and hashes")
    return _sdists(folder)


def _sdists(folder: Path) -> dict[str, Path]:
    return {hashlib.sha256(file.read_bytes()).hexdigest(): file for file in folder.glob("*.tar.gz")}


class Reachable(Exception):
    """Agents would find the package where they run: its path there."""


def make(package: Package, sdist: Path, out: Path, run_task: list[str]) -> dict[str, Any]:
    """One task directory, complete when this returns; an existing one is replaced. Raises `Reachable`."""
    task = out / f"{package.name}-{package.version}"
    shutil.rmtree(task, ignore_errors=True)
    with tempfile.TemporaryDirectory() as unpacked:
        with tarfile.open(sdist) as archive:
            archive.extractall(unpacked, filter="data")
        (source,) = Path(unpacked).iterdir()
        write_task(package, source, task)
    targets = [f"suite/{name}" for name in package.tests]
    expected = task / "tests" / "expected.json"
    expected.write_text(json.dumps({"targets": targets, "tests": None}))
    script = look_script(package) + stub_script(task / "solution" / "reference")
    stub, output = passing(run_task, task, "--harness-cmd", shlex.join(["sh", "-c", script]))
    if found := [line.removeprefix("FOUND ") for line in output.splitlines() if line.startswith("FOUND ")]:
        shutil.rmtree(task)
        raise Reachable(found[0])
    empty, _ = passing(run_task, task, "--harness", "nop")
    expected.write_text(json.dumps({"targets": targets, "tests": None, "runs": RUNS}))
    right, _ = passing(run_task, task, "--harness", "oracle")
    unstable = {test.partition("[")[0] for test in set.union(*right) - set.intersection(*right)}  # random, or its cases' names change
    tests = sorted(test for test in right[0].difference(*empty, *stub) if test.partition("[")[0] not in unstable)
    if not tests:
        sys.exit(f"{task}: upstream's tests pass for none of its own code; run gyre-task run {task} --show-output")
    expected.write_text(json.dumps({"targets": targets, "tests": tests}, indent=0))
    instruction = task / "instruction.md"
    return {"task": task.name, "tests": len(tests), "dropped": len(right[0]) - len(tests), "instruction_bytes": instruction.stat().st_size}


def write_task(package: Package, source: Path, task: Path) -> None:
    """All of a task but expected.json. `source` is the unpacked sdist."""
    reference = task / "solution" / "reference"
    reference.mkdir(parents=True)
    for name in package.sources:
        _copy(source / name, reference / Path(name).name)
    shutil.rmtree(reference / "tests", ignore_errors=True)
    for inner in [*reference.glob("*/tests"), *reference.glob("*/test")]:
        shutil.rmtree(inner)
    modules = [Path(name).stem for name in package.sources]
    files = {str(file.relative_to(reference)): file for file in reference.rglob("*.py")}
    documents = [source / name for name in package.documents]
    wanted = suite.names_imported(source, package.tests, modules)
    (task / "instruction.md").write_text(specification.instruction(package.name, modules, files, documents, wanted), encoding="utf-8")
    (task / "task.toml").write_text(TOML.format(**package._asdict()))
    (task / "environment" / "workspace").mkdir(parents=True)
    (task / "environment" / "Dockerfile").write_text(DOCKERFILE)
    solve = task / "solution" / "solve.sh"
    solve.write_text(SOLVE)
    solve.chmod(0o755)
    suite.write(source, package.tests, task / "tests")
    for folder in (reference.parent, task / "tests" / "suite"):
        shutil.copy(source / package.licence_file, folder / "LICENCE.upstream")


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    else:
        shutil.copy(source, target)


def stub_script(reference: Path) -> str:
    """A shell script that writes a package of the same files, each of which has every name."""
    script = ""
    for file in sorted(reference.rglob("*.py")):
        place = file.relative_to(reference)
        script += f"mkdir -p {shlex.quote(str(place.parent))}; printf %s {shlex.quote(STUB)} > {shlex.quote(str(place))}\n"
    return script


def look_script(package: Package) -> str:
    """A shell script that prints where the package is installed, or vendored, in an agent's sight."""
    names = [name for source in package.sources for name in (Path(source).stem, f"{Path(source).stem}.py")]
    places = " -o ".join(f"-path '*{folder}/{name}'" for name in names for folder in ("-packages", "/_vendor"))
    return f"find / -path /proc -prune -o '(' {places} ')' -print 2>/dev/null | sed 's/^/FOUND /'\n"


def passing(run_task: list[str], task: Path, *agent: str) -> tuple[list[set[str]], str]:
    """The tests that pass for what an agent leaves, in each run of a verifier that has no list yet; and all that was written."""
    done = subprocess.run([*run_task, str(task), "--json", *agent], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{task}: it cannot be graded: {done.stderr.strip() or done.returncode}")
    output = json.loads(done.stdout)["output"]
    lines = [line for line in output.splitlines() if line.startswith("PASSED ")]
    return [set(run) for run in json.loads(lines[-1].removeprefix("PASSED "))], output


def main() -> None:
    parser = argparse.ArgumentParser(description="Turn source distributions that carry their own tests into Harbor tasks.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the tasks in")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this package (repeatable); all without it")
    parser.add_argument("--packages", type=Path, default=HERE / "packages.toml", help="the list (default: packages.toml beside this file)")
    parser.add_argument("--downloads", type=Path, help="where sdists are kept (default: OUT/downloads)")
    parser.add_argument("--unsafe", action="store_true", help="find out which tests count without a sandbox: upstream's code runs as you")
    options = parser.parse_args()
    packages = load_packages(options.packages, options.only)
    sdists = fetch(packages, options.downloads or options.out / "downloads")
    run_task = [sys.executable, "-m", "gyre_commands.task", "run", *(["--backend", "process", "--unsafe"] if options.unsafe else [])]
    for package in packages:
        try:
            made = make(package, sdists[package.sha256], options.out, run_task)
        except Reachable as e:
            print(f"{package.name}: left out: agents can read it at {e}; remove it from this machine", file=sys.stderr)
        else:
            print(json.dumps(made), flush=True)
    tasks = sorted(file.parent.name for file in options.out.glob("*/task.toml"))
    (options.out / "tasks.jsonl").write_text("".join(json.dumps({"path": task}) + "\n" for task in tasks))


if __name__ == "__main__":
    main()
