"""The task kinds of the quick start: what is asked, what is there at first, what must be there in the end.

Invariants
- A task is a pure function of (kind, split, random state): the same seed gives the same tasks, byte for byte.
- Names (file stems, function names) are split once and for all by a hash: a name of a held-out task occurs in
  no training task.
- `files`, `outputs` and the name of the function are all that the verifier knows. `right` is one way to solve
  the task (it becomes `solution/solve.sh`); `mistakes` are what a careless demonstrator does instead. The
  verifier sees neither, and reinforcement learning sees only the verifier.

Nothing here touches the disk; `make_tasks.py` writes task directories, `make_model.py` makes demonstrations.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

WORDS = (  # noqa: SIM905
    "red blue green amber silver golden dark bright quiet loud small big cold warm fast slow old new soft "
    "hard fox lake river stone tree bird cloud hill road house lamp ship star moon wind rain snow fire leaf "
    "root door wall book page note list plan word song game ball cup box key map ring rope sand seed shoe "
    "sock tank tent tile tool"
).split()
EXTENSIONS = ("txt", "md", "log", "csv")
HELDOUT_SHARE = 5  # one name in five is held out


class ToolCall(NamedTuple):
    """One tool call of a demonstration: the tool's name and its arguments."""

    name: str
    arguments: dict[str, str]


class Operator(NamedTuple):
    """What a function of a `func` or `fix` task computes."""

    parameters: str
    body: str
    phrases: tuple[str, str]
    confused_with: str  # what a careless demonstrator writes instead
    compute: Callable[..., object]


OPERATORS: dict[str, Operator] = {
    "add": Operator("a, b", "a + b", ("the sum of a and b", "a plus b"), "sub", lambda a, b: a + b),
    "sub": Operator("a, b", "a - b", ("the difference of a and b", "a minus b"), "add", lambda a, b: a - b),
    "mul": Operator("a, b", "a * b", ("the product of a and b", "a times b"), "add", lambda a, b: a * b),
    "max": Operator("a, b", "max(a, b)", ("the larger of a and b", "the maximum of a and b"), "min", max),
    "min": Operator("a, b", "min(a, b)", ("the smaller of a and b", "the minimum of a and b"), "max", min),
    "rev": Operator("a", "a[::-1]", ("the list a reversed", "a in reverse order"), "len", lambda a: a[::-1]),
    "len": Operator("a", "len(a)", ("the length of a", "the number of items in a"), "rev", len),
}
# Inputs on which any two operators with the same parameters differ at least once.
INPUTS: dict[str, list[tuple[object, ...]]] = {
    "a, b": [(3, 5), (7, 2), (-4, 4), (0, 9), (6, 6)],
    "a": [([1, 2, 3],), ([9, 4],), ([5, -1, 7, 2],), ([8, 8, 1],)],
}


class Function(NamedTuple):
    """A function that the verifier calls: file, name, arguments of each call and the `repr` of each right
    result."""

    path: str
    name: str
    inputs: list[tuple[object, ...]]
    outputs: list[str]


@dataclass(frozen=True)
class Task:
    kind: str
    instruction: str
    start: dict[str, str]  # path -> content before the agent starts
    right: tuple[ToolCall, ...]
    mistakes: tuple[tuple[ToolCall, ...], ...]
    files: dict[str, str | None]  # path -> content wanted in the end (up to final newlines); None: must be gone
    function: Function | None = None


def split_of(name: str) -> str:
    """The split a name belongs to: a hash decides, so adding names never moves one."""
    digest = hashlib.sha256(name.encode()).digest()
    return "heldout" if digest[0] % HELDOUT_SHARE == 0 else "train"


def bash(cmd: str) -> ToolCall:
    return ToolCall("bash", {"cmd": cmd})


def write(path: str, content: str) -> ToolCall:
    return ToolCall("write_file", {"path": path, "content": content})


class Draw:
    """Random names and words of one split. Two names of one task never coincide."""

    def __init__(self, rng: random.Random, split: str) -> None:
        self.rng = rng
        self.split = split
        self.used: set[str] = set()

    def stem(self) -> str:
        while True:
            name = self.rng.choice(WORDS) + str(self.rng.randrange(10))
            if split_of(name) == self.split and name not in self.used:
                self.used.add(name)
                return name

    def file(self) -> str:
        return self.stem() + "." + self.rng.choice(EXTENSIONS)

    def words(self, count: int) -> str:
        return " ".join(self.rng.choice(WORDS) for _ in range(count))


def create(draw: Draw) -> Task:
    path, words = draw.file(), draw.rng.sample(WORDS, 2)
    text = " ".join(words)
    other = draw.rng.choice([e for e in EXTENSIONS if not path.endswith(e)])
    return Task(
        kind="create",
        instruction=f"Create the file `{path}` with the text `{text}`.",
        start={},
        right=(write(path, text + "\n"),),
        mistakes=(
            (write(path, " ".join(words[:-1]) + "\n"),),
            (write(path.split(".")[0] + "." + other, text + "\n"),),
        ),
        files={path: text},
    )


def _source(name: str, op: Operator) -> str:
    return f"def {name}({op.parameters}):\n    return {op.body}\n"


def _function(path: str, name: str, op: Operator) -> Function:
    inputs = INPUTS[op.parameters]
    return Function(path, name, inputs, [repr(op.compute(*given)) for given in inputs])


