"""Run a command with container engines of its own: python tests/sandbox/engines.py [docker|podman] COMMAND…

Starts a Docker daemon and Podman's service, whichever is installed (and asked for), in a temporary directory, without bridges and firewall rules;
gives both a small image; tells the command of them by GYRE_DOCKER, GYRE_PODMAN (addresses), GYRE_DOCKER_PID, GYRE_PODMAN_PID, DOCKER_HOST (the first)
and GYRE_IMAGE; stops them. Fails if it leaves a mount, a control group or a process. The image is kept in ~/.cache/gyre.

A command that ends with STUCK says that an engine answers no more: its goroutines are shown, and the command is run once more, with new engines.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import docker
import small_image

IMAGE = "gyre-tests:latest"  # Podman imports under no other tag
START_S = 60.0
STUCK = 75
PROBE_S = 30
PATIENCE_S = 15.0  # Podman cleans up after a container in a process of its own
CHANGES = ["ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]


def image_file() -> Path:
    """The image's files, made once."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gyre")
    file = cache / "test-image-3.tar"
    if not file.exists():
        cache.mkdir(parents=True, exist_ok=True)
        part = cache / f"part-{os.getpid()}.tar"
        small_image.write(part)
        part.rename(file)
    return file


def mounts() -> set[str]:
    return {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}


def groups() -> set[Path]:
    """Control groups that engines make at the top."""
    return {
        path for root in (Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").glob("*")) for name in ("docker", "libpod*") for path in root.glob(name)
    }


def processes(word: str) -> dict[int, bytes]:
    """Command lines that have the word, by pid."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found[int(entry.name)] = (entry / "cmdline").read_bytes()
    return {pid: words for pid, words in found.items() if word.encode() in words and pid != os.getpid()}


class Engine:
    """A daemon below `folder`, and its address."""

    def __init__(self, argv: list[str], folder: Path, address: str) -> None:
        self.address, self.log = address, folder / "log"
        conf = folder / "containers.conf"  # Podman's: its events in a file of their own, never rotated, for who follows them would miss some
        conf.write_text(f'[engine]\nevents_logger = "file"\nevents_logfile_path = "{folder}/events"\nevents_logfile_max_size = "0"\n')
        env = os.environ | {"CONTAINERS_CONF": str(conf)}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, env=env, start_new_session=True)

    def ready(self) -> None:
        until = time.monotonic() + START_S
        while True:
            try:
                client = docker.DockerClient(base_url=self.address)
                break
            except docker.errors.DockerException as e:
                if self.process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"{self.process.args} does not start ({e}):\n{self.log.read_text()[-3000:]}") from None
                time.sleep(0.1)
        client.api.import_image(src=str(image_file()), repository=IMAGE.split(":")[0], tag=IMAGE.split(":")[1], changes=CHANGES)
        client.close()

    def stop(self) -> None:
        if answers(self.address):
            client = docker.DockerClient(base_url=self.address)
            for container in client.api.containers(all=True):
                print(f"engines: left behind: {container['Names']}", file=sys.stderr)
                client.api.remove_container(container["Id"], force=True, v=True)
            client.close()
            self.process.terminate()
        else:
            print(f"engines: {self.address} does not answer any more:\n{self.explain()}", file=sys.stderr)
            self.process.kill()
        self.process.wait(30)

    def explain(self) -> str:
        """The end of its log, and its goroutines that have waited for minutes, if it is Docker."""
        self.process.send_signal(signal.SIGUSR1)
        time.sleep(3)
        stacks = "\n\n".join(file.read_text() for file in self.log.parent.glob("**/goroutine-stacks*"))
        waiting = [stack for stack in stacks.split("\n\n") if " minutes" in stack.partition("\n")[0]]
        return "\n\n".join([self.log.read_text()[-3000:], *waiting])[:60_000]


def answers(address: str) -> bool:
    """Whether an engine makes a container and removes it."""
    try:
        client = docker.DockerClient(base_url=address, timeout=PROBE_S)
        made = client.api.create_container(IMAGE, ["true"])["Id"]
        client.api.remove_container(made, force=True)
        client.close()
    except (docker.errors.DockerException, OSError):
        return False
    return True


def engines(base: Path, names: list[str]) -> dict[str, Engine]:
    """Those that are installed."""
    found = {}
    for name in names:
        folder = base / name
        folder.mkdir()
        address = f"unix://{base}/{name}.sock"
        if name == "docker" and shutil.which("dockerd"):
            roots = [f"--data-root={folder}/data", f"--exec-root={folder}/run", f"--pidfile={folder}/pid", "-H", address]
            found[name] = Engine(["dockerd", *roots, "--iptables=false", "--ip6tables=false", "--bridge=none", "--ip-forward=false"], folder, address)
        elif name == "podman" and shutil.which("podman"):
            roots = ["--root", f"{folder}/data", "--runroot", f"{folder}/run", "--storage-driver", "overlay"]
            argv = ["podman", *roots, "--cgroup-manager", "cgroupfs", "--runtime", "runc", "system", "service", "-t", "0", address]
            found[name] = Engine(argv, folder, address)
    return found


def clean(base: Path, before: tuple[set[str], set[Path]]) -> list[str]:
    """Remove what is below `base`; what is left, other than by design."""
    left = []
    for place in sorted(mounts() - before[0], reverse=True):
        ours = place.endswith(("/run/netns/default", "/data/overlay"))  # the daemons' own
        if not ours:
            left.append(f"mount {place}")
        if place.startswith(str(base)):
            subprocess.run(["umount", "-l", place], check=False)
    until = time.monotonic() + PATIENCE_S
    while any(b"conmon" not in words for words in processes(str(base)).values()) and time.monotonic() < until:
        time.sleep(0.1)
    for pid, words in processes(str(base)).items():
        if b"conmon" not in words:  # Podman leaves one for five minutes after an exec
            left.append(f"process {pid}: {words[:300]!r}")
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + PATIENCE_S
    while (made := groups() - before[1]) and time.monotonic() < until:  # whoever was killed is in them for a moment
        for group in made:
            with suppress(OSError):
                for folder, _, _ in os.walk(group, topdown=False):
                    Path(folder).rmdir()
        time.sleep(0.1)
    left += [f"control group {group}" for group in sorted(made)]
    shutil.rmtree(base, ignore_errors=True)
    return left


def main() -> int:
    names, command = ["docker", "podman"], sys.argv[1:]
    if command and command[0] in names:
        names, command = command[:1], command[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    code = with_engines(names, command)
    if code == STUCK:
        print("engines: once more, with new ones", file=sys.stderr)
        code = with_engines(names, command)
    return code


def with_engines(names: list[str], command: list[str]) -> int:
    before = (mounts(), groups())
    base = Path(tempfile.mkdtemp(prefix="gyre-engines-"))
    code, running = 1, {}
    try:
        running = engines(base, names)
        for engine in running.values():
            engine.ready()
        first = {"DOCKER_HOST": next(iter(running.values())).address} if running else {}
        env = os.environ | {"GYRE_IMAGE": IMAGE} | first | {f"GYRE_{name.upper()}": engine.address for name, engine in running.items()}
        env |= {f"GYRE_{name.upper()}_PID": str(engine.process.pid) for name, engine in running.items()}
        print(f"engines: {', '.join(running) or 'none is installed'}", file=sys.stderr)
        code = subprocess.run(command, env=env, check=False).returncode
    finally:
        for engine in running.values():
            engine.stop()
        left = clean(base, before)
        for thing in left:
            print(f"engines: left behind: {thing}", file=sys.stderr)
    return code or int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
