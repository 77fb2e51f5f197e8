"""What gyre-graph does: find one execution's graph in a run directory, a dump or a pipe; draw it in a form; write it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Final

import msgspec

from gyre import cli
from gyre.errors import UsageError, WorkFailed
from gyre.report.graph import page, svg, tree
from gyre.report.graph.layout import Recorded, arrange
from gyre.report.read import RunReader, Selection
from gyre.report.show import show

_EXCERPT: Final = 160  # tokens of a message that are read
_SCHEMA: Final = "gyre.graph/1"


def write(source: str, rollout: str | None, form: str, output: Path | None) -> None:
    """Draw the graph of `rollout`, or of the first execution that has one. `source`: a run directory, a file of JSON lines, or "-" for stdin.
    Raises `UsageError` for what is no source, `WorkFailed` when there is nothing to draw."""
    found = next((g for g in graphs(source, rollout) if rollout in (None, g.rollout_id)), None)
    if found is None:
        raise WorkFailed(f"{source}: no prefix graph" + (f" of {rollout}; gyre-dump --fields rollout_id lists those there are" if rollout else ""))
    layout = arrange(found)
    if form == "tree":
        show(lambda width: [tree.sketch(layout, width)], output)
        return
    data = (svg.svg(layout) if form == "svg" else page.page(layout)).encode()
    if output is None:
        cli.stdout().write(data)
    else:
        output.write_bytes(data)


def graphs(source: str, rollout: str | None) -> Iterator[Recorded]:
    """The graphs in a source, in its order."""
    path = Path(source)
    if source != "-" and path.is_dir():
        with RunReader(path) as reader:
            for record in reader.graphs(Selection(rollout_id=rollout, evaluation=True), tokens=False, most=_EXCERPT):
                yield msgspec.convert(record, Recorded)
        return
    if source == "-" and sys.stdin is None:
        raise UsageError("-", "stdin is closed", "pipe gyre-dump --kind graphs into it")
    if source != "-" and not path.is_file():
        raise UsageError(source, "no such file or directory", "give a run directory, a dump, or - for a pipe")
    with path.open("rb") if source != "-" else nullcontext(sys.stdin.buffer) as lines:
        yield from _parse(source, lines)


def _parse(source: str, lines: Iterable[bytes]) -> Iterator[Recorded]:
    decoder = msgspec.json.Decoder(Recorded)
    for number, line in enumerate(lines, 1):
        try:
            graph = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            raise UsageError(f"{source}:{number}", f"no prefix graph ({e})", "write them with gyre-dump --kind graphs") from None
        if graph.schema != _SCHEMA:
            raise UsageError(f"{source}:{number}", f"a {graph.schema}, no {_SCHEMA}", "write them with gyre-dump --kind graphs")
        yield graph
