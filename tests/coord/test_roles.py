"""Cells and their roles as literal events and effects, and a property: no trainer beside a waking or serving engine, whatever happens."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gyre.coord.cells import (
    Cell,
    Complain,
    Counted,
    Done,
    Effect,
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
)  # fmt: skip
from gyre.coord.roles import REPEAT_S, Roles
from gyre.rules.named import make_rule
from gyre.rules.roles import CellPhase
from gyre.wire.messages import Route

ROLLOUT, TO_TRAIN, TRAIN, TO_ROLLOUT, LOST = CellPhase.ROLLOUT, CellPhase.TO_TRAIN, CellPhase.TRAIN, CellPhase.TO_ROLLOUT, CellPhase.LOST
FULL, LOW, OVER = Level(20, 1, 1, 0), Level(10, 1, 1, 1), Level(0, 1, 0, 0)


def cell(name: str, trainer: bool = True, engine: bool = True) -> Cell:
    t, e = f"{name}-train", f"{name}-rollout"
    return Cell(name=name, trainer=t if trainer else None, engine=e if engine else None, core_address=f"at-{t}", address=f"at-{e}", capacity=10)


def roles(*cells: Cell, rule: str = "elastic") -> Roles:
    made = list(cells) or [cell("a"), cell("b")]
    return Roles(made, make_rule(rule), rule_name=rule, now=0.0, groups_per_step=2, steps_per_burst=1, deadline_s=60.0)


def orders(effects: list[Effect]) -> list[tuple[str, str]]:
    return [(e.name, e.role) for e in effects if isinstance(e, SendRole)]


def events(effects: list[Effect]) -> list[tuple[Any, ...]]:
    return [tuple(e.fields[k] for k in ("cell", "from", "to", "phase")) for e in effects if isinstance(e, Report)]


def obey(r: Roles, now: float, name: str, role: str) -> list[Effect]:
    """The process says that it is `role`, to its cell's newest order."""
    hello = [] if r._parts[name].live else r.handle(now, Heard(name, "asleep" if name.endswith("rollout") else "idle", 0))
    return [*hello, *r.handle(now, Heard(name, role, r._of[name].epoch))]


def serving(*cells: Cell, rule: str = "elastic") -> Roles:
    """All cells roll out; 20 executions are in flight."""
    r = roles(*cells, rule=rule)
    for c in list(r.cells.values()):
        for name, role in ((c.trainer, "idle"), (c.engine, "serving")):
            if name is not None:
                obey(r, 1.0, name, role)
    r.handle(2.0, Counted(FULL))
    return r


def test_at_the_start_each_engine_wakes_when_its_trainer_has_left_the_device() -> None:
    r = roles()
    first = r.handle(0.0, Tick())
    assert orders(first) == [("a-train", "rollout"), ("b-train", "rollout")]
    assert first[0] == SendRole("a-train", "rollout", 1, "at-a-train", "a")
    assert [e.engines for e in first if isinstance(e, SendRoutes)] == [(Route("a", "at-a-rollout", 0, False), Route("b", "at-b-rollout", 1, False))]
    assert r.handle(0.5, Tick()) == []
    assert len(orders(r.handle(REPEAT_S, Tick()))) == 2, "said again until it is heard"
    assert orders(r.handle(1.0, Heard("b-train", "idle", 0))) == [("b-rollout", "train")], "it was not heard of: it may hold the device"
    assert orders(r.handle(2.5, Heard("b-rollout", "asleep", 0))) == [("b-train", "rollout")], "it does not: it starts asleep"
    assert orders(obey(r, 2.6, "b-train", "leaving")) == [], "what it loads takes the device"
    assert orders(obey(r, 2.7, "b-train", "idle")) == [("b-rollout", "rollout")]
    done = obey(r, 1.0, "b-rollout", "serving")
    assert events(done) == [("b", "train", "rollout", "rollout")]
    (routes,) = [e for e in done if isinstance(e, SendRoutes)]
    assert routes.engines == (Route("a", "at-a-rollout", 0, False), Route("b", "at-b-rollout", 1, True))


