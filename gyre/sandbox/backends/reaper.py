"""What containers and volumes are labelled with, and their removal by label once their owner is dead.

Invariants
- Whatever a backend makes bears its owner (a process, by pid and start time), the place where that pid means something, and its run.
- Only what was made in this place, by an owner that is dead or is named, is removed. Images are kept.

Run as a module, it removes what the owner that is its argument left. A backend keeps a shell that waits for its end to do so.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from docker.client import DockerClient
from docker.errors import DockerException
from requests.exceptions import Timeout

from gyre.sandbox.backends.lifeline import is_orphaned

OWNER, PLACE, RUN = "gyre.owner", "gyre.place", "gyre.run"
SWEEPS: Final = 60
SWEEP_S: Final = 0.5
CALL_S: Final = 60
AT_ONCE: Final = 8
_WAIT: Final = 'read _ || exec "$0" -P -m gyre.sandbox.backends.reaper "$1"'


def connect(connections: int = AT_ONCE) -> Any:
    """A client of the daemon that DOCKER_HOST names, or the usual one; it waits for no answer longer than `CALL_S`. `DockerException`."""
    client: Any = DockerClient.from_env(timeout=CALL_S, max_pool_size=connections)  # type: ignore[no-untyped-call]
    client.api._disable_socket_timeout = lambda _: None  # which the SDK calls before it reads an archive
    return client


def labels(owner: str, run: str) -> dict[str, str]:
    return {OWNER: owner, PLACE: _place(), RUN: run}


def _place() -> str:
    """Where pids are those of this process: a machine, and a namespace of it."""
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115 (it points to no path)


def reap(api: Any, of: Callable[[str], bool] = is_orphaned) -> int:
    """Remove containers, then volumes, of the owners that `of` picks; how many there were. A daemon that does not answer once is asked no more.

    Raises `DockerException`, or `OSError` if it does not answer at all."""
    filters = {"label": [OWNER]}

    def ours(labels: dict[str, str] | None) -> bool:
        return labels is not None and labels.get(PLACE) == _place() and of(labels[OWNER])

    stuck: list[str] = []

    def remove(call: Callable[..., None], name: str, **given: Any) -> None:
        try:
            if not stuck:
                call(name, **given)
        except Timeout:
            stuck.append(name)
        except (DockerException, OSError):  # it is gone, or somebody is at it
            pass

    containers = [c["Id"] for c in api.containers(all=True, filters=filters) if ours(c["Labels"])]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(lambda container: remove(api.remove_container, container, force=True, v=True), containers))
    volumes = [v["Name"] for v in api.volumes(filters)["Volumes"] or [] if ours(v["Labels"])]
    for volume in volumes:
        remove(api.remove_volume, volume)
    return len(containers) + len(volumes)


def reap_all(owner: str) -> None:
    """Remove what an owner left, until nothing is found twice: what a killed one had asked for may come into being after it. A daemon that does not
    answer, or is being started again, is asked again for a while."""
    clean = 0
    for _ in range(SWEEPS):
        try:
            clean = 0 if reap(connect().api, owner.__eq__) else clean + 1
        except (DockerException, OSError):
            clean = 0
        if clean == 2:
            return
        time.sleep(SWEEP_S)


def watch(owner: str) -> subprocess.Popen[bytes]:
    """A shell that reaps if this process ends without having written a line to it."""
    quiet = subprocess.DEVNULL
    words = ["/bin/sh", "-c", _WAIT, sys.executable, owner]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True)


if __name__ == "__main__":
    reap_all(sys.argv[1])
