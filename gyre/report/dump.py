"""A run's records as a stream: what to read, which fields. In which bytes is formats.py's business.

`follow` yields the records of each step once it is committed, until the run is finished. Should the core go back to an older checkpoint, steps it
replays are not yielded again.
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import msgspec

from gyre import cli
from gyre.errors import UsageError
from gyre.events import EventReader
from gyre.report import formats
from gyre.report.atif import Parse
from gyre.report.read import Record, RunReader, Selection

_POLL_S: Final = 0.5
_ARRAYS: Final = ("token_ids", "loss_mask", "logprobs", "versions", "prompt_ids")


def parse_steps(text: str | None) -> tuple[int | None, int | None]:
    """ "A:B" (half-open, either side may be left out) or "A" to (first, last) inclusive. Raises `UsageError`."""
    if text is None:
        return None, None
    first, colon, last = text.partition(":")
    try:
        lo = int(first) if first else 1
        hi = (int(last) - 1 if last else None) if colon else lo
    except ValueError:
        raise UsageError("--step", f"{text!r} is no range of steps", "write A:B, A: or A") from None
    if hi is not None and hi < lo:
        raise UsageError("--step", f"{text!r} holds no step", "write A:B with A < B; B is not in it")
    return lo, hi


def check(kind: str, form: str, fields: list[str], *, tokens: bool) -> None:
    """Whether what was asked for goes together and can be written here. Raises `UsageError`, or `ModuleNotFoundError` for what is not installed."""
    if form == "atif" and (kind != "trajectories" or fields or not tokens):
        raise UsageError("--format atif", "is for whole trajectories", "leave out --kind, --fields and --no-tokens")
    if form == "parquet":
        import pyarrow.parquet  # noqa: F401  (before an output file is emptied)


def check_remote(form: str) -> None:
    """Whether a form can be had from another host. Raises `UsageError`."""
    if form == "atif":
        raise UsageError("--format atif", "needs the run's tokenizer", "give the run directory")


def write(
    found: Iterable[Record | None], output: Path | None, form: str, fields: list[str], reader: RunReader | None, parse: Parse, *, flush: bool
) -> None:
    """Write records to `output`, or stdout; `reader`: of their run, where it is here; `flush`: each at once. Raises `BrokenPipeError` when nobody
    reads any more."""
    encode = formats.of_form(form, reader, parse)  # before the file is emptied, for it may fail
    with output.open("wb") if output is not None else nullcontext(cli.stdout()) as out:
        sink = encode(out)
        try:
            for record in found:
                if record is not None:
                    sink.write(pick(record, fields) if fields else record)
                elif reader_gone(out.fileno()):
                    raise BrokenPipeError
                if flush:
                    out.flush()
        except OSError:
            sink.abandon()
            raise
        except KeyboardInterrupt:
            sink.close()  # what there is shall be whole
            raise
        sink.close()


def records(reader: RunReader, kind: str, selection: Selection, *, tokens: bool) -> Iterator[Record]:
    """The records of one kind."""
    match kind:
        case "trajectories":
            yield from reader.trajectories(selection, tokens=tokens)
        case "calls":
            for record in reader.calls(selection):
                yield record if tokens else {k: v for k, v in record.items() if k not in _ARRAYS}
        case "graphs":
            yield from reader.graphs(selection, tokens=tokens)
        case "rollouts":
            yield from reader.rollouts(selection)
        case "groups":
            yield from reader.groups(selection)
        case "steps":
            yield from reader.steps(selection)
        case "queries":
            yield from reader.queries()
        case "evals":
            yield from reader.evals()
        case _:
            yield from (msgspec.to_builtins(e) for e in reader.events())


def follow(run: RunReader, kind: str, selection: Selection, *, tokens: bool) -> Iterator[Record | None]:
    """Records as they become final, until the run is finished; None now and then, so that the caller notices a closed pipe."""
    step = (selection.first_step or 1) - 1
    log = EventReader(run.run_dir / "events.jsonl")
    seen: set[str] = set()
    finished = False
    while True:
        for event in log.events():  # before the ledger is read, which is never behind its log
            if event.kind in ("finished", "failure", "buffer_started"):
                finished = event.kind != "buffer_started"  # the buffer may have been started again, for more steps
            if kind == "events":
                yield msgspec.to_builtins(event)
        if kind in ("queries", "evals"):
            for record in records(run, kind, selection, tokens=tokens):
                key = record["query_id" if kind == "queries" else "eval_id"]
                if key not in seen:
                    seen.add(key)
                    yield record
        elif kind != "events":
            last = max((s.step for s in run.step_rows()), default=0)
            last = min(last, selection.last_step) if selection.last_step is not None else last
            if last > step:
                yield from records(run, kind, msgspec.structs.replace(selection, first_step=step + 1, last_step=last), tokens=tokens)
                step = last
        if finished:
            return
        yield None
        time.sleep(_POLL_S)


def reader_gone(fd: int) -> bool:
    """Has the reader of a pipe closed it? Writing would tell too, but there may be nothing to write for hours."""
    poll = select.poll()
    poll.register(fd, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def pick(record: Record, fields: list[str]) -> Record:
    """Only these fields, in this order. Raises `UsageError` for one the record lacks."""
    missing = [f for f in fields if f not in record]
    if missing:
        raise UsageError("--fields", f"no field {missing[0]!r}", f"the fields are {', '.join(record)}")
    picked: dict[str, Any] = {f: record[f] for f in fields}
    return picked
