"""gyre-report: figures of one or several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gyre import cli


@click.command()
@cli.common(run=False)
@click.argument("run_dirs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN_DIR...")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True, help="For people or for scripts.")
@click.option("-o", "output", type=click.Path(path_type=Path, dir_okay=False), help="Write to this file.")
def main(run_dirs: tuple[Path, ...], form: str, output: Path | None, **options: Any) -> None:
    """Print the figures of runs: steps, reward, staleness, evaluation, counts, seconds. A run under way can be read.

    With --format json, one run gives an object, several give a list.
    """

    def run() -> None:
        cli.start_logging(options["log_level"], options["json_logs"])
        from contextlib import redirect_stdout

        import msgspec

        from gyre.report import summary

        if output is not None:
            cli.writable(output)
        summaries = [summary.summarize(d) for d in run_dirs]
        if form == "json":
            text = msgspec.json.format(msgspec.json.encode(summaries[0] if len(summaries) == 1 else summaries), indent=2).decode()
            if output is None:
                click.echo(text)
            else:
                output.write_text(text + "\n", encoding="utf-8")
        elif output is None:
            summary.print_text(summaries)
        else:
            with output.open("w", encoding="utf-8") as file, redirect_stdout(file):
                summary.print_text(summaries)

    cli.guarded(run)


if __name__ == "__main__":
    main()
