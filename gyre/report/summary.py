"""The figures of one run, from its ledger: what gyre-report prints and scripts read.

Keys of the JSON form are an interface (docs/commands/gyre-report.md): `steps`, `reward.first`, `reward.last`, `staleness.{predicted,mean,p95,max}`,
`counts`, `seconds`; others may be added. A figure that cannot be had is null.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gyre.report.figures import brief, clock, mean, moving_average, score_chart, table
from gyre.report.read import RunReader
from gyre.rules import staleness

_PHASES: Final = ("setup", "harness", "grade")  # of an execution, one after the other; model calls are made in the harness' time
FIRST_STEPS: Final = 5
LAST_STEPS: Final = 10
_ROWS: Final = 20
_SECONDS: Final = ("wait", "compute", "update", "publish", "checkpoint")


def summarize(run_dir: Path) -> dict[str, Any]:
    """All figures of a run. Raises `UsageError` when the directory holds none."""
    with RunReader(run_dir) as reader:
        rows = list(reader.step_rows())
        table = [_row(r.step, r.manifest.get("stats", {}), r.metrics, r.committed_at, r.opened_at) for r in rows]

        def column(name: str) -> list[Any]:
            return [r[name] for r in table if r[name] is not None]

        rewards = column("reward")
        consumed = {g.group_id: g for g in reader.group_rows() if g.state == "consumed" and g.step is not None}
        stale = staleness.summarize([staleness.discrete(g.step - 1, g.version_step) for g in consumed.values() if g.step is not None])
        evals = list(reader.evals())
        rollouts = [r for g in consumed for r in reader.rollout_rows(g)]
        endings = Counter(str(r.ending) for r in rollouts)
        starts = [p.at for p in reader.publication_rows()]
        first_at, last_at = (min(starts) if starts else None), (rows[-1].committed_at if rows else None)
        return {
            "schema": "gyre.report/1",
            "run_id": reader.meta.run_id,
            "steps": len(rows),
            "total_steps": reader.meta.total_steps,
            "reward": {
                "first": mean(rewards[:FIRST_STEPS]),
                "last": mean(rewards[-LAST_STEPS:]),
                "first_steps": len(rewards[:FIRST_STEPS]),
                "last_steps": len(rewards[-LAST_STEPS:]),
            },
            "eval": {"before": _eval(evals[:1]), "after": _eval(evals[-1:] if len(evals) > 1 else []), "all": evals},
            "staleness": {
                "predicted": table[-1]["staleness_predicted"] if table else None,
                "mean": stale.mean,
                "p95": stale.p95,
                "max": stale.max,
                "interpolated": mean(column("staleness_interpolated")),
            },
            "counts": reader.counts(),
            "endings": dict(sorted(endings.items())),
            "tokens": {"trained": sum(column("tokens")), "trainable": sum(column("trainable_tokens"))},
            "logprob_diff": {"mean": mean(column("logprob_diff_current_mean")), "max": max(column("logprob_diff_current_max"), default=None)},
            "seconds": {
                "total": last_at - first_at if first_at is not None and last_at is not None else None,
                "trainer": {p: sum(column(f"seconds_{p}"), 0.0) for p in _SECONDS},
                "execution_mean": {
                    p: mean([r.seconds[p] for r in rollouts if p in r.seconds]) for p in sorted({k for r in rollouts for k in r.seconds})
                },
            },
            "table": table,
        }


def _row(step: int, stats: dict[str, Any], metrics: dict[str, float | None], committed_at: float | None, opened_at: float) -> dict[str, Any]:
    names = (
        "loss", "grad_norm", "lr", "entropy", "clip_fraction", "logprob_diff_mean", "logprob_diff_max", "logprob_diff_current_mean",
        "logprob_diff_current_max", *(f"seconds_{p}" for p in _SECONDS),
    )  # fmt: skip
    counted = (
        "groups", "executions", "trajectories", "tokens", "trainable_tokens", "staleness_mean", "staleness_p95", "staleness_max",
        "staleness_interpolated", "staleness_predicted", "discarded_groups", "uniform_groups",
    )  # fmt: skip
    row = {"step": step, "reward": stats.get("reward_mean")}
    row |= {n: stats.get(n) for n in counted} | {n: metrics.get(n) for n in names}
    return {**row, "seconds": committed_at - opened_at if committed_at else None}


def _eval(evals: list[dict[str, Any]]) -> dict[str, Any] | None:
    return {k: evals[0][k] for k in ("version", "reward_mean", "graded", "by_kind")} if evals else None


COLUMNS: Final = (
    ("step", "step", "d"), ("reward", "reward", ".3f"), ("loss", "loss", "+.4f"), ("grad", "grad_norm", ".3f"), ("entropy", "entropy", ".3f"),
    ("clipped", "clip_fraction", ".3f"), ("stale", "staleness_mean", ".2f"), ("p95", "staleness_p95", ".0f"), ("max", "staleness_max", ".0f"),
    ("Δ log-prob", "logprob_diff_current_mean", ".1e"), ("tokens", "trainable_tokens", "d"), ("seconds", "seconds", ".2f"),
)  # fmt: skip


def cells(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Steps as the words of COLUMNS."""
    return [[brief(row[key], form) for _, key, form in COLUMNS] for row in rows]


