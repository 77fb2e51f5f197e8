"""hosts.txt: which processes run where.

    file   := (blank | "#"… | line)*
    line   := KIND target ("," target)* (KEY "=" VALUE)*      shell quoting
    KIND   := buffer | sandbox | cell | rollout-cell | train-cell
    target := [USER "@"] HOST [":" SSHPORT]                   node[01-16,20]; [v6]; never a leading "-"
    KEY    := name gpus ranks slots bind python env.NAME set.table.key

A range makes a line each; commas make one cell of several nodes, the first having rank 0. Every mistake, also in what a line sets, is a
`UsageError` with `FILE:LINE`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import msgspec

from gyre import config, inputs
from gyre.errors import UsageError


class Kind(StrEnum):
    BUFFER = "buffer"
    SANDBOX = "sandbox"
    CELL = "cell"
    ROLLOUT_CELL = "rollout-cell"
    TRAIN_CELL = "train-cell"


class Host(msgspec.Struct, frozen=True):
    """Where a process runs."""

    host: str
    user: str = ""
    ssh_port: int = 0  # 0: what ssh's own configuration says

    @property
    def local(self) -> bool:
        return self.host in ("localhost", "127.0.0.1", "::1") and not self.user and not self.ssh_port


class Line(msgspec.Struct, frozen=True):
    """One process, or one cell, of hosts.txt."""

    kind: Kind
    name: str
    hosts: list[Host]
    where: str  # FILE:LINE
    gpus: list[int] = []  # on each host
    ranks: int | None = None  # of the cell, as many on each of its hosts
    slots: int | None = None
    bind: str | None = None
    python: str | None = None
    env: dict[str, str] = {}
    sets: list[str] = []


MAX_RANGE = 10_000
_KEYS = ("name", "gpus", "ranks", "slots", "bind", "python")
_TARGET = re.compile(r"(?:(?P<user>[A-Za-z_][\w.-]*)@)?(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_][\w.\[\],-]*)(?::(?P<port>\d{1,5}))?$", re.ASCII)
_ENV = re.compile(r"env\.[A-Za-z_]\w*$", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}$")


def parse(text: str, file: str) -> list[Line]:
    """The lines of a hosts file with ranges unfolded. Raises `UsageError`."""
    lines: list[Line] = []
    counts: dict[Kind, int] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        where = f"{file}:{number}"
        try:
            words = shlex.split(raw, comments=True)
        except ValueError as e:
            raise UsageError(where, f"quoting: {e}", "close the quote") from None
        if words:
            for line in _line(words, where):
                counts[line.kind] = counts.get(line.kind, 0) + 1
                lines.append(line if line.name else msgspec.structs.replace(line, name=_default_name(line.kind, counts[line.kind])))
    _check(lines, file)
    return lines


def _default_name(kind: Kind, count: int) -> str:
    return f"{kind.value}{'' if kind is Kind.BUFFER else count - 1}"


def _line(words: list[str], where: str) -> Iterator[Line]:
    try:
        kind = Kind(words[0])
    except ValueError:
        raise UsageError(where, f"unknown kind {words[0]!r}", f"use one of {', '.join(Kind)}") from None
    if len(words) < 2 or "=" in words[1]:
        raise UsageError(where, f"{kind} without a host", f"write for example: {kind} localhost")
    options: dict[str, str] = {}
    for word in words[2:]:
        key, eq, value = word.partition("=")
        if not eq or not (key in _KEYS or key.startswith(("env.", "set."))):
            raise UsageError(where, f"unknown option {word!r}", f"use KEY=VALUE with {', '.join(_KEYS)}, env.NAME or set.table.key")
        if key.startswith("env.") and not _ENV.match(key):
            raise UsageError(where, f"{key.removeprefix('env.')!r} names no environment variable", "use letters, digits and '_'", key)
        if key in options:
            raise UsageError(where, f"{key} is given twice", "keep one", key)
        options[key] = value
    targets = [list(_unfold(t, where)) for t in _split_commas(words[1])]
    rows = [[host for target in targets for host in target]] if len(targets) > 1 else [[host] for host in targets[0]]
    if len(rows) > 1 and "name" in options:
        raise UsageError(where, "one name for several processes", "leave it out, or write a line each", "name")
    if len(rows) > 1 and "bind" in options:
        raise UsageError(where, f"one address for {len(rows)} hosts", "write a line for each, or leave it out", "bind")
    config.overlaid(config.Config(), _sets(options), where)
    for hosts in rows:
        yield _build(kind, hosts, options, where)


def _build(kind: Kind, hosts: list[Host], options: dict[str, str], where: str) -> Line:
    name = options.get("name", "")
    if name and not _NAME.match(name):
        raise UsageError(where, f"{name!r} is no name", "use letters, digits, '.', '_' and '-'", "name")
    numbers: dict[str, int] = {}
    for key in ("slots", "ranks"):
        if (text := options.get(key)) is not None:
            if not (text.isdecimal() and len(text) < 10 and int(text) > 0):
                raise UsageError(where, f"{text!r} is no positive integer", f"write for example {key}=16", key)
            numbers[key] = int(text)
    if len(hosts) > 1 and kind is not Kind.TRAIN_CELL:
        raise UsageError(where, f"a {kind} on several hosts", "write a line for each host; only a train-cell can span them")
    gpus = _gpus(options["gpus"], where) if "gpus" in options else []
    ranks = numbers.get("ranks", len(hosts) * max(1, len(gpus)) if len(hosts) > 1 else None)
    if ranks is not None and ranks % len(hosts):
        raise UsageError(where, f"{ranks} ranks on {len(hosts)} hosts", "give a multiple", "ranks")
    trains = kind in (Kind.CELL, Kind.TRAIN_CELL)
    for key, meant in (("slots", kind is Kind.SANDBOX), ("bind", kind is not Kind.SANDBOX), ("ranks", trains)):
        if key in options and not meant:
            raise UsageError(where, f"a {kind} has none", "leave it out", key)
    return Line(
        kind=kind,
        name=name,
        hosts=hosts,
        where=where,
        gpus=gpus,
        ranks=ranks,
        slots=numbers.get("slots"),
        bind=options.get("bind"),
        python=options.get("python"),
        env={k.removeprefix("env."): v for k, v in options.items() if k.startswith("env.")},
        sets=_sets(options),
    )


def _sets(options: dict[str, str]) -> list[str]:
    return [f"{k.removeprefix('set.')}={v}" for k, v in options.items() if k.startswith("set.")]


def _gpus(text: str, where: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        m = re.match(r"(\d{1,3})(?:-(\d{1,3}))?$", part, re.ASCII)
        if not m or (m[2] and int(m[2]) < int(m[1])):
            raise UsageError(where, f"{text!r} names no GPUs", "write for example gpus=0-3,6", "gpus")
        found += range(int(m[1]), int(m[2] or m[1]) + 1)
    if len(set(found)) != len(found):
        raise UsageError(where, f"{text!r} names a GPU twice", "name each once", "gpus")
    return found


def _split_commas(text: str) -> list[str]:
    """Split at commas outside brackets."""
    return re.split(r",(?![^\[]*\])", text)


def _unfold(target: str, where: str) -> Iterator[Host]:
    m = _TARGET.match(target)
    if not m:
        raise UsageError(where, f"{target!r} is no host", "write [USER@]HOST[:SSHPORT], for example node[01-16]")
    user, host, port = m["user"] or "", m["host"], int(m["port"] or 0)
    if host.startswith("["):
        yield Host(host.strip("[]"), user, port)
        return
    head, bracket, rest = host.partition("[")
    if not bracket:
        yield Host(host, user, port)
        return
    body, closed, tail = rest.partition("]")
    if not closed or not re.match(r"\d+(-\d+)?(,\d+(-\d+)?)*$", body) or "[" in tail or "]" in tail:
        raise UsageError(where, f"{target!r} is no host range", "write for example node[01-16,20]")
    for part in body.split(","):
        first, _, last = part.partition("-")
        if len(first) > 9 or len(last) > 9 or int(last or first) - int(first) >= MAX_RANGE:
            raise UsageError(where, f"{target[:60]!r} is too wide a range", f"name at most {MAX_RANGE} hosts at once")
        if int(last or first) < int(first):
            raise UsageError(where, f"the range {part} is empty", f"write the lower number first: {last}-{first}", target)
        for n in range(int(first), int(last or first) + 1):
            yield Host(f"{head}{n:0{len(first)}d}{tail}", user, port)


def _check(lines: list[Line], file: str) -> None:
    seen: dict[str, Line] = {}
    gpus: dict[tuple[str, int], Line] = {}
    for line in lines:
        if line.name in seen:
            raise UsageError(line.where, f"name {line.name!r} is taken by {seen[line.name].where}", "give another name=", "name")
        seen[line.name] = line
        for host in line.hosts:
            for gpu in line.gpus:
                if (host.host, gpu) in gpus:
                    raise UsageError(line.where, f"GPU {gpu} of {host.host} belongs to {gpus[host.host, gpu].where}", "share none", "gpus")
                gpus[host.host, gpu] = line
    kinds = [line.kind for line in lines]
    if kinds.count(Kind.BUFFER) != 1:
        raise UsageError(file, f"{kinds.count(Kind.BUFFER)} buffers", "write exactly one buffer line")
    if Kind.SANDBOX not in kinds:
        raise UsageError(file, "no sandbox", "add a line: sandbox HOST")
    if not {Kind.CELL, Kind.TRAIN_CELL} & set(kinds):
        raise UsageError(file, "no cell that can train", "add a line: train-cell HOST")


def read(path: str) -> list[Line]:
    """Read a hosts file; "-" is standard input. Raises `UsageError`."""
    import sys

    if path == "-":
        return parse(sys.stdin.read(), "standard input")
    return parse(inputs.text(Path(path), "give the path of a hosts file to --cells"), path)
