"""Judges of a world: each reads the chronicle and returns what it finds wrong. They share no code with machines, loops or learners.

Invariants of a run that they check
- `partition`: the micro-steps of every committed step hold each trainable trajectory of its groups exactly once, and so did the update's sum.
- `voided`: no incarnation is in a manifest committed after it was voided.
- `cores`: a term is granted once, to one process; only that process commits and publishes under it; terms grow.
- `lineage`: committed steps follow each other; a new term goes back to a step of the lineage; no group is consumed twice in what survives.
- `counts`: in every snapshot the states add up to the executions admitted, and are those of the rows on disk.
- `durable`: what the buffer acknowledged is in its ledger.
- `weights`: the gradient and the weights of every committed step are those of one cell alone, and so are weights wherever they are seen under a
  version's name, which is one that was committed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

from gyre.types import RolloutState
from gyre.wire.messages import Ack, CommitStep, MicroStepClaimed, Published, RolloutEnded, TermGranted
from theorem.buffer import Event
from theorem.chronicle import Chronicle
from theorem.feeder import Execution, execution

Findings = Iterator[str]
Checker = Callable[[Chronicle], Findings]


class _Endings:
    """The graded executions of each group, by the durable log and the feeder's draws."""

    def __init__(self, c: Chronicle) -> None:
        self._graded: dict[str, dict[str, Execution]] = {}
        for e in c.disk.events:
            if e.kind == "rollout_ended" and e.fields["state"] == RolloutState.WAITING:
                rollout, epoch = e.fields["rollout"], e.fields["epoch"]
                outcome = execution(c.seed, rollout, epoch, trouble=c.trouble, rewards=c.rewards)
                self._graded.setdefault(e.fields["group"], {})[rollout] = outcome

    def of(self, groups: list[str]) -> list[list[Execution]]:
        return [list(self._graded.get(g, {}).values()) for g in groups]

    def trajectories(self, groups: list[str]) -> Counter[str]:
        """Those that bear loss, once each."""
        return Counter(f"{r}.{b.index}" for g in groups for r, e in self._graded.get(g, {}).items() for b in e.branches if any(b.trainable))


def _steps(c: Chronicle) -> list[Event]:
    return [e for e in c.disk.events if e.kind == "step"]


def partition(c: Chronicle) -> Findings:
    endings = _Endings(c)
    packed: dict[str, Counter[str]] = {}
    for s in c.said:
        if isinstance(s.message, MicroStepClaimed):
            names = Counter(t.trajectory_id for t in s.message.trajectories)
            if packed.setdefault(s.message.micro_step_id, names) != names:
                yield f"micro-step {s.message.micro_step_id} was delivered with other trajectories than before"
    for e in _steps(c):
        ids = [m for entry in e.fields["entries"] for m in entry["micro_steps"]]
        expected = endings.trajectories(e.fields["groups"])
        found: Counter[str] = Counter()
        for name in ids:
            found += packed.get(name, Counter())
        if len(ids) != len(set(ids)):
            yield f"step {e.fields['step']} of term {e.fields['term']}: a micro-step is in two accumulators"
        if found != expected:
            yield f"step {e.fields['step']} of term {e.fields['term']}: manifest and groups differ by {_difference(found, expected)}"
        update = next((u for u in reversed(c.updates) if (u.term, u.step) == (e.fields["term"], e.fields["step"]) and u.at_s <= e.at_s), None)
        if update is None and expected:
            yield f"step {e.fields['step']} of term {e.fields['term']} was committed without an update"
        if update is not None and update.counts != expected:
            yield f"step {e.fields['step']} of term {e.fields['term']}: its sum and its groups differ by {_difference(update.counts, expected)}"
        graded = sum(len(g) for g in endings.of(e.fields["groups"]))
        if e.fields["stats"]["executions"] != graded:
            yield f"step {e.fields['step']}: divided by {e.fields['stats']['executions']} executions, {graded} were graded"


def _difference(found: Counter[str], expected: Counter[str]) -> str:
    return f"too many {dict(found - expected)}, too few {dict(expected - found)}"


def voided(c: Chronicle) -> Findings:
    dead: set[tuple[str, str]] = set()
    for e in c.disk.events:
        match e.kind:
            case "term":
                dead.clear()
            case "voided":
                dead.add((e.fields["cell"], e.fields["incarnation"]))
            case "step":
                for entry in e.fields["entries"]:
                    if (entry["cell"], entry["incarnation"]) in dead and entry["micro_steps"]:
                        yield f"step {e.fields['step']} holds gradients of {entry['cell']}/{entry['incarnation']}, which was voided"


def cores(c: Chronicle) -> Findings:
    holder: dict[int, str] = {}
    acknowledged = {s.message.cause for s in c.said if isinstance(s.message, Ack)}
    for s in c.said:
        match s.message:
            case TermGranted():
                if holder.setdefault(s.message.term, s.to) != s.to:
                    yield f"term {s.message.term} was granted to {holder[s.message.term]} and to {s.to}"
            case CommitStep() if s.message.id in acknowledged:
                if holder.get(s.message.term) != s.sender:
                    yield f"{s.sender} committed step {s.message.step} under term {s.message.term} of {holder.get(s.message.term)}"
            case Published() if s.message.id in acknowledged:
                if holder.get(s.message.version.term) != s.sender:
                    yield f"{s.sender} published {s.message.version} under the term of {holder.get(s.message.version.term)}"
            case _:
                pass
    terms = [e.fields["term"] for e in c.disk.events if e.kind == "term"]
    if terms != sorted(set(terms)):
        yield f"terms do not grow: {terms}"


