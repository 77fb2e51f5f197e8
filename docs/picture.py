"""Draw the live view of a finished run as it looked after its last step: `python docs/picture.py RUN_DIR docs/demo.svg`."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

from rich.console import Console

from gyre.report.live import RunView
from gyre.report.read import RunReader
from gyre.types import Version
from gyre.wire.messages import Counters


def main() -> None:
    run_dir, target = Path(sys.argv[1]), Path(sys.argv[2])
    with RunReader(run_dir) as reader:
        events = list(reader.events())
        view = RunView(reader.meta.run_id)
        clock = time.monotonic() - (events[-1].t_wall - events[0].t_wall)
        for event in events:
            view.started = clock + (events[-1].t_wall - event.t_wall)  # the view stamps a line when it hears of it
            view.event(event.kind, event.fields)
        view.started = clock
        counts = reader.counts()
        meta = reader.meta
        view.counters = Counters(
            id="", seq=0, admitted=counts.pop("admitted"), states=counts, water_level=0, step=meta.committed, total_steps=meta.total_steps,
            published=Version(meta.published_term or 0, meta.published_step or 0), term=meta.term, groups_open=0, eval_outstanding=0, finished=True,
        )  # fmt: skip
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(view.render())
    console.save_svg(str(target), title=f"gyre-coord --run {run_dir}")


if __name__ == "__main__":
    main()