def test_a_turn_to_training_and_back() -> None:
    r = serving()
    began = r.handle(3.0, Counted(LOW))
    assert events(began) == [("a", "rollout", "train", "to_train")]
    assert orders(began) == [("a-rollout", "train")], "the trainer is told only when the engine sleeps"
    (report,) = [e for e in began if isinstance(e, Report)]
    assert report.fields["reason"] == "w = 10 <= 10 = the capacity that remains"
    assert (report.fields["water_level"], report.fields["rule"], report.fields["burst"]) == (10, "elastic", 1)
    (routes,) = [e for e in began if isinstance(e, SendRoutes)]
    assert [(x.cell, x.open) for x in routes.engines] == [("a", False), ("b", True)], "routes are switched as the order is given"
    assert orders(obey(r, 3.1, "a-rollout", "closing")) == []
    assert orders(obey(r, 3.2, "a-rollout", "asleep")) == [("a-train", "train")]
    assert obey(r, 3.3, "a-train", "joining") == []
    assert events(obey(r, 3.4, "a-train", "training")) == [("a", "rollout", "train", "train")]
    assert r.cells["a"].burst == 1
    over = r.handle(9.0, Counted(OVER))
    assert events(over) == [("a", "train", "rollout", "to_rollout")] and orders(over) == [("a-train", "rollout")]
    assert orders(obey(r, 9.1, "a-train", "leaving")) == []
    assert orders(obey(r, 9.2, "a-train", "idle")) == [("a-rollout", "rollout")]
    assert events(obey(r, 9.3, "a-rollout", "waking")) == []
    assert events(obey(r, 9.4, "a-rollout", "serving")) == [("a", "train", "rollout", "rollout")]


def test_a_core_that_stayed_for_a_ready_batch_goes_home_when_it_is_consumed() -> None:
    """The publication before waits for this very cell's engine; nothing but the commit changes."""
    r = serving(cell("a"))
    r.handle(3.0, Counted(Level(0, 1, 1, 4)))
    obey(r, 4.0, "a-rollout", "asleep")
    obey(r, 5.0, "a-train", "training")
    assert not events(r.handle(6.0, Counted(Level(0, 1, 0, 2)))) and r.cells["a"].phase is TRAIN, "the next batch is ready"
    assert events(r.handle(7.0, Counted(Level(0, 1, 0, 0)))) == [("a", "train", "rollout", "to_rollout")]


def test_what_a_process_says_to_an_older_order_is_no_answer() -> None:
    r = serving()
    old = r.cells["a"].epoch
    r.handle(3.0, Counted(LOW))
    assert orders(r.handle(3.1, Heard("a-rollout", "asleep", old))) == []
    assert orders(obey(r, 3.2, "a-rollout", "asleep")) == [("a-train", "train")]


def test_a_turn_that_is_late_is_given_up_with_a_name() -> None:
    r = serving()
    r.handle(3.0, Counted(LOW))
    obey(r, 3.1, "a-rollout", "closing")
    assert r.waits(8.0) == ["cell a (to_train) waits for a-rollout to be asleep: it says closing to order 6 of 6, for 5 s"]
    r.handle(4.0, Counted(FULL))
    late = r.handle(63.5, Tick())
    complaint = "gave up after 60 s: cell a (to_train) waits for a-rollout to be asleep: it says closing to order 6 of 6"
    assert Complain(complaint) in late
    assert events(late) == [("a", "train", "rollout", "to_rollout")]
    assert ("a-train", "rollout") in orders(late) or ("a-rollout", "rollout") in orders(late)


@pytest.mark.pain(12)
def test_a_lost_engine_is_not_routed_to_until_it_serves_again() -> None:
    """Pains 12, the coordinator's half."""
    r = serving()
    lost = r.handle(3.0, Lost("b-rollout", "was killed by signal 9"))
    assert events(lost) == [("b", "rollout", "lost", "lost")]
    assert [[x.open for x in e.engines] for e in lost if isinstance(e, SendRoutes)] == [[True, False]]
    back = r.handle(5.0, Heard("b-rollout", "asleep", 0))
    assert events(back) == [("b", "lost", "rollout", "to_rollout")]
    assert orders(back) == [("b-train", "rollout")] and not [e for e in back if isinstance(e, SendRoutes)]
    assert orders(obey(r, 5.5, "b-train", "idle")) == [("b-rollout", "rollout")]
    again = obey(r, 6.0, "b-rollout", "serving")
    assert events(again) == [("b", "train", "rollout", "rollout")]
    assert [[x.open for x in e.engines] for e in again if isinstance(e, SendRoutes)] == [[True, True]]


