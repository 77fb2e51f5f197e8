"""What the Docker backend has beyond what every backend keeps: images, labels, limits, and what it says of a daemon."""

import asyncio
import gc
import os
import signal
import time
from types import SimpleNamespace

import docker
import pytest

from gyre.config import Sandbox
from gyre.errors import DeadlineExceeded, UsageError
from gyre.sandbox.backends import docker as docker_backend
from gyre.sandbox.backends import reaper
from gyre.sandbox.backends.base import Image, InfraSetupFailed, SandboxLost, TaskSetupFailed
from gyre.sandbox.backends.choose import choose
from gyre.sandbox.backends.images import digest
from gyre.sandbox.run_task import check_tasks, run_task
from gyre.sandbox.task import load_task


@pytest.fixture(params=["docker", "podman"])
def engine(request, shared):
    """Tell a story with Docker, and with Podman."""
    return lambda story: shared.tell(request.param, story)


def agents(b, containers):
    """Those that run a command, and keep no workspace."""
    return [c for c in containers if c["Names"][0].lstrip("/") not in b.backend._spaces]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the SDK leaves the socket of such a try open
def test_no_daemon_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nothing.sock")
    with pytest.raises(UsageError, match=r"no Docker daemon answers.*DOCKER_HOST"):
        asyncio.run(choose("docker", unsafe=False).start())
    gc.collect()


def test_a_runtime_that_the_daemon_lacks(engine):
    async def story(b):
        with pytest.raises(UsageError, match=r"sandbox.runtime: the daemon has no runtime 'nosuch'.*give one of .*runc"):
            b.backend._table, table = Sandbox(runtime="nosuch"), b.backend._table
            try:
                b.backend._check(await asyncio.to_thread(b.backend._api.info))
            finally:
                b.backend._table = table

    engine(story)


def test_an_image_is_built_once_and_its_files_are_in_the_workspace(engine, tmp_path):
    (tmp_path / "Dockerfile").write_text(
        f"FROM {os.environ.get('GYRE_IMAGE')}\nWORKDIR /app\nCOPY data /app/data\nRUN echo built > /app/built\nENV MINE=yes\nVOLUME /big\n"
        'USER nobody\nENTRYPOINT ["false"]\n'
    )
    (tmp_path / "data").write_text("from the image\n")
    source = tmp_path / "workspace"
    source.mkdir()
    (source / "mine").write_text("from the task\n")

    async def story(b):
        image = Image(context=str(tmp_path))
        spaces = await asyncio.gather(*(b.backend.workspace(str(source), 16, image=image) for _ in range(3)))
        assert [w.place for w in spaces] == ["/app"] * 3
        ended = await b.run(spaces[0], "pwd; cat built data mine; echo $MINE $GYRE_WORK; id -u; echo more >> data; stat -f -c %T /big")
        assert ended.output.decode().split("\n") == ["/app", "built", "from the image", "from the task", "yes /app", "1000", "tmpfs", ""]
        assert len({b.backend._spaces[w.key].image.id for w in spaces}) == 1
        started = time.monotonic()
        again = await b.backend.workspace(None, 16, image=image, place="/elsewhere")
        assert (await b.run(again, "ls")).output == b"" and time.monotonic() - started < 60
        for w in (*spaces, again):
            await b.backend.drop(w)

    engine(story)


def test_whose_fault_it_is_that_there_is_no_image(engine, tmp_path):
    (tmp_path / "Dockerfile").write_text("NONSENSE\n")
    other = tmp_path / "other"
    other.mkdir()
    (other / "Dockerfile").write_text(f"FROM {os.environ.get('GYRE_IMAGE')}\nRUN exit 3\n")

    async def story(b):
        with pytest.raises((TaskSetupFailed, InfraSetupFailed), match=r"NONSENSE|instruction|FROM"):
            await b.backend.workspace(None, 16, image=Image(context=str(tmp_path)))
        with pytest.raises(InfraSetupFailed, match="Dockerfile cannot be built"):  # it may be the network's: not a reward of 0
            await b.backend.workspace(None, 16, image=Image(context=str(other)))
        with pytest.raises((TaskSetupFailed, InfraSetupFailed)):
            await b.backend.workspace(None, 16, image=Image(name="localhost:1/no/such:image"))

    engine(story)


