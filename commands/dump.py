"""gyre-dump: a run's records on stdout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gyre import cli

KINDS = ["trajectories", "rollouts", "groups", "calls", "graphs", "steps", "queries", "evals", "events"]


class _Offered(dict[str, Any]):
    """Which tools a harness offered is not on record: any."""

    def __contains__(self, _: object) -> bool:
        return True


def _parse(text: str, id_prefix: str) -> dict[str, Any]:
    """A completion as a message, by the gateway's own parser; how the model writes tool calls is told by the text."""
    from gyre.sandbox.gateway.parse import Format, parse

    form = Format.XML if "<function=" in text else Format.HERMES if "<tool_call>" in text else Format.LLAMA
    return parse(text, id_prefix, offered=_Offered(), form=form)


@click.command()
@cli.common(run=False)
@click.argument("source", metavar="RUN_DIR|ADDRESS")
@click.option("--kind", type=click.Choice(KINDS), default="trajectories", show_default=True, help="What to dump.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["jsonl", "msgpack", "parquet", "atif"]),
    default="jsonl",
    show_default=True,
    help="Bytes of a record; parquet needs the extra gyre[dump], atif is for trajectories.",
)
@click.option("-o", "output", type=click.Path(path_type=Path, dir_okay=False), help="Write to this file.")
@click.option("--step", "steps", metavar="A:B", help="Only what steps A to B - 1 consumed.")
@click.option("--group", help="Only this group.")
@click.option("--rollout", help="Only this rollout.")
@click.option("--eval", "evaluation", is_flag=True, help="Evaluation rollouts too (not with --step).")
@click.option("--fields", metavar="A,B", help="Only these fields, in this order.")
@click.option("--no-tokens", is_flag=True, help="Leave out token arrays.")
@click.option("--redact-system", is_flag=True, help="Leave out what system messages say: the harness's prompt and its tools.")
@click.option("--count", is_flag=True, help="Print only the number of records.")
@click.option("--keys", metavar="DIR", type=click.Path(path_type=Path), help="Keys of the run (net.keys), for an address.")
@click.option("--follow", is_flag=True, help="Go on with each step as it is committed, until the run is finished.")
def main(
    source: str, kind: str, form: str, output: Path | None, steps: str | None, group: str | None, rollout: str | None, evaluation: bool,
    fields: str | None, no_tokens: bool, redact_system: bool, count: bool, keys: Path | None, follow: bool, **options: Any,
) -> None:  # fmt: skip
    """Write a run's records, one after the other: trajectories with their tokens, or what else --kind names. A run under way can be read, from
    another host by the address of its gyre-buffer (tcp://HOST:PORT)."""

    def run() -> None:
        cli.start_logging(options["log_level"], options["json_logs"])
        from gyre.report import dump
        from gyre.report.read import RunReader, Selection

        names = [f.strip() for f in fields.split(",")] if fields else []
        dump.check(kind, form, names, tokens=not no_tokens)
        first, last = dump.parse_steps(steps)
        if output is not None:
            cli.writable(output)
        shape = "count" if count else form
        if source.startswith(("tcp://", "ipc://")):
            from gyre.net.endpoints import check_peer
            from gyre.net.keys import load
            from gyre.report.remote import Remote
            from gyre.wire.messages import AskRecords

            dump.check_remote(form)
            asked = AskRecords(
                id="", kind=kind, first_step=first, last_step=last, group_id=group, rollout_id=rollout, evaluation=evaluation,
                tokens=not no_tokens, redact_system=redact_system,
            )  # fmt: skip
            with Remote(check_peer("ADDRESS", source), load(keys, "observer") if keys is not None else None) as remote:
                dump.write((remote.follow if follow else remote.records)(asked), output, shape, names, None, _parse, flush=follow)
            return
        selection = Selection(first_step=first, last_step=last, group_id=group, rollout_id=rollout, evaluation=evaluation)
        with RunReader(Path(source), redact_system=redact_system) as reader:
            found = (dump.follow if follow else dump.records)(reader, kind, selection, tokens=not no_tokens)
            dump.write(found, output, shape, names, reader, _parse, flush=follow)

    cli.guarded(run)


if __name__ == "__main__":
    main()
