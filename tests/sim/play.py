"""Play the world of a seed and judge it.

python tests/sim/play.py 17          play one world; print its plan, what befell it, and what is wrong with it
python tests/sim/play.py 17 --log    and what its processes logged, in virtual time
python tests/sim/play.py 17 --said   and every message
python tests/sim/play.py 17 --fleet  the world of that seed that has a coordinator
"""

from __future__ import annotations

import argparse
import logging
import sys

from theorem import clock
from theorem.trial import fleet_trial, trial


class _Formatter(logging.Formatter):
    """Virtual time and process before each line."""

    def format(self, record: logging.LogRecord) -> str:
        process = clock.current()
        at = f"{process.now:9.3f} {process.name}" if process is not None else ""
        return f"{at}: {record.name}: {record.getMessage()}"


def main(arguments: list[str]) -> int:
    """See the module. Returns 1 if something is wrong with the world."""
    parser = argparse.ArgumentParser(prog="python tests/sim/play.py", description="Play the world of a seed and judge it.")
    parser.add_argument("seed", type=int)
    parser.add_argument("--log", action="store_true", help="print what processes log, in virtual time")
    parser.add_argument("--said", action="store_true", help="print every message")
    parser.add_argument("--fleet", action="store_true", help="play the world that has a coordinator")
    options = parser.parse_args(arguments)
    if options.log:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Formatter())
        logging.basicConfig(level=logging.INFO, handlers=[handler])
    verdict = (fleet_trial if options.fleet else trial)(options.seed)
    print(verdict.plan)
    for s in verdict.chronicle.said if options.said else ():
        print(f"{s.at_s:9.3f} {s.sender} -> {s.to}: {s.message}")
    print(f"{verdict.seconds:.3f} s of virtual time, {verdict.turns} turns, digest {verdict.chronicle.digest()}")
    print("\n".join(verdict.struck or ["no fault struck"]))
    print("\n".join(verdict.findings or ["nothing is wrong: each update is that of one cell alone, to the last bit that floating point allows"]))
    return bool(verdict.findings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
