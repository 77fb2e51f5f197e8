"""Which python3 a sandbox gets: the system's if it is recent enough and has pytest, else one put together from gyre's own.

Harnesses and tests are written for `python3` and `python3 -m pytest`. A machine may have neither in /usr: then the interpreter gyre runs on,
wherever it lies (below a home directory, say), is bound at its own path, and a virtual environment of it with pytest and nothing else is put
first in PATH. gyre's own packages are never visible in a sandbox, nor are those that were installed beside that interpreter.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec

PLACE: Final = "/opt/gyre-python"
SYSTEM: Final = ("/usr/local/bin/python3", "/usr/bin/python3", "/bin/python3")
PACKAGES: Final = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments", "exceptiongroup", "tomli")
_QUESTION: Final = "import sys, importlib.util as u; sys.exit(sys.version_info < (3, 9) or not u.find_spec('pytest'))"


class Interpreter(msgspec.Struct, frozen=True):
    """What to add to a sandbox. Empty when the system's python3 will do."""

    note: str = ""
    config: str = ""  # pyvenv.cfg
    packages: list[tuple[str, str]] = []  # (source on this machine, path in the environment)
    links: list[tuple[str, str]] = []  # (path in the environment, what it points to)
    home: str = ""  # to be bound at its own path, "" if it is below /usr
    hidden: list[str] = []  # directories of packages of other people's, to be covered


def find() -> Interpreter:
    """Ask the system's python3, or put one together."""
    system = next((path for path in SYSTEM if Path(path).exists()), None)
    if system and subprocess.run([system, "-I", "-c", _QUESTION], capture_output=True, env={}, timeout=30, check=False).returncode == 0:
        return Interpreter()
    packages = [source for name in PACKAGES if (source := _source(name)) is not None]
    note = "" if any(s.name == "pytest" for s in packages) else "pytest is not installed beside gyre: tasks whose tests need it will fail"
    base = Path(sys.base_prefix)
    binary = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return Interpreter(
        note=note,
        config=f"home = {binary.parent}\ninclude-system-site-packages = false\nversion = {sys.version.split()[0]}\n",
        packages=[(str(source), f"lib/{version}/site-packages/{source.name}") for source in packages],
        links=[("bin/python3", str(binary)), ("bin/python", "python3"), (f"bin/{version}", "python3")],
        home="" if base.resolve().is_relative_to("/usr") else str(base.resolve()),
        hidden=[str(place) for place in (base.resolve() / "lib" / version / "site-packages",) if place.is_dir()],
    )


def _source(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    origin = Path(spec.origin)
    return origin.parent if origin.name == "__init__.py" else origin
