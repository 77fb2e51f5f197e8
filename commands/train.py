"""gyre-train: a cell's training engine."""

from __future__ import annotations

from typing import Any

import click

from gyre import cli


@click.command()
@cli.common(addresses=("buffer", "train", "coord", "bind"), named="")
@click.option(
    "--role",
    type=click.Choice(["core", "satellite", "auto"]),
    default="core",
    show_default=True,
    help="core: hold the optimizer; satellite: add gradients to the core's steps; auto: what the coordinator says.",
)
@click.option("--steps", type=int, help="Optimizer steps of the run (train.steps).")
@click.option("--resume", is_flag=True, help="Start from the last good checkpoint of the run directory, if there is one.")
def main(role: str, steps: int | None, resume: bool, **options: Any) -> None:
    """Train: claim micro-steps, accumulate their gradients; the core: update, publish the policy every mu steps, checkpoint.

    Ends with 0 when the run's last step is committed, published and saved.
    """

    async def body(setup: cli.Setup, worker: Any) -> None:
        from gyre.train import shell

        await shell.run(setup, worker, role=role, resume=resume)

    cli.work("train", options, {"train.steps": steps}, body)


if __name__ == "__main__":
    main()
