"""What every backend keeps, told of each of them."""

import asyncio
import os
import socket
import time
import uuid

import pytest

from gyre.errors import DeadlineExceeded
from gyre.sandbox.backends.base import InfraSetupFailed, SandboxLost, TaskSetupFailed
from gyre.sandbox.backends.output import Capped


def test_command_output_and_status(box):
    async def story(b):
        good = await b.once("echo out; echo err >&2; pwd; echo $GYRE_WORK; exit 3")
        out, err, where, work = good.output.decode().split()
        assert (good.status, good.timed_out, good.oom, out, err) == (3, False, False, "out", "err")
        assert where == work
        for number in (1, 2, 9, 13, 15):  # none is ignored
            assert (await b.once(f"kill -{number} $$; echo survived")).status == 128 + number
        assert (await b.once("", argv=["no-such-command"])).status == 127

    box(story)


def test_only_the_environment_that_was_given(new_box, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")

    async def story(b):
        env = (await b.once("env", env={"MINE": "1 2"})).output.decode()
        assert "MINE=1 2" in env and "SECRET_TOKEN" not in env

    new_box(story)


def test_workspace_outlives_sandboxes_and_is_nobody_elses(box):
    async def story(b):
        one, two = [await b.backend.workspace(None, 16) for _ in range(2)]
        await b.run(one, "echo mine > file; touch $TMPDIR/left $HOME/left")
        assert (await b.run(one, "cat file; ls $HOME $TMPDIR | grep left")).output == b"mine\n"
        assert (await b.run(two, "ls")).output == b""
        await b.backend.drop(one)
        await b.backend.drop(one)
        three = await b.backend.workspace(None, 16)
        assert (await b.run(three, "ls")).output == b""

    box(story)


def test_a_workspace_made_impassable_is_passable_for_the_next_sandbox(box):
    async def story(b):
        workspace = await b.backend.workspace(None, 16)
        assert (await b.run(workspace, "echo kept > file; chmod 000 .")).status == 0
        assert (await b.run(workspace, "cat file")).output == b"kept\n"

    box(story)


def test_workspace_starts_with_a_copy(box, tmp_path):
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "run.sh").write_text("echo ran\n")
    (source / "sub" / "run.sh").chmod(0o755)
    (source / "link").symlink_to("/etc/hostname")
    (source / "secret").write_text("kept")
    (source / "secret").chmod(0o600)
    tmp_path.chmod(0o700)

    async def story(b):
        w = await b.backend.workspace(str(source), 16)
        ended = await b.run(w, "sub/run.sh; cat secret; echo more >> secret; readlink link; rm -rf sub")
        assert ended.output == b"ran\nkept/etc/hostname\n"

    box(story)
    assert (source / "secret").read_text() == "kept" and (source / "sub" / "run.sh").exists()


def test_what_cannot_be_copied_is_the_tasks_fault(box, tmp_path):
    os.mkfifo(tmp_path / "fifo")

    async def story(b):
        for source in (tmp_path, tmp_path / "missing"):
            with pytest.raises(TaskSetupFailed):
                await b.backend.workspace(str(source), 16)
        assert (await b.once("echo still works")).status == 0

    box(story)


@pytest.mark.pain(36)
def test_setup_has_a_deadline(box, tmp_path):
    (tmp_path / "file").write_text("x")

    async def story(b):
        with pytest.raises(DeadlineExceeded, match="workspace"):
            await b.backend.workspace(str(tmp_path), 16, timeout_s=0)
        assert (await b.once("echo still works")).status == 0

    box(story)


@pytest.mark.hostile("to ignore SIGTERM, to run on", "killed at its deadline")
def test_deadline_kills_what_ignores_signals(box):
    async def story(b):
        ended = await b.once("trap '' TERM INT HUP; echo start; while :; do sleep 1; done", timeout_s=0.5)
        assert (ended.status, ended.timed_out, ended.output) == (137, True, b"start\n")

    box(story)


@pytest.mark.pain(34)
@pytest.mark.hostile("to leave a daemon behind", "it dies with its sandbox")
def test_everything_is_dead_when_run_returns(box, living):
    mark = uuid.uuid4().hex

    async def story(b):
        script = f'setsid sh -c "sleep 1000; : {mark}" & (sh -c "sleep 1000; : {mark}" &) ; sleep 0.2; exit 0'
        assert (await b.once(script)).status == 0
        assert living(mark) == []
        assert (await b.once(f'setsid sh -c "sleep 1000; : {mark}" & sleep 1000', timeout_s=0.5)).timed_out
        assert living(mark) == []

    box(story)


@pytest.mark.pain(34)
def test_cancelled_run_is_dead(box, living):
    mark = uuid.uuid4().hex

    async def story(b):
        w = await b.backend.workspace(None, 16)
        for pause_s in (0.0, 0.001, 0.01, 0.3):
            run = asyncio.create_task(b.run(w, f"setsid sleep 1000 & sleep 1000; : {mark}"))
            await asyncio.sleep(pause_s)
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run
            assert living(mark) == []
        assert (await b.run(w, "echo again")).output == b"again\n"

    box(story)


