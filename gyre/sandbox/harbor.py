"""What the Harbor format may ask for, and what becomes of it: refused, said, or left alone.

`task.py` reads what gyre gives. Here is the rest of the format (task.toml 1.4 and its older spellings): what a task cannot do without and no backend
of gyre has is a `UsageError`; what a task may well run without is a note, one line that names the key; a key that is in no list is a note too.

Pure but for looking whether files are there. docs/tasks.md has the same as a table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

from gyre.errors import UsageError

COMPOSE: Final = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
ENVIRONMENT: Final = frozenset(
    ("build_timeout_sec", "docker_image", "os", "cpus", "memory_mb", "memory", "storage_mb", "storage", "gpus", "gpu_types", "tpu", "mcp_servers",
     "env", "skills_dir", "healthcheck", "workdir", "network_mode", "allowed_hosts", "allow_internet")
)  # fmt: skip
KNOWN: Final[Mapping[str, frozenset[str] | None]] = {
    "schema_version": None,
    "version": None,
    "source": None,
    "artifacts": None,
    "metadata": None,
    "task": None,
    "steps": None,
    "multi_step_reward_strategy": None,
    "agent": frozenset(("timeout_sec", "user", "network_mode", "allowed_hosts")),
    "verifier": frozenset(
        ("timeout_sec", "env", "user", "environment_mode", "environment", "collect", "network_mode", "allowed_hosts", "allow_internet")
    ),
    "environment": ENVIRONMENT,
    "solution": frozenset(("env",)),
}
_VARIABLE: Final = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG])I?B?", re.I)


def refuse(path: Path, data: Mapping[str, Any]) -> None:
    """`UsageError` if the task in the directory `path` needs what no sandbox of gyre has."""
    file = str(path / "task.toml")
    for folder in ("environment", "tests"):
        for name in COMPOSE:
            if (path / folder / name).exists():
                raise UsageError(str(path / folder / name), "it needs several containers, an execution has one", "take the task out of the task set")
    if data.get("steps"):
        raise UsageError(file, "it has several steps, an execution has one", "make each step a task", "steps")
    environment, verifier = _table(data, "environment"), _table(data, "verifier")
    if str(environment.get("os", "linux")).lower() != "linux":
        raise UsageError(file, f"{environment['os']!r} cannot be had", "sandboxes are Linux", "environment.os")
    for key in ("gpus", "tpu"):
        if environment.get(key):
            raise UsageError(file, "no sandbox has an accelerator", "take the task out of the task set", f"environment.{key}")
    if "docker_image" in _table(verifier, "environment") or (path / "tests" / "Dockerfile").exists():
        raise UsageError(
            file, "a verifier with an image of its own cannot be had", "give both the task's image, or take the task out", "verifier.environment"
        )


def notes(data: Mapping[str, Any], workdir: str) -> Iterator[str]:
    """What is asked for and not given, a line each."""
    for section in ("environment", "agent", "verifier"):
        table = _table(data, section)
        mode = table.get("network_mode", "public" if table.get("allow_internet") else "no-network")
        if mode != "no-network" or table.get("allowed_hosts"):
            yield f"{section}: network {mode}: sandboxes have none"
        if table.get("user") not in (None, ""):
            yield f"{section}.user = {table['user']!r}: all of a task runs as one unprivileged user"
    for key, why in (
        ("environment.mcp_servers", "they are not started, nor made known to the agent"),
        ("environment.skills_dir", "it is not made known to the agent"),
        ("verifier.collect", "these commands are not run"),
        ("verifier.environment", "the verifier has the task's own environment and limits"),
    ):
        section, _, name = key.partition(".")
        if _table(data, section).get(name):
            yield f"{key}: {why}"
    for item in data["artifacts"] if isinstance(data.get("artifacts"), list) else []:
        place = item.get("source", item.get("path")) if isinstance(item, dict) else item
        if not PurePosixPath(str(place)).is_relative_to(workdir):
            yield f"artifacts: {place!r}: the verifier sees what is in {workdir} and nothing else of what the agent wrote"
    for name, value in data.items():
        known = KNOWN.get(name, frozenset())
        if name not in KNOWN:
            yield f"{name}: not a key that gyre knows; left alone"
        elif known is not None and isinstance(value, dict):
            yield from (f"{name}.{key}: not a key that gyre knows; left alone" for key in value if key not in known)


def variables(key: str, env: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """A table of variables with `${NAME:-default}` replaced by the default, and notes: nothing of this machine's environment enters a sandbox."""
    given, said = {}, []
    for name, value in env.items():
        lacking = [found[1] for found in _VARIABLE.finditer(value) if found[2] is None]
        if lacking:
            said.append(f"{key}.{name}: {lacking[0]} of this machine is not given to sandboxes; it is not set")
        else:
            given[name] = _VARIABLE.sub(lambda found: found[2], value)
    return given, said


def megabytes(text: str) -> int | None:
    """MiB of an older spelling such as "2G" or "512M"; None if it is none."""
    found = _SIZE.fullmatch(text.strip())
    return None if found is None else int(float(found[1]) * {"K": 1 / 1024, "M": 1, "G": 1024}[found[2].upper()])


def _table(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = data.get(name)
    return found if isinstance(found, dict) else {}
