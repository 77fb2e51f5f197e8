"""gyre-top: a run as it goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gyre import cli


@click.command()
@cli.common(run=False)
@click.argument("run_dir", required=False, type=click.Path(path_type=Path))
@click.option("--coord", metavar="ADDRESS", help="Address of its gyre-coord; default: the one that has RUN_DIR.")
@click.option("--keys", metavar="DIR", type=click.Path(path_type=Path), help="Keys of the run (net.keys); default: those its run.toml names.")
@click.option("--stall", is_flag=True, help="Show the last stall: who waited for whom, since when, and the stacks of all processes.")
def main(run_dir: Path | None, coord: str | None, keys: Path | None, stall: bool, **options: Any) -> None:
    """Show a run: its cells and what they do, water level, groups, staleness, last steps and events. Live on a terminal, until Ctrl-C; elsewhere
    one picture. Without a coordinator, or when it has ended, what its directory says."""

    def run() -> None:
        cli.start_logging("warning" if options["log_level"] == "info" else options["log_level"], options["json_logs"])
        import asyncio

        from rich.console import Console

        from gyre import config
        from gyre.coord.claim import address
        from gyre.errors import UsageError
        from gyre.net.endpoints import check_peer
        from gyre.net.keys import load
        from gyre.report import stall as stalls
        from gyre.report.show import show
        from gyre.report.watch import Watch, watch

        if run_dir is None and coord is None:
            raise UsageError("RUN_DIR", "is not given", "name a run directory, or its coordinator's address by --coord")
        where = check_peer("--coord", coord) if coord is not None else address(run_dir) if run_dir is not None else None
        file = run_dir / "run.toml" if run_dir is not None else None
        named = keys or (config.load(file, (), {}).config.net.keys if file is not None and file.is_file() else "")
        held = load(Path(named), "observer") if named and where is not None and where.startswith("tcp://") else None
        source = Watch(run_dir, where, held)

        async def once() -> None:
            await source.look()
            source.close()

        if stall:
            asyncio.run(once())
            event = source.view.stall
            if event is None:
                click.echo("no stall so far", err=True)
            else:
                show(lambda width: stalls.drawing(event, width), None)
            return
        console = Console()
        try:
            asyncio.run(watch(source, console))
        finally:
            if source.view.title:
                show(lambda width: [source.view], None)

    cli.guarded(run)


if __name__ == "__main__":
    main()