def drawing(s: dict[str, Any], width: int) -> RenderableType:
    """The figures for people, as wide as that."""
    rewards = [r["reward"] for r in s["table"] if r["reward"] is not None]
    parts: list[RenderableType] = [Text.assemble(("gyre ", "bold"), (s["run_id"], "bold cyan")), Text()]
    if rewards:
        text = Text.assemble(("reward", "bold"), " of the steps, mean of five")
        score_chart(text, moving_average(rewards, 5), max(8, min(72, width - 8)), 6)
        parts += [text, Text()]
    n = len(s["table"])
    shown = s["table"] if n <= _ROWS else [s["table"][i * (n - 1) // (_ROWS - 1)] for i in range(_ROWS)]  # evenly
    parts += [table([title for title, _, _ in COLUMNS], cells(shown), width - 2), Text()]
    if s["eval"]["before"]:
        parts += [_evals(s["eval"], width - 2), Text()]
    grid = Table.grid(padding=(0, 3, 0, 0))
    for label, value in facts(s).items():
        grid.add_row(label, value)
    return Padding(Group(*parts, grid), (0, 1))


def facts(s: dict[str, Any]) -> dict[str, str]:
    """What became of a run, for people: a label and its words."""
    st, lp, seconds = s["staleness"], s["logprob_diff"], s["seconds"]
    evals = [brief((s["eval"][k] or {}).get("reward_mean")) for k in ("before", "after")]
    states = ", ".join(f"{n} {k}" for k, n in s["counts"].items() if n and k != "admitted")
    return {
        "trained": f"{s['steps']} of {s['total_steps']} steps" + ("" if seconds["total"] is None else f" in {clock(seconds['total'])}"),
        "reward": _reward(s),
        "held-out": " → ".join(evals),
        "staleness": f"predicted {brief(st['predicted'])}, mean {brief(st['mean'])}, p95 {brief(st['p95'])}, max {brief(st['max'])}",
        "log-probs": f"trainer against engine: mean {brief(lp['mean'], '.1e')}, max {brief(lp['max'], '.1e')}",
        "executions": f"{s['counts']['admitted']} admitted: {states or 'none'}",
        "endings": ", ".join(f"{n} {k}" for k, n in s["endings"].items()) or "–",
        "trainer": ", ".join(f"{k} {v:.1f} s" for k, v in seconds["trainer"].items()),
        "an execution": _execution(seconds["execution_mean"]),
    }


def _reward(s: dict[str, Any]) -> str:
    """Of the first and the last steps that have a reward; of all where these would be the same ones in part."""
    r, rewards = s["reward"], [row["reward"] for row in s["table"] if row["reward"] is not None]
    if r["first_steps"] + r["last_steps"] <= len(rewards):
        return f"first {r['first_steps']} steps {brief(r['first'])}, last {r['last_steps']} {brief(r['last'])}"
    return f"{brief(mean(rewards))}, mean of {len(rewards)} step{'s' * (len(rewards) != 1)}"


def _execution(seconds: dict[str, float | None]) -> str:
    """Mean seconds in the order of time."""
    known = {k: f"{v:.3f} s" for k, v in seconds.items() if v is not None}
    calls = known.pop("model", None)
    if calls is not None and "harness" in known:
        known["harness"] += f" ({calls} of it in model calls)"
    elif calls is not None:
        known["model calls"] = calls
    order = [k for k in _PHASES if k in known] + [k for k in known if k not in _PHASES]
    return ", ".join(f"{k} {known[k]}" for k in order) or "–"


def _evals(evals: dict[str, Any], width: int) -> Group:
    kinds = sorted(evals["before"]["by_kind"])
    rows = [[str(e["version"]), brief(e["reward_mean"]), *(brief(e["by_kind"].get(k, {}).get("reward_mean")) for k in kinds)]
            for e in (evals["before"], evals["after"]) if e]  # fmt: skip
    return table(("held-out at", "reward", *kinds), rows, width)
