"""Which cell is what, and how one turns. Pure: statuses, counters and time in, orders out.

Invariants
- A cell's trainer is told to train only when its engine said, to this very order, that it is asleep; its engine is told to serve only when the
  trainer said that it is idle. A process that does not live holds nothing.
- What a trainer loads at its first order takes the device: it gets that order only when the engine sleeps, and says idle when it has left it.
- An order is repeated until a status reports its epoch and the role wanted, so lost messages and restarted processes change nothing. Epochs grow,
  also past those of a coordinator before this one, which are known from the statuses.
- Phases follow `gyre.rules.roles.CELL_TRANSITIONS`. What a cell is to become follows from the rule alone, or from a turn given up at its deadline.
- Every turn has a deadline; then a complaint names the process waited for and what it says, and the cell is sent home, or asked anew.
- A cell is lost when one of its processes is, and found when all live again. When one of the two is given up for good, the cell goes on as what the
  other makes it; the core is then the next cell with a trainer, in the order of the hosts file, and all are told.

Not here: starting and stopping processes (machine.py), sockets (shell.py), the rules (gyre/rules).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, assert_never

import msgspec

from gyre.coord.cells import (
    Cell,
    Complain,
    Counted,
    Done,
    Effect,
    Event,
    Followed,
    GivenUp,
    Heard,
    Joined,
    Level,
    Lost,
    Report,
    Retire,
    Retired,
    SendRole,
    SendRoutes,
    Tick,
)
from gyre.rules.roles import CellEvent, CellPhase, CellView, Known, Move, Rule, Stay, View, turned
from gyre.wire.messages import Route

REPEAT_S: Final = 1.0
_MOVES_AT_ONCE: Final = 64


class _Part(msgspec.Struct):
    """A process of a cell, as its statuses tell."""

    role: str = ""
    epoch: int = 0
    live: bool | None = None  # None: not heard of yet
    asked_at: float = float("-inf")
    asked_epoch: int = 0
    asked: str = ""
    begins: bool = False  # a trainer in a new life, or with another core: at its next order it loads, which takes the device


class Roles:
    """The cells of a run under a rule."""

    def __init__(
        self, cells: list[Cell], rule: Rule, *, rule_name: str, now: float, groups_per_step: int, steps_per_burst: int,
        deadline_s: float, rollouts_per_group: int = 0, known: Callable[[float], Known | None] | None = None,
    ) -> None:  # fmt: skip
        self.cells = {c.name: c for c in cells}
        self.core = next((c.name for c in cells if c.trainer is not None), "")
        self.level: Level | None = None
        self.ending = False
        self._rule, self._rule_name = rule, rule_name
        self._b, self._n, self._mu, self._deadline_s = groups_per_step, rollouts_per_group, steps_per_burst, deadline_s
        self._known = known
        self._epoch = 0
        self._parts = {p: _Part() for c in cells for p in c.parts}
        self._of = {p: c for c in cells for p in c.parts}
        self._leaving: set[str] = set()
        self._stay: tuple[Stay, tuple[object, ...]] | None = None
        self._moved = True  # has a cell turned, come or gone since the rule was asked?
        self._table: dict[str, Route] = {}
        self._ranked = self._told = False  # are its cells and their order what there is? Was it told?
        self._routes_epoch = 0
        self._renumbered: dict[str, None] = {}  # cells whose orders are to be said
        self._unsettled: dict[str, None] = {}  # cells that time may change: they turn, or somebody has not obeyed yet
        self._effects: list[Effect] = []
        for c in cells:
            self._begin(now, c)

    def handle(self, now: float, event: Event) -> list[Effect]:
        touched = list(self.cells.values())
        if not isinstance(event, Heard | Followed | Counted | Tick):
            self._moved, self._ranked = True, self._ranked and not isinstance(event, Joined | GivenUp)
        match event:
            case Heard(name, role, epoch):
                part, cell = self._parts[name], self._of.get(name)
                if (part.role, part.epoch, part.live) == (role, epoch, True):
                    return []  # most statuses say nothing new, and there are many; what time changes comes with a tick
                others = epoch > 0 and not part.live  # what it says first is no answer to us: it may have the number by chance
                part.role, part.epoch, part.live = role, epoch, True
                part.begins = epoch == 0 or (part.begins and cell is not None and epoch < cell.epoch)
                self._epoch = max(self._epoch, epoch)
                if cell is not None and epoch >= cell.epoch + (not others):
                    self._renumber(cell)
                touched = [cell] if cell is not None and cell.name in self.cells else []
            case Followed(epoch, first):
                if epoch < self._routes_epoch + (not first):
                    return []
                self._epoch, self._told, touched = max(self._epoch, epoch), False, []
            case Lost(name, reason):
                self._lose(now, name, reason)
            case Done(name):
                self._parts[name] = _Part(role="idle", epoch=1 << 62, live=True)
            case GivenUp(name):
                self._give_up(now, name)
            case Counted(level):
                self.level, touched = level, []
            case Joined(cell):
                self.cells[cell.name] = cell
                self._parts |= {p: _Part() for p in cell.parts}
                self._of |= dict.fromkeys(cell.parts, cell)
                self._begin(now, cell)
            case Retired(name):
                self._leaving.add(name)
                self._renumber(self.cells[name])
            case Tick():
                touched = [self.cells[name] for name in self._unsettled]
            case _:
                assert_never(event)
        for cell in list(self.cells.values()) if isinstance(event, Joined) else touched:
            self._advance(now, cell)
        self._decide(now)
        self._renumbered |= dict.fromkeys(c.name for c in touched)
        for name in self._renumbered:
            if name in self.cells:
                self._order(now, self.cells[name])
            else:
                self._unsettled.pop(name, None)
        self._route()
        self._renumbered.clear()
        effects, self._effects = self._effects, []
        return effects

    def view(self, now: float) -> View | None:
        """What the rule is shown; None before the first publication."""
        level = self.level
        if level is None or level.burst == 0:
            return None
        cells = sorted((c for c in self.cells.values() if c.name not in self._leaving), key=lambda c: c.name != self.core)
        return View(
            now=now, cells=tuple(CellView(c.name, c.phase, c.capacity, c.burst, c.fixed) for c in cells),
            water_level=level.water_level, burst=level.burst, steps_left=level.steps_left, ready=level.ready,
            groups_per_step=self._b, steps_per_burst=self._mu, rollouts_per_group=self._n, admitting=level.admitting,
            known=self._known(now) if self._known is not None else None,
        )  # fmt: skip

    def waits(self, now: float) -> list[str]:
        """For whom each turning cell waits, and since when."""
        return [f"{text}, for {now - c.since:.0f} s" for c in self.cells.values() if (text := self._waits_for(c))]

    # --- phases ---------------------------------------------------------------------------------------------------------------------------

    def _begin(self, now: float, cell: Cell) -> None:
        cell.phase = CellPhase.TRAIN if cell.engine is None else CellPhase.TO_ROLLOUT
        cell.since = now
        self._renumber(cell)

    def _renumber(self, cell: Cell) -> None:
        self._epoch += 1
        cell.epoch = self._epoch
        self._renumbered[cell.name] = None

    def _turn(self, now: float, cell: Cell, event: CellEvent, reason: str) -> None:
        before, cell.phase = cell.phase, turned(cell.phase, event)
        cell.since, self._moved = now, True
        if event in (CellEvent.ORDER_TRAIN, CellEvent.ORDER_ROLLOUT, CellEvent.FOUND):
            self._renumber(cell)
        if event is CellEvent.ORDER_TRAIN and self.level is not None:
            cell.burst = self.level.burst
        self._tell(cell, before, reason)

    def _tell(self, cell: Cell, before: CellPhase, reason: str) -> None:
        ends = {CellPhase.TO_TRAIN: ("rollout", "train"), CellPhase.TRAIN: ("rollout", "train"),
                CellPhase.TO_ROLLOUT: ("train", "rollout"), CellPhase.ROLLOUT: ("train", "rollout")}  # fmt: skip
        start, end = ends.get(cell.phase, (str(before), "lost"))
        if before is CellPhase.LOST:
            start = "lost"
        level = self.level
        self._effects.append(
            Report({
                "cell": cell.name, "from": start, "to": end, "phase": str(cell.phase), "reason": reason, "rule": self._rule_name,
                "water_level": level.water_level if level else None, "burst": level.burst if level else None,
            })
        )  # fmt: skip

    def _lose(self, now: float, name: str, reason: str) -> None:
        self._parts[name] = _Part(live=False)
        cell = self._of.get(name)
        if cell is not None and cell.phase is not CellPhase.LOST:
            self._turn(now, cell, CellEvent.LOST, f"{name} {reason}")

    def _give_up(self, now: float, name: str) -> None:
        cell = self._of[name]
        core = name == cell.trainer and cell.name == self.core
        if not cell.fixed:  # the other one goes on, in the role that is left
            cell.trainer, cell.engine = (None, cell.engine) if name == cell.trainer else (cell.trainer, None)
            del self._of[name]
        if core:
            self._promote(now)

    def _promote(self, now: float) -> None:
        """Another trainer is the core from now on; everyone is told, and whoever trains under the old one goes home first."""
        heir = next((c for c in self.cells.values() if c.trainer is not None and c.name != self.core), None)
        if heir is None:
            return
        self._effects.append(Complain(f"the core is now {heir.name}, in place of {self.core}"))
        self.core = heir.name
        for cell in self.cells.values():
            if cell.trainer is not None:
                self._parts[cell.trainer].begins = True
            if not cell.fixed and cell.phase in (CellPhase.TO_TRAIN, CellPhase.TRAIN):
                self._turn(now, cell, CellEvent.ORDER_ROLLOUT, f"{heir.name} is the new core")
            else:
                self._renumber(cell)

    def _says(self, name: str | None, cell: Cell, role: str) -> bool:
        """Does this process say, to the cell's newest order, that it is `role`? One that is not there says what is convenient."""
        if name is None:
            return True
        part = self._parts[name]
        return part.epoch >= cell.epoch and part.role == role

    def _out(self, name: str | None, cell: Cell, role: str) -> bool:
        """Is the other process of the cell out of the way? Dead, or it says so; one that was not heard of yet may be at anything."""
        return name is None or self._parts[name].live is False or self._says(name, cell, role)

    def _asleep(self, cell: Cell) -> bool:
        """Is its engine out of the way, as it started, or by order?"""
        part = self._parts[cell.engine] if cell.engine is not None else _Part()
        return self._out(cell.engine, cell, "asleep") or (part.role, part.epoch) == ("asleep", 0)

    def _advance(self, now: float, cell: Cell) -> None:
        """Take the phase on when the processes say so, and complain when they do not in time."""
        if cell.name in self._leaving:
            if self._out(cell.trainer, cell, "idle") and self._out(cell.engine, cell, "asleep"):
                self._leaving.discard(cell.name)
                del self.cells[cell.name]
                self._moved, self._ranked = True, False
                for p in cell.parts:
                    del self._of[p]
                self._effects.append(Retire(tuple(cell.parts)))
            return
        match cell.phase:
            case CellPhase.LOST if all(self._parts[p].live for p in cell.parts):
                if cell.engine is None:
                    cell.phase, cell.since, self._moved = CellPhase.TRAIN, now, True
                    self._renumber(cell)
                    self._tell(cell, CellPhase.LOST, f"{cell.trainer} is back")
                else:
                    self._turn(now, cell, CellEvent.FOUND, "its processes are back")
            case CellPhase.TO_TRAIN if self._says(cell.trainer, cell, "training"):
                self._turn(now, cell, CellEvent.JOINED, "its trainer joined")
            case CellPhase.ROLLOUT | CellPhase.TO_ROLLOUT if self._put_to_sleep(cell) and self._says(cell.trainer, cell, "idle"):
                self._renumber(cell)  # the trainer is through: the engine may wake
            case CellPhase.TO_ROLLOUT if self._says(cell.engine, cell, "serving"):
                self._turn(now, cell, CellEvent.SERVING, "its engine serves the current policy")
            case CellPhase.TO_TRAIN | CellPhase.TO_ROLLOUT if now - cell.since > self._deadline_s:
                self._late(now, cell)
            case _:
                pass

    def _put_to_sleep(self, cell: Cell) -> bool:
        """Was it the cell's newest order by which its engine sleeps?"""
        return cell.engine is not None and self._parts[cell.engine].epoch == cell.epoch and self._parts[cell.engine].role == "asleep"

    def _late(self, now: float, cell: Cell) -> None:
        waited = f"gave up after {now - cell.since:.0f} s: {self._waits_for(cell)}"
        self._effects.append(Complain(waited))
        if cell.phase is CellPhase.TO_TRAIN:
            self._turn(now, cell, CellEvent.ORDER_ROLLOUT, waited)
        else:
            cell.since = now
            self._renumber(cell)

    def _waits_for(self, cell: Cell) -> str:
        wanted = self._wanted(cell)
        if cell.phase not in (CellPhase.TO_TRAIN, CellPhase.TO_ROLLOUT) or not wanted:
            return ""
        name, _, role = wanted[0]
        part = self._parts[name]
        says = f"it says {part.role or 'nothing'} to order {part.epoch} of {cell.epoch}" if part.live else "it is not there"
        return f"cell {cell.name} ({cell.phase}) waits for {name} to be {role}: {says}"

    # --- orders ---------------------------------------------------------------------------------------------------------------------------

    def _decide(self, now: float) -> None:
        if self.ending or self.level is None or (not self._moved and self._stays(now, self.level)):
            return
        for _ in range(_MOVES_AT_ONCE):
            view = self.view(now)
            if view is None:
                return
            decision = self._rule(view)
            if not isinstance(decision, Move):
                self._stay, self._moved = (decision, self._situation(self.level)), False
                return
            event = CellEvent.ORDER_TRAIN if decision.to is CellPhase.TRAIN else CellEvent.ORDER_ROLLOUT
            self._turn(now, self.cells[decision.cell], event, decision.reason)

    def _situation(self, level: Level) -> tuple[object, ...]:
        """All that is not changed by executions that end, and whether a batch is ready: a commit takes one away."""
        return level.burst, level.steps_left, level.admitting, level.ready >= self._b

    def _stays(self, now: float, level: Level) -> bool:
        """Does the last answer still stand, as far as it says so itself, with the cells as they were?"""
        if self._stay is None or self._stay[1] != self._situation(level):
            return False
        stay = self._stay[0]
        return (stay.above is not None and level.water_level > stay.above) or (stay.until is not None and now < stay.until)

    def _wanted(self, cell: Cell) -> list[tuple[str, str, str]]:
        """What is still to be said and heard now: (process, role to tell it, role that it must report). In the order of a turn."""
        if cell.name in self._leaving:
            found = [(cell.trainer, "rollout", "idle"), (cell.engine, "train", "asleep")]
        elif cell.phase is CellPhase.LOST:
            return []
        elif cell.phase in (CellPhase.TO_TRAIN, CellPhase.TRAIN):
            found = [(cell.engine, "train", "asleep")]
            if self._out(cell.engine, cell, "asleep"):
                found.append((cell.trainer, "train", "training"))
        else:
            found = [(cell.trainer, "rollout", "idle")]
            if cell.trainer is not None and self._parts[cell.trainer].begins and not self._asleep(cell):
                found = [(cell.engine, "train", "asleep")]
            elif self._out(cell.trainer, cell, "idle"):
                found.append((cell.engine, "rollout", "serving"))
        return [(p, order, role) for p, order, role in found if p is not None and not self._says(p, cell, role)]

    def _order(self, now: float, cell: Cell) -> None:
        core, wanted = self.cells.get(self.core), self._wanted(cell)
        if wanted or cell.name in self._leaving or cell.phase not in (CellPhase.ROLLOUT, CellPhase.TRAIN):
            self._unsettled[cell.name] = None
        else:
            self._unsettled.pop(cell.name, None)
        for name, role, _ in wanted:
            part = self._parts[name]
            if (part.asked_epoch, part.asked) == (cell.epoch, role) and now - part.asked_at < REPEAT_S:
                continue
            part.asked_at, part.asked_epoch, part.asked = now, cell.epoch, role
            self._effects.append(SendRole(name, role, cell.epoch, core.core_address if core else "", self.core))

    def _route(self) -> None:
        """The route table, whenever it changes. The last cell to leave rollout stays longest, a fixed one longer still."""
        names = list(self._renumbered)
        if not self._ranked:
            order = sorted((c for c in self.cells.values() if c.engine is not None), key=lambda c: (c.fixed, c.name != self.core))
            self._table = {c.name: Route(c.name, c.address, rank, False) for rank, c in enumerate(order)}
            self._ranked, self._told, names = True, False, list(self._table)
        for cell in (self.cells[name] for name in names if name in self._table):
            route, open = self._table[cell.name], self._says_serving(cell) and self._rolls(cell)
            if route.open is not open:
                self._table[cell.name], self._told = Route(route.cell, route.address, route.rank, open), False
        if not self._told:
            self._told = True
            self._epoch += 1
            self._routes_epoch = self._epoch
            self._effects.append(SendRoutes(self._epoch, tuple(self._table.values())))

    def _says_serving(self, cell: Cell) -> bool:
        return cell.engine is not None and self._parts[cell.engine].role == "serving"

    def _rolls(self, cell: Cell) -> bool:
        return cell.name not in self._leaving and cell.phase not in (CellPhase.TO_TRAIN, CellPhase.TRAIN)
