"""What is random in a world, drawn from its seed before it begins: sizes, weather, who comes and goes, and which faults strike where.

Invariant: a plan is a function of its seed, and prints as what a reader of a failure needs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from gyre.config import Config
from theorem.network import Weather

CORE_MOMENTS: Final = (
    "ClaimMicroStep", "Accumulated", "SealStep", "CommitStep", "VoidIncarnations", "Published", "CheckpointSaved", "RenewClaims", "AcquireTerm",
    "StepOffer", "ReduceOrder", "StepEnded", "Hold", "accumulate", "update", "reduce", "broadcast", "save", "lend",
)  # fmt: skip
SATELLITE_MOMENTS: Final = ("JoinStep", "ClaimMicroStep", "Accumulated", "AttendStep", "RenewClaims", "accumulate", "reduce", "broadcast", "install")
BUFFER_MOMENTS: Final = ("TermGranted", "MicroStepClaimed", "NothingToClaim", "Manifest", "Ack", "Refuse", "Tickets")
SANDBOX_MOMENTS: Final = ("LeaseTickets", "RolloutEnded", "RenewLeases")
MOMENTS: Final = {"core": CORE_MOMENTS, "satellite": SATELLITE_MOMENTS, "buffer": BUFFER_MOMENTS, "sandbox": SANDBOX_MOMENTS}


@dataclass(frozen=True)
class Fault:
    """At the `nth` time that a process of this kind says or does `moment`, `turns` turns later, it is killed, stopped or cut off for `seconds`."""

    what: str  # kill | stop | cut
    kind: str  # core | satellite | buffer | sandbox
    moment: str
    nth: int
    turns: int
    seconds: float
    other: str = ""  # cut off from this process alone


@dataclass(frozen=True)
class Move:
    """A satellite is told to train, or to leave."""

    at_s: float
    cell: str
    trains: bool


@dataclass(frozen=True)
class Plan:
    """One world."""

    seed: int
    config: Config
    weather: Weather
    satellites: int
    moves: tuple[Move, ...]
    faults: tuple[Fault, ...]
    sandboxes: int
    slots: int
    rollout_s: float
    trouble: float  # executions that end without a grade
    rewards: int
    compute_s: float
    collective_s: float
    collective_trouble: float
    patience_s: float  # a core that is stopped for longer is replaced
    restart_s: float
    promote: float  # probability that another cell follows a lost core

    @property
    def groups(self) -> int:
        """No more than so many are ever admitted; a bound for the learner's counts."""
        return 400


def draw(seed: int) -> Plan:
    """The world of a seed. One in six is calm: no faults, only cells that come and go."""
    rng = random.Random(f"plan/{seed}")
    calm = seed % 6 == 0
    satellites = rng.choice((1, 1, 2, 2, 3, 4))
    faults = () if calm else tuple(_fault(rng) for _ in range(rng.choice((1, 2, 2, 3, 4, 6))))
    rough = 0.0 if calm else rng.choice((0.0, 0.3, 1.0))
    return Plan(
        seed=seed,
        config=_config(rng, seed),
        weather=Weather(
            delay_s=rng.choice((0.01, 0.05, 0.2)), late=0.1 * rough, late_s=rng.choice((0.5, 2.0)), lost=0.05 * rough, doubled=0.1 * rough,
            broken=0.05 * rough,
        ),
        satellites=satellites,
        moves=_moves(rng, satellites),
        faults=faults,
        sandboxes=rng.choice((1, 2)),
        slots=rng.choice((2, 4, 8)),
        rollout_s=rng.choice((0.5, 2.0, 5.0)),
        trouble=rng.choice((0.0, 0.1, 0.3)),
        rewards=rng.choice((2, 3, 5)),
        compute_s=rng.choice((0.2, 0.5, 1.0)),
        collective_s=rng.choice((0.05, 0.5)),
        collective_trouble=0.0 if calm else rng.choice((0.0, 0.0, 0.05, 0.2)),
        patience_s=rng.choice((2.0, 8.0)),
        restart_s=rng.choice((0.5, 3.0)),
        promote=rng.choice((0.0, 0.5, 1.0)),
    )  # fmt: skip


def _moves(rng: random.Random, satellites: int) -> tuple[Move, ...]:
    moves = []
    for i in range(satellites):
        at_s, trains = rng.choice((0.0, 10.0 * rng.random())), True
        for _ in range(rng.choice((1, 1, 2, 4, 8))):
            moves.append(Move(at_s, f"c{i + 1}", trains))
            at_s, trains = at_s + rng.expovariate(1 / 8.0), not trains
    return tuple(sorted(moves, key=lambda m: m.at_s))


def _fault(rng: random.Random) -> Fault:
    kind = rng.choice(("core", "core", "core", "satellite", "satellite", "satellite", "buffer", "sandbox"))
    what = rng.choice(("kill", "kill", "stop", "stop", "cut")) if kind in ("core", "satellite") else rng.choice(("kill", "kill", "stop"))
    return Fault(what, kind, rng.choice(MOMENTS[kind]), rng.randint(1, 4), rng.choice((0, 1, 1, 2, 3, 5, 8, 13)), rng.choice((1.0, 4.0, 12.0, 30.0)))


def _config(rng: random.Random, seed: int) -> Config:
    steps_per_burst = rng.choice((1, 1, 2))
    dispatch = rng.choice(("boundary", "continuous"))
    staleness = (steps_per_burst - 1) / 2 + (rng.choice((0.0, 1.0)) if dispatch == "boundary" else rng.choice((1.0, 2.0)))
    tables: dict[str, dict[str, Any]] = {
        "run": {"seed": seed, "max_infra_failures": 10_000},
        "system": {
            "groups_per_step": rng.choice((1, 2, 3, 4)),
            "rollouts_per_group": rng.choice((2, 3, 4)),
            "steps_per_burst": steps_per_burst,
            "dispatch": dispatch,
            "target_staleness": staleness,
            "min_group": rng.choice((1, 2)),
            "on_discard": rng.choice(("shrink", "replace")),
        },
        "sandbox": {"lease_ttl_s": 6.0, "reissues": rng.choice((1, 5))},
        "train": {
            "steps": rng.choice((2, 3, 4)),
            "micro_step_tokens": rng.choice((1, 12, 30)),
            "claim_ttl_s": rng.choice((3.0, 6.0)),
            "reduce_timeout_s": rng.choice((2.0, 5.0)),
            "core_timeout_s": 60.0,
            "checkpoint_every": rng.choice((1, 2, 0)),
            "lr": 0.1,
            "clip_norm": rng.choice((0.0, 0.05, 1.0)),
        },
        "net": {"resend_s": rng.choice((1.0, 2.5)), "request_timeout_s": 60.0},
    }
    return msgspec.convert(tables, Config)
