"""When processes start, start again and stop, and how the run ends. Pure: events and time in, effects out.

Invariants
- Stages start and stop as wholes: buffer, then trainers, engines and sandboxes; they stop in the order of `STOP_ORDER`, the buffer last.
- A process that fails before it has ever worked (a bug, a bad configuration) ends the run with its traceback. One that has worked, or was killed, is
  started again, at most `RESTARTS` times in a row with growing pauses; then it is given up, and the run goes on if there are others of its kind.
- The buffer that ends with 0 ends the run; a sandbox or a trainer may do so when every step is committed.
- Every wait has a deadline: a process told to stop is terminated after `STOP_S` and killed after `KILL_S` more; no hello in time fails the run.
  A slow start is no failure: once it said hello, a process may load for as long as it says that it lives.
- The ranks of a cell's further hosts say nothing. They end with the cell's trainer, and are started again whatever they ended of.
- A process that falls silent is lost after `silent_s`, and killed, hence started again, after `stall_s`. When nothing progresses for `stall_s`, the
  stacks of all are dumped, once. Time in which a process loads, or is to be started again, is no stall; it may take `start_timeout_s`.
- A process's health changes by the table `HEALTH` and nowhere else. Whether an engine takes calls follows from what it says it serves (roles.py), so
  one that is not healthy is in no route table as open.

Not here: what a cell is (roles.py).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, assert_never

import msgspec

from gyre.errors import EXIT_BUG, EXIT_BUSY, EXIT_FAILED, EXIT_OK, EXIT_USAGE

STOP_S: Final = 30.0
KILL_S: Final = 5.0
EARLY_S: Final = 10.0  # the buffer's word that all steps are done may come this much after a trainer's end; when it is not heard, later
RESTARTS: Final = 5
BACKOFF_S: Final = (1.0, 60.0)  # the first pause, doubled each time up to the second
HEALTHY_S: Final = 300.0  # after so long a life, deaths before it do not count
UNREACHED: Final = 255  # instead of an exit code: ssh did not get there
STOP_ORDER: Final = ("sandbox", "train", "rank", "rollout", "buffer")


class Health(StrEnum):
    """Of a process."""

    RESTARTING = "restarting"  # launched, for the first time or again; no hello yet
    STALE = "stale"  # said hello, and is not through its start: an engine without a policy, whoever still loads
    HEALTHY = "healthy"
    SUSPECT = "suspect"  # silent
    DEAD = "dead"  # to be started again
    STOPPING = "stopping"
    GONE = "gone"


class Sign(StrEnum):
    """What changes it."""

    HELLO = "hello"  # a status of one that has not got through its start, or is in another
    WORKS = "works"  # a status of one that has
    SILENT = "silent"
    DIED = "died"
    DUE = "due"  # its pause is over
    STOP = "stop"
    ENDED = "ended"


HEALTH: Final[dict[tuple[Health, Sign], Health]] = {
    (Health.RESTARTING, Sign.HELLO): Health.STALE,
    (Health.RESTARTING, Sign.WORKS): Health.HEALTHY,
    (Health.STALE, Sign.WORKS): Health.HEALTHY,
    (Health.HEALTHY, Sign.HELLO): Health.STALE,
    (Health.STALE, Sign.SILENT): Health.SUSPECT,
    (Health.HEALTHY, Sign.SILENT): Health.SUSPECT,
    (Health.SUSPECT, Sign.HELLO): Health.STALE,
    (Health.SUSPECT, Sign.WORKS): Health.HEALTHY,
    (Health.DEAD, Sign.DUE): Health.RESTARTING,
    (Health.DEAD, Sign.STOP): Health.GONE,
    **{(h, Sign.DIED): Health.DEAD for h in (Health.RESTARTING, Health.STALE, Health.HEALTHY, Health.SUSPECT)},
    **{(h, Sign.STOP): Health.STOPPING for h in (Health.RESTARTING, Health.STALE, Health.HEALTHY, Health.SUSPECT)},
    **{(h, Sign.ENDED): Health.GONE for h in (Health.RESTARTING, Health.STALE, Health.HEALTHY, Health.SUSPECT, Health.STOPPING)},
}
"""A pair that is not here changes nothing: the words of one that has ended may arrive late."""

UP: Final = frozenset((Health.STALE, Health.HEALTHY, Health.SUSPECT))


class Process(msgspec.Struct, kw_only=True):
    """What the machine knows of one process."""

    name: str
    kind: str  # buffer | sandbox | rollout | train | rank
    health: Health = Health.RESTARTING
    since: float = 0.0  # that it is up, or in what health it else is
    pressed: int = 0  # how hard it was asked to go: 0 not, 1 told, 2 terminated, 3 killed
    worked: bool = False  # ever
    loads_since: float | None = None  # None: it is through its start
    deaths: int = 0  # in a row
    heard_at: float = 0.0
    expected: bool = False  # its end is: it was taken out of the hosts file


# events
class HelloSeen(msgspec.Struct, frozen=True):
    """A status. `worked`: it has got through its start."""

    name: str
    worked: bool = False


class Exited(msgspec.Struct, frozen=True):
    name: str
    code: int


class RunFinished(msgspec.Struct, frozen=True):
    """The buffer says that nothing is left to do."""


class StepsDone(msgspec.Struct, frozen=True):
    """The buffer has every step committed: trainers may end."""


class RunFailed(msgspec.Struct, frozen=True):
    reason: str


class StopAsked(msgspec.Struct, frozen=True):
    code: int


class Progress(msgspec.Struct, frozen=True):
    """The buffer's counters came, and changed."""

    changed: bool = True


