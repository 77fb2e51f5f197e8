"""gyre-sandbox: runs tickets."""

from __future__ import annotations

from typing import Any

import click

from gyre import cli


@click.command()
@cli.common(addresses=("buffer", "rollout", "coord"), named="sandbox")
@click.option("--slots", type=int, help="Executions at once (sandbox.slots).")
@click.option("--backend", type=click.Choice(["bubblewrap", "docker", "process", "paced"]), help="How executions are contained (sandbox.backend).")
@click.option("--unsafe", is_flag=True, default=None, help="Accept what cannot contain an execution (sandbox.unsafe).")
@click.option("--harness", help="Command of the harness (sandbox.harness).")
def main(slots: int | None, backend: str | None, unsafe: bool | None, harness: str | None, **options: Any) -> None:
    """Run executions: a harness in a sandbox, the model endpoint it talks to, then the verifier in a fresh sandbox.

    Ends with 0 when the run needs no more rollouts.
    """

    async def body(setup: cli.Setup, worker: Any) -> None:
        from gyre.sandbox import shell

        await shell.run(setup, worker)

    flags = {"sandbox.slots": slots, "sandbox.backend": backend, "sandbox.unsafe": unsafe, "sandbox.harness": harness}
    cli.work("sandbox", options, flags, body)


if __name__ == "__main__":
    main()
