"""gyre-dump: a run's records on stdout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gyre import cli

KINDS = ["trajectories", "rollouts", "groups", "calls", "steps", "queries", "evals", "events"]


@click.command()
@cli.common(run=False)
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--kind", type=click.Choice(KINDS), default="trajectories", show_default=True, help="What to dump.")
@click.option("--format", "form", type=click.Choice(["jsonl", "msgpack"]), default="jsonl", show_default=True, help="Bytes of a record.")
@click.option("-o", "output", type=click.Path(path_type=Path, dir_okay=False), help="Write to this file.")
@click.option("--step", "steps", metavar="A:B", help="Only what steps A to B - 1 consumed.")
@click.option("--group", help="Only this group.")
@click.option("--rollout", help="Only this rollout.")
@click.option("--eval", "evaluation", is_flag=True, help="Evaluation rollouts too (not with --step).")
@click.option("--fields", metavar="A,B", help="Only these fields, in this order.")
@click.option("--no-tokens", is_flag=True, help="Leave out token arrays.")
@click.option("--count", is_flag=True, help="Print only the number of records.")
@click.option("--follow", is_flag=True, help="Go on with each step as it is committed, until the run is finished.")
def main(
    run_dir: Path, kind: str, form: str, output: Path | None, steps: str | None, group: str | None, rollout: str | None, evaluation: bool,
    fields: str | None, no_tokens: bool, count: bool, follow: bool, **options: Any,
) -> None:  # fmt: skip
    """Write a run's records, one after the other: trajectories with their tokens, or what else --kind names. A run under way can be read."""

    def run() -> None:
        cli.start_logging(options["log_level"], options["json_logs"])
        from contextlib import nullcontext

        from gyre.report import dump
        from gyre.report.read import RunReader, Selection

        first, last = dump.parse_steps(steps)
        if output is not None:
            cli.writable(output)
        selection = Selection(first_step=first, last_step=last, group_id=group, rollout_id=rollout, evaluation=evaluation)
        encode, names = dump.FORMATS[form], [f.strip() for f in fields.split(",")] if fields else []
        with RunReader(run_dir) as reader, output.open("wb") if output is not None else nullcontext(cli.stdout()) as out:
            found = (
                dump.follow(run_dir, kind, selection, tokens=not no_tokens) if follow else dump.records(reader, kind, selection, tokens=not no_tokens)
            )
            n = 0
            for record in found:
                if record is not None:
                    n += 1
                    if not count:
                        out.write(encode(dump.pick(record, names) if names else record))
                elif dump.reader_gone(out.fileno()):
                    raise BrokenPipeError
                if follow:
                    out.flush()
            if count:
                out.write(f"{n}\n".encode())
            out.flush()

    cli.guarded(run)


if __name__ == "__main__":
    main()