def test_a_trainer_lost_while_it_trains_comes_home() -> None:
    r = serving()
    r.handle(3.0, Counted(LOW))
    obey(r, 3.1, "a-rollout", "asleep")
    obey(r, 3.2, "a-train", "training")
    assert events(r.handle(4.0, Lost("a-train", "was killed by signal 9"))) == [("a", "train", "lost", "lost")]
    r.handle(4.5, Counted(FULL))
    back = r.handle(5.0, Heard("a-train", "idle", 0))
    assert events(back) == [("a", "lost", "rollout", "to_rollout")]
    assert orders(obey(r, 5.1, "a-train", "idle")) == [("a-rollout", "rollout")]


def test_a_core_given_up_is_promoted_elsewhere_and_all_are_told() -> None:
    r = serving(cell("a"), cell("b"), cell("c"))
    r.handle(3.0, Lost("a-train", "was killed by signal 9"))
    given_up = r.handle(4.0, GivenUp("a-train"))
    assert r.core == "b" and Complain("the core is now b, in place of a") in given_up
    told = [e for e in given_up if isinstance(e, SendRole)]
    for name in ("b-rollout", "c-rollout"):  # while the trainers load anew
        assert (name, "train") in orders(given_up)
        told += [e for e in obey(r, 4.02, name, "asleep") if isinstance(e, SendRole)]
    told += [e for name in ("b-train", "c-train") for e in obey(r, 4.05, name, "idle") if isinstance(e, SendRole)]
    assert {e.core for e in told} == {"at-b-train"} and {e.core_cell for e in told} == {"b"}
    assert {e.name for e in told} == {"a-rollout", "b-train", "b-rollout", "c-train", "c-rollout"}
    assert r.cells["a"].fixed and r.cells["a"].phase is TO_ROLLOUT, "its engine goes on"
    obey(r, 4.1, "a-rollout", "serving")
    view = r.view(5.0)
    assert view is not None and [c.name for c in view.cells] == ["b", "a", "c"], "the core comes first"


def test_a_cell_whose_engine_is_given_up_trains_for_good() -> None:
    r = serving()
    r.handle(3.0, Lost("a-rollout", "was killed by signal 9"))
    r.handle(4.0, GivenUp("a-rollout"))
    assert r.cells["a"].phase is TRAIN and r.cells["a"].fixed and r.core == "a"
    assert orders(r.handle(6.0, Tick())) == [("a-train", "train")]


def test_fixed_cells_are_told_and_never_moved() -> None:
    r = serving(cell("core", engine=False), cell("x", trainer=False), rule="async")
    assert r.cells["core"].phase is TRAIN and r.cells["x"].phase is ROLLOUT
    assert events(r.handle(3.0, Counted(LOW))) == []


def test_all_turn_together_under_colocate() -> None:
    r = serving(rule="colocate")
    all_in = r.handle(3.0, Counted(Level(0, 1, 1, 2)))
    assert [e[0] for e in events(all_in)] == ["a", "b"] and orders(all_in) == [("a-rollout", "train"), ("b-rollout", "train")]


def test_a_trainer_that_has_ended_is_out_of_the_way() -> None:
    r = serving()
    r.handle(3.0, Counted(LOW))
    obey(r, 3.1, "a-rollout", "asleep")
    obey(r, 3.2, "a-train", "training")
    r.handle(4.0, Done("a-train"))
    assert orders(r.handle(5.0, Counted(OVER))) == [("a-rollout", "rollout")]


@pytest.mark.pain(31)
def test_a_cell_joins_and_is_retired() -> None:
    """Pains 31: its engine gives its requests back before its processes are stopped."""
    r = serving()
    r.handle(2.5, Counted(Level(40, 1, 1, 0)))
    joined = r.handle(3.0, Joined(cell("c")))
    assert orders(joined) == [("c-train", "rollout")]
    r.handle(3.4, Heard("c-rollout", "asleep", 0))
    assert orders(obey(r, 3.5, "c-train", "idle")) == [("c-rollout", "rollout")]
    obey(r, 3.6, "c-rollout", "serving")
    leaving = r.handle(4.0, Retired("c"))
    assert ("c-rollout", "train") in orders(leaving)
    assert [[(x.cell, x.open) for x in e.engines] for e in leaving if isinstance(e, SendRoutes)] == [[("a", True), ("b", True), ("c", False)]]
    obey(r, 4.1, "c-train", "idle")
    gone = obey(r, 4.2, "c-rollout", "asleep")
    assert Retire(("c-train", "c-rollout")) in gone
    assert [[x.cell for x in e.engines] for e in gone if isinstance(e, SendRoutes)] == [["a", "b"]]
    assert r.handle(5.0, Lost("c-rollout", "ended")) == []