def lineage(c: Chronicle) -> Findings:
    term, line = 0, dict[int, list[str]]()
    for e in c.disk.events:
        if e.kind == "term":
            term = e.fields["term"]
            if not 0 <= e.fields["step"] <= len(line):
                yield f"term {term} begins at step {e.fields['step']}, the lineage has {len(line)}"
            line = {k: v for k, v in line.items() if k <= e.fields["step"]}
        elif e.kind == "step":
            step, groups = e.fields["step"], e.fields["groups"]
            if step != len(line) + 1:
                yield f"step {step} was committed after step {len(line)}"
            if e.fields["term"] != term:
                yield f"step {step} was committed under term {e.fields['term']} in term {term}"
            again = set(groups) & {g for past in line.values() for g in past}
            if again or len(groups) != len(set(groups)):
                yield f"step {step} consumes {sorted(again) or groups} again"
            line[step] = groups
        elif e.kind == "publication" and not 0 <= e.fields["step"] <= len(line):
            yield f"version {e.fields['step']} was published with {len(line)} steps committed"


def counts(c: Chronicle) -> Findings:
    for s in c.snapshots:
        rows = {k.value: n for k, n in s.rows.items() if n}
        said = {k: n for k, n in s.counters.states.items() if n}
        if rows != said or sum(said.values()) != s.counters.admitted:
            yield f"at {s.at_s:.3f} s the counters say {said} of {s.counters.admitted}, the rows {rows}"


def durable(c: Chronicle) -> Findings:
    acknowledged = {s.message.cause for s in c.said if s.sender == "buffer" and isinstance(s.message, Ack)}
    steps = {(e.fields["term"], e.fields["step"], e.fields["hash"]) for e in _steps(c)}
    ended = {(e.fields["rollout"], e.fields["epoch"]) for e in c.disk.events if e.kind == "rollout_ended"}
    ended |= {(e.fields["rollout"], e.fields["epoch"] - 1) for e in c.disk.events if e.kind == "reissued"}
    for s in c.said:
        match s.message:
            case CommitStep() as m if m.id in acknowledged and (m.term, m.step, m.hash) not in steps:
                yield f"the commit of step {m.step} was acknowledged to {s.sender} and is not in the ledger"
            case RolloutEnded() as m if m.id in acknowledged and (m.rollout_id, m.epoch) not in ended:
                yield f"the end of {m.rollout_id}/{m.epoch} was acknowledged to {s.sender} and is not in the ledger"
            case _:
                pass


def weights(c: Chronicle) -> Findings:
    states, gradients = _versions(c)
    for sight in c.sights:
        expected = states.get((sight.term, sight.step))
        if expected is None:
            yield f"{sight.where} at {sight.at_s:.3f} s saw version {sight.term}.{sight.step}, which was never committed"
        elif (error := _error(sight.weights, expected)) > c.tolerance:
            yield f"{sight.where} at {sight.at_s:.3f} s: weights of version {sight.term}.{sight.step} are {error:.3g} from one cell's alone"
    for u in c.updates:
        if (u.term, u.step) in gradients:
            errors = _error(u.gradient, gradients[u.term, u.step]), _error(u.weights, states[u.term, u.step])
            if max(errors) > c.tolerance:
                yield f"{u.process}: gradient and weights of step {u.step} of term {u.term} are {errors} from one cell's alone"


def _error(found: Any, expected: Any) -> float:
    """The largest difference, relative to the largest element; infinite where it is no number."""
    found, expected = np.asarray(found), np.asarray(expected)
    error = float(np.abs(found - expected).max()) / max(float(np.abs(expected).max()), 1e-3)
    return error if math.isfinite(error) else math.inf


def _versions(c: Chronicle) -> tuple[dict[tuple[int, int], Any], dict[tuple[int, int], Any]]:
    """The weights of every version that ever existed and the gradient of every committed step, by (term, step), from scratch along each lineage."""
    endings = _Endings(c)
    line = [c.alone.begin()]
    found: dict[tuple[int, int], Any] = {}
    gradients: dict[tuple[int, int], Any] = {}
    for e in c.disk.events:
        if e.kind == "term":
            del line[e.fields["step"] + 1 :]
            found.update({(e.fields["term"], k): c.alone.weights(state) for k, state in enumerate(line)})
        elif e.kind == "step":
            name = e.fields["term"], e.fields["step"]
            state, gradients[name] = c.alone.step(line[-1], endings.of(e.fields["groups"]), e.fields["step"])
            line.append(state)
            found[name] = c.alone.weights(state)
    return found, gradients


CHECKERS: Final[tuple[Checker, ...]] = (partition, voided, cores, lineage, counts, durable, weights)


def judge(c: Chronicle, checkers: tuple[Checker, ...] = CHECKERS) -> list[str]:
    """Everything that is wrong with a world."""
    return [f"{check.__name__}: {finding}" for check in checkers for finding in check(c)]
