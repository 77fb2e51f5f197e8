"""The system-call filter of a sandbox: a list of what is denied, compiled once.

The namespaces and the uid contain a sandbox; this narrows the kernel that is left to attack. It denies, with EPERM: mounts and namespaces, tracing
others, keys, BPF, perf, io_uring, userfaultfd, modules, clocks, file handles. `clone3` gets ENOSYS, since its flags cannot be looked at: libraries
then fall back to `clone`, whose namespace flags are denied here. Sockets are of the Unix, internet and netlink families: a network namespace does not
hold all others back (vsock reaches the machine that a virtual machine runs on). It is not a whitelist: agents run compilers and package managers.
"""

from __future__ import annotations

import errno
import json
import tempfile
from typing import Final

DENIED: Final = (  # noqa: SIM905 - a list of words reads better as words
    "mount umount umount2 pivot_root chroot unshare setns open_tree move_mount fsopen fsconfig fsmount fspick mount_setattr "
    "ptrace process_vm_readv process_vm_writev kcmp process_madvise pidfd_getfd add_key request_key keyctl bpf perf_event_open userfaultfd "
    "io_uring_setup io_uring_enter io_uring_register kexec_load kexec_file_load init_module finit_module delete_module reboot "
    "swapon swapoff acct quotactl quotactl_fd syslog settimeofday clock_settime clock_adjtime adjtimex stime open_by_handle_at name_to_handle_at "
    "iopl ioperm modify_ldt vm86 vm86old lookup_dcookie nfsservctl fanotify_init mbind migrate_pages move_pages set_mempolicy"
).split()
NAMESPACE_FLAGS: Final = (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000, 0x00000080)
FAMILIES: Final = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK
TIOCSTI, TIOCLINUX = 0x5412, 0x541C  # typing into the terminal that gyre was started from


def program() -> bytes:
    """The filter as BPF. `ImportError` or `OSError` if pyseccomp or libseccomp is missing."""
    import pyseccomp

    deny = pyseccomp.ERRNO(errno.EPERM)
    rules = pyseccomp.SyscallFilter(defaction=pyseccomp.ALLOW)
    for name in DENIED:
        try:
            rules.add_rule(deny, name)
        except OSError:  # unknown to this architecture or this libseccomp
            continue
    for flag in NAMESPACE_FLAGS:
        rules.add_rule(deny, "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, flag, flag))
    for request in (TIOCSTI, TIOCLINUX):
        rules.add_rule(deny, "ioctl", pyseccomp.Arg(1, pyseccomp.MASKED_EQ, 0xFFFFFFFF, request))
    no_family = pyseccomp.ERRNO(errno.EAFNOSUPPORT)
    for name in ("socket", "socketpair"):
        rules.add_rule(no_family, name, pyseccomp.Arg(0, pyseccomp.GT, max(FAMILIES)))
        for family in set(range(max(FAMILIES))) - set(FAMILIES):
            rules.add_rule(no_family, name, pyseccomp.Arg(0, pyseccomp.EQ, family))
    rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")
    with tempfile.TemporaryFile() as out:
        rules.export_bpf(out)
        out.seek(0)
        return out.read()


def profile() -> str:
    """The same filter as a container engine takes it."""

    def rule(names: list[str], code: int, *args: tuple[int, str, int, int]) -> dict[str, object]:
        keys = ("index", "op", "value", "valueTwo")
        return {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": code, "args": [dict(zip(keys, arg, strict=True)) for arg in args]}

    sockets = ["socket", "socketpair"]
    rules = [rule(list(DENIED), errno.EPERM), rule(["clone3"], errno.ENOSYS)]
    rules += [rule(["clone"], errno.EPERM, (0, "SCMP_CMP_MASKED_EQ", flag, flag)) for flag in NAMESPACE_FLAGS]
    rules += [rule(["ioctl"], errno.EPERM, (1, "SCMP_CMP_MASKED_EQ", 0xFFFFFFFF, request)) for request in (TIOCSTI, TIOCLINUX)]
    rules += [rule(sockets, errno.EAFNOSUPPORT, (0, "SCMP_CMP_GT", max(FAMILIES), 0))]
    rules += [rule(sockets, errno.EAFNOSUPPORT, (0, "SCMP_CMP_EQ", family, 0)) for family in sorted(set(range(max(FAMILIES))) - set(FAMILIES))]
    return json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": rules})
