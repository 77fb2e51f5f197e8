"""CURVE keys of a run: one pair for each kind of process, in files that pyzmq's own functions write and read.

Invariants
- With keys every tcp socket is encrypted and authenticated both ways: a server knows the kind of each client by its key, a client that it speaks to
  the kind of server it meant. ipc sockets need none, the file system guards them.
- A process reads one secret, its own kind's; a node needs `KIND.key_secret` of the kinds that run there, and `*.key` of all.
- An unknown key is refused by the handshake: nothing it sends reaches the process. Each refusal is counted (limits.py).

Not here: what a kind may say (gyre/wire/speakers.py). The collectives between trainers (Gloo, NCCL) are not under these keys: docs/security.md.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import Final

import msgspec
import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from gyre.errors import UsageError
from gyre.net.limits import Refusals
from gyre.wire.speakers import KINDS

log = logging.getLogger(__name__)

MAKE: Final = "make them with gyre-keys"
_zap: ThreadAuthenticator | None = None


class Keys(msgspec.Struct, frozen=True):
    """What one process holds: its own pair, and the public key of every kind (Z85)."""

    kind: str
    secret: bytes
    public: dict[str, bytes]

    def kind_of(self, public: str) -> str:
        """Whose key it is, "" if nobody's."""
        return next((kind for kind, key in self.public.items() if key.decode() == public), "")

    def guard(self, server: zmq.Socket[bytes], domain: str, refusals: Refusals) -> None:
        """Make a server's socket take only clients with a key of this run, and count the others. Before it is bound."""
        global _zap
        if _zap is None or not _zap.is_alive():  # one thread answers for all sockets of the process
            _zap = ThreadAuthenticator(zmq.Context.instance(), log=logging.getLogger("zmq.auth"))
            _zap.start()
        _zap.configure_curve_callback(domain, _Judge(self, domain, refusals))
        server.setsockopt(zmq.CURVE_SERVER, 1)
        server.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        server.setsockopt(zmq.ZAP_DOMAIN, domain.encode())

    def present(self, client: zmq.Socket[bytes], server: str) -> None:
        """Make a client's socket show its key, and talk to no server but one of that kind. Before it connects."""
        client.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        client.setsockopt(zmq.CURVE_PUBLICKEY, self.public[self.kind])
        client.setsockopt(zmq.CURVE_SERVERKEY, self.public[server])


class _Judge:
    """Decides on the keys that are shown to one server. Called in the authenticator's thread, where alone `key` is counted."""

    def __init__(self, keys: Keys, domain: str, refusals: Refusals) -> None:
        self._keys, self._domain, self._refusals = keys, domain, refusals

    def callback(self, domain: str, key: bytes) -> bool:
        if self._keys.kind_of(key.decode()):
            return True
        self._refusals.add("key", key, f"{self._domain}: a key that is none of this run's: {key[:8].decode()}…")
        return False


def make(directory: Path) -> list[str]:
    """Make the pairs that `directory` lacks; the kinds that were made. Raises `UsageError`."""
    old = os.umask(0o077)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        missing = [kind for kind in KINDS if not (directory / f"{kind}.key").exists()]
        for kind in missing:
            zmq.auth.create_certificates(directory, kind, metadata={"kind": kind})
        for kind in missing:
            (directory / f"{kind}.key").chmod(0o644)
    except OSError as e:
        raise UsageError(str(directory), f"keys cannot be written ({e.strerror})", "name a directory that this user can write") from None
    finally:
        os.umask(old)
    return missing


def load(directory: Path, kind: str) -> Keys:
    """The keys of a process of this kind. Raises `UsageError` for files that are missing, no keys, or readable by others."""
    public = {name: _read(directory / f"{name}.key")[0] for name in KINDS}
    file = directory / f"{kind}.key_secret"
    own, secret = _read(file)
    if secret is None:
        raise UsageError(str(file), "holds no secret key", MAKE)
    if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UsageError(str(file), "can be read by others", f"chmod 600 {file}")
    if own != public[kind]:
        raise UsageError(str(file), f"does not belong to {kind}.key", "copy both from where gyre-keys made them")
    return Keys(kind, secret, public)


def _read(file: Path) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(file)
    except OSError as e:
        raise UsageError(str(file), f"cannot be read ({e.strerror or e})", f"{MAKE}, and copy it here") from None
    except (ValueError, UnicodeDecodeError):
        raise UsageError(str(file), "holds no key", MAKE) from None
