"""A harness that compacts and delegates: the quick start's agent, asked for several things in one execution.

    python3 -I -S harness.py        # inside a sandbox; single.py, the quick start's harness, lies beside it

The instruction has a line for each thing to do. The first half the agent does itself: after each, what was said is dropped for a summary, from which
the next begins. The second half goes to sub-agents: each has a system prompt of its own and is told one line. So an execution of n lines leaves n
leaves in its prefix graph, half of class main, half of class sub-agent.
"""

# ruff: noqa: PTH120, PTH123
from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(__file__))  # -I leaves it out

from single import SYSTEM, Endpoint, ModelError, answers, ask

SUB_SYSTEM = SYSTEM + " You help another agent."
TURNS = 3


def work(endpoint: Endpoint, system: str, instruction: str) -> None:
    """One conversation until the model has nothing left to do."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": instruction}]
    for _ in range(TURNS):
        message = ask(endpoint, messages, stream=False)
        told = answers(message)
        if not told:
            return
        messages += [message, *told]


def main() -> int:
    env = os.environ.get
    try:
        with open(env("GYRE_INSTRUCTION", "/run/gyre/instruction.md"), encoding="utf-8") as f:
            lines = f.read().split("\n")
        things = [line for line in lines if line.strip()]
        endpoint = Endpoint(env("GYRE_MODEL_SOCKET", "/run/gyre/model.sock"))
        own = (len(things) + 1) // 2
        for done, thing in enumerate(things):
            if done < own:
                work(endpoint, SYSTEM, thing if done == 0 else f"Done before: {done}.\n{thing}")
            else:
                work(endpoint, SUB_SYSTEM, thing)
    except (ModelError, OSError, ValueError, LookupError, TypeError) as error:
        print(f"harness: {type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
