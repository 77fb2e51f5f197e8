"""gyre-graph: the prefix graph of an execution as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gyre import cli


@click.command()
@cli.common(run=False)
@click.argument("source", metavar="RUN_DIR|FILE|-")
@click.option("--rollout", metavar="ID", help="The execution to draw; default: the first.")
@click.option("--format", "form", type=click.Choice(["tree", "svg", "html"]), default="tree", show_default=True,
              help="For a terminal, for documents, for a browser.")  # fmt: skip
@click.option("-o", "output", type=click.Path(path_type=Path, dir_okay=False), help="Write to this file.")
def main(source: str, rollout: str | None, form: str, output: Path | None, **options: Any) -> None:
    """Draw all calls of an execution as they share their prefixes: segments with their tokens, calls and first and last message, branches at right
    angles, chosen trajectories by number and colour. Reads a run directory, or what gyre-dump --kind graphs wrote, from a file or a pipe."""

    def run() -> None:
        cli.start_logging(options["log_level"], options["json_logs"])
        from gyre.report.graph import source as graphs

        if output is not None:
            cli.writable(output)
        graphs.write(source, rollout, form, output)

    cli.guarded(run)


if __name__ == "__main__":
    main()
