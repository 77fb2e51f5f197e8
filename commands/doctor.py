"""gyre-doctor: look at the hosts of a run before it starts."""

from __future__ import annotations

from typing import Any

import click

from gyre import cli

WIDTH = 400  # in a pipe: a row a line


@click.command()
@cli.common()
@click.option("--cells", "cells", metavar="HOSTS", help='Hosts file; "-" reads it from standard input; without it, this host is examined.')
@click.option("--ssh", metavar="COMMAND", help="How other hosts are reached: ssh with its options (net.ssh).")
def main(cells: str | None, ssh: str | None, **options: Any) -> None:
    """Say of each host whether it is reached, what it has, and what a run would lack there. Starts nothing.

    Prints a table, and a line for each problem; the exit code is 1 if there is one. gyre-coord looks at the same before it starts anything.
    """

    def run() -> int:
        check = options["check"] and cells is not None  # then the hosts file too
        setup = cli.setup({**options, "check": options["check"] and not check}, {"net.ssh": ssh})
        import asyncio

        from gyre.coord import doctor, hosts
        from gyre.coord.launcher import Launcher

        lines = hosts.read(cells) if cells is not None else doctor.local_lines()
        asked = cells is not None or options["config_file"] is not None  # else this host is looked at, for no run yet
        missing = doctor.unset(lines, setup.config) if asked else ""
        told = [f"run.toml: not set: {missing}"] if missing else []
        if not check:
            found = asyncio.run(doctor.examine(lines, Launcher(setup.run_dir, setup.config.net.ssh), setup.config))
            show(doctor.table(found))
            told += [text for text, _ in doctor.problems(found)]
        for text in told:
            click.echo(text)
        if check and not told:
            click.echo("configuration and hosts file ok", err=True)
        return 1 if told else 0

    cli.guarded(run)


def show(table: Any) -> None:
    """As wide as the terminal, or WIDTH."""
    import sys

    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)


if __name__ == "__main__":
    main()
