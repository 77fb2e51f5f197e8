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

from gyre.report.figures import chart, clock, mean, moving_average
from gyre.report.read import RunReader
from gyre.rules import staleness

FIRST_STEPS: Final = 5
LAST_STEPS: Final = 10
_ROWS: Final = 20
_SECONDS: Final = ("wait", "compute", "update", "publish", "checkpoint")


def summarize(run_dir: Path) -> dict[str, Any]:
    """All figures of a run. Raises `UsageError` when the directory holds none."""
    with RunReader(run_dir) as reader:
        rows = list(reader.step_rows())
        table = [_row(r.step, r.manifest.get("stats", {}), r.metrics, r.committed_at, r.opened_at) for r in rows]
        rewards = [r["reward"] for r in table if r["reward"] is not None]
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
                "interpolated": mean([r["staleness_interpolated"] for r in table if r["staleness_interpolated"] is not None]),
            },
            "counts": reader.counts(),
            "endings": dict(sorted(endings.items())),
            "tokens": {"trained": sum(r["tokens"] or 0 for r in table), "trainable": sum(r["trainable_tokens"] or 0 for r in table)},
            "logprob_diff": {
                "mean": mean([r["logprob_diff_current_mean"] for r in table if r["logprob_diff_current_mean"] is not None]),
                "max": max((r["logprob_diff_current_max"] for r in table if r["logprob_diff_current_max"] is not None), default=None),
            },
            "seconds": {
                "total": last_at - first_at if first_at is not None and last_at is not None else None,
                "trainer": {p: sum(r[f"seconds_{p}"] or 0.0 for r in table) for p in _SECONDS},
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


def drawing(s: dict[str, Any], width: int) -> RenderableType:
    """The figures for people, as wide as that."""
    rewards = [r["reward"] for r in s["table"] if r["reward"] is not None]
    head = Text.assemble(("gyre ", "bold"), (s["run_id"], "bold cyan"), f"   {s['steps']} of {s['total_steps']} steps")
    if s["seconds"]["total"] is not None:
        head.append(f" in {clock(s['seconds']['total'])}")
    parts: list[RenderableType] = [head, Text()]
    if rewards:
        text = Text.assemble(
            ("reward", "bold"), f" of the steps, mean of five: first five {cell(s['reward']['first'])}, last ten {cell(s['reward']['last'])}"
        )
        for i, row in enumerate(chart(moving_average(rewards, 5), max(8, min(72, width - 8)), 6, 0.0, 1.0)):
            text.append(f"\n{'1.0' if i == 0 else '0.0' if i == 5 else '   '} │", style="grey50")
            text.append(row, style="green")
        parts += [text, Text()]
    parts += [_table(s["table"], width), Text()]
    if s["eval"]["before"]:
        parts += [_evals(s["eval"]), Text()]
    st, lp = s["staleness"], s["logprob_diff"]
    states = ", ".join(f"{n} {k}" for k, n in s["counts"].items() if n and k != "admitted")
    parts.append(Text(f"staleness    predicted {cell(st['predicted'])}, mean {cell(st['mean'])}, p95 {cell(st['p95'])}, max {cell(st['max'])}"))
    parts.append(Text(f"log-probs    trainer against engine: mean {cell(lp['mean'], '.1e')}, max {cell(lp['max'], '.1e')}"))
    parts.append(Text(f"executions   {s['counts']['admitted']} admitted: {states}"))
    parts.append(Text(f"endings      {', '.join(f'{n} {k}' for k, n in s['endings'].items())}"))
    parts.append(Text("seconds      trainer: " + ", ".join(f"{k} {v:.1f}" for k, v in s["seconds"]["trainer"].items())))
    parts.append(Text("             execution: " + ", ".join(f"{k} {v:.3f}" for k, v in s["seconds"]["execution_mean"].items() if v is not None)))
    return Padding(Group(*parts), (0, 1))


def _table(rows: list[dict[str, Any]], width: int) -> Table:
    """The steps, at most _ROWS of them, evenly; as many columns as there is room for."""
    n = len(rows)
    shown = rows if n <= _ROWS else [rows[i * (n - 1) // (_ROWS - 1)] for i in range(_ROWS)]
    table = Table(box=None, header_style="grey50", padding=(0, 1))
    cells: list[list[str]] = []
    room = width - 2
    for title, key, form in COLUMNS:
        column = [cell(row[key], form) for row in shown]
        room -= 2 + max(map(len, [title, *column]))
        if room < 0:
            break
        table.add_column(title, justify="right")
        cells.append(column)
    for line in zip(*cells, strict=True):
        table.add_row(*line)
    return table


def _evals(evals: dict[str, Any]) -> Table:
    table = Table(box=None, header_style="grey50", padding=(0, 1))
    kinds = sorted(evals["before"]["by_kind"])
    for title in ("held-out at", "reward", *kinds):
        table.add_column(title, justify="right")
    for e in (evals["before"], evals["after"]):
        if e:
            table.add_row(str(e["version"]), cell(e["reward_mean"]), *(cell(e["by_kind"].get(k, {}).get("reward_mean")) for k in kinds))
    return table


def cell(value: float | None, form: str = ".2f") -> str:
    """A number for people, a dash for none."""
    return "–" if value is None else format(value, form)
