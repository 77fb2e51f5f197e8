"""Draw the live view of a finished run as it looked after its last step: `python docs/picture.py RUN_DIR docs/demo.svg`."""

from __future__ import annotations

import asyncio
import io
import sys
from pathlib import Path

from rich.console import Console

from gyre.report.watch import Watch


def main() -> None:
    run_dir, target = Path(sys.argv[1]), Path(sys.argv[2])
    source = Watch(run_dir, None)
    asyncio.run(source.look())
    console = Console(record=True, width=100, height=36, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(source.view)
    console.save_svg(str(target), title=f"gyre-top {run_dir}")


if __name__ == "__main__":
    main()
