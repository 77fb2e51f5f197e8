"""A ledger in memory around the machine, and small clients of it, for the tests of this folder."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from gyre.buffer.effects import Deliver, Drop, Effect, Log, Now, Put, Received, Reply, Store, Tick
from gyre.buffer.machine import Machine
from gyre.buffer.queries import Task, TaskSet
from gyre.config import Config
from gyre.types import Ending, LeafClass, RolloutState, Ticket, TrajectoryMeta, Version
from gyre.wire import messages as w
from gyre.wire.rows import ROWS, Codec, GroupRow, GroupState, RolloutRow, Row, StepRow


def config(**keys: Any) -> Config:
    """`table__key=value`."""
    tables: dict[str, dict[str, Any]] = {}
    for dotted, value in keys.items():
        table, _, name = dotted.partition("__")
        tables.setdefault(table, {})[name] = value
    return msgspec.convert(tables, Config)


def tasks(n: int = 6, heldout: int = 0) -> TaskSet:
    return TaskSet(tuple(Task(f"/t/{i}", "kind") for i in range(n)), tuple(Task(f"/h/{i}", f"kind{i % 2}") for i in range(heldout)))


class World:
    """The machine with a durable copy of its rows; `restart` builds a new machine from that copy alone."""

    def __init__(self, cfg: Config, task_set: TaskSet) -> None:
        self.cfg, self.tasks = cfg, task_set
        self.now, self.wall = 100.0, 1e9
        self.rows: dict[tuple[Any, ...], list[Any]] = {}
        self.codecs: dict[type[Row], Codec[Any]] = {r: Codec(r) for r in ROWS}
        self.log: list[Log] = []
        self.ids = itertools.count()
        self.machine = self._machine()

    def _machine(self) -> Machine:
        rows = self.stored()
        rows = [r for r in rows if not (r.TABLE == "micro_steps" and r.state == "committed")]
        machine = Machine(self.cfg, self.tasks, rows, self.clock(), "run")
        self.apply(machine.start(self.clock()))
        return machine

    def stored(self) -> list[Any]:
        return [self.codecs[key[0]].decode(list(self.codecs[key[0]].columns), tuple(values)) for key, values in self.rows.items()]

    def since(self, step: int) -> list[Any]:
        """As `Ledger.rows_from` has them."""
        rows = self.stored()
        groups = {r.group_id for r in rows if isinstance(r, GroupRow) and r.state is GroupState.CONSUMED and (r.step or 0) > step}
        return [r for r in rows if (isinstance(r, StepRow) and r.step >= step) or getattr(r, "group_id", "") in groups]

    def restart(self) -> None:
        self.machine = self._machine()
        self.check()

    def clock(self) -> Now:
        return Now(self.now, self.wall + self.now)

    def apply(self, effects: list[Effect]) -> None:
        puts = []
        for e in effects:
            match e:
                case Put(row):
                    puts.append(row)
                case Drop(row):
                    del self.rows[type(row), *row.key]
                case Store(row):
                    row.segment = 0
                case Log():
                    self.log.append(e)
                case _:
                    pass
        dropped = {(type(e.row), *e.row.key) for e in effects if isinstance(e, Drop)}
        for row in puts:
            if (type(row), *row.key) not in dropped:
                self.rows[type(row), *row.key] = self.codecs[type(row)].values(row)

    def id(self) -> str:
        return f"m{next(self.ids)}"

    def send(self, message: w.Message, to: str = "peer", holder: str = "sb/1") -> list[tuple[Any, w.Message]]:
        """Hand over a message; the replies, as (to, message)."""
        versions = (0, 0) if isinstance(message, w.RolloutEnded) else None
        return self._handle(Received(to, message, holder, versions))

    def tick(self, seconds: float) -> list[tuple[Any, w.Message]]:
        self.now += seconds
        return self._handle(Tick())

    def _handle(self, e: Received | Tick) -> list[tuple[Any, w.Message]]:
        if isinstance(e, Received) and (step := self.machine.missing(e.message)) is not None:
            self.machine.recall(self.since(step))
        effects = self.machine.handle(self.clock(), e)
        self.apply(effects)
        self.check()
        return [(x.to, x.message) for x in effects if isinstance(x, Reply | Deliver)]

    def one(self, message: w.Message, **keys: Any) -> Any:
        """The one reply to a message."""
        replies = [m for _, m in self.send(message, **keys) if m.cause == message.id]
        assert len(replies) == 1, replies
        return replies[0]

    def kinds(self) -> list[str]:
        return [e.kind for e in self.log]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [e.fields for e in self.log if e.kind == kind]

    def check(self) -> None:
        """Independent of the machine's own bookkeeping: recount everything from the rows."""
        s = self.machine.state
        c = self.machine.counters()
        column = self.codecs[RolloutRow].columns.index
        train = [v[column("state")] for (kind, *_), v in self.rows.items() if kind is RolloutRow and v[column("purpose")] == "train"]
        assert c.admitted == len(train) == sum(c.states.values())
        for state in RolloutState:
            assert c.states[state.value] == train.count(state)
        assert len(s.open) == sum(g.state is GroupState.OPEN for g in s.groups.values())
        assert sorted(g for _, g in s.ready) == sorted(g.group_id for g in s.groups.values() if g.state is GroupState.READY)
        assert sorted(s.taken) == sorted(g.group_id for g in s.groups.values() if g.state is GroupState.CLAIMED)
        assert set(s.leases) == {r.rollout_id for r in s.rollouts.values() if r.state in (RolloutState.RUNNING, RolloutState.GRADING)}
        settled = s.meta.settled  # what was consumed until then may be forgotten
        consumed = [g for step in s.steps.values() if step.state == "committed" and step.step > settled for g in step.groups]
        assert len(consumed) == len(set(consumed))
        assert set(consumed) == {g.group_id for g in s.groups.values() if g.state is GroupState.CONSUMED and g.step > settled}
        packed = [(i.rollout_id, i.index) for m in s.micro_steps.values() for i in m.items] + [(i.rollout_id, i.index) for i in s.pending]
        assert len(packed) == len(set(packed))

    # --- clients ---

    def core(self, step: int = 0, cell: str = "core") -> w.TermGranted:
        granted = self.one(w.AcquireTerm(id=self.id(), cell=cell, step=step))
        assert isinstance(granted, w.TermGranted), granted
        return granted

    def publish(self, step: int) -> Any:
        return self.one(w.Published(id=self.id(), version=Version(self.machine.state.meta.term, step), cells=["c"], seconds=0.1))

    def lease(self, n: int = 1, wait_s: float = 0.0, **keys: Any) -> list[Ticket]:
        answer = self.one(w.LeaseTickets(id=self.id(), n=n, wait_s=wait_s), **keys)
        assert isinstance(answer, w.Tickets)
        return answer.tickets

    def end(
        self, ticket: Ticket, reward: float | None = 1.0, ending: Ending = Ending.FINISHED, sizes: tuple[tuple[int, int], ...] = ((10, 4),)
    ) -> Any:
        return self.one(ended(self.id(), ticket, reward, ending, sizes))

    def finish_all(self, reward: float = 1.0) -> int:
        """Lease and end all tickets there are."""
        n = 0
        while leased := self.lease(64):
            for ticket in leased:
                self.end(ticket, reward)
                n += 1
        return n

    def claim(self, step: int, wait_s: float = 0.0, incarnation: str = "i1", term: int | None = None, id: str = "") -> Any:
        term = self.machine.state.meta.term if term is None else term
        return self.one(w.ClaimMicroStep(id=id or self.id(), term=term, step=step, cell="core", incarnation=incarnation, wait_s=wait_s))

    def seal(self, step: int, wait_s: float = 0.0) -> Any:
        return self.one(w.SealStep(id=self.id(), term=self.machine.state.meta.term, step=step, wait_s=wait_s))

    def accumulate(self, micro_step_id: str, step: int, incarnation: str = "i1") -> Any:
        term = self.machine.state.meta.term
        m = w.Accumulated(id=self.id(), term=term, step=step, micro_step_id=micro_step_id, cell="core", incarnation=incarnation)
        return self.one(m)

    def commit(self, step: int, hash: str, term: int | None = None) -> Any:
        term = self.machine.state.meta.term if term is None else term
        return self.one(w.CommitStep(id=self.id(), term=term, step=step, hash=hash, metrics={"loss": 0.5, "bad": float("nan")}))

    def train(self, step: int, incarnation: str = "i1") -> w.Manifest:
        """Claim, accumulate, seal, commit."""
        while isinstance(got := self.claim(step, incarnation=incarnation), w.MicroStepClaimed):
            assert isinstance(self.accumulate(got.micro_step_id, step, incarnation), w.Ack)
        assert isinstance(got, w.NothingToClaim) and got.drained, got
        manifest = self.seal(step)
        assert isinstance(manifest, w.Manifest), manifest
        assert isinstance(self.commit(step, manifest.hash), w.Ack)
        return manifest


