"""hosts.txt: the grammar, and FILE:LINE for every mistake."""

from __future__ import annotations

import pytest

from gyre.coord.hosts import Host, Kind, parse
from gyre.errors import UsageError

GOOD = """
# a cluster
buffer   login
sandbox  ops@cpu[1-3]:2222 slots=64
train-cell gpu01,gpu02 gpus=0-3,6 name=core env.NCCL_DEBUG=INFO 'set.train.lr=1e-5'   # two nodes, one cell
cell     node[08-10,20]x
rollout-cell [fe80::1] bind=tcp://127.0.0.1:9000
"""


def test_grammar() -> None:
    lines = parse(GOOD, "hosts.txt")
    assert [(x.kind, x.name, [h.host for h in x.hosts]) for x in lines] == [
        (Kind.BUFFER, "buffer", ["login"]),
        (Kind.SANDBOX, "sandbox0", ["cpu1"]),
        (Kind.SANDBOX, "sandbox1", ["cpu2"]),
        (Kind.SANDBOX, "sandbox2", ["cpu3"]),
        (Kind.TRAIN_CELL, "core", ["gpu01", "gpu02"]),
        (Kind.CELL, "cell0", ["node08x"]),
        (Kind.CELL, "cell1", ["node09x"]),
        (Kind.CELL, "cell2", ["node10x"]),
        (Kind.CELL, "cell3", ["node20x"]),
        (Kind.ROLLOUT_CELL, "rollout-cell0", ["fe80::1"]),
    ]
    assert lines[1].hosts == [Host("cpu1", "ops", 2222)] and lines[1].slots == 64
    core = lines[4]
    assert (core.gpus, core.env, core.sets, core.where) == ([0, 1, 2, 3, 6], {"NCCL_DEBUG": "INFO"}, ["train.lr=1e-5"], "hosts.txt:5")
    assert core.ranks == 10 and lines[5].ranks is None


REST = "\nsandbox localhost\ntrain-cell localhost\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bufer localhost", r"hosts.txt:1: unknown kind 'bufer'; use one of buffer"),
        ("buffer", r"hosts.txt:1: buffer without a host"),
        ("buffer -oProxyCommand=x", r"hosts.txt:1: buffer without a host"),
        ("buffer -x", r"hosts.txt:1: '-x' is no host"),
        ("buffer a@-x", r"hosts.txt:1: 'a@-x' is no host"),
        ("sandbox node[1-99999999999]", r"hosts.txt:1: 'node\[1-99999999999\]' is too wide a range; name at most 10000"),
        ("sandbox node[00001-20000]", r"hosts.txt:1: 'node\[00001-20000\]' is too wide a range"),
        ("sandbox localhost slots=99999999999999999999", r"hosts.txt:1: slots: '9+' is no positive integer"),
        ("sandbox localhost slots=\u00b2", r"hosts.txt:1: slots: .* is no positive integer"),
        ("cell localhost gpus=0-999999999", r"hosts.txt:1: gpus: '0-999999999' names no GPUs"),
        ("buffer node[1-", r"hosts.txt:1: 'node\[1-' is no host range"),
        ("sandbox node[3-1]", r"hosts.txt:1: node\[3-1\]: the range 3-1 is empty; write the lower number first: 1-3"),
        ("sandbox node[1,3-2]:22", r"hosts.txt:1: node\[1,3-2\]:22: the range 3-2 is empty"),
        ("cell gpu[1-4] bind=10.0.0.5", r"hosts.txt:1: bind: one address for 4 hosts; write a line for each"),
        ("cell localhost set.foo.bar=1", r"hosts.txt:1: set.foo.bar: unknown key; docs/config.md lists the keys"),
        ("cell localhost set.rollout.slot=1", r"hosts.txt:1: set.rollout.slot: unknown key; did you mean set.rollout.slots\?"),
        ("cell localhost set.rollout.slots=x", r"hosts.txt:1: set.rollout.slots: expected `int`, got `str`; give integer"),
        ("cell localhost set.rollout.slots=0", r"hosts.txt:1: set.rollout.slots: expected `int` >= 1"),
        ("buffer localhost slots=0", r"hosts.txt:1: slots: '0' is no positive integer"),
        ("buffer localhost slots=4", r"hosts.txt:1: slots: a buffer has none; leave it out"),
        ("sandbox localhost bind=ipc://x", r"hosts.txt:1: bind: a sandbox has none; leave it out"),
        ("cell a,b", r"hosts.txt:1: a cell on several hosts; write a line for each host; only a train-cell can span them"),
        ("train-cell a,b ranks=3", r"hosts.txt:1: ranks: 3 ranks on 2 hosts; give a multiple"),
        ("rollout-cell a ranks=2", r"hosts.txt:1: ranks: a rollout-cell has none"),
        ("buffer localhost gpus=3-1", r"hosts.txt:1: gpus: '3-1' names no GPUs"),
        ("buffer localhost env.A-B=1", r"hosts.txt:1: env.A-B: 'A-B' names no environment variable"),
        ("buffer localhost gpus=1,1", r"hosts.txt:1: gpus: '1,1' names a GPU twice"),
        ("buffer localhost color=red", r"hosts.txt:1: unknown option 'color=red'"),
        ("buffer localhost name=../x", r"hosts.txt:1: name: '../x' is no name"),
        ("buffer localhost name=a name=b", r"hosts.txt:1: name: name is given twice"),
        ("buffer 'localhost", r"hosts.txt:1: quoting"),
        ("sandbox node[1-2] name=a", r"hosts.txt:1: name: one name for several"),
        ("buffer localhost\nbuffer localhost name=b2", r"hosts.txt: 2 buffers"),
        ("buffer localhost\nsandbox localhost name=buffer", r"hosts.txt:2: name: name 'buffer' is taken by hosts.txt:1"),
        ("buffer localhost\ncell h gpus=0\ncell h gpus=0-1", r"hosts.txt:3: gpus: GPU 0 of h belongs to hosts.txt:2"),
    ],
)
def test_mistakes(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(text + REST, "hosts.txt")


@pytest.mark.parametrize(
    ("text", "message"), [("", "0 buffers"), ("buffer h\ntrain-cell h", "no sandbox"), ("buffer h\nsandbox h\nrollout-cell h", "no cell that can")]
)
def test_what_must_be_there(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(text, "hosts.txt")