class Added(msgspec.Struct, frozen=True):
    process: Process


class Removed(msgspec.Struct, frozen=True):
    name: str


class Tick(msgspec.Struct, frozen=True):
    pass


Event = HelloSeen | Exited | StepsDone | RunFinished | RunFailed | StopAsked | Progress | Added | Removed | Tick


# effects
class Start(msgspec.Struct, frozen=True):
    """Start it (again, if `again`)."""

    name: str
    again: bool = True


class TellStop(msgspec.Struct, frozen=True):
    name: str
    reason: str


class Terminate(msgspec.Struct, frozen=True):
    name: str


class Kill(msgspec.Struct, frozen=True):
    name: str


class Missing(msgspec.Struct, frozen=True):
    """Nothing can be expected of this process for now."""

    name: str
    reason: str


class GiveUp(msgspec.Struct, frozen=True):
    """It will not be started again; the run goes on without it."""

    name: str


class Dump(msgspec.Struct, frozen=True):
    """Nothing has progressed: put the stacks of these processes into their logs, and say what is known."""

    names: tuple[str, ...]
    idle_s: float


class End(msgspec.Struct, frozen=True):
    """All processes are gone: the coordinator ends with `code`; `culprit` is the process whose log explains a failure."""

    code: int
    reason: str
    culprit: str | None


Effect = Start | TellStop | Terminate | Kill | Missing | GiveUp | Dump | End