def ended(id: str, ticket: Ticket, reward: float | None, ending: Ending, sizes: tuple[tuple[int, int], ...] = ((10, 4),)) -> w.RolloutEnded:
    metas = [TrajectoryMeta(i, LeafClass.MAIN, [], [], n, k) for i, (n, k) in enumerate(sizes)]
    return w.RolloutEnded(
        id=id, rollout_id=ticket.rollout_id, epoch=ticket.epoch, ending=ending, reward=reward, trajectories=metas if reward is not None else []
    )


Outcome = tuple[Ending, float | None, tuple[tuple[int, int], ...]]


def any_outcome(rng: random.Random, faults: bool) -> Outcome:
    """An ending, the reward if it is graded, sizes of trajectories."""
    ending = rng.choice(list(Ending)) if faults and rng.random() < 0.3 else Ending.FINISHED
    graded = ending in (Ending.FINISHED, Ending.HARNESS_TIMEOUT, Ending.CONTEXT_FULL, Ending.TURN_LIMIT, Ending.NO_TRAINABLE_TOKEN)
    sizes = tuple((n, rng.randint(0, n)) for n in (rng.randint(1, 60) for _ in range(rng.randint(1, 3))))
    return ending, float(rng.random() < 0.5) if graded else None, sizes


def simulate(
    seed: int, cfg: Config, task_set: TaskSet, *, faults: bool = True, limit: int = 20_000, outcome: Callable[[World, Ticket], Outcome] | None = None
) -> World:
    """Random sandboxes and a core, losing, repeating and restarting things, until the run is finished. Asserts on a stall.
    `outcome`: of an execution, where it is not to be a random one."""
    rng = random.Random(seed)
    world = World(cfg, task_set)
    held: list[tuple[Ticket, int]] = []  # (ticket, sandbox)
    incarnation = 0
    claimed: list[str] = []
    checkpoint = 0
    world.core()
    world.publish(0)
    old: list[w.Message] = []

    def keep(m: w.Message) -> w.Message:
        old.append(m)
        return m

    for _ in range(limit):
        s = world.machine.state
        if world.machine.finished or world.machine.failure:
            return world
        act = rng.random()
        if faults and act < 0.005:
            world.wall += rng.choice((-1e5, 1e5))  # somebody sets the clock
        elif faults and act < 0.02:
            world.restart()
        elif faults and act < 0.04 and held:
            held = [h for h in held if h[1] != rng.randrange(3)]  # a sandbox dies
        elif faults and act < 0.05:
            world.tick(cfg.sandbox.lease_ttl_s + 1)
        elif faults and act < 0.07 and old:
            world.send(rng.choice(old))
        elif faults and act < 0.08:
            if rng.random() < 0.5:
                checkpoint = s.meta.committed
                world.send(w.CheckpointSaved(id=world.id(), term=s.meta.term, step=checkpoint, path="p"))
            else:
                checkpoint = min(checkpoint, s.meta.committed)
                world.core(checkpoint)
                incarnation, claimed = incarnation + 1, []
                world.publish(checkpoint)
        elif act < 0.35:
            sandbox = rng.randrange(3)
            m = keep(w.LeaseTickets(id=world.id(), n=rng.randint(1, 5), wait_s=0.0))
            held += [(t, sandbox) for t in world.one(m, holder=f"sb/{sandbox}").tickets]
        elif act < 0.7 and held:
            ticket, _ = held.pop(rng.randrange(len(held)))
            ending, reward, sizes = outcome(world, ticket) if outcome else any_outcome(rng, faults)
            world.send(keep(ended(world.id(), ticket, reward, ending, sizes)))
        else:
            step, name = s.meta.committed + 1, f"i{incarnation}"
            if s.publication_due:
                assert isinstance(world.publish(s.meta.committed), w.Ack)
            elif claimed and rng.random() < 0.7:
                if isinstance(world.accumulate(claimed.pop(), step, name), w.Refuse):
                    incarnation, claimed = incarnation + 1, []
            elif step <= s.meta.total_steps:
                got = world.claim(step, incarnation=name)
                if isinstance(got, w.MicroStepClaimed):
                    claimed.append(got.micro_step_id)
                elif isinstance(got, w.Refuse):
                    incarnation, claimed = incarnation + 1, []
                elif got.drained and not claimed:
                    manifest = world.seal(step)
                    if isinstance(manifest, w.Manifest):
                        for m in (manifest, manifest):
                            commit = w.CommitStep(id=world.id(), term=s.meta.term, step=step, hash=m.hash, metrics={})
                            assert isinstance(world.one(keep(commit)), w.Ack)
        world.now += 0.01
    raise AssertionError(f"stalled (seed {seed}): {world.machine.waits(world.clock())} {world.machine.counters()}")


