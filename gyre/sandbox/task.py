"""Harbor task directories: `instruction.md`, `task.toml`, `environment/`, `tests/test.sh`, optionally `solution/solve.sh`.

The directory is someone else's format: those keys that gyre reads must have the right type, what becomes of all others is in harbor.py. Every fault
is a `UsageError` naming file, key and remedy. `environment/workspace/` is what a workspace starts with; its Dockerfile is for backends with images
and not looked at here.

Loading reads `task.toml` and `instruction.md`; nothing of a task is executed or unpickled.
"""

from __future__ import annotations

import math
import os
import shlex
from pathlib import Path, PurePosixPath
from typing import Any, Final

import msgspec

from gyre import inputs
from gyre.errors import UsageError
from gyre.sandbox import harbor
from gyre.sandbox.backends.base import SOLUTION, TESTS, WORK, Image, Limits
from gyre.sandbox.healthcheck import Healthcheck

MAX_INSTRUCTION_BYTES: Final = 1 << 20
SYSTEM_PLACES: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/proc", "/sys", "/dev", "/run", "/opt", "/boot")
OTHER_PLACES: Final = (TESTS, SOLUTION, "/harness", "/logs", "/tmp")


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A task as loaded. Times are seconds; None: the task does not say."""

    path: Path
    name: str
    instruction: str
    workdir: str = ""  # where the workspace is; "": the image's working directory, else /work
    workspace: Path | None = None  # what a workspace starts with
    has_solution: bool = False
    agent_timeout_s: float | None = None
    verifier_timeout_s: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    cpus: float | None = None
    docker_image: str = ""
    env: dict[str, str] = {}
    verifier_env: dict[str, str] = {}
    solution_env: dict[str, str] = {}
    healthcheck: Healthcheck | None = None
    notes: tuple[str, ...] = ()  # what it asks for and is not given, a line each
    needs_image: bool = False  # it names an image, or has a Dockerfile and nothing that would do without

    @property
    def tests(self) -> Path:
        return self.path / "tests"

    @property
    def solution(self) -> Path:
        return self.path / "solution"

    def verifier_argv(self) -> list[str]:
        return script_argv(self.tests / "test.sh", f"{TESTS}/test.sh")

    def oracle_argv(self) -> list[str]:
        """`UsageError` if the task has no solution."""
        if not self.has_solution:
            raise UsageError(str(self.solution / "solve.sh"), "no such file", "add the solution, or do not ask for the oracle")
        return script_argv(self.solution / "solve.sh", f"{SOLUTION}/solve.sh")

    @property
    def image(self) -> Image:
        """`docker_image`, else what its Dockerfile makes."""
        environment = self.path / "environment"
        return Image(self.docker_image, str(environment) if (environment / "Dockerfile").is_file() else "")

    def limits(self, base: Limits) -> Limits:
        """`base`, tightened by what the task asks for."""
        return msgspec.structs.replace(
            base,
            memory_mb=_tighter(base.memory_mb, self.memory_mb),
            workspace_mb=_tighter(base.workspace_mb, self.storage_mb),
            cpus=min(base.cpus or math.inf, self.cpus) if self.cpus else base.cpus,
        )


def _tighter(ours: int, theirs: int | None) -> int:
    return ours if theirs is None else min(ours, theirs)


def tighter_s(ours: float, theirs: float | None) -> float:
    """The shorter of a limit of ours and a task's."""
    return ours if theirs is None else min(ours, theirs)


def command(text: str, where: str, key: str) -> list[str]:
    """The words of a shell-quoted command. Raises `UsageError` if there are none."""
    try:
        words = shlex.split(text)
    except ValueError as e:
        raise UsageError(where, f"{text!r} cannot be understood ({e})", "mend the quotes", key) from None
    if not words or "\0" in text:
        raise UsageError(where, f"{text!r} is no command", "name a program", key)
    return words


def script_argv(file: Path, place: str) -> list[str]:
    """How to run a script that is seen at `place`: itself if it is executable, else through its #! line, else by sh. Raises `UsageError`."""
    try:
        if os.access(file, os.X_OK):
            return [place]
        with file.open("rb") as f:
            first = f.readline(256).decode(errors="replace")
        words = shlex.split(first[2:]) if first.startswith("#!") else ["/bin/sh"]
    except OSError as e:
        raise UsageError(str(file), f"cannot be read ({e.strerror})", "a task needs it as long as the run lasts") from None
    except ValueError as e:
        raise UsageError(str(file), f"its first line cannot be understood ({e})", "mend the #! line, or make the file executable") from None
    if not words or any("\0" in w for w in words):
        raise UsageError(str(file), "its first line names no program", "mend the #! line, or make the file executable")
    return [*words, place]


_SECTIONS: Final[dict[str, dict[str, type]]] = {
    "task": {"name": str},
    "agent": {"timeout_sec": float},
    "verifier": {"timeout_sec": float, "env": dict},
    "environment": {
        "memory_mb": int,
        "storage_mb": int,
        "memory": str,
        "storage": str,
        "cpus": float,
        "workdir": str,
        "docker_image": str,
        "env": dict,
    },
    "solution": {"env": dict},
}
_WORDS: Final = {str: "a string", float: "a positive number", int: "a positive integer", dict: "a table of strings"}