class Machine:
    """The coordinator's mind, as far as processes go."""

    def __init__(
        self, processes: list[Process], *, now: float, start_timeout_s: float, silent_s: float = 20.0, stall_s: float = 300.0
    ) -> None:  # fmt: skip
        self.processes = {p.name: p for p in processes}
        self.ending: End | None = None
        self.steps_done = False
        self._start_timeout_s, self._silent_s, self._stall_s = start_timeout_s, silent_s, stall_s
        self._progress_at, self._dumped = now, False
        self._counted_at = now
        self._removed = False  # was anybody told to go, in the midst of the run?
        self._effects: list[Effect] = []
        for p in processes:
            p.since = p.heard_at = now

    def handle(self, now: float, event: Event) -> list[Effect]:
        match event:
            case HelloSeen(name, worked):
                p = self.processes[name]
                self._turn(now, p, Sign.WORKS if worked else Sign.HELLO)
                p.heard_at, p.worked = now, p.worked or worked
                p.loads_since = None if worked else now if p.loads_since is None else p.loads_since
            case Exited(name, code):
                self._exited(now, self.processes[name], code)
            case StepsDone():
                self.steps_done = True
            case RunFinished():
                self._end(EXIT_OK, "the run is finished")
            case RunFailed(reason):
                self._end(EXIT_FAILED, reason, "buffer")
            case StopAsked(code):
                self._end(code, "asked to stop")
            case Progress(changed):
                self._counted_at = now
                if changed:
                    self._progress_at, self._dumped = now, False
            case Added(process):
                process.since = process.heard_at = now
                self.processes[process.name] = process
                self._effects.append(Start(process.name, again=False))
            case Removed(name):
                self._remove(now, self.processes[name])
            case Tick():
                for p in self.processes.values():
                    self._tick(now, p)
                self._watch(now)
            case _:
                assert_never(event)
        if not isinstance(event, HelloSeen):
            self._press(now)
        effects, self._effects = self._effects, []
        return effects

    @staticmethod
    def _turn(now: float, p: Process, sign: Sign) -> None:
        """The only place where a health changes."""
        before, p.health = p.health, HEALTH.get((p.health, sign), p.health)
        if p.health is not before and not (before in UP and p.health in UP):
            p.since = now

    def _tick(self, now: float, p: Process) -> None:
        waited_s = now - p.since
        match p.health:
            case Health.RESTARTING if waited_s > self._start_timeout_s and p.kind != "rank":
                self._end(EXIT_FAILED, f"gave up after {self._start_timeout_s:.0f} s waiting for the hello of {p.name}", p.name)
            case Health.GONE if p.kind in ("train", "sandbox") and not self.steps_done and not p.expected and self._counted_at > p.since + EARLY_S:
                self._end(EXIT_FAILED, f"{p.name} ended before the run's last step", p.name)
            case Health.DEAD if waited_s >= self._pause_s(p) and self.ending is None:
                self._turn(now, p, Sign.DUE)
                p.heard_at, p.pressed = now, 0
                self._effects.append(Start(p.name))
            case _ if p.health not in UP or self.ending is not None:
                pass
            case _ if now - p.heard_at > self._stall_s:
                p.heard_at, p.pressed = now, 3
                self._effects.append(Kill(p.name))
            case _ if now - p.heard_at > self._silent_s and p.health is not Health.SUSPECT:
                self._turn(now, p, Sign.SILENT)
                self._effects.append(Missing(p.name, f"is silent for {now - p.heard_at:.0f} s"))
            case _:
                pass

    def _watch(self, now: float) -> None:
        if any(self._loads(now, p) for p in self.processes.values()):
            self._progress_at = now
        idle_s = now - self._progress_at
        if idle_s > self._stall_s and not self._dumped and self.ending is None:
            self._dumped = True
            self._effects.append(Dump(tuple(p.name for p in self.processes.values() if p.health in UP), idle_s))

    def _loads(self, now: float, p: Process) -> bool:
        if p.health in UP:
            return p.loads_since is not None and now - p.loads_since <= self._start_timeout_s
        return p.health in (Health.RESTARTING, Health.DEAD)

    @staticmethod
    def _pause_s(p: Process) -> float:
        first, most = BACKOFF_S
        return min(most, first * 2.0 ** (p.deaths - 1))

    def _exited(self, now: float, p: Process, code: int) -> None:
        was, lived_s = p.health, now - p.since
        how = "cannot be reached" if code == UNREACHED else f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        again_a_bug = code == EXIT_BUG and p.deaths > 0 and lived_s <= HEALTHY_S
        again = False
        if was is Health.STOPPING:
            if code not in (0, 130, 143) and p.pressed < 2:
                self._end(EXIT_FAILED, f"{p.name} {how} while stopping", p.name)
        elif code == 0 and p.kind != "rollout":
            if p.kind == "buffer":
                self._end(EXIT_OK, "the run is finished")
        elif p.expected or self.ending is not None:
            pass
        elif 0 <= code < UNREACHED and (not p.worked or again_a_bug) and p.kind != "rank":  # it will go on coming
            self._end(code if code in (EXIT_USAGE, EXIT_BUSY) else EXIT_FAILED, f"{p.name} {how}", p.name)
        else:
            again = self._died(p, how, code, lived_s)
        self._turn(now, p, Sign.DIED if again else Sign.ENDED)

    def _died(self, p: Process, how: str, code: int, lived_s: float) -> bool:
        """Is it to be started again?"""
        p.deaths = 1 if lived_s > HEALTHY_S else p.deaths + 1
        self._effects.append(Missing(p.name, how))
        if p.deaths <= RESTARTS:
            return True
        if any(q.kind == p.kind and q is not p and not q.expected and q.health is not Health.GONE for q in self.processes.values()):
            p.expected = True
            self._effects.append(GiveUp(p.name))
        else:
            reason = f"{p.name} {how}, the last of {p.deaths} times in a row"
            self._end(EXIT_USAGE if code == EXIT_USAGE else EXIT_FAILED, reason, p.name)
        return False

    def _remove(self, now: float, p: Process) -> None:
        p.expected = self._removed = True
        if p.kind == "rank" and p.health is not Health.DEAD:
            return  # its trainer ends it
        self._turn(now, p, Sign.STOP)
        if p.health is Health.STOPPING and p.pressed == 0:
            p.pressed = 1
            self._effects.append(TellStop(p.name, "taken out of the hosts file"))

    def _end(self, code: int, reason: str, culprit: str | None = None) -> None:
        if self.ending is None or (self.ending.code == EXIT_OK and code != EXIT_OK):
            self.ending = End(code, reason, culprit)

    def _press(self, now: float) -> None:
        """Ask the first stage that is still there to go, and whoever was asked already, harder as time passes."""
        if self.ending is None and not self._removed:
            return
        for p in self.processes.values():
            if self.ending is not None and p.health is Health.DEAD:
                self._turn(now, p, Sign.STOP)
        here = [p for p in self.processes.values() if p.health is not Health.GONE]
        if self.ending is not None and not here:
            self._effects.append(self.ending)
            return
        stage = min((STOP_ORDER.index(p.kind) for p in here), default=0) if self.ending is not None else None
        for p in here:
            if p.health is not Health.STOPPING:
                if self.ending is None or STOP_ORDER.index(p.kind) != stage:
                    continue
                never_up = p.health is Health.RESTARTING
                self._turn(now - (STOP_S if never_up else 0.0), p, Sign.STOP)
                p.pressed = max(p.pressed, 2 if never_up else 1)
                self._effects.append(Terminate(p.name) if never_up else TellStop(p.name, self.ending.reason))
            elif p.pressed == 1 and now - p.since > STOP_S:
                p.pressed = 2
                self._effects.append(Terminate(p.name))
            elif p.pressed == 2 and now - p.since > STOP_S + KILL_S:
                p.pressed = 3
                self._effects.append(Kill(p.name))
