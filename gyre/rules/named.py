"""Rules by the name that `--rule` takes: `elastic | lookahead | async[:N][+stream] | colocate`."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from gyre.errors import UsageError
from gyre.rules.elastic import elastic
from gyre.rules.fixed import colocate, fixed_split
from gyre.rules.lookahead import lookahead
from gyre.rules.roles import Rule

RULES: Final[dict[str, Rule]] = {"elastic": elastic, "colocate": colocate, "lookahead": lookahead}
"""Rules that need no number; `async` is made for one."""

FORMS: Final = "elastic, lookahead, async[:N][+stream] or colocate"


class RuleName(msgspec.Struct, frozen=True):
    """A parsed name. `trainers` is the split of `async`, None where it was not given. `stream`: a step begins with its first ready groups, not
    only when all are there; the paper's Async does not stream, every other rule does."""

    text: str
    kind: str
    trainers: int | None = None
    stream: bool = True


def parse_rule(name: str) -> RuleName:
    """Raises `UsageError` for what is not a rule."""
    if name in RULES:
        return RuleName(name, name)
    found = re.fullmatch(r"async(?::([0-9]{1,4}))?(\+stream)?", name)
    if found is None:
        raise UsageError("--rule", f"{name!r} is no rule", f"give {FORMS}")
    number, stream = found.groups()
    if number is not None and int(number) < 1:
        raise UsageError("--rule", f"{name!r} has no cell that trains", "give at least async:1")
    return RuleName(name, "async", int(number) if number else None, stream is not None)


def make_rule(name: str) -> Rule:
    """The rule of that name; `async` without a number trains on one cell. Raises `UsageError`."""
    parsed = parse_rule(name)
    return RULES[parsed.kind] if parsed.kind in RULES else fixed_split(parsed.trainers or 1)
