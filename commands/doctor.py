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

    Prints a table; the exit code is 1 if there is a problem. gyre-coord looks at the same before it starts anything.
    """

    def run() -> int:
        setup = cli.setup(options, {"net.ssh": ssh})
        import asyncio

        from rich.console import Console

        from gyre.coord import doctor, hosts
        from gyre.coord.launcher import Launcher

        lines = hosts.read(cells) if cells is not None else doctor.local_lines()
        found = asyncio.run(doctor.examine(lines, Launcher(setup.run_dir, setup.config.net.ssh), setup.config))
        console = Console()
        console.print(doctor.table(found), width=None if console.is_terminal else WIDTH, no_wrap=not console.is_terminal)
        return 1 if any(h.problems for h in found) else 0

    cli.guarded(run)


if __name__ == "__main__":
    main()
