"""A process's health, and who is routed to: random lives of engines, as the coordinator's two machines see them together."""

from __future__ import annotations

import random

import pytest

from gyre.coord import machine as m
from gyre.coord.cells import Cell, Effect, Heard, Lost, SendRole, SendRoutes, Tick
from gyre.coord.roles import Roles
from gyre.rules.named import make_rule

HEARABLE = (m.Health.RESTARTING, m.Health.STALE, m.Health.HEALTHY, m.Health.SUSPECT)


def test_the_table_leaves_nobody_behind() -> None:
    """From each health that is not the last one can come to the last; only from dead one starts again; only by a word one is healthy."""
    reached = {m.Health.GONE}
    for _ in m.Health:
        reached |= {before for (before, _), after in m.HEALTH.items() if after in reached}
    assert reached == set(m.Health)
    assert {before for (before, _), after in m.HEALTH.items() if after is m.Health.RESTARTING} == {m.Health.DEAD}
    assert {sign for (_, sign), after in m.HEALTH.items() if after is m.Health.HEALTHY} == {m.Sign.WORKS}
    assert all((h, m.Sign.DIED) in m.HEALTH and (h, m.Sign.STOP) in m.HEALTH for h in HEARABLE)


@pytest.mark.pain(12)
@pytest.mark.parametrize("seed", range(20))
def test_only_who_serves_is_open_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"e{i}" for i in range(3)]
    cells = [Cell(name=n, trainer=None, engine=n, address=n) for n in names]
    roles = Roles(cells, make_rule("elastic"), rule_name="elastic", now=0.0, groups_per_step=1, steps_per_burst=1, deadline_s=1e6)
    machine = m.Machine([m.Process(name=n, kind="rollout") for n in names], now=0.0, start_timeout_s=1e6, silent_s=5.0, stall_s=30.0)
    serves = dict.fromkeys(names, False)  # has said so, since it was last lost
    order = dict.fromkeys(names, 0)
    opened = 0

    def look(effects: list[Effect]) -> None:
        nonlocal opened
        for e in effects:
            if isinstance(e, SendRole):
                order[e.name] = max(order[e.name], e.epoch)
            elif isinstance(e, SendRoutes):
                assert {r.cell for r in e.engines if r.open} <= {n for n in names if serves[n]}, f"seed {seed}"
                opened += any(r.open for r in e.engines)

    def feed(now: float, event: m.Event) -> None:
        for e in machine.handle(now, event):
            if isinstance(e, m.Missing):
                serves[e.name] = False
                look(roles.handle(now, Lost(e.name, e.reason)))

    for step in range(800):
        now, name = step / 4, rng.choice(names)
        if machine.processes[name].health in (*m.UP, m.Health.RESTARTING):
            draw = rng.random()
            if draw < 0.02 and machine.processes[name].deaths < m.RESTARTS:
                order[name] = 0
                feed(now, m.Exited(name, -9))
            elif draw < 0.7:
                role = rng.choice(["asleep", "waking", "serving"]) if order[name] else "asleep"
                serves[name] = role == "serving"
                feed(now, m.HelloSeen(name, role == "serving"))
                look(roles.handle(now, Heard(name, role, order[name])))
                assert machine.processes[name].health is (m.Health.HEALTHY if role == "serving" else m.Health.STALE)
        feed(now, m.Tick())
        look(roles.handle(now, Tick()))
        assert machine.ending is None
    assert opened > 10