def test_an_image_is_called_after_its_content(tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM a\n")
    first = digest(tmp_path)
    assert digest(tmp_path) == first
    (tmp_path / "Dockerfile").chmod(0o755)
    second = digest(tmp_path)
    (tmp_path / "link").symlink_to("Dockerfile")
    assert len({first, second, digest(tmp_path)}) == 3


def test_everything_is_labelled_and_processor_time_is_limited(engine):
    async def story(b):
        w = await b.backend.workspace(None, 16)
        run = asyncio.create_task(b.run(w, "read x < /proc/uptime; while :; do :; done", cpus=0.5, timeout_s=10))
        api = b.backend._api
        mine = {"label": [f"{reaper.OWNER}={b.backend._home.name}"]}
        found = []
        while not agents(b, found):
            assert not run.done(), run.result()
            found = await asyncio.to_thread(api.containers, filters=mine)
        assert {c["Labels"][reaper.RUN] for c in found} == {"tests"}
        volumes = (await asyncio.to_thread(api.volumes, {"label": [reaper.OWNER]}))["Volumes"]
        assert {v["Labels"][reaper.OWNER] for v in volumes} >= {b.backend._home.name}
        hosts = [(await asyncio.to_thread(api.inspect_container, c["Id"]))["HostConfig"] for c in found]
        assert {h["NetworkMode"] for h in hosts} == {"none"} and all(h["ReadonlyRootfs"] for h in hosts)
        assert sum(h["NanoCpus"] == 500_000_000 or (h["CpuQuota"], h["CpuPeriod"]) == (50_000, 100_000) for h in hosts) == 1
        assert (await run).timed_out
        await b.backend.drop(w)

    engine(story)


def test_a_container_that_somebody_removes_is_a_lost_sandbox(engine):
    async def story(b):
        w = await b.backend.workspace(None, 16)
        run = asyncio.create_task(b.run(w, "echo started; sleep 1000"))
        api = b.backend._api
        while not (found := agents(b, await asyncio.to_thread(api.containers))):
            assert not run.done(), run.result()
            await asyncio.sleep(0.1)
        await asyncio.to_thread(api.remove_container, found[0]["Id"], force=True)
        with pytest.raises(SandboxLost):
            await run
        await b.backend.drop(w)

    engine(story)


def test_starts_keep_a_distance(engine):
    async def story(b):
        table, b.backend._table = b.backend._table, Sandbox(starts_per_s=2.0)
        try:
            started = time.monotonic()
            spaces = await asyncio.gather(*(b.backend.workspace(None, 4, image=Image(name=table.image)) for _ in range(4)))
            assert time.monotonic() - started > 1.4
        finally:
            b.backend._table = table
        for w in spaces:
            await b.backend.drop(w)

    engine(story)


def test_a_task_is_graded_in_a_container_of_its_own(engine, make_task):
    """The verifier has /tests and a fresh /tmp; nothing that the agent started is there."""
    test = 'r=1; [ -e /tmp/left ] && r=0; ps ax | grep -q [s]leep && r=0; [ "$(cat answer)" = yes ] || r=0; echo $r > /logs/verifier/reward.txt\n'
    solve = "ls /tests 2>/dev/null && exit 1; touch /tmp/left; setsid sleep 1000 & echo yes > answer\n"
    task = load_task(make_task(test=test, solve=solve))
    table = Sandbox(verifier_retries=0)

    async def story(b):
        done = await run_task(b.backend, task, table, "oracle")
        assert (done.reward, done.harness_exit, done.detail) == (1.0, 0, "")
        checks = []
        await check_tasks(b.backend, [task] * 3, table, 3, checks.append)
        assert all(c.sound for c in checks) and len(checks) == 3

    engine(story)


@pytest.mark.parametrize("new_box", ["docker", "podman"], indirect=True)
def test_a_daemon_that_answers_no_more_holds_nobody_and_is_cleaned_when_it_does_again(new_box, request, monkeypatch):
    monkeypatch.setattr(reaper, "CALL_S", 2)
    monkeypatch.setattr(docker_backend, "CLOSE_S", 3.0)
    engine = request.node.callspec.params["new_box"].upper()

    async def story(b):
        w = await b.backend.workspace(None, 16)
        assert (await b.run(w, "echo before")).output == b"before\n"
        run = asyncio.create_task(b.run(w, "sleep 1000", timeout_s=4))
        while not agents(b, await asyncio.to_thread(b.backend._api.containers, filters={"label": [f"{reaper.OWNER}={b.backend._home.name}"]})):
            assert not run.done(), run.result()
        os.kill(int(os.environ[f"GYRE_{engine}_PID"]), signal.SIGSTOP)
        try:
            with pytest.raises(SandboxLost):
                await run
            with pytest.raises((SandboxLost, DeadlineExceeded)):
                await b.backend.workspace(None, 16, timeout_s=5)
            with pytest.raises(SandboxLost):
                await b.backend.drop(w)
            owner = b.backend._home.name
            await b.backend.close()
        finally:
            os.kill(int(os.environ[f"GYRE_{engine}_PID"]), signal.SIGCONT)
        return owner

    mine = {"label": [f"{reaper.OWNER}={new_box(story)}"]}
    client = docker.DockerClient(base_url=os.environ[f"GYRE_{engine}"])
    until = time.monotonic() + 60
    while left := [*client.api.containers(all=True, filters=mine), *(client.api.volumes(mine)["Volumes"] or [])]:
        assert time.monotonic() < until, left
        time.sleep(0.2)
    client.close()


def test_who_removes_what_was_left_asks_a_silent_daemon_again(monkeypatch):
    """A daemon that does not answer, then one that finds something, then nothing twice."""
    answers, asked = iter([OSError("silent"), 3, 0, OSError("silent again"), 0, 0]), []

    def reap(_api, of):
        asked.append(of("me"))
        if isinstance(answer := next(answers), OSError):
            raise answer
        return answer

    monkeypatch.setattr(reaper, "connect", lambda: SimpleNamespace(api=None))
    monkeypatch.setattr(reaper, "reap", reap)
    monkeypatch.setattr(reaper, "SWEEP_S", 0.0)
    reaper.reap_all("me")
    assert asked == [True] * 6
