"""Addresses: the default one of each process of a run, and which ones may be bound without keys."""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import os
import re
import tempfile
from pathlib import Path

from gyre.errors import UsageError

_SOCKET_PATH_MAX = 100  # sockaddr_un holds 108 bytes on Linux, 104 elsewhere


def endpoint(run_dir: Path, kind: str, name: str = "") -> str:
    """The ipc address of a process of a run: the same for all who name the same directory, short enough for a socket's path."""
    leaf = f"{kind}-{name}" if name else kind
    path = run_dir.resolve() / "sock" / leaf
    if len(os.fsencode(path)) > _SOCKET_PATH_MAX:
        digest = hashlib.blake2b(os.fsencode(run_dir.resolve()), digest_size=8).hexdigest()
        path = Path(tempfile.gettempdir()) / f"gyre-{os.getuid()}-{digest}" / hashlib.blake2b(leaf.encode(), digest_size=6).hexdigest()
    return f"ipc://{path}"


def check_peer(flag: str, address: str) -> str:
    """`address`, if it is one to connect to. Raises `UsageError` that names the flag."""
    port = re.fullmatch(r"tcp://(?:\[[0-9A-Fa-f:.%\w]+\]|[^\s:/*]+):(\d{1,5})", address)
    if not (re.fullmatch(r"ipc://.+", address, re.S) or (port and 0 < int(port[1]) < 65536)):
        raise UsageError(flag, f"{address!r} is no address to connect to", "give tcp://HOST:PORT or ipc://PATH")
    return address


def check_bind(address: str, insecure: bool) -> None:
    """Refuse to bind what others on the network could reach, unless `insecure`. Raises `UsageError`."""
    if address.startswith(("ipc://", "inproc://")) or insecure:
        return
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if not address.startswith("tcp://"):
        raise UsageError("--bind", f"{address} is no address", "give tcp://127.0.0.1:PORT or ipc://PATH")
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local:
        raise UsageError("--bind", f"{address} can be reached by others and has no keys", "bind loopback or ipc, or accept the risk with --insecure")


def claim_ipc(address: str) -> int | None:
    """Hold the lock beside an ipc socket: ZeroMQ itself would silently take the address from a living process."""
    if not address.startswith("ipc://"):
        return None
    path = Path(address.removeprefix("ipc://"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as e:
        raise UsageError("--bind", f"{address} cannot be bound ({e.strerror})", "make its directory writable or give another --run") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise UsageError("--bind", f"{address} is in use", "stop its holder or give another --run or --name") from None
    return fd
