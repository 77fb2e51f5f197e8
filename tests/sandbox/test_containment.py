"""Hostile programs in every backend that contains: the same scripts, the same expectations; and what bubblewrap alone leaves behind, or not."""

import errno
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from gyre.sandbox.backends.cgroup import current_hierarchies
from gyre.sandbox.backends.lifeline import PREFIX, is_orphaned, own_name

ROOT = Path(__file__).parents[2]
CONTAINING = ["bubblewrap", "docker", "podman"]


def python(code):
    return {"argv": ["python3", "-I", "-c", code]}


@pytest.mark.hostile("a fork bomb", "the process limit")
def test_fork_bomb(strong):
    async def story(b):
        w = await b.backend.workspace(None, 16)
        ended = await b.run(w, "b() { b | b & b; }; b", pids=32, timeout_s=3)
        assert ended.timed_out or ended.status != 0
        count = "import os\nn = 0\ntry:\n    while os.fork(): n += 1\n    __import__('time').sleep(9)\n"
        ended = await b.run(w, "", **python(count + "except OSError: print(n)"), pids=32)
        assert 20 < int(ended.output) <= 36
        assert (await b.run(w, "echo fine")).output == b"fine\n"

    strong(story)


@pytest.mark.hostile("to take all memory, alone or by many processes", "the memory limit kills it")
@pytest.mark.parametrize("workers", [1, 4])
def test_memory_hog(strong, workers):
    code = f"""
import os, time
pids = [os.fork() for _ in range({workers})] if {workers} > 1 else [0]
if 0 in pids:
    held = [b'x' * (16 << 20) for _ in range({400 // workers // 16})]
    time.sleep(1 if {workers} > 1 else 0)
    os._exit(0)
print(sorted(os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]) for p in pids))
"""

    async def story(b):
        ended = await b.once("", **python(code), memory_mb=64, workspace_mb=16, tmp_mb=16)
        assert ended.oom or b.backend.name == "docker"  # Docker hears of it too late at times, Podman never
        assert ended.status == 137 if workers == 1 else b"-9" in ended.output or ended.status == 137
        assert (await b.once("echo fine")).output == b"fine\n"

    strong(story)


@pytest.mark.hostile("to fill the disk", "no space left, in its workspace, /tmp and /dev/shm; nor can it make files without end")
def test_full_disk(strong):
    script = "for d in . /tmp /dev/shm; do head -c 200000000 /dev/zero > $d/big; stat -c %s $d/big; rm $d/big; done; echo x > small"

    async def story(b):
        ended = await b.once(script, workspace_mb=16, tmp_mb=8)
        sizes = [int(word) for word in ended.output.split() if word.isdigit()]
        assert ended.output.count(b"No space left") == 3
        assert sizes[0] <= 16 << 20 and sizes[1] <= 8 << 20 and sizes[2] <= 8 << 20
        count = "n = 0\ntry:\n    while True: open(f'f{n}', 'x').close(); n += 1\nexcept OSError as e: print(n, e.errno)"
        files = (await b.once("", **python(count))).output.split()
        assert int(files[0]) < 20000 and int(files[1]) == errno.ENOSPC

    strong(story)


@pytest.mark.hostile("to fill the disk before it is graded", "grading still works")
def test_full_disk_does_not_stop_the_verifier(strong):
    async def story(b):
        w = await b.backend.workspace(None, 4)
        await b.run(w, "head -c 100000000 /dev/zero > big", workspace_mb=4)
        ended = await b.run(w, "echo 0 > $GYRE_LOGS/reward.txt", workspace_mb=4, collect=["reward.txt"])
        assert ended.files == {"reward.txt": b"0\n"}

    strong(story)


