"""The coordinator's machine as literal events and effects."""

from __future__ import annotations

import pytest

from gyre.coord.machine import (
    KILL_S,
    RESTARTS,
    STOP_S,
    Added,
    Dump,
    End,
    Exited,
    GiveUp,
    Health,
    HelloSeen,
    Kill,
    Machine,
    Missing,
    Process,
    Progress,
    Removed,
    RunFailed,
    RunFinished,
    Start,
    StepsDone,
    StopAsked,
    TellStop,
    Terminate,
    Tick,
)  # fmt: skip

NAMES = {"buffer": "buffer", "core": "train", "cell": "rollout", "box": "sandbox"}


def up(worked: bool = False, **more: str) -> Machine:
    names = NAMES | more
    m = Machine([Process(name=n, kind=k) for n, k in names.items()], now=0.0, start_timeout_s=60.0, silent_s=1e3, stall_s=1e4)
    for name in names:
        assert m.handle(1.0, HelloSeen(name, worked)) == []
    return m


@pytest.mark.pain(5)
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
    assert m.ending is None, "the buffer was not heard since: it may be that all is done"
    m.handle(12.1, Progress(False))
    m.handle(12.2, Tick())
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


@pytest.mark.pain(33)
def test_a_worker_that_dies_ends_the_run() -> None:
    m = up()
    assert m.handle(2.0, Exited("cell", 70)) == [TellStop("box", "cell ended with exit code 70")]
    assert m.handle(3.0, Exited("box", 0)) == [TellStop("core", "cell ended with exit code 70")]
    assert m.handle(4.0, Exited("core", 0)) == [TellStop("buffer", "cell ended with exit code 70")]
    assert m.handle(5.0, Exited("buffer", 0)) == [End(1, "cell ended with exit code 70", "cell")]


@pytest.mark.pain(33)
def test_what_worked_or_was_killed_is_started_again_with_growing_pauses() -> None:
    m, now = up(worked=True), 10.0
    for pause in (1.0, 2.0, 4.0, 8.0, 16.0):
        assert m.handle(now, Exited("core", -9)) == [Missing("core", "was killed by signal 9")]
        assert m.handle(now + pause - 0.1, Tick()) == [] and m.processes["core"].health is Health.DEAD
        assert m.handle(now + pause, Tick()) == [Start("core")]
        assert m.handle(now + pause + 1, HelloSeen("core")) == []
        now += pause + 2
    m.handle(now, Exited("core", 1))
    assert m.ending == End(1, f"core ended with exit code 1, the last of {RESTARTS + 1} times in a row", "core")
    m = up()  # killed before it worked: the machine's fault, not its own
    assert m.handle(2.0, Exited("cell", -9)) == [Missing("cell", "was killed by signal 9")] and m.ending is None
    assert up().handle(2.0, Exited("cell", 255)) == [Missing("cell", "cannot be reached")], "nor is a cable"


def test_a_long_life_forgets_earlier_deaths() -> None:
    m = up(worked=True)
    for n in range(3 * RESTARTS):
        at = 1000.0 * n
        m.handle(at, Exited("cell", -11))
        m.handle(at + 1.0, Tick())
        m.handle(at + 2.0, HelloSeen("cell"))
    assert m.ending is None and m.processes["cell"].deaths == 1


def test_one_of_several_is_given_up_and_the_run_goes_on() -> None:
    m, now = up(worked=True, other="rollout"), 10.0
    effects = []
    for _ in range(RESTARTS + 1):
        effects = m.handle(now, Exited("other", 1))
        m.handle(now + 60.0, Tick())
        m.handle(now + 61.0, HelloSeen("other"))
        now += 62.0
    assert effects == [Missing("other", "ended with exit code 1"), GiveUp("other")]
    assert m.ending is None and m.processes["other"].health is Health.GONE
    m.handle(now, StopAsked(130))
    assert m.ending == End(130, "asked to stop", None)


def test_whoever_waits_to_be_started_is_not_when_the_run_ends() -> None:
    m = up(worked=True)
    m.handle(2.0, Exited("cell", -9))
    m.handle(2.5, StopAsked(130))
    assert m.processes["cell"].health is Health.GONE
    assert Start("cell") not in m.handle(9.0, Tick())


def test_an_early_end_of_an_engine_is_a_failure() -> None:
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


@pytest.mark.pain(1)
def test_no_hello_is_a_failure_with_a_name() -> None:
    m = Machine([Process(name="buffer", kind="buffer"), Process(name="box", kind="sandbox")], now=0.0, start_timeout_s=60.0, silent_s=1e3)
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


