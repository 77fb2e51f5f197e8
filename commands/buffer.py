"""gyre-buffer: the durable ledger of a run."""

from __future__ import annotations

from typing import Any

import click

from gyre import cli


@click.command()
@cli.common(addresses=("coord", "bind"), named="buffer")
@click.option("--resume", is_flag=True, help="Go on with the ledger that the run directory holds.")
@click.option("--steps", type=int, help="Optimizer steps of the run (train.steps).")
def main(resume: bool, steps: int | None, **options: Any) -> None:
    """Own a run's ledger: admit queries, lease tickets, keep rollouts, pack micro-steps, count the water level.

    Acknowledged means on disk: killed at any moment and started again with --resume, it goes on where it was.
    """

    async def body(setup: cli.Setup, worker: Any) -> None:
        from gyre.buffer import shell

        cli.make_run_dir(setup.run_dir)
        await shell.run(setup, worker, resume=resume)

    cli.work("buffer", options, {"train.steps": steps}, body)


if __name__ == "__main__":
    main()
