"""gyre-rollout: a cell's inference engine."""

from __future__ import annotations

from typing import Any

import click

from gyre import cli


@click.command()
@cli.common(addresses=("train", "coord", "bind"), named="")
@click.option("--engine", type=click.Choice(["torch", "vllm", "scripted", "paced"]), help="Which engine serves the policy (rollout.engine).")
@click.option("--no-train", is_flag=True, help="Serve the model as it is on disk, without a trainer to follow.")
@click.option(
    "--role",
    type=click.Choice(["serve", "auto"]),
    default="serve",
    show_default=True,
    help="serve: from the start; auto: asleep until the coordinator says what its cell is.",
)
def main(engine: str | None, no_train: bool, role: str, **options: Any) -> None:
    """Serve the policy: continue token ids, give back log-probs and versions, load each new policy while requests are in flight."""

    async def body(setup: cli.Setup, worker: Any) -> None:
        from gyre.rollout import shell

        await shell.run(setup, worker, follow=not no_train, auto=role == "auto")

    cli.work("rollout", options, {"rollout.engine": engine}, body)


if __name__ == "__main__":
    main()
