"""What kind of call each of an execution's calls was: the leaf classes, by rules and by a default that knows no harness.

A rule is a line `CLASS PLACE REGEX`: calls whose PLACE matches get that class. PLACE is `system` (the system messages), `user` (the last message of
the user), or `tools` (names of the tools, in order, a space between two; empty if there are none). The first rule that fits holds: the run's own
(`trajectory.leaf_rules`) before those of the harness (`RULES`), and where none fits the default, `classify`.

Pure. Rules look at a request as it comes, so that no text is kept; what they say of a call and all else that counts is an `Origin`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from gyre.errors import UsageError
from gyre.types import LeafClass

RULES: Final[Mapping[str, tuple[str, ...]]] = {
    "codex": (r"sub-agent tools ^(?!.*spawn_agent).",),
    "opencode": (r"sub-agent tools ^(?!.*\btask\b).",),
    "qwen-code": (r"sub-agent tools ^(?!.*\b(?:agent|task)\b).",),
    "claude-code": (r"sub-agent tools ^(?!.*\bWorkflow\b).",),
}
"""By the name of a preset. Their sub-agents have tools, but not the one that starts sub-agents, or workflows of them."""

_CLASSES: Final = [c.value for c in LeafClass]
_PLACES: Final = ("system", "user", "tools")
_CLOSED: Final = re.compile(r"</(\w+)>\Z")


class Rule(NamedTuple):
    """See the module."""

    leaf_class: LeafClass
    place: str
    pattern: re.Pattern[str]


class Origin(NamedTuple):
    """What a call was asked with: a digest of its system prompt and tools, whether it had tools, tokens it sampled; the class that a rule gave it;
    the call whose request has this call's reply as text, though it does not continue it."""

    family: bytes
    has_tools: bool
    n_sampled: int
    told: LeafClass | None = None
    quoted_by: str | None = None


def quotable(reply: str) -> str:
    """What of a reply comes back if it is a summary: all of it, or what stands in the tag that it ends with (some drop an analysis before it)."""
    end = _CLOSED.search(reply)
    inside = reply[: end.start()].partition(f"<{end[1]}>")[2].strip() if end else ""
    return inside or reply


def parse_rules(lines: Iterable[str], where: str, key: str) -> tuple[Rule, ...]:
    """Read rules. Raises `UsageError`."""
    rules = []
    for line in lines:
        name, _, rest = line.strip().partition(" ")
        place, _, pattern = rest.strip().partition(" ")
        if name not in _CLASSES or place not in _PLACES or not pattern:
            remedy = f"write CLASS PLACE REGEX with a class of {', '.join(_CLASSES)} and a place of {', '.join(_PLACES)}"
            raise UsageError(where, f"{line!r} is no rule", remedy, key)
        try:
            rules.append(Rule(LeafClass(name), place, re.compile(pattern)))
        except re.error as e:
            raise UsageError(where, f"{pattern!r} is no regular expression ({e})", "mend it", key) from None
    return tuple(rules)


def rules_of(harness: str, lines: Sequence[str]) -> tuple[Rule, ...]:
    """A run's own rules, then those of its harness. Raises `UsageError`."""
    return parse_rules([*lines, *RULES.get(harness, ())], "run.toml", "trajectory.leaf_rules")


def told(rules: Sequence[Rule], messages: Sequence[Mapping[str, Any]], tools: Iterable[str]) -> LeafClass | None:
    """What the rules say of a request: canonical messages (role and content), names of its tools."""
    texts: dict[str, Callable[[], str]] = {
        "system": lambda: "\n".join(m["content"] for m in messages if m["role"] == "system"),
        "user": lambda: next((m["content"] for m in reversed(messages) if m["role"] == "user"), ""),
        "tools": lambda: " ".join(tools),
    }
    return next((rule.leaf_class for rule in rules if rule.pattern.search(texts[rule.place]())), None)


def classify(origins: Mapping[str, Origin]) -> dict[str, LeafClass]:
    """A class for each call, in order of arrival.

    What a rule says, holds. Of the other calls, `main` is the first family (system prompt and tools) that has tools and more than one call:
    sub-agents are started by it, titles have no tools. Where there is none, it is the one with the most calls; among equals with the most sampled
    tokens, then the earliest. A family of one call without tools (summaries aside), where the main one has tools, is a side call. All others are
    sub-agents. A call whose reply stands as text in a later request that is no side call is a summary: the main agent's or a sub-agent's, as that
    request is. (This holds for calls that a rule gives to the same agent: rules do not tell an agent from its summaries.)
    """
    calls: Counter[bytes] = Counter()
    adopted = Counter(origin.family for origin in origins.values() if origin.told is None and origin.quoted_by)
    tokens: Counter[bytes] = Counter()
    with_tools: set[bytes] = set()
    for origin in origins.values():
        if origin.told is None or origin.told is LeafClass.MAIN:
            calls[origin.family] += 1
            tokens[origin.family] += origin.n_sampled
            if origin.has_tools:
                with_tools.add(origin.family)
    main = next((f for f in calls if f in with_tools and calls[f] > 1), None) or max(
        calls, key=lambda f: (calls[f], tokens[f]), default=None
    )  # the first of equals: dictionaries keep the order of arrival
    classes: dict[str, LeafClass] = {}
    for call_id, origin in origins.items():
        family = origin.family
        if origin.told is not None:
            classes[call_id] = origin.told
        elif family == main:
            classes[call_id] = LeafClass.MAIN
        elif calls[family] - adopted[family] == 1 and family not in with_tools and main in with_tools:
            classes[call_id] = LeafClass.SIDE
        else:
            classes[call_id] = LeafClass.SUB_AGENT
    for call_id, origin in reversed(list(origins.items())):  # those quoted by a summary come before it
        quoting = classes.get(origin.quoted_by or "", LeafClass.SIDE)
        main_like = quoting in (LeafClass.MAIN, LeafClass.MAIN_SUMMARY)
        if quoting is not LeafClass.SIDE and origin.told in (None, LeafClass.MAIN if main_like else LeafClass.SUB_AGENT):
            classes[call_id] = LeafClass.MAIN_SUMMARY if main_like else LeafClass.SUB_AGENT_SUMMARY
    return classes
