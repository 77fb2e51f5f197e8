"""Run examples/workloads/grid.toml and write its table into docs/scheduling.md, losing points first: `python docs/grid.py [--jobs 2]`.

The best fixed split is found among `async:N+stream` by narrowing in on the minimum over N (hours fall, then rise), its neighbours tried at the end.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from gyre.rules.named import parse_rule
from gyre.rules.workload import Workload, apply_sets, build, read_toml
from gyre.sim.compare import simulate

ROOT = Path(__file__).resolve().parent.parent
GRID = ROOT / "examples" / "workloads" / "grid.toml"
PAGE = ROOT / "docs" / "scheduling.md"
AXES = ("cells", "train_cell_h_per_group", "target_staleness", "slots_per_cell")


def points() -> list[dict[str, Any]]:
    """Every point as a flat dict."""
    grid = read_toml(GRID)
    out = []
    for block in grid["block"]:
        for values in itertools.product(*(block[a] for a in AXES)):
            rest = {k: v for k, v in block.items() if k not in AXES}
            out.append({**rest, **dict(zip(AXES, values, strict=True)), "bursts": grid["bursts"], "seeds": grid["seeds"]})
    return out


def workload(p: dict[str, Any]) -> Workload:
    data = read_toml(GRID.with_name(p["workload"]))
    sets = [f"system.{k}={p[k]}" for k in ("cells", "target_staleness", "slots_per_cell")]
    sets += [f"system.dispatch={p['dispatch']}", f"system.groups_per_step={round(p['per_cell'] * p['cells'])}"]
    sets += [f"workload.{k}={p[k]}" for k in ("train_cell_h_per_group", "bursts", "seeds")]
    apply_sets(data, sets)
    return build(str(GRID), data)


def run(p: dict[str, Any]) -> dict[str, Any]:
    """The hours of each rule at a point."""
    w = workload(p)

    def hours(rule: str) -> float:
        return sum(simulate(w, parse_rule(rule), p["target_staleness"], seed).now for seed in p["seeds"]) / len(p["seeds"]) / 3600

    known: dict[int, float] = {}

    def split(n: int) -> float:
        if n not in known:
            known[n] = hours(f"async:{n}+stream")
        return known[n]

    low, high = 1, w.system.cells - 1
    while high - low > 2:
        a, b = low + (high - low) // 3, high - (high - low) // 3
        low, high = (low, b) if split(a) <= split(b) else (a, high)
    best = min(range(low, high + 1), key=split)
    while True:
        near = min((n for n in (best - 1, best + 1) if 1 <= n < w.system.cells), key=split, default=best)
        if split(near) >= split(best):
            break
        best = near
    return {**p, "elastic": hours("elastic"), "lookahead": hours("lookahead"), "async": split(best), "split": best}


def summary(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| model | points | lookahead over elastic, geometric mean | 5th percentile | over the best split, geometric mean | 5th percentile |"]
    lines.append("|---|---|---|---|---|---|")
    for title, part in (
        ("shared", [r for r in rows if "shared" in r["workload"]]),
        ("slots", [r for r in rows if "nl2" in r["workload"]]),
        ("all", rows),
    ):
        cells = [title, str(len(part))]
        for other in ("elastic", "async"):
            gains = sorted(r[other] / r["lookahead"] for r in part)
            mean = math.exp(math.fsum(map(math.log, gains)) / len(gains))
            cells += [f"{mean:.3f}", f"{gains[max(0, math.ceil(0.05 * len(gains)) - 1)]:.3f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def table(rows: list[dict[str, Any]]) -> str:
    lines = summary(rows)
    lines += [
        "",
        "| model | dispatch | cells | slots | cell-h per group | E[d] | elastic, h | best split, h | lookahead, h | over elastic | over split |",
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|---|---|")
    for r in sorted(rows, key=lambda r: min(r["elastic"], r["async"]) / r["lookahead"]):
        model = "shared" if "shared" in r["workload"] else "slots"
        lines.append(
            f"| {model} | {r['dispatch']} | {r['cells']} | {r['slots_per_cell']} | {r['train_cell_h_per_group']} | {r['target_staleness']} "
            f"| {r['elastic']:.2f} | {r['async']:.2f} ({r['split']}) | {r['lookahead']:.2f} "
            f"| {r['elastic'] / r['lookahead']:.3f} | {r['async'] / r['lookahead']:.3f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    jobs = parser.parse_args().jobs
    rows = []
    with ProcessPoolExecutor(jobs) as pool:
        for r in pool.map(run, points()):
            rows.append(r)
            shown = " ".join(str(r[k]) for k in ("workload", "dispatch", *AXES))
            print(f"{shown}: elastic {r['elastic']:.2f}, lookahead {r['lookahead']:.2f}, split {r['async']:.2f}", file=sys.stderr, flush=True)
    text = PAGE.read_text(encoding="utf-8")
    block = f"<!-- grid -->\n{table(rows)}\n<!-- /grid -->"
    PAGE.write_text(re.sub(r"<!-- grid -->.*?<!-- /grid -->", lambda _: block, text, flags=re.S), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