def func(draw: Draw) -> Task:
    path, name = draw.rng.choice(WORDS) + ".py", draw.stem()
    op = draw.rng.choice(list(OPERATORS.values()))
    return Task(
        kind="func",
        instruction=(f"In `{path}` write a function `{name}({op.parameters})` that returns {draw.rng.choice(op.phrases)}."),
        start={},
        right=(write(path, _source(name, op)),),
        mistakes=((write(path, _source(name, OPERATORS[op.confused_with])),),),
        files={},
        function=_function(path, name, op),
    )


def fix(draw: Draw) -> Task:
    """The name of the function stands only in the file: it must be read before it is written."""
    path, name, invented = draw.rng.choice(WORDS) + ".py", draw.stem(), draw.stem()
    op = draw.rng.choice(list(OPERATORS.values()))
    wrong = draw.rng.choice([o for o in OPERATORS.values() if o.parameters == op.parameters and o is not op])
    look = bash(f"cat {path}")
    return Task(
        kind="fix",
        instruction=f"The function in `{path}` should return {draw.rng.choice(op.phrases)}. Fix it.",
        start={path: _source(name, wrong)},
        right=(look, write(path, _source(name, op))),
        mistakes=(
            (write(path, _source(invented, op)),),
            (look, write(path, _source(name, OPERATORS[op.confused_with]))),
        ),
        files={},
        function=_function(path, name, op),
    )


def rename(draw: Draw) -> Task:
    old, new, text = draw.file(), draw.file(), draw.words(3)
    verb = draw.rng.choice(("Rename", "Move"))
    other = draw.rng.choice([e for e in EXTENSIONS if not new.endswith(e)])
    return Task(
        kind="rename",
        instruction=f"{verb} `{old}` to `{new}`.",
        start={old: text + "\n"},
        right=(bash(f"mv {old} {new}"),),
        mistakes=((bash(f"cp {old} {new}"),), (bash(f"mv {old} {new.split('.')[0]}.{other}"),)),
        files={old: None, new: text},
    )


def append(draw: Draw) -> Task:
    path, text, before = draw.file(), draw.words(2), draw.words(3)
    return Task(
        kind="append",
        instruction=f"Append the line `{text}` to `{path}`.",
        start={path: before + "\n"},
        right=(bash(f"echo {text} >> {path}"),),
        mistakes=((bash(f"echo {text} > {path}"),), (write(path, text + "\n"),)),
        files={path: before + "\n" + text},
    )


def count(draw: Draw) -> Task:
    path, out = draw.file(), draw.file()
    what, other = draw.rng.choice((("lines", "words"), ("words", "lines")))
    flag = {"lines": "-l", "words": "-w"}
    lines = [draw.words(draw.rng.randint(1, 4)) for _ in range(draw.rng.randint(2, 6))]
    words = sum(len(line.split()) for line in lines)
    if words == len(lines):  # else counting the wrong thing would be right
        lines[-1] += " " + draw.words(1)
        words += 1
    return Task(
        kind="count",
        instruction=f"Count the {what} of `{path}` and write the number to `{out}`.",
        start={path: "\n".join(lines) + "\n"},
        right=(bash(f"wc {flag[what]} < {path} > {out}"),),
        mistakes=(
            (bash(f"wc {flag[other]} < {path} > {out}"),),
            (bash(f"wc {flag[what]} {path} > {out}"),),  # prints the name too; twice, see SKILL
            (bash(f"wc {flag[what]} {path} > {out}"),),
            (bash(f"wc -c < {path} > {out}"),),
        ),
        files={path: "\n".join(lines), out: str(len(lines) if what == "lines" else words)},
    )


def follow(draw: Draw) -> Task:
    """The name of the file to create stands only in another file: read before write. Graded by pytest."""
    path, target, text = draw.file(), draw.file(), draw.words(2)
    look = bash(f"cat {path}")
    return Task(
        kind="follow",
        instruction=f"Read `{path}`. It names a file. Create that file with the text `{text}`.",
        start={path: target + "\n"},
        right=(look, write(target, text + "\n")),
        mistakes=((write(path, text + "\n"),), (look, write(path, text + "\n"))),
        files={path: target, target: text},
    )


KINDS: dict[str, Callable[[Draw], Task]] = {f.__name__: f for f in (create, func, fix, rename, append, count, follow)}
# One round of kinds. `follow` is rare because pytest takes a quarter of a second to start.
ROUND = (
    *("create", "func", "fix", "rename", "append", "count", "create", "count", "rename", "follow"),
    *("create", "func", "fix", "rename", "append", "count", "create", "count", "rename", "append"),
)
# The round of demonstrations dwells on what takes the imitator longest: choosing an operator, and the second step after
# a look.
DEMONSTRATED = ("create", "func", "fix", "rename", "append", "count", "follow", "create", "func", "fix", "follow")
# How often the careless demonstrator does the right thing. Where a word of the instruction decides (operators, flags)
# it must be right clearly more often than wrong: else the imitator does not tie the word to the choice, a group of
# rollouts is soon all right or all wrong, and nothing more is learned.
SKILL = {"create": 0.2, "func": 0.8, "fix": 0.65, "rename": 0.15, "append": 0.25, "count": 0.36, "follow": 0.5}


def make_task(rng: random.Random, split: str, kind: str) -> Task:
    return KINDS[kind](Draw(rng, split))


def make_split(seed: int, split: str, number: int) -> list[Task]:
    """`number` tasks of a split: rounds of kinds, each task with its own random state."""
    return [make_task(random.Random(f"{seed}/{split}/{i}"), split, ROUND[i % len(ROUND)]) for i in range(number)]
