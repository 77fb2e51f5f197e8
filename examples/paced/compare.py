"""Play a workload with real processes and with the simulator, and compare the end-to-end times: `python examples/paced/compare.py [--rule R]…`.

For each rule: gyre-coord runs examples/paced compressed, from the first admission to the last publication; gyre-sim predicts the same bursts with the
same draws. A line each, and exit 1 when a ratio is further from 1 than `--within`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
WORKLOAD = HERE.parent / "workloads" / "nl2repo-122b.toml"
RULES = ["async:4+stream", "elastic", "colocate", "lookahead"]


def played_h(run_dir: Path, compress: float) -> float:
    """Hours of the workload's time from the first admission to the last publication of a run."""
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    began = next(e["t_mono"] for e in events if e["kind"] == "admitted")
    return float(max(e["t_mono"] for e in events if e["kind"] == "publication") - began) * compress / 3600


def play(args: argparse.Namespace, rule: str, steps: int, run_dir: Path) -> float:
    """Run the processes. Returns hours of the workload's time."""
    argv = [sys.executable, "-m", "gyre_commands.coord", "--run", str(run_dir), "--config", str(HERE / "run.toml"), "--cells", str(args.cells)]
    argv += ["--rule", rule, "--steps", str(steps), "--set", f"run.compress={args.compress}", "--set", f"run.workload={args.workload}"]
    argv += ["--set", f"run.seed={args.seed}"]
    with (run_dir.parent / f"{run_dir.name}.log").open("wb") as log:
        code = subprocess.run(argv, stdout=subprocess.DEVNULL, stderr=log, check=False).returncode
    if code:
        sys.exit(f"{rule}: gyre-coord ended with {code}; see {log.name}")
    return played_h(run_dir, args.compress)


def predict(args: argparse.Namespace, rule: str) -> float:
    """What gyre-sim says, in hours."""
    argv = [sys.executable, "-m", "gyre_commands.sim", "--workload", str(args.workload), "--rule", rule, "--format", "json"]
    argv += ["--set", f"workload.bursts={args.bursts}", "--set", f"workload.seeds=[{args.seed}]"]
    found = json.loads(subprocess.run(argv, stdout=subprocess.PIPE, check=True).stdout)
    return float(found[0]["hours"])  # the first target: the one that a run takes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rule", action="append", help=f"repeatable; default: {' '.join(RULES)}")
    parser.add_argument("--workload", type=Path, default=WORKLOAD)
    parser.add_argument("--cells", type=Path, default=HERE / "hosts.txt")
    parser.add_argument("--compress", type=float, default=100.0)
    parser.add_argument("--bursts", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--within", type=float, default=0.05)
    parser.add_argument("--out", type=Path, help="where the runs go; default: a temporary directory")
    args = parser.parse_args()
    args.workload = args.workload.resolve()
    out = args.out or Path(tempfile.mkdtemp(prefix="gyre-paced-"))
    out.mkdir(parents=True, exist_ok=True)
    steps = args.bursts * tomllib.loads(args.workload.read_text())["system"]["steps_per_burst"]
    far = False
    print(f"{'rule':16} {'played h':>9} {'predicted h':>12} {'ratio':>7} {'took s':>8}", flush=True)
    for rule in args.rule or RULES:
        started = time.monotonic()
        predicted = predict(args, rule)
        played = play(args, rule, steps, out / rule.replace(":", ""))
        ratio = played / predicted
        far = far or abs(ratio - 1) > args.within
        print(f"{rule:16} {played:9.3f} {predicted:12.3f} {ratio:7.3f} {time.monotonic() - started:8.1f}", flush=True)
    print(f"runs are in {out}")
    sys.exit(1 if far else 0)


if __name__ == "__main__":
    main()
