"""A small image from this machine's own Debian packages: the essential ones, python3, procps, all that they depend on; and pytest from beside gyre.

It takes seconds and no network. Its files are those that dpkg lists, less documentation.
"""

from __future__ import annotations

import importlib.util
import io
import os
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Final

from gyre.sandbox.backends import interpreter

WANTED: Final = {"python3", "procps", "libstdc++6"}  # the last for Node
LEFT_OUT: Final = re.compile(
    r"/usr/share/(doc|man|locale|info|lintian|zoneinfo|perl|bash-completion)/|/(var|boot|home|root|run|tmp)/|.*/__pycache__/"
)
PASSWD: Final = "root:x:0:0:root:/root:/bin/sh\nsandbox:x:1000:1000::/tmp:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"
GROUP: Final = "root:x:0:\nsandbox:x:1000:\nnogroup:x:65534:\n"


def packages() -> list[str]:
    """Installed packages to take, as dpkg calls them."""
    fields = r"${binary:Package}\t${Package}\t${Essential}\t${Provides}\t${Pre-Depends}, ${Depends}\n"
    lines = subprocess.run(["dpkg-query", "-W", "-f", fields], check=True, capture_output=True, text=True).stdout.splitlines()
    full, needs, todo = {}, {}, set(WANTED)
    for binary, name, essential, provides, depends in (line.split("\t") for line in lines):
        needs[name] = re.findall(r"(?:^|[,|])\s*([a-z0-9][a-z0-9.+-]*)", depends)
        for known in [name, *re.findall(r"(?:^|,)\s*([a-z0-9][a-z0-9.+-]*)", provides)]:
            full.setdefault(known, (name, binary))
        if essential == "yes":
            todo.add(name)
    taken: dict[str, str] = {}
    while todo:
        name, binary = full.get(todo.pop(), ("", ""))
        if name and name not in taken:
            taken[name] = binary
            todo |= {need for need in needs[name] if need in full}
    return sorted(taken.values())


def files() -> set[str]:
    """What those packages installed, under its true name: /bin may be a link."""
    listed = subprocess.run(["dpkg-query", "-L", *packages()], check=True, capture_output=True, text=True).stdout.splitlines()
    found = {f"{os.path.realpath(folder)}/{name}" for folder, _, name in (p.rpartition("/") for p in listed if p.startswith("/")) if name}
    alternatives = {str(p) for p in Path("/etc/alternatives").glob("*")}
    return {p for p in found | alternatives if not LEFT_OUT.match(p) and (Path(p).is_symlink() or Path(p).is_file())}


def write(target: Path) -> None:
    """The tar of the image."""
    with tarfile.open(target, "w") as tar:

        def text(path: str, content: str, mode: int = 0o644) -> None:
            info = tarfile.TarInfo(path)
            info.size, info.mode = len(content), mode
            tar.addfile(info, io.BytesIO(content.encode()))

        for path in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
            if Path("/", path).is_symlink():
                tar.add(f"/{path}", path)
        for path in ("proc", "sys", "dev", "root", "run", "tmp", "var/tmp", "home", "etc"):
            info = tarfile.TarInfo(path)
            info.type, info.mode = tarfile.DIRTYPE, 0o1777 if path.endswith("tmp") else 0o755
            tar.addfile(info)
        for path in sorted(files() - {"/etc/passwd", "/etc/group", "/etc/shadow"}):
            tar.add(path, path.lstrip("/"), recursive=False)
        tar.add("/etc/ld.so.cache", "etc/ld.so.cache")
        text("etc/passwd", PASSWD)
        text("etc/group", GROUP)
        text("etc/shadow", "root:secret:1:0:99999:7:::\n", 0o600)
        for name in interpreter.PACKAGES:
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.origin is not None:
                origin = Path(spec.origin)
                source = origin.parent if origin.name == "__init__.py" else origin
                tar.add(source, f"usr/lib/python3/dist-packages/{source.name}", filter=lambda i: None if "__pycache__" in i.name else i)
