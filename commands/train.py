"""gyre-train: a cell's training engine."""

from __future__ import annotations

import os
import sys
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
@click.option("--ranks", type=int, help="Processes that share the model; the others are started by this one, unless torchrun did (train.ranks).")
@click.option("--resume", is_flag=True, help="Start from the last good checkpoint of the run directory, if there is one.")
def main(role: str, steps: int | None, ranks: int | None, resume: bool, **options: Any) -> None:
    """Train: claim micro-steps, accumulate their gradients; the core: update, publish the policy every mu steps, checkpoint.

    Ends with 0 when the run's last step is committed, published and saved.
    """

    async def body(setup: cli.Setup, worker: Any) -> None:
        from gyre.train import shell

        await shell.run(setup, worker, role=role, resume=resume)

    flags = {"train.steps": steps, "train.ranks": ranks}
    try:
        if _follows():
            cli.guarded(lambda: _follow(options, flags))
        cli.work("train", options, flags, body)
    except SystemExit as end:
        if "gyre.train.ranks" in sys.modules and isinstance(end.code, int):
            from gyre.train.processes import leave

            leave(end.code)
        raise


def _follows() -> bool:
    """Is this process one of a cell's ranks, but not the first? gyre-train and gyre-coord say so to those they start, torchrun to all."""
    return not os.environ.get("GYRE_RANK", "0/").startswith("0/") or ("TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0")


def _follow(options: dict[str, Any], flags: dict[str, Any]) -> int:
    config = cli.setup(options, flags).config
    from gyre.train import ranks

    return ranks.follow(config)


if __name__ == "__main__":
    main()
