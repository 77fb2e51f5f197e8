"""gyre-report: figures of one or several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gyre import cli

FIGURES = ["roles", "water", "burst", "slots", "staleness", "speedup", "learning", "durations"]


@click.command()
@cli.common(run=False)
@click.argument("run_dirs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN_DIR...")
@click.option("--format", "form", type=click.Choice(["text", "html", "json", "svg", "png"]), default="text", show_default=True,
              help="For a terminal, a browser, scripts, documents.")  # fmt: skip
@click.option("-o", "output", type=click.Path(path_type=Path, dir_okay=False), help="Write to this file.")
@click.option("--figure", "figures", multiple=True, type=click.Choice(FIGURES), help="Only this figure; repeatable.")
@click.option("--burst", type=click.IntRange(min=1), help="Draw this burst; default: one in which many cells turned.")
def main(run_dirs: tuple[Path, ...], form: str, output: Path | None, figures: tuple[str, ...], burst: int | None, **options: Any) -> None:
    """Draw runs: roles of the cells, water level, a burst, slots, staleness, speed-up of the first run over the others, gradient norm and score,
    durations; and print what became of them: steps, reward, evaluation, counts, seconds. A run under way can be read.

    With --format json, one run gives an object, several give a list. html, svg and png need the extra gyre[report].
    """

    def run() -> None:
        cli.start_logging(options["log_level"], options["json_logs"])
        from gyre.report import report

        if output is not None:
            cli.writable(output)
        report.write(list(run_dirs), form, output, list(figures), burst)

    cli.guarded(run)


if __name__ == "__main__":
    main()