@pytest.fixture
def world() -> Callable[..., World]:
    """`world(n_tasks=…, heldout=…, table__key=…)`."""

    def make(n_tasks: int = 6, heldout: int = 0, **keys: Any) -> World:
        return World(config(**keys), tasks(n_tasks, heldout))

    return make


@pytest.fixture
def run_deterministic() -> Callable[..., World]:
    """`run(seed, order=…, faults=…)`: a configuration from the seed with `run.deterministic`, a history from `order`. What an execution comes to
    follows from its rollout and from the policy at its end, as it does with an engine whose draws are keyed."""

    def outcome(world: World, ticket: Ticket) -> Outcome:
        policy = world.machine.state.published
        assert policy is not None
        rng = random.Random(f"{ticket.rollout_id} {ticket.seed} {policy.step}")
        return Ending.FINISHED, rng.random(), tuple((n, rng.randint(0, n)) for n in (rng.randint(1, 60) for _ in range(rng.randint(1, 3))))

    def run(seed: int, *, order: int, faults: bool) -> World:
        rng = random.Random(seed)
        cfg = config(
            run__deterministic=True,
            run__max_infra_failures=1000,
            system__groups_per_step=rng.choice([1, 2, 3, 5]),
            system__rollouts_per_group=rng.choice([1, 2, 4]),
            system__target_staleness=0.0,
            train__steps=rng.randint(3, 7),
            train__micro_step_tokens=rng.choice([20, 100, 1000]),
            sandbox__reissues=1000,
            tasks__eval_every=rng.choice([0, 1]),
        )
        return simulate(order, cfg, tasks(6, 2), faults=faults, outcome=outcome)

    return run