@pytest.mark.hostile("to write without end", "output is capped, the rest is counted")
def test_output_is_capped(box):
    async def story(b):
        ended = await b.once("echo first; head -c 300000000 /dev/zero; echo last", output_kb=8, timeout_s=50)
        assert (ended.status, ended.output_bytes) == (0, 300000011)
        assert len(ended.output) < 8 * 1024 + 100
        assert ended.output.startswith(b"first\n") and ended.output.endswith(b"last\n") and b"bytes left out" in ended.output

    box(story)


def test_capped_keeps_head_and_tail():
    out = Capped(10)
    for piece in (b"abc", b"defgh", b"i" * 100, b"wxyz"):
        out.add(piece)
    assert out.total == 112
    assert out.value() == b"abcde\n[\xe2\x80\xa6 102 bytes left out \xe2\x80\xa6]\niwxyz"
    small = Capped(10)
    small.add(b"0123456789")
    assert small.value() == b"0123456789" and not small.full


@pytest.mark.hostile("to have links, directories, pipes or large files collected", "regular files alone are, and what a link points to never")
def test_only_small_regular_files_are_collected(box):
    script = """cd $GYRE_LOGS; ls -A; echo 1 > good; ln -s /etc/passwd link; ln good hard; mkfifo fifo; mkdir dir
    head -c 100000 /dev/zero > large; ln -s . self; exit 0"""
    names = ["good", "link", "hard", "fifo", "dir", "large", "missing", "self/good", "../../../etc/passwd"]

    async def story(b):
        w = await b.backend.workspace(None, 16)
        for _ in range(2):
            ended = await b.run(w, script, collect=names[:-2])
            assert ended.output == b"" and ended.files == {"good": b"1\n", "hard": b"1\n"}

    box(story)


def test_binds_from_unreadable_places(box, tmp_path):
    tests = tmp_path / "tests"
    tests.mkdir(mode=0o700)
    (tests / "data").write_text("data")
    (tests / "data").chmod(0o600)
    alone = tmp_path / "instruction.md"
    alone.write_text("do it")
    alone.chmod(0o600)
    tmp_path.chmod(0o700)

    async def story(b):
        binds = [(tests, "/tests"), (alone, "/run/gyre/instruction.md")]
        assert (await b.once("cat $GYRE_TESTS/data $GYRE_INSTRUCTION", binds=binds)).output == b"datado it"
        assert (await b.once("", argv=["cat", "/tests/data"], binds=binds)).output == b"data"

    box(story)


def test_model_socket(box, tmp_path):
    path = tmp_path / "model.sock"
    client = "import os, socket; s = socket.socket(socket.AF_UNIX); s.connect(os.environ['GYRE_MODEL_SOCKET']); print(s.recv(9).decode())"

    async def story(b):
        server = await asyncio.start_unix_server(lambda _, out: (out.write(b"hello"), out.close()), path)
        path.chmod(0o666)
        ended = await b.once("", argv=["python3", "-I", "-c", client], binds=[(path, "/run/gyre/model.sock")])
        assert ended.output == b"hello\n"
        server.close()

    box(story)


def test_pytest_runs(strong):
    async def story(b):
        ended = await b.once(
            "echo 'def test(): assert 1' > test_it.py; python3 -m pytest -q; python3 -I -m pytest -q; python3 -I -S -c 'import json'"
        )
        assert ended.output.count(b"1 passed") == 2 and ended.status == 0

    strong(story)


def test_many_at_once(box):
    async def story(b):
        ended = await asyncio.gather(*(b.once(f"echo {n}; sleep 0.2") for n in range(24)))
        assert [e.output for e in ended] == [f"{n}\n".encode() for n in range(24)]

    box(story)


def test_a_missing_source_is_no_exit_status(strong, tmp_path):
    async def story(b):
        with pytest.raises(InfraSetupFailed, match="nowhere"):
            await b.once("true", binds=[(tmp_path / "nowhere", "/tests")])
        assert (await b.once("echo still works")).status == 0

    strong(story)


def test_a_command_too_long_is_the_tasks_fault(strong):
    async def story(b):
        for argv, env in [(["echo", "x" * (1 << 17)], {}), (["true"], {"A": "x" * 200_000})]:
            with pytest.raises(TaskSetupFailed):
                await b.once("", argv=argv, env=env)
        assert (await b.once("echo fine")).output == b"fine\n"

    strong(story)


@pytest.mark.parametrize("new_box", ["bubblewrap"], indirect=True)
def test_lost_warden_is_a_lost_sandbox(new_box, living):
    mark = uuid.uuid4().hex

    async def story(b):
        w = await b.backend.workspace(None, 16)
        run = asyncio.create_task(b.run(w, f"sleep 1000; : {mark}"))
        await asyncio.sleep(0.3)
        b.backend._process.kill()
        with pytest.raises(SandboxLost):
            await asyncio.wait_for(run, 20)
        with pytest.raises(SandboxLost):
            await b.backend.workspace(None, 16)

    new_box(story)
    until = time.monotonic() + 20
    while living(mark):
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.hostile("to reach abstract sockets of the host", "refused")
def test_abstract_sockets_of_the_host_are_out_of_reach(strong):
    name = "\0gyre-test-" + uuid.uuid4().hex
    host = socket.socket(socket.AF_UNIX)
    host.bind(name)
    host.listen()
    client = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({name!r})"

    async def story(b):
        assert b"refused" in (await b.once("", argv=["python3", "-c", client])).output

    try:
        strong(story)
    finally:
        host.close()
