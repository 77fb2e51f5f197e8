"""Judges of a world with a coordinator, beside those of `checkers`. Like them they read the chronicle alone.

Invariants of a run that they check
- `progress`: the run ends with exit code 0, and within `QUIET_S` after the last fault is over.
- `fates`: an execution ends once under each epoch; at the end of the run each one admitted is consumed, or discarded, and none is both.
- `quota`: unfinished executions are never more than the quota's, and no group is admitted beyond it.
- `leases`: a ticket is leased to one holder at a time, and only its holder's outcome is taken.
- `tokens`: each token that is trained has the one version with which an engine drew it, at or past its ticket's, and of a step that was committed.
- `devices`: a cell's engine and its trainer never hold the device together.
- `routes`: an engine is in the table as open only while the last that the coordinator heard of it is that it serves a version it loaded.
- `seen`: no process of the world saw what it should not.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from gyre.wire import payload
from gyre.wire.messages import Ack, PolicyLoaded, RolloutEnded, Routes, Tickets, WorkerStatus
from theorem.checkers import Checker, Findings
from theorem.chronicle import Chronicle

QUIET_S: Final = 300.0


def progress(c: Chronicle) -> Findings:
    if c.verdict is None:
        yield "the run did not end"
        return
    at_s, code, reason = c.verdict
    if code != 0:
        yield f"the run ended with exit code {code}: {reason}"
    if at_s > c.quiet_at_s + QUIET_S:
        yield f"the run ended at {at_s:.0f} s, the last fault was over at {c.quiet_at_s:.0f} s"


def fates(c: Chronicle) -> Findings:
    members: dict[str, int] = {}
    ended: dict[str, set[str]] = {}  # group → executions graded or discarded
    epochs: Counter[tuple[str, int]] = Counter()
    gone, line = set[str](), dict[int, list[str]]()
    for e in c.disk.events:
        f = e.fields
        match e.kind:
            case "admitted":
                members[f["group"]] = f["rollouts"]
            case "rollout_ended" if f["group"] in members:
                epochs[f["rollout"], f["epoch"]] += 1
                if f["rollout"] in ended.setdefault(f["group"], set()):
                    yield f"{f['rollout']} ended again, under epoch {f['epoch']}"
                ended[f["group"]].add(f["rollout"])
            case "group_discarded":
                gone.add(f["group"])
            case "term":
                line = {k: v for k, v in line.items() if k <= f["step"]}
            case "step":
                line[f["step"]] = f["groups"]
    consumed = Counter(g for groups in line.values() for g in groups)
    for group, n in members.items():
        if consumed[group] + (group in gone) != 1:
            yield f"group {group} was consumed {consumed[group]} times and {'' if group in gone else 'not '}discarded"
        if group not in gone and len(ended.get(group, ())) != n:
            yield f"group {group} was consumed with {len(ended.get(group, ()))} of {n} executions ended"


def quota(c: Chronicle) -> Findings:
    groups, executions = 0, 0
    inside: dict[str, list[str]] = {}  # groups not consumed, and their executions that have not ended
    line: dict[int, list[str]] = {}
    for e in c.disk.events:
        f = e.fields
        match e.kind:
            case "buffer_started":
                groups, executions = f["quota"], f["quota"] * f["rollouts_per_group"]
                spare = f["groups_per_step"] if f["dispatch"] == "continuous" else 0  # those of the open step do not count
            case "admitted":
                inside[f["group"]] = [f"{f['group']}.{i}" for i in range(f["rollouts"])]
                if len(inside) > groups + spare and not f["substitute_for"]:
                    yield f"{f['group']} is group {len(inside)} in the system, the quota is {groups}"
            case "rollout_ended" if f["rollout"] in inside.get(f["group"], ()):
                inside[f["group"]].remove(f["rollout"])
            case "group_discarded":
                inside.pop(f["group"], None)
            case "step":
                line[f["step"]] = f["groups"]
                for group in f["groups"]:
                    inside.pop(group, None)
            case "term":
                for step in [s for s in line if s > f["step"]]:
                    inside |= {group: [] for group in line.pop(step)}
        unfinished = sum(len(v) for v in inside.values())
        if unfinished > executions + spare * (executions // max(1, groups)):
            yield f"at {e.at_s:.3f} s {unfinished} executions are unfinished, the quota is {executions}"


def leases(c: Chronicle) -> Findings:
    leased: dict[str, str] = {}  # by the durable log
    for e in c.disk.events:
        f = e.fields
        if e.kind == "leased":
            for rollout in f["rollouts"]:
                if rollout in leased:
                    yield f"{rollout} was leased to {f['holder']} while {leased[rollout]} held it"
                leased[rollout] = f["holder"]
        elif e.kind in ("reissued", "rollout_ended"):
            leased.pop(f["rollout"], None)
    holder: dict[tuple[str, int], str] = {}  # by what was said
    acknowledged = {s.message.cause for s in c.said if s.sender == "buffer" and isinstance(s.message, Ack)}
    for s in c.said:
        if isinstance(s.message, Tickets):
            for t in s.message.tickets:
                if holder.setdefault((t.rollout_id, t.epoch), s.to) != s.to:
                    yield f"{t.rollout_id}/{t.epoch} was given to {holder[t.rollout_id, t.epoch]} and to {s.to}"
        elif isinstance(s.message, RolloutEnded) and s.message.id in acknowledged:
            held = holder.get((s.message.rollout_id, s.message.epoch))
            if held != s.sender:
                yield f"the outcome of {s.message.rollout_id}/{s.message.epoch} was taken from {s.sender}, held by {held}"


def tokens(c: Chronicle) -> Findings:
    committed = {(e.fields["term"], e.fields["step"]) for e in c.disk.events if e.kind == "step"}
    begun: dict[int, int] = {e.fields["term"]: e.fields["step"] for e in c.disk.events if e.kind == "term"}
    wanted = {(t.rollout_id, t.epoch): t.policy for s in c.said if isinstance(s.message, Tickets) for t in s.message.tickets}
    drawn: dict[tuple[str, int], set[int]] = {}
    for d in c.drawn:
        call = d.request.rpartition(".")[0]
        rollout, epoch, _ = call.split("/")
        drawn.setdefault((call, d.draw), set()).add(d.step)
        if (d.term, d.step) not in committed and begun.get(d.term) != d.step:
            yield f"{d.process} drew for {call} with version {d.term}.{d.step}, which was never committed"
        policy = wanted[rollout, int(epoch)]
        if (d.term, d.step) < (policy.term, policy.step):
            yield f"{d.process} drew for {call} with version {d.term}.{d.step}, its ticket wants {policy.term}.{policy.step}"
    for frames in c.disk.payloads:
        m, arrays = payload.parse(frames)
        starts, at = [], 0
        for node in m.nodes:
            starts.append(at)
            at += node.n_tokens
        for t in m.trajectories:
            last = t.nodes[-1]
            versions = arrays["versions"][starts[last] : starts[last] + m.nodes[last].n_tokens]
            for k, version in enumerate(versions):
                if version not in drawn.get((f"{m.rollout_id}/{m.epoch}/{t.index}", k), ()):
                    yield f"token {k} of {m.rollout_id}/{m.epoch}/{t.index} says version {version}, no engine drew it so"


def devices(c: Chronicle) -> Findings:
    holding: dict[str, set[str]] = {}
    for h in c.held:
        here = {p for p in holding.get(h.cell, set()) if c.ends.get(p, h.at_s + 1) > h.at_s}
        here = here | {h.process} if h.held else here - {h.process}
        holding[h.cell] = here
        if h.held and len(here) > 1:
            yield f"at {h.at_s:.3f} s {h.process} takes the device of {h.cell}, where {', '.join(sorted(here - {h.process}))} is"


def routes(c: Chronicle) -> Findings:
    said: dict[str, tuple[str, WorkerStatus]] = {}
    heard: dict[str, WorkerStatus] = {}
    loaded: set[tuple[str, Any]] = set()
    for s in c.said:
        m = s.message
        if isinstance(m, WorkerStatus):
            said[m.id] = s.sender, m
        elif isinstance(m, PolicyLoaded):
            loaded.add((m.cell, m.version))
        elif s.sender == "coord" and isinstance(m, Ack) and m.cause in said:
            status = said[m.cause][1]
            if status.address.startswith("rollout/"):
                heard[status.cell] = status
        elif isinstance(m, Routes):
            for r in m.engines:
                status_ = heard.get(r.cell)
                if r.open and (status_ is None or status_.role != "serving" or status_.version is None):
                    yield f"at {s.at_s:.3f} s {r.cell} is open in the table, and was last heard to say {status_}"


def seen(c: Chronicle) -> Findings:
    yield from c.odd


FLEET: Final[tuple[Checker, ...]] = (progress, fates, quota, leases, tokens, devices, routes, seen)