def load_task(path: Path) -> Task:
    """Load and check one task directory."""
    path = path.resolve()
    file = path / "task.toml"
    if not path.is_dir():
        raise UsageError(str(path), "no such directory", "give the path of a task directory")
    if not file.exists() and (one := next(path.glob("*/task.toml"), None)) is not None:
        raise UsageError(str(path), "holds tasks and is none", f"give one of them, such as {one.parent}")
    data = inputs.toml(file, "give the path of a Harbor task directory")
    values = _values(file, data)
    harbor.refuse(path, data)
    instruction = _instruction(path / "instruction.md")
    if not (path / "tests" / "test.sh").is_file():
        raise UsageError(str(path / "tests" / "test.sh"), "no such file", "a task needs tests: add one that writes /logs/verifier/reward.txt")
    workdir = values.get("environment.workdir", "")
    if workdir:
        _check_workdir(file, workdir)
    workspace = path / "environment" / "workspace"
    envs: dict[str, dict[str, str]] = {}
    notes = list(harbor.notes(data, workdir or WORK))
    for section in ("environment", "verifier", "solution"):
        envs[section], said = harbor.variables(f"{section}.env", values.get(f"{section}.env", {}))
        notes += said
    return Task(
        path=path,
        name=values.get("task.name", path.name),
        instruction=instruction,
        workdir=workdir,
        workspace=workspace if workspace.is_dir() else None,
        has_solution=(path / "solution" / "solve.sh").is_file(),
        agent_timeout_s=values.get("agent.timeout_sec"),
        verifier_timeout_s=values.get("verifier.timeout_sec"),
        memory_mb=_size(file, values, "memory"),
        storage_mb=_size(file, values, "storage"),
        env=envs["environment"],
        verifier_env=envs["verifier"],
        solution_env=envs["solution"],
        healthcheck=_healthcheck(file, data),
        notes=tuple(notes),
        needs_image="docker_image" in data.get("environment", {}) or ((workspace.parent / "Dockerfile").exists() and not workspace.is_dir()),
        cpus=values.get("environment.cpus"),
        docker_image=values.get("environment.docker_image", ""),
    )


def _size(file: Path, values: dict[str, Any], name: str) -> int | None:
    """MiB by either spelling."""
    text = values.get(f"environment.{name}")
    if text is None:
        return values.get(f"environment.{name}_mb")
    found = harbor.megabytes(text)
    if not found:
        raise UsageError(str(file), f"{text!r} is no size", f'write {name}_mb = 512, or "512M", "2G"', f"environment.{name}")
    return found


def _healthcheck(file: Path, data: dict[str, Any]) -> Healthcheck | None:
    table = data.get("environment", {}).get("healthcheck")
    try:
        return None if table is None else msgspec.convert(table, Healthcheck)
    except msgspec.ValidationError as e:
        raise UsageError(str(file), str(e), 'write for example command = "test -f ready" and retries = 3', "environment.healthcheck") from None


def _values(file: Path, data: dict[str, Any]) -> dict[str, Any]:
    """The keys of `_SECTIONS` that the file has, dotted."""
    values: dict[str, Any] = {}
    for section, keys in _SECTIONS.items():
        table = data.get(section, {})
        if not isinstance(table, dict):
            raise UsageError(str(file), "not a table", f"write [{section}] and keys below it", section)
        for key, kind in keys.items():
            if key in table:
                values[f"{section}.{key}"] = _checked(file, f"{section}.{key}", table[key], kind)
    return values


def _checked(file: Path, key: str, value: Any, kind: type) -> Any:
    good = isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
    if good and kind in (int, float):
        good = 0 < value < float("inf")
    if good and kind is dict:
        # LD_*: the loader would obey it in a program that is still root of the sandbox's namespaces
        good = all(isinstance(v, str) and "\0" not in k + v and k and "=" not in k and not k.startswith("LD_") for k, v in value.items())
    elif good and kind is str:
        good = "\0" not in value  # it would end an argument of bwrap's, and begin another
    if not good:
        raise UsageError(str(file), f"{value!r} will not do", f"give {_WORDS[kind]}", key)
    return value


def _instruction(file: Path) -> str:
    try:
        data = file.read_bytes()
        text = data.decode("utf-8").strip()
    except FileNotFoundError:
        raise UsageError(str(file), "no such file", "a task needs an instruction") from None
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(str(file), f"cannot be read ({e})", "make it a readable UTF-8 file") from None
    if "\0" in text:
        raise UsageError(str(file), "it has a NUL character", "make it plain text")
    if not text or len(data) > MAX_INSTRUCTION_BYTES:
        raise UsageError(str(file), "empty" if not text else f"{len(data)} bytes", f"write an instruction of 1 to {MAX_INSTRUCTION_BYTES} bytes")
    return text


def _check_workdir(file: Path, workdir: str) -> None:
    place = PurePosixPath(workdir)
    taken = any(place.is_relative_to(p) or PurePosixPath(p).is_relative_to(place) for p in (*SYSTEM_PLACES, *OTHER_PLACES))
    if place.root != "/" or ".." in place.parts or taken:
        raise UsageError(str(file), f"{workdir!r} cannot hold a workspace", 'give a directory of its own, such as "/work"', "environment.workdir")
