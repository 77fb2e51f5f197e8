"""One machine plays several: network namespaces joined by veth pairs and a bridge, an sshd in each. Needs root, iproute2 and openssh-server.

    login (10.77.0.254) ─ bridge ─┬─ node1 (10.77.0.1)
                                  ├─ node2 …
All see the same files, processes and clock; what they do not share is the network, so a cable can be pulled, or two of them cut off from each other.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

DEADLINE_S = 60.0
SSHD = """
Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
"""


def missing() -> str:
    """What this machine lacks to play several, "" if nothing."""
    if os.geteuid() != 0:
        return "root"
    lacks = [tool for tool in ("ip", "ssh", "ssh-keygen", "/usr/sbin/sshd", "flock", "setpriv", "nsenter") if not shutil.which(tool)]
    if lacks:
        return lacks[0]
    probe = f"gyre-probe-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode == 0:
        done = ip("-n", probe, "link", "add", "br0", "type", "bridge", check=False)
        ip("netns", "del", probe)
    return done.stderr.strip()


def needed() -> None:
    """Skip the test where namespaces cannot be; fail it if GYRE_REQUIRE names netns."""
    lack = missing()
    if lack and "netns" in os.environ.get("GYRE_REQUIRE", ""):
        pytest.fail(f"GYRE_REQUIRE=netns, and this machine lacks {lack}")
    if lack:
        pytest.skip(f"network namespaces: this machine lacks {lack}")


def ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert not check or done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done


class Nodes:
    """A login node and `count` others, named node1, node2 …"""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.names = folder, [f"node{n}" for n in range(1, count + 1)]
        self._mark = f"gyre{os.getpid()}"
        self._sshd: list[subprocess.Popen[bytes]] = []
        self.ssh = (
            f"ssh -F /dev/null -i {folder}/key -o IdentitiesOnly=yes -o UserKnownHostsFile={folder}/known_hosts -o GlobalKnownHostsFile=/dev/null"
        )

    def space(self, name: str) -> str:
        return f"{self._mark}-{name}"

    def build(self) -> None:
        self.folder.mkdir()
        for name in ("key", "host_key"):
            argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(argv, check=True, timeout=DEADLINE_S)
        key = " ".join((self.folder / "host_key.pub").read_text().split()[:2])
        self.folder.joinpath("known_hosts").write_text("".join(f"{n} {key}\n" for n in self.names))
        self.folder.joinpath("sshd_config").write_text(SSHD.format(folder=self.folder))
        Path("/run/sshd").mkdir(exist_ok=True)
        table = "127.0.0.1 localhost\n10.77.0.254 login\n" + "".join(f"10.77.0.{n} {name}\n" for n, name in enumerate(self.names, 1))
        (self.folder / "hosts").write_text(table)
        for number, name in [(254, "login"), *enumerate(self.names, 1)]:
            space = self.space(name)
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
            if name == "login":
                ip("-n", space, "link", "add", "br0", "type", "bridge")
                ip("-n", space, "addr", "add", f"10.77.0.{number}/24", "dev", "br0")
                ip("-n", space, "link", "set", "br0", "up")
                continue
            ip("-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", name, "netns", self.space("login"))
            ip("-n", space, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", self.space("login"), "link", "set", name, "master", "br0", "up")
            with (self.folder / f"{name}.log").open("wb") as log:
                argv = self.on(name, "/usr/sbin/sshd", "-D", "-e", "-f", str(self.folder / "sshd_config"))
                self._sshd.append(subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
        end = time.monotonic() + DEADLINE_S
        for name in self.names:
            while self.run("login", *self.ssh.split(), "-o", "BatchMode=yes", name, "true").returncode != 0:
                assert time.monotonic() < end, f"no sshd at {name}: {(self.folder / f'{name}.log').read_text()}"
                time.sleep(0.2)

    def on(self, name: str, *argv: str) -> list[str]:
        """The command that runs `argv` at a node. (`ip netns exec` would hide control groups.)"""
        mine = f'mount --bind {self.folder}/hosts /etc/hosts && exec "$@"'
        return ["nsenter", f"--net=/run/netns/{self.space(name)}", "unshare", "-m", "sh", "-c", mine, "sh", *argv]

    def run(self, name: str, *argv: str, timeout_s: float = DEADLINE_S, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.on(name, *argv), capture_output=True, text=True, timeout=timeout_s, check=False, env=env)

    def cable(self, name: str, plugged: bool) -> None:
        ip("-n", self.space("login"), "link", "set", name, "up" if plugged else "down")

    def cut(self, source: str, sink: str, there: bool) -> None:
        """What `source` sends to `sink` vanishes on its way, or comes there again: it addresses a card that nobody has."""
        number = {**{name: n for n, name in enumerate(self.names, 1)}, "login": 254}[sink]
        entry = (f"10.77.0.{number}", "dev", "br0" if source == "login" else "eth0")
        if there:
            ip("-n", self.space(source), "neigh", "del", *entry)
        else:
            ip("-n", self.space(source), "neigh", "replace", entry[0], "lladdr", "02:00:00:00:00:00", *entry[1:], "nud", "permanent")

    def processes(self, names: Sequence[str] = ()) -> dict[int, str]:
        """What runs at the nodes, but for their sshd and its sessions: pid → command."""
        found = {}
        for name in names or self.names:
            for pid in map(int, ip("netns", "pids", self.space(name)).stdout.split()):
                try:
                    line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                except OSError:
                    continue
                if line and "sshd" not in line:
                    found[pid] = line
        return found

    def remove(self) -> None:
        for name in (*self.names, "login"):
            for pid in ip("netns", "pids", self.space(name), check=False).stdout.split():
                subprocess.run(["kill", "-9", pid], check=False, capture_output=True, timeout=DEADLINE_S)
            ip("netns", "del", self.space(name), check=False)
        for sshd in self._sshd:
            sshd.wait(DEADLINE_S)


@contextmanager
def nodes(folder: Path, count: int) -> Iterator[Nodes]:
    """Nodes for the time of a test; skips it where there can be none."""
    needed()
    made = Nodes(folder, count)
    try:
        made.build()
        yield made
    finally:
        made.remove()