@pytest.fixture
def run_simulation() -> Callable[[int], World]:
    """A configuration and a history, both drawn from the seed."""

    def run(seed: int) -> World:
        rng = random.Random(seed)
        mu = rng.choice([1, 2, 3])
        dispatch = rng.choice(["boundary", "boundary", "continuous"])
        extra = rng.choice([0.0, 0.5, 1.0]) if dispatch == "boundary" else rng.choice([1.0, 1.5, 2.0])
        cfg = config(
            system__groups_per_step=rng.choice([1, 2, 3, 5]),
            system__rollouts_per_group=rng.choice([1, 2, 4]),
            system__steps_per_burst=mu,
            system__target_staleness=(mu - 1) / 2 + extra,
            system__dispatch=dispatch,
            system__on_discard=rng.choice(["shrink", "replace"]),
            train__steps=rng.randint(1, 7),
            train__micro_step_tokens=rng.choice([20, 100, 1000]),
            sandbox__reissues=rng.choice([0, 2]),
            run__max_infra_failures=1000,
            tasks__eval_every=rng.choice([0, 1, 2]),
            tasks__epochs=rng.choice([0, 1, 2]),
            train__drop_uniform=seed % 5 == 4,
        )
        return simulate(seed, cfg, tasks(rng.choice([3, 6, 20]), rng.choice([0, 3])), faults=seed % 3 > 0)

    return run