def test_an_engine_sleeps_while_a_trainer_that_came_back_loads() -> None:
    r = serving()
    r.handle(3.0, Lost("b-train", "was killed by signal 9"))
    assert orders(r.handle(5.0, Heard("b-train", "idle", 0))) == [("b-rollout", "train")]
    assert orders(obey(r, 5.1, "b-rollout", "closing")) == []
    assert orders(obey(r, 5.2, "b-rollout", "asleep")) == [("b-train", "rollout")]
    assert orders(obey(r, 5.3, "b-train", "leaving")) == []
    assert orders(obey(r, 5.4, "b-train", "idle")) == [("b-train", "rollout")], "a new order, which the engine will not take for the old one"
    assert orders(obey(r, 5.5, "b-train", "idle")) == [("b-rollout", "rollout")]
    assert events(obey(r, 5.6, "b-rollout", "serving")) == [("b", "train", "rollout", "rollout")]


def test_a_coordinator_that_comes_back_gives_orders_above_those_of_the_one_before() -> None:
    """Its clock may have been set back, its predecessor may have counted far: what it knows is what they say."""
    r = roles()
    assert ("a-rollout", "rollout") not in orders(r.handle(0.0, Heard("a-rollout", "serving", 900))), "its trainer may be training"
    assert r.cells["a"].epoch > 900
    again = r.handle(0.1, Heard("a-train", "training", 905))
    assert [(e.name, e.role) for e in again if isinstance(e, SendRole)] == [("a-train", "rollout")] and r.cells["a"].epoch > 905
    assert orders(obey(r, 0.5, "a-train", "idle")) == [("a-rollout", "rollout")]
    routes = [e.epoch for e in r.handle(0.6, Followed(2000)) if isinstance(e, SendRoutes)]
    assert routes and routes[0] > 2000
    assert r.handle(0.7, Followed(routes[0])) == []


@pytest.mark.pain(14)
@pytest.mark.parametrize("seed", range(30))
def test_never_a_trainer_beside_an_engine(seed: int) -> None:
    """Processes that obey late, lose orders, die and come back: a trainer trains only while its cell's engine holds nothing, and turns end."""
    rng = random.Random(seed)
    cells = [cell(x) for x in "abcd"[: rng.randint(1, 4)]]
    r = roles(*cells, rule=rng.choice(["elastic", "colocate"]))
    roles_of = {p: ("asleep" if p.endswith("rollout") else "idle") for c in cells for p in c.parts}
    order: dict[str, tuple[int, str]] = dict.fromkeys(roles_of, (0, ""))
    dead: set[str] = set()
    done = {"train": {"train": "training", "rollout": "idle"}, "rollout": {"train": "asleep", "rollout": "serving"}}
    moves = 0

    def take(effects: list[Effect]) -> None:
        nonlocal moves
        for e in effects:
            if isinstance(e, SendRole) and e.name not in dead and rng.random() < 0.8 and e.epoch > order[e.name][0]:
                order[e.name] = e.epoch, e.role
            moves += isinstance(e, Report) and e.fields["phase"] in ("train", "rollout")

    for now in range(600):
        match rng.random():
            case x if x < 0.03 and now < 500:
                name = rng.choice(list(roles_of))
                dead.add(name)
                take(r.handle(now, Lost(name, "died")))
                roles_of[name], order[name] = ("asleep" if name.endswith("rollout") else "idle"), (0, "")
            case x if x < 0.1 and dead:
                dead.discard(rng.choice(sorted(dead)))
            case x if x < 0.5:
                left = rng.choice([0, 1])
                take(r.handle(now, Counted(Level(rng.randint(0, 45), 1 + now // 50, left, rng.randint(0, 4)))))
            case _:
                take(r.handle(now, Tick()))
        for name in roles_of.keys() - dead:
            epoch, wanted = order[name]
            if wanted and rng.random() < 0.5:
                roles_of[name] = done[name.partition("-")[2]][wanted]
            take(r.handle(now, Heard(name, roles_of[name], epoch)))
        for c in cells:
            assert (roles_of[f"{c.name}-train"], roles_of[f"{c.name}-rollout"]) != ("training", "serving"), f"seed {seed}, second {now}"
    assert moves > 3, f"seed {seed}: {moves}"
