"""From `sandbox.harness` to what a sandbox is given: the command, what it sees, its environment, the files in its home, the limits it needs.

A plain command is itself. A preset (`preset:pi`) is an installed harness, bound read-only, told its model by files and environment; it always has the
model on TCP. Nothing is installed here: what is missing is a `UsageError` with the command that installs it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from gyre.config import Config
from gyre.errors import UsageError
from gyre.sandbox.backends.base import Bind, Limits
from gyre.sandbox.gateway.protocol import POLICY
from gyre.sandbox.harness import install
from gyre.sandbox.harness.presets import NODE, NODE_ROOT, ROOT, SPELLING, Preset, preset
from gyre.sandbox.task import command

BASE_URL: Final = "http://127.0.0.1:8080"
HOME: Final = "/tmp/home"
_KEY: Final = "sandbox.harness"


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """How a harness is started. In `argv`, {instruction} is still to be replaced. `label` says in records what was run, `name` is the preset's."""

    label: str
    name: str = ""
    argv: Sequence[str]
    tcp: bool
    binds: Sequence[Bind] = ()
    env: Mapping[str, str] = {}
    home: str = ""  # a home directory of its own, with `files` in it; "" for the sandbox's
    files: Mapping[str, str] = {}
    floor: Limits | None = None

    def words(self, instruction: str) -> list[str]:
        """The command for one instruction. A preset gets a space before one that it would take for an option or a file."""
        if self.name and instruction.startswith(("-", "@")):
            instruction = f" {instruction}"
        return [word.replace("{instruction}", instruction) for word in self.argv]

    def limits(self, limits: Limits) -> Limits:
        """Limits raised to what the harness itself needs."""
        if self.floor is None:
            return limits
        raised = {name: max(getattr(limits, name), getattr(self.floor, name)) for name in ("memory_mb", "pids", "tmp_mb")}
        return msgspec.structs.replace(limits, **raised)

    def write_files(self, directory: Path) -> None:
        """Lay out what its home begins with."""
        directory.mkdir()
        for path, text in self.files.items():
            file = directory / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")


def launch(config: Config) -> Launch:
    """What `sandbox.harness` means. Raises `UsageError`."""
    text = config.sandbox.harness
    if not text.startswith(SPELLING):
        return Launch(label=text, argv=command(text, "run.toml", _KEY), tcp=config.sandbox.forward_tcp)
    used = preset(text.removeprefix(SPELLING).strip(), "run.toml", _KEY)
    if config.sandbox.backend == "process":
        raise UsageError("run.toml", "presets need a sandbox with mounts", "use the bubblewrap backend, or give a command", _KEY)
    if config.rollout.context < used.least_context:
        raise UsageError(
            "run.toml", f"{config.rollout.context} is too little for {used.name}", f"give {used.least_context} or more", "rollout.context"
        )
    found = _installed(used)
    binds = [Bind(str(install.place(used)), ROOT)]
    if install.needs_node(used):
        _installed(NODE)
        binds.append(Bind(str(install.place(NODE)), NODE_ROOT))
    if found.python:
        binds += _python(found.python, used)
    words = {
        "{root}": ROOT,
        "{node}": f"{NODE_ROOT}/{NODE.entry}",
        "{python}": found.python,
        "{arch}": install.arch(),
        "{base_url}": BASE_URL,
        "{model}": config.sandbox.models[0] if config.sandbox.models else POLICY,
        "{context}": str(config.rollout.context),
        "{eighth}": str(config.rollout.context // 8),
        "{max_tokens}": str(config.rollout.max_tokens),
    }

    def fill(text: str) -> str:
        for word, value in words.items():
            text = text.replace(word, value)
        return text

    return Launch(
        label=f"{used.name} {used.version}",
        name=used.name,
        argv=[fill(word) for word in used.argv],
        tcp=True,
        binds=binds,
        env={"HOME": HOME, "TZ": "UTC", **{name: fill(value) for name, value in used.env.items()}},
        home=HOME,
        files={path: fill(value) for path, value in used.files.items()},
        floor=Limits(memory_mb=used.memory_mb, pids=used.pids, tmp_mb=used.tmp_mb),
    )


def _installed(used: Preset) -> install.Installed:
    found = install.find(used)
    if found is None:
        raise UsageError(
            "run.toml", f"{used.name} {used.version} is not installed in {install.cache()}", f"run: gyre-harness install {used.name}", _KEY
        )
    return found


def _python(binary: str, used: Preset) -> list[Bind]:
    """What else a sandbox must see for this interpreter: nothing if it is the system's."""
    if not Path(binary).is_file():
        raise UsageError(
            "run.toml", f"{used.name} was installed for {binary}, which is gone", f"remove {install.place(used)} and install it again", _KEY
        )
    if Path(binary).is_relative_to("/usr"):
        return []
    home = str(Path(sys.base_prefix).resolve())
    return [Bind(home, home)]