@pytest.mark.hostile("to read the host's environment and files", "out of sight")
@pytest.mark.parametrize("new_box", CONTAINING, indirect=True)
def test_the_hosts_environment_and_files_are_out_of_sight(new_box, monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    (tmp_path / "secret").write_text("hunter2")
    where = [str(tmp_path), str(ROOT), "/run/docker.sock", "/var/run/docker.sock", "/etc/ssh"]

    async def story(b):
        ended = await b.once("cat /proc/*/environ /proc/*/cmdline 2>/dev/null; env")
        assert b"hunter2" not in ended.output and str(tmp_path).encode() not in ended.output
        unseen = [*where, "/home", "/var", "/srv", "/mnt", "/sys"] if b.backend.name == "bubblewrap" else where  # an image may have those
        assert (await b.once("(ls -d " + " ".join(unseen) + "; cat /etc/shadow) 2>/dev/null")).output == b""
        assert (await b.once("ls -A /root/* /root/.ssh /tmp 2>/dev/null; ls /proc | grep -c '^[0-9]'")).output.split()[-1] < b"9"

    new_box(story)


def test_packages_beside_gyres_interpreter_are_out_of_sight(bwrap):
    """Where sandboxes get an interpreter that is not the system's, they get it bare: a reference package installed there would be an answer."""
    code = "import sys, pathlib; home = pathlib.Path(sys.base_prefix); print(home, *home.glob('lib/python3*/site-packages/*'))"

    async def story(b):
        home, *packages = (await b.once("", **python(code))).output.decode().split()
        assert packages == [] or Path(home).is_relative_to("/usr")
        assert (await b.once("", **python("import pytest"))).status == 0

    bwrap(story)


@pytest.mark.hostile("to reach the host's loopback, or the network", "refused; a loopback of its own works")
def test_the_hosts_loopback_is_out_of_reach(strong):
    host = socket.create_server(("127.0.0.1", 0))
    port = host.getsockname()[1]
    code = f"import socket\nfor a in ('127.0.0.1', '10.0.0.1', '1.1.1.1'):\n  try: socket.create_connection((a, {port}), 2); print('reached')\n"
    code += "  except OSError as e: print(e.strerror)\nown = socket.create_server(('127.0.0.1', 0))\n"
    code += "socket.create_connection(own.getsockname()); print('own')"

    async def story(b):
        words = (await b.once("", **python(code))).output.decode().splitlines()
        assert words == ["Connection refused", "Network is unreachable", "Network is unreachable", "own"]

    try:
        strong(story)
    finally:
        host.close()


@pytest.mark.hostile("to write outside its workspace", "refused")
def test_nothing_can_be_written_outside_the_workspace(strong, tmp_path):
    (tmp_path / "file").write_text("kept")
    script = """for f in /x /usr/x /usr/bin/x /etc/passwd /bin/x /lib/x /proc/sys/kernel/hostname /dev/x /tests/file /tests/x /run/x /run/gyre/x
    do (echo evil > $f) 2>/dev/null && echo wrote $f; done; rm -rf /tests/file 2>/dev/null; chmod 777 /tests /usr 2>/dev/null && echo chmod; exit 0"""

    async def story(b):
        assert (await b.once(script, binds=[(tmp_path, "/tests")])).output == b""

    strong(story)
    assert (tmp_path / "file").read_text() == "kept" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.hostile("to kill everyone (`kill -9 -1`)", "only itself")
def test_killing_everyone_kills_only_oneself(strong):
    async def story(b):
        w = await b.backend.workspace(None, 16)
        await b.run(w, "kill -9 -1; sleep 1")
        await b.run(w, "kill -9 1; kill -STOP 1; echo survived")
        assert (await b.run(w, "echo fine")).output == b"fine\n"

    strong(story)


@pytest.mark.hostile("to gain privileges: mounts, devices, namespaces, other uids, odd system calls", "refused")
def test_privileges_are_out_of_reach(strong):
    attempts = [
        "unshare -U true",
        "unshare -r true",
        "unshare -m true",
        "unshare -n true",
        "mount -t tmpfs none /tmp",
        "mount --bind /usr /tmp",
        "umount /proc",
        "mknod /tmp/sda b 8 0",
        "chroot / true",
        "su -c true",
        "chown root:root .",
        "dmesg",
        "nsenter -t 1 -m true",
        "hostname evil",
        "setpriv --reuid=0 true",
        "renice -n -5 $$",
        "swapoff /dev/null",
        "echo 1 > /proc/sys/user/max_user_namespaces",
    ]
    calls = """
import ctypes, errno, os
c = ctypes.CDLL(None, use_errno=True)
def call(name, *a):
    r = getattr(c, name)(*a); return r == -1 and ctypes.get_errno() in (errno.EPERM, errno.ENOSYS, errno.EACCES)
SYS = {'clone': 56, 'bpf': 321, 'keyctl': 250, 'io_uring_setup': 425, 'userfaultfd': 323, 'perf_event_open': 298, 'ptrace': 101, 'clone3': 435}
if os.uname().machine == 'x86_64':
    for name, n in SYS.items():
        assert call('syscall', n, 0x10000000 | 17, 0, 0, 0, 0), name
assert call('unshare', 0x10000000)
import socket
for family in {*range(50)} - {1, 2, 10, 16}:  # vsock, AF_ALG, packets
    try:
        socket.socket(family, socket.SOCK_DGRAM)
    except OSError as e:
        assert e.errno == errno.EAFNOSUPPORT, family
    else:
        raise AssertionError(family)
for family in (1, 2, 10):
    socket.socket(family, socket.SOCK_DGRAM)
print('denied')
"""

    async def story(b):
        script = "\n".join(f"({attempt}) >/dev/null 2>&1 </dev/null && echo 'succeeded: {attempt}'" for attempt in attempts)
        assert (await b.once(script + "; exit 0")).output == b""
        assert (await b.once("", **python(calls))).output == b"denied\n"
        ids = (await b.once("id -u; id -g; id -G; grep -h -e Cap -e NoNewPrivs /proc/self/status | cut -f2")).output.decode().split()
        assert int(ids[0]) >= 1000 and ids[:3] == [ids[0]] * 3
        assert set(ids[3:8]) == {"0" * 16} and ids[8] == "1"

    strong(story)


@pytest.mark.hostile("to leave a tree that cannot be removed", "it is removed")
def test_a_deep_tree_and_odd_names_do_not_stop_removal(strong):
    code = "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')\nopen(b'\\xff\\n', 'w')"

    async def story(b):
        assert (await b.once("", **python(code))).status == 0

    strong(story)


OWNER = """
import asyncio, sys
from gyre.sandbox.backends.base import Limits, Spec
from gyre.sandbox.backends.bubblewrap import Bubblewrap
async def main():
    b = Bubblewrap()
    await b.start()
    specs = [Spec(workspace=await b.workspace(None, 4), argv=["sh", "-c", "setsid sleep 1000 & sleep 1000; : " + sys.argv[1]], limits=Limits())
             for _ in range(4)]
    runs = [asyncio.create_task(b.run(s)) for s in specs]
    await asyncio.sleep(float(sys.argv[2]))
    print(b._process.pid, flush=True)
    await asyncio.gather(*runs)
asyncio.run(main())
"""


def left_behind():
    """Cgroups and mount points whose owner is dead."""
    bases = {parent for h in current_hierarchies().values() for parent in h.parents} | {Path(os.environ.get("TMPDIR", "/tmp"))}
    return [path for base in bases for path in base.glob(PREFIX + "*") if is_orphaned(path.name)]


def start_owner(mark, pause_s):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, mark, str(pause_s)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    return owner, int(owner.stdout.readline())


def eventually(what):
    until = time.monotonic() + 20
    while not what():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.pain(34)
@pytest.mark.parametrize("pause_s", [0.0, 0.5])
def test_killed_owner_leaves_nothing(living, pause_s, bwrap):
    mark = uuid.uuid4().hex
    owner, _ = start_owner(mark, pause_s)
    with owner:
        owner.kill()
    eventually(lambda: living(mark) == [])
    eventually(lambda: not left_behind())
    assert mark not in Path("/proc/self/mountinfo").read_text()


@pytest.mark.pain(34)
@pytest.mark.parametrize("new_box", ["bubblewrap"], indirect=True)
def test_reaper_removes_what_is_left_when_owner_and_warden_are_killed(living, new_box):
    mark = uuid.uuid4().hex
    owner, warden = start_owner(mark, 0.3)
    with owner:
        os.kill(warden, signal.SIGSTOP)  # it cannot clean up
        owner.kill()
        os.kill(warden, signal.SIGKILL)
    eventually(lambda: living(mark) == [])

    async def story(b):
        assert (await b.once("echo fine")).status == 0

    new_box(story)  # its start reaps
    eventually(lambda: not left_behind())


def test_names_say_whether_their_owner_lives():
    assert not is_orphaned(own_name(0))
    assert is_orphaned(f"{PREFIX}{os.getpid()}-1-0")
    assert is_orphaned(f"{PREFIX}999999999-5-0")
    assert not is_orphaned("somebody-elses-1-2")
    zombie = subprocess.Popen(["true"])
    time.sleep(0.1)
    assert is_orphaned(f"{PREFIX}{zombie.pid}-{1}-0")
    zombie.wait()
