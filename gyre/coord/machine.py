"""When processes start, when they are told to stop, and how the run ends. Pure: events and time in, effects out.

Invariants
- Stages start and stop as wholes: buffer, then trainers, engines and sandboxes; they stop in the order of `STOP_ORDER`, the buffer last.
- A process that ends before it was told to fails the run, unless its work is done: the buffer that ends with 0 (its end is the run's), a sandbox or
  a trainer that does so when every step is committed.
- Every wait has a deadline: a process told to stop is terminated after `STOP_S` and killed after `KILL_S` more; no hello in time fails the run.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, assert_never

import msgspec

from gyre.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE

STOP_S: Final = 30.0
KILL_S: Final = 5.0
EARLY_S: Final = 10.0  # the buffer's word that all steps are done may come this much after a trainer's end
STOP_ORDER: Final = ("sandbox", "train", "rollout", "buffer")


class Phase(StrEnum):
    STARTING = "starting"  # launched, no hello yet
    UP = "up"
    STOPPING = "stopping"
    GONE = "gone"


class Process(msgspec.Struct, kw_only=True):
    """What the machine knows of one process."""

    name: str
    kind: str  # buffer | sandbox | rollout | train
    phase: Phase = Phase.STARTING
    since: float = 0.0
    pressed: int = 0  # how hard it was asked to go: 0 not, 1 told, 2 terminated, 3 killed


# events
class HelloSeen(msgspec.Struct, frozen=True):
    name: str


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


class Tick(msgspec.Struct, frozen=True):
    pass


Event = HelloSeen | Exited | StepsDone | RunFinished | RunFailed | StopAsked | Tick


# effects
class TellStop(msgspec.Struct, frozen=True):
    name: str
    reason: str


class Terminate(msgspec.Struct, frozen=True):
    name: str


class Kill(msgspec.Struct, frozen=True):
    name: str


class End(msgspec.Struct, frozen=True):
    """All processes are gone: the coordinator ends with `code`; `culprit` is the process whose log explains a failure."""

    code: int
    reason: str
    culprit: str | None


Effect = TellStop | Terminate | Kill | End


class Machine:
    """The coordinator's mind."""

    def __init__(self, processes: list[Process], *, now: float, start_timeout_s: float) -> None:
        self.processes = {p.name: p for p in processes}
        self.ending: End | None = None
        self._steps_done = False
        self._start_timeout_s = start_timeout_s
        for p in processes:
            p.since = now

    def handle(self, now: float, event: Event) -> list[Effect]:
        match event:
            case HelloSeen(name):
                p = self.processes[name]
                if p.phase is Phase.STARTING:
                    p.phase, p.since = Phase.UP, now
            case Exited(name, code):
                self._exited(now, self.processes[name], code)
            case StepsDone():
                self._steps_done = True
            case RunFinished():
                self._end(EXIT_OK, "the run is finished")
            case RunFailed(reason):
                self._end(EXIT_FAILED, reason, "buffer")
            case StopAsked(code):
                self._end(code, "asked to stop")
            case Tick():
                for p in self.processes.values():
                    if p.phase is Phase.STARTING and now - p.since > self._start_timeout_s:
                        self._end(EXIT_FAILED, f"gave up after {self._start_timeout_s:.0f} s waiting for the hello of {p.name}", p.name)
                    early = p.phase is Phase.GONE and p.kind in ("train", "sandbox") and not self._steps_done
                    if early and now - p.since > EARLY_S:
                        self._end(EXIT_FAILED, f"{p.name} ended before the run's last step", p.name)
            case _:
                assert_never(event)
        return self._press(now)

    def _exited(self, now: float, p: Process, code: int) -> None:
        was, p.phase, p.since = p.phase, Phase.GONE, now
        done = code == 0 and p.kind != "rollout"
        if done and p.kind == "buffer":
            self._end(EXIT_OK, "the run is finished")
        if was is not Phase.STOPPING and not done:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            self._end(EXIT_USAGE if code == EXIT_USAGE else EXIT_FAILED, f"{p.name} {how}", p.name)
        elif was is Phase.STOPPING and code not in (0, 130, 143) and p.pressed < 2:
            self._end(EXIT_FAILED, f"{p.name} ended with exit code {code} while stopping", p.name)

    def _end(self, code: int, reason: str, culprit: str | None = None) -> None:
        if self.ending is None or (self.ending.code == EXIT_OK and code != EXIT_OK):
            self.ending = End(code, reason, culprit)

    def _press(self, now: float) -> list[Effect]:
        """Ask the first stage that is still there to go, harder as time passes."""
        if self.ending is None:
            return []
        here = [p for p in self.processes.values() if p.phase is not Phase.GONE]
        if not here:
            return [self.ending]
        stage = min(STOP_ORDER.index(p.kind) for p in here)
        effects: list[Effect] = []
        for p in (p for p in here if p.kind == STOP_ORDER[stage]):
            if p.phase is not Phase.STOPPING:
                never_up = p.phase is Phase.STARTING
                p.phase, p.since, p.pressed = Phase.STOPPING, now - (STOP_S if never_up else 0.0), 2 if never_up else 1
                effects.append(Terminate(p.name) if never_up else TellStop(p.name, self.ending.reason))
            elif p.pressed == 1 and now - p.since > STOP_S:
                p.pressed = 2
                effects.append(Terminate(p.name))
            elif p.pressed == 2 and now - p.since > STOP_S + KILL_S:
                p.pressed = 3
                effects.append(Kill(p.name))
        return effects
