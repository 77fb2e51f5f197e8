"""What is asked of a container engine: the keeper of a workspace, the container of one command, as the API's requests.

Pure but for asking for this process's own limits. docker.py says why there are two kinds.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any, Final

import msgspec

from gyre.sandbox.backends.base import PLACES, Spec
from gyre.sandbox.backends.images import Found

UID: Final = 1000
LOGS_MB: Final = 16
MOST: Final = 1 << 15  # open files, and processes of all sandboxes; Podman gives itself no more
KEEPER_MB: Final = 64  # of memory, beside its volumes
KEPT, KEPT_LOGS, SOURCE = "/gyre/work", "/gyre/logs", "/gyre/source"
READY: Final = b"ready\n"
KEEP: Final = f"""set -e
if [ -d "$1" ]; then cp -a "$1/." {KEPT}/; fi
if [ -d {SOURCE} ]; then cp -a {SOURCE}/. {KEPT}/; fi
chown -Rh {UID}:{UID} {KEPT}
chmod 755 {KEPT}
echo ready
exec sleep 2147483647
"""
REFRESH: Final = f"chmod 755 {KEPT} {KEPT_LOGS} && rm -rf {KEPT_LOGS}/* {KEPT_LOGS}/.[!.]* {KEPT_LOGS}/..?*"


class Space:
    """A workspace: its keeper, which its volumes are named after, and the sandbox that uses it."""

    def __init__(self, name: str, image: Found, place: str) -> None:
        self.name, self.image, self.place = name, image, place
        self.used = False
        self.busy = False
        self.removals: set[asyncio.Future[None]] = set()

    @property
    def volumes(self) -> tuple[str, str]:
        return f"{self.name}.work", f"{self.name}.logs"


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """What all containers of a backend have in common. `tmp`: options of /tmp beside its size."""

    labels: dict[str, str]
    security: list[str]
    runtime: str
    tmp: str

    def keeper(self, space: Space, source: str | None, size_mb: int) -> dict[str, Any]:
        """The container that holds a workspace, fills it and says that it is ready."""
        mounts = [volume(name, place) for name, place in zip(space.volumes, (KEPT, KEPT_LOGS), strict=True)]
        mounts += [bound(source, SOURCE)] if source is not None else []
        host = {
            "Mounts": mounts,
            "CapAdd": ["CHOWN", "DAC_OVERRIDE", "FOWNER"],
            "SecurityOpt": self.security,
            "Memory": size_mb + LOGS_MB + KEEPER_MB << 20,
            "PidsLimit": 16,
        }
        return self._config(space.image, ["sh", "-c", KEEP, "sh", space.place], "0:0", host)

    def sandbox(self, space: Space, spec: Spec, mounts: list[dict[str, Any]]) -> dict[str, Any]:
        """The container of one command."""
        limits = spec.limits
        memory = limits.memory_mb + limits.workspace_mb + 2 * limits.tmp_mb << 20  # files on tmpfs count as memory of the group
        places = {"/tmp", *space.image.volumes} - {space.place, *(m["Target"] for m in mounts)}
        host = {
            "Mounts": mounts,
            "Tmpfs": dict.fromkeys(places, f"size={limits.tmp_mb}m,{self.tmp}"),
            "ShmSize": limits.tmp_mb << 20,
            "SecurityOpt": self.security,
            "Memory": memory,
            "MemorySwap": memory,
            "PidsLimit": limits.pids + 1,  # the init process
            "NanoCpus": int(limits.cpus * 1e9),
            "OomScoreAdj": 500,
            "Init": True,
        }
        env = {"HOME": "/tmp", "TMPDIR": "/tmp", "USER": "agent", "LANG": "C.UTF-8", "GYRE_WORK": space.place}
        env |= {PLACES[target]: target for m in mounts if (target := m["Target"]) in PLACES}
        argv = ["sh", "-c", 'exec "$@" 2>&1', "sh", *spec.argv]  # else the order of output and errors is lost
        config = self._config(space.image, argv, f"{UID}:{UID}", host)
        return config | {"Env": [f"{k}={v}" for k, v in (env | dict(spec.env)).items()], "WorkingDir": space.place, "Hostname": "sandbox"}

    def _config(self, image: Found, argv: list[str], user: str, host: dict[str, Any]) -> dict[str, Any]:
        """What keeper and sandbox have in common."""
        common: dict[str, Any] = {
            "NetworkMode": "none",
            "ReadonlyRootfs": True,
            "CapDrop": ["ALL"],
            "LogConfig": {"Type": "none"},
            "IpcMode": "private",
        }
        common["Ulimits"] = [ulimit("core", 0), ulimit("nofile", own(resource.RLIMIT_NOFILE)), ulimit("nproc", own(resource.RLIMIT_NPROC))]
        runtime = {"Runtime": self.runtime} if self.runtime else {}
        return {
            "Image": image.id,
            "Entrypoint": argv,
            "User": user,
            "Labels": self.labels,
            "Healthcheck": {"Test": ["NONE"]},
            "HostConfig": common | runtime | host,
        }


def volume_options(mb: int) -> dict[str, str]:
    """Of a sized tmpfs, the sandbox's own."""
    blocks = (mb << 20) // resource.getpagesize()  # the size; Podman takes the word for a quota of the disk
    options = f"nr_blocks={blocks},nr_inodes={max(16384, mb * 512)},uid={UID},gid={UID},mode=755,nosuid,nodev"
    return {"type": "tmpfs", "device": "tmpfs", "o": options}


def ulimit(name: str, limit: int) -> dict[str, Any]:
    return {"Name": name, "Soft": limit, "Hard": limit}


def own(kind: int) -> int:
    """A limit of ours: an engine's own default may be more than it is allowed to give."""
    hard = resource.getrlimit(kind)[1]
    return MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)


def volume(name: str, target: str) -> dict[str, Any]:
    return {"Type": "volume", "Source": name, "Target": target, "VolumeOptions": {"NoCopy": True}}


def bound(source: str, target: str, *, readonly: bool = True) -> dict[str, Any]:
    return {"Type": "bind", "Source": source, "Target": target, "ReadOnly": readonly}
