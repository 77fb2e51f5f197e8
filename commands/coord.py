"""gyre-coord: start the processes of a run and see it through."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from gyre import cli


@click.command()
@cli.common()
@click.option("--cells", "cells", required=True, metavar="HOSTS", help='Hosts file; "-" reads it from standard input.')
@click.option(
    "--rule",
    metavar="RULE",
    help="Who decides the cells' roles: elastic | lookahead | async[:N][+stream] | colocate.  [default: elastic, if cells can turn]",
)
@click.option("--steps", type=int, help="Optimizer steps of the run (train.steps).")
@click.option("--resume", is_flag=True, help="Go on with the run that the run directory holds.")
@click.option("--dry-run", is_flag=True, help="Print the command of each process and exit.")
def main(cells: str, rule: str | None, steps: int | None, resume: bool, dry_run: bool, **options: Any) -> None:
    """Launch all processes of hosts.txt, show the run, and end when every one of them has ended.

    Prints the run directory on stdout. The first Ctrl-C stops everything in order, a second one at once.
    """

    def run() -> int:
        setup = cli.setup(options, {"train.steps": steps})
        from gyre.coord import hosts, launch
        from gyre.net.endpoints import endpoint

        bind = endpoint(setup.run_dir, "coord")
        lines = hosts.read(cells)
        named = rule or launch.default_rule(lines)
        plans = launch.plans(
            lines, setup.run_dir, resume=resume, log_level=options["log_level"], coord=bind, rule=named, slots=setup.config.rollout.slots
        )
        if dry_run:
            for plan in plans:
                click.echo(shlex.join([f"{k}={v}" for k, v in plan.env.items()] + plan.argv))
            return 0
        cli.make_run_dir(setup.run_dir)
        if not resume and _has_run(setup.run_dir):
            from gyre.errors import UsageError

            raise UsageError("--run", f"{setup.run_dir} holds a run", "give --resume to go on with it, or another directory")
        return see_through(setup, plans, bind, named)

    cli.guarded(run)


def _has_run(run_dir: Path) -> bool:
    """Has anything been admitted there? A start that failed before is no run."""
    if not (run_dir / "ledger.db").exists():
        return False
    from gyre.report.read import RunReader

    with RunReader(run_dir) as reader:
        return reader.counts()["admitted"] > 0


def see_through(setup: cli.Setup, plans: list[Any], bind: str, rule: str) -> int:
    """Run to the end; the exit code."""
    import asyncio
    import sys

    from gyre.coord import shell

    end = asyncio.run(shell.Coordinator(setup, plans, bind, rule).run())
    if end.code not in (0, 130, 143):
        shell.explain(end, setup.run_dir / "logs", sys.stderr)
    click.echo(setup.run_dir)
    return end.code


if __name__ == "__main__":
    main()
