"""gyre-sim: rules of scheduling in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gyre import cli


@click.command()
@cli.common(run=False)
@click.option("--workload", type=click.Path(path_type=Path), metavar="FILE", help="Workload file; examples/workloads has some.")
@click.option("--replay", type=click.Path(path_type=Path), metavar="RUN_DIR", help="Take durations and costs from a run's events instead.")
@click.option("--rule", "rules", multiple=True, metavar="RULE", shell_complete=cli.rules, help="elastic, lookahead, async[:N][+stream] (no N: "
              "the best split) or colocate; repeatable.  [default: elastic, lookahead, async, colocate]")  # fmt: skip
@click.option("--cells", type=click.IntRange(2, 4096), help="So many cells; like --set system.cells=K.")
@click.option("--set", "sets", multiple=True, metavar="TABLE.KEY=VALUE", help="Override one key of the workload; repeatable.")
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True, help="For people or for scripts.")
def main(
    workload: Path | None, replay: Path | None, rules: tuple[str, ...], cells: int | None, sets: tuple[str, ...], form: str, **options: Any
) -> None:
    """Simulate a workload under rules of scheduling, all on the same executions, and compare them. Deterministic."""

    def run() -> None:
        cli.start_logging(options["log_level"], options["json_logs"])
        import msgspec

        from gyre.errors import UsageError
        from gyre.report.show import stdout_width
        from gyre.rules import workload as files
        from gyre.sim import compare

        given = [*sets, *([f"system.cells={cells}"] if cells is not None else [])]
        if (workload is None) == (replay is None):
            raise UsageError("gyre-sim", "needs one of --workload and --replay", "give a workload file, or the directory of a run")
        if replay is not None:
            from gyre.sim.replay import from_run

            made = from_run(replay, given)
        else:
            assert workload is not None
            made = files.load(workload, given)
        from rich.console import Console

        with Console(stderr=True).status("") as status:  # nothing where stderr is no terminal
            rows = compare.compare(made, rules or compare.DEFAULT_RULES, lambda next_: status.update(f"simulating {next_}"))
        click.echo(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode() if form == "json" else compare.table(rows, stdout_width()))

    cli.guarded(run)


if __name__ == "__main__":
    main()
