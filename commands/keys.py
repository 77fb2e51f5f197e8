"""gyre-keys: make the keys of a run."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import click

from gyre import cli


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.version_option(importlib.metadata.version("gyre"), prog_name="gyre")
def main(directory: Path) -> None:
    """Make a CURVE key pair for each kind of process in DIRECTORY, those it lacks; name it as net.keys.

    A node needs KIND.key_secret of the kinds that run there, and every KIND.key. Prints KIND and public key, a line each.
    """

    def body() -> None:
        from gyre.net import keys
        from gyre.wire.speakers import KINDS

        made = keys.make(directory)
        for kind in KINDS:
            click.echo(f"{kind} {keys.load(directory, kind).public[kind].decode()}")
        click.echo(f"{directory}: {len(made)} pairs made, {len(KINDS) - len(made)} kept", err=True)

    cli.guarded(body)


if __name__ == "__main__":
    main()
