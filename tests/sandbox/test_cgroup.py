"""Where control groups are looked for, on the kinds of machine there are."""

from pathlib import Path

from gyre.sandbox.backends.cgroup import Cgroups, _hierarchies

V1 = """25 1 0:22 / /sys/fs/cgroup rw - tmpfs tmpfs rw
30 25 0:26 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
31 25 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
32 25 0:28 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids
33 25 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
"""
V2 = "30 1 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n40 1 0:9 / / rw - ext4 /dev/vda rw\n"
DOCKER_V1 = "30 25 0:26 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"


def found(mountinfo, own):
    return {name: (h.version, [str(p) for p in h.parents]) for name, h in _hierarchies(mountinfo, own).items()}


def test_version_1_beside_an_empty_version_2():
    assert found(V1, "9:pids:/\n4:memory:/jobs/7\n1:cpu,cpuacct:/x\n0::/\n") == {
        "memory": (1, ["/sys/fs/cgroup/memory/jobs/7"]),
        "pids": (1, ["/sys/fs/cgroup/pids"]),
    }


def test_version_2_offers_the_own_group_then_its_parent():
    own = "/sys/fs/cgroup/user.slice/session-2.scope"
    expected = (2, [own, "/sys/fs/cgroup/user.slice"])
    assert found(V2, "0::/user.slice/session-2.scope\n") == {"memory": expected, "pids": expected}


def test_version_2_never_leaves_the_mount():
    assert found(V2, "0::/\n")["memory"] == (2, ["/sys/fs/cgroup"])


def test_a_container_that_sees_its_own_group_as_root():
    assert found(DOCKER_V1, "4:memory:/docker/abc\n") == {"memory": (1, ["/sys/fs/cgroup/memory"])}
    assert found(DOCKER_V1, "4:memory:/docker/abc/sub\n") == {"memory": (1, ["/sys/fs/cgroup/memory/sub"])}


def test_nothing_there():
    assert found("", "") == {}


def test_what_cannot_be_had_is_said_and_leaves_nothing(tmp_path: Path):
    hierarchies = _hierarchies(f"30 25 0:26 / {tmp_path} rw - cgroup2 cgroup2 rw\n", "0::/\n")
    groups = Cgroups("gyre-sandbox-1-1-0", hierarchies)  # a plain directory: no controller can be enabled
    assert [groups.has(c) for c in ("memory", "pids")] == [False, False]
    assert "memory_mb holds for each process" in groups.notes[0] and "RLIMIT_NPROC" in groups.notes[1]
    assert groups.join_files(1, memory_bytes=1 << 20, pids=5) == [] and groups.new_oom_kills(1) == 0
    assert list(tmp_path.iterdir()) == []
