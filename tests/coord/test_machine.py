"""The coordinator's machine as literal events and effects."""

from __future__ import annotations

from gyre.coord.machine import (
    KILL_S,
    STOP_S,
    End,
    Exited,
    HelloSeen,
    Kill,
    Machine,
    Process,
    RunFailed,
    RunFinished,
    StepsDone,
    StopAsked,
    TellStop,
    Terminate,
    Tick,
)  # fmt: skip

NAMES = {"buffer": "buffer", "core": "train", "cell": "rollout", "box": "sandbox"}


def up() -> Machine:
    m = Machine([Process(name=n, kind=k) for n, k in NAMES.items()], now=0.0, start_timeout_s=60.0)
    for name in NAMES:
        assert m.handle(1.0, HelloSeen(name)) == []
    return m


def test_a_run_that_finishes() -> None:
    m = up()
    assert m.handle(2.0, Exited("box", 0)) == []  # a sandbox ends by itself when no rollout is needed
    assert m.handle(3.0, Exited("core", 0)) == []
    assert m.handle(4.0, RunFinished()) == [TellStop("cell", "the run is finished")]
    assert m.handle(5.0, RunFinished()) == []
    assert m.handle(6.0, Exited("cell", 0)) == [TellStop("buffer", "the run is finished")]
    assert m.handle(7.0, Exited("buffer", 0)) == [End(0, "the run is finished", None)]


def test_a_trainer_that_leaves_early_fails_the_run() -> None:
    m = up()
    assert m.handle(2.0, Exited("core", 0)) == []
    assert m.handle(12.0, Tick()) == []
    m.handle(12.1, Tick())
    assert m.ending == End(1, "core ended before the run's last step", "core")
    m = up()
    m.handle(2.0, Exited("core", 0))
    m.handle(5.0, StepsDone())
    assert m.handle(20.0, Tick()) == [] and m.ending is None


def test_the_buffers_end_is_the_runs() -> None:
    m = up()
    m.handle(2.0, Exited("box", 0))
    m.handle(3.0, Exited("core", 0))
    assert m.handle(4.0, Exited("buffer", 0)) == [TellStop("cell", "the run is finished")]
    assert m.handle(5.0, Exited("cell", 0)) == [End(0, "the run is finished", None)]


def test_a_worker_that_dies_ends_the_run() -> None:
    m = up()
    assert m.handle(2.0, Exited("cell", 70)) == [TellStop("box", "cell ended with exit code 70")]
    assert m.handle(3.0, Exited("box", 0)) == [TellStop("core", "cell ended with exit code 70")]
    assert m.handle(4.0, Exited("core", 0)) == [TellStop("buffer", "cell ended with exit code 70")]
    assert m.handle(5.0, Exited("buffer", 0)) == [End(1, "cell ended with exit code 70", "cell")]


def test_killed_and_early_ends_are_failures_too() -> None:
    m = up()
    m.handle(2.0, Exited("core", -9))
    assert m.ending == End(1, "core was killed by signal 9", "core")
    m = up()
    m.handle(2.0, Exited("cell", 0))
    assert m.ending == End(1, "cell ended with exit code 0", "cell")


def test_a_workers_bad_input_is_the_runs() -> None:
    m = up()
    m.handle(2.0, Exited("box", 2))
    assert m.ending == End(2, "box ended with exit code 2", "box")


def test_a_stop_grows_harder() -> None:
    m = up()
    assert m.handle(2.0, StopAsked(130)) == [TellStop("box", "asked to stop")]
    assert m.handle(2.0 + STOP_S, Tick()) == []
    assert m.handle(2.1 + STOP_S, Tick()) == [Terminate("box")]
    assert m.handle(2.2 + STOP_S, Tick()) == []
    assert m.handle(2.3 + STOP_S + KILL_S, Tick()) == [Kill("box")]
    assert m.handle(2.4 + STOP_S + KILL_S, Exited("box", -9)) == [TellStop("core", "asked to stop")]
    for name, following in (("core", "cell"), ("cell", "buffer")):
        assert m.handle(50.0, Exited(name, 0)) == [TellStop(following, "asked to stop")]
    assert m.handle(51.0, Exited("buffer", 0)) == [End(130, "asked to stop", None)]


def test_a_failure_while_stopping_is_not_hidden() -> None:
    m = up()
    m.handle(2.0, RunFinished())
    m.handle(3.0, Exited("box", 0))
    m.handle(4.0, Exited("core", 1))
    assert m.ending == End(1, "core ended with exit code 1 while stopping", "core")


def test_no_hello_is_a_failure_with_a_name() -> None:
    m = Machine([Process(name="buffer", kind="buffer"), Process(name="box", kind="sandbox")], now=0.0, start_timeout_s=60.0)
    m.handle(1.0, HelloSeen("buffer"))
    assert m.handle(60.0, Tick()) == []
    assert m.handle(60.1, Tick()) == [Terminate("box")]
    assert m.ending == End(1, "gave up after 60 s waiting for the hello of box", "box")
    assert m.handle(60.1 + KILL_S, Tick()) == []
    assert m.handle(60.2 + KILL_S, Tick()) == [Kill("box")]  # it was terminated at once


def test_the_buffers_failure_is_the_runs() -> None:
    m = up()
    m.handle(2.0, RunFailed("20 infrastructure failures in a row"))
    assert m.ending == End(1, "20 infrastructure failures in a row", "buffer")