@pytest.mark.pain(13)
def test_a_slow_start_is_no_death() -> None:
    """Pains 13: an engine that says hello and loads for an hour is neither killed nor given up."""
    m = Machine([Process(name="cell", kind="rollout")], now=0.0, start_timeout_s=60.0)
    for second in range(1, 3600):
        assert m.handle(float(second), HelloSeen("cell")) == []
        assert [e for e in m.handle(float(second), Tick()) if not isinstance(e, Dump)] == []
    assert m.ending is None


def test_silence_is_a_loss_and_long_silence_a_death() -> None:
    m = Machine([Process(name="cell", kind="rollout")], now=0.0, start_timeout_s=60.0, silent_s=20.0, stall_s=300.0)
    m.handle(1.0, HelloSeen("cell", True))
    assert m.handle(21.0, Tick()) == []
    assert m.handle(21.5, Tick()) == [Missing("cell", "is silent for 20 s")]
    assert m.handle(22.0, Tick()) == []  # said once
    m.handle(23.0, HelloSeen("cell"))  # stopped and woken
    assert m.handle(44.0, Tick()) == [Missing("cell", "is silent for 21 s")]
    assert Kill("cell") in m.handle(330.0, Tick())
    assert m.handle(331.0, Exited("cell", -9)) == [Missing("cell", "was killed by signal 9")]
    assert m.handle(332.0, Tick()) == [Start("cell")]


@pytest.mark.pain(4)
def test_no_progress_is_dumped_once() -> None:
    """Pains 4."""
    m = up()
    m._stall_s = 300.0
    m.handle(100.0, Progress())
    for name in NAMES:
        m.handle(399.0, HelloSeen(name, True))
    assert m.handle(400.0, Tick()) == []
    assert m.handle(400.5, Tick()) == [Dump(("buffer", "core", "cell", "box"), 300.5)]
    assert m.handle(401.0, Tick()) == []
    m.handle(402.0, Progress())
    for name in NAMES:
        m.handle(700.0, HelloSeen(name, True))
    assert m.handle(703.0, Tick()) == [Dump(("buffer", "core", "cell", "box"), 301.0)]


@pytest.mark.pain(4)
def test_who_loads_does_not_stall_unless_for_too_long() -> None:
    """Pains 4 and 13: so it is at its start, and when it starts again."""
    m = Machine([Process(name=n, kind=n) for n in ("buffer", "rollout")], now=0.0, start_timeout_s=600.0, silent_s=50.0, stall_s=100.0)

    def dumps(begin: int, end: int, *, through: bool) -> list[int]:
        found = []
        for second in range(begin, end):
            m.handle(float(second), HelloSeen("buffer", True))
            m.handle(float(second), HelloSeen("rollout", through))
            found += [second for e in m.handle(float(second), Tick()) if isinstance(e, Dump)]
        return found

    assert dumps(1, 601, through=False) == []
    assert dumps(601, 800, through=True) == [701]
    m.handle(800.0, Progress())
    m.handle(800.0, Exited("rollout", -9))
    m.handle(802.0, Tick())
    assert dumps(803, 1600, through=False) == [1504], "it never got through"


def test_a_process_is_added_and_taken_out() -> None:
    m = up()
    assert m.handle(2.0, Added(Process(name="new", kind="rollout"))) == [Start("new", again=False)]
    m.handle(3.0, HelloSeen("new", True))
    assert m.handle(4.0, Removed("new")) == [TellStop("new", "taken out of the hosts file")]
    assert m.handle(4.1 + STOP_S, Tick()) == [Terminate("new")]
    assert m.handle(50.0, Exited("new", 143)) == []
    assert m.handle(99.0, Tick()) == [] and m.ending is None


def test_a_bug_that_comes_again_ends_the_run() -> None:
    m = up(worked=True)
    assert m.handle(10.0, Exited("core", 70)) == [Missing("core", "ended with exit code 70")] and m.ending is None
    m.handle(11.0, Tick())
    m.handle(12.0, HelloSeen("core", True))
    m.handle(15.0, Exited("core", 70))
    assert m.ending == End(1, "core ended with exit code 70", "core")


def test_a_process_that_finds_the_run_busy_is_the_runs_exit() -> None:
    m = up()
    m.handle(2.0, Exited("buffer", 75))
    assert m.ending == End(75, "buffer ended with exit code 75", "buffer")
