"""Leaf classes: rules as a table, the default that knows no harness, summaries by what became of their text."""

from __future__ import annotations

import pytest

from gyre.errors import UsageError
from gyre.trajectory.classes import RULES, Origin, classify, parse_rules, quotable, rules_of, told
from gyre.types import LeafClass

MAIN = Origin(b"main", True, 5)
REQUEST = [
    {"role": "system", "content": "You name things."},
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "x"},
    {"role": "user", "content": "Sum it up."},
]


def test_the_default() -> None:
    origins = {"t": Origin(b"title", False, 5), "m1": MAIN, "s1": Origin(b"sub", True, 50), "m2": MAIN}
    assert classify(origins) == {"t": LeafClass.SIDE, "m1": LeafClass.MAIN, "s1": LeafClass.SUB_AGENT, "m2": LeafClass.MAIN}
    busy = {"m1": MAIN, **{f"s{i}": Origin(b"sub", True, 50) for i in range(9)}, "m2": MAIN}
    assert classify(busy)["m2"] is LeafClass.MAIN and classify(busy)["s8"] is LeafClass.SUB_AGENT, "sub-agents do not lead, however much they do"
    assert classify({"only": Origin(b"x", False, 0)}) == {"only": LeafClass.MAIN}
    assert classify({}) == {}


def test_a_summary_is_one_whose_text_was_adopted() -> None:
    """A compaction without tools is a side call until its text begins another conversation; then it is of that conversation's class."""
    asked = Origin(b"sum", False, 9)
    assert classify({"m": MAIN, "c": asked, "n": MAIN})["c"] is LeafClass.SIDE
    assert classify({"m": MAIN, "c": asked._replace(quoted_by="n"), "n": MAIN})["c"] is LeafClass.MAIN_SUMMARY
    again = {"m": MAIN, "c": asked._replace(quoted_by="n"), "n": MAIN, "d": asked}
    assert [classify(again)[c] for c in "cd"] == [LeafClass.MAIN_SUMMARY, LeafClass.SIDE], "the last one came to nothing"
    inside = {"m": MAIN, "k": MAIN, "s": Origin(b"sub", True, 1), "c": asked._replace(quoted_by="r"), "r": Origin(b"sub", True, 1)}
    assert classify(inside)["c"] is LeafClass.SUB_AGENT_SUMMARY
    twice = {"m": MAIN, "c": asked._replace(quoted_by="d"), "d": Origin(b"more", False, 9, quoted_by="n"), "n": MAIN}
    assert [classify(twice)[c] for c in "cd"] == [LeafClass.MAIN_SUMMARY] * 2
    titled = {"m": MAIN._replace(quoted_by="t"), "k": MAIN, "t": Origin(b"title", False, 5)}
    assert classify(titled)["m"] is LeafClass.MAIN, "a side call that quotes a reply makes no summary of it"


def test_what_a_rule_says_holds() -> None:
    """But it does not tell an agent from its summaries, which may have its tools."""
    sub = Origin(b"sub", True, 9, told=LeafClass.SUB_AGENT)
    inside = {"m": MAIN, "s1": sub._replace(quoted_by="s2"), "s2": sub._replace(quoted_by="n"), "n": MAIN}
    assert [classify(inside)[c] for c in ("s1", "s2")] == [LeafClass.SUB_AGENT_SUMMARY, LeafClass.SUB_AGENT]
    busy = {"m": MAIN, **{f"s{i}": Origin(b"sub", True, 9, told=LeafClass.SUB_AGENT) for i in range(5)}}
    assert classify(busy)["m"] is LeafClass.MAIN and classify(busy)["s4"] is LeafClass.SUB_AGENT


@pytest.mark.parametrize(
    ("line", "tools", "expected"),
    [
        ("side system ^You name", ["bash"], LeafClass.SIDE),
        ("main-summary user (?i)^sum it", ["bash"], LeafClass.MAIN_SUMMARY),
        ("main-summary user first", ["bash"], None),
        ("sub-agent tools ^$", [], LeafClass.SUB_AGENT),
        (RULES["opencode"][0], ["bash", "task"], None),
        (RULES["opencode"][0], ["bash", "todowrite"], LeafClass.SUB_AGENT),
        (RULES["opencode"][0], [], None),
        (RULES["qwen-code"][0], ["agent", "list_agents"], None),
        (RULES["qwen-code"][0], ["list_agents"], LeafClass.SUB_AGENT),
        (RULES["codex"][0], ["exec_command", "multi_agent_v1__spawn_agent"], None),
        (RULES["codex"][0], ["exec_command"], LeafClass.SUB_AGENT),
        (RULES["claude-code"][0], ["Bash", "Agent", "Workflow"], None),
        (RULES["claude-code"][0], ["Bash", "Agent"], LeafClass.SUB_AGENT),
    ],
)
def test_rules(line: str, tools: list[str], expected: LeafClass | None) -> None:
    assert told(parse_rules([line], "f", "k"), REQUEST, tools) is expected


def test_a_runs_own_rules_come_first() -> None:
    rules = rules_of("opencode", ["main tools bash"])
    assert told(rules, REQUEST, ["bash"]) is LeafClass.MAIN
    assert told(rules, REQUEST, ["read"]) is LeafClass.SUB_AGENT
    assert rules_of("of a stranger", []) == ()


@pytest.mark.parametrize("line", ["", "main", "main tools", "best tools x", "main body x", "main tools ("])
def test_bad_rules_are_one_line(line: str) -> None:
    with pytest.raises(UsageError, match=r"run\.toml: trajectory\.leaf_rules: .*; "):
        rules_of("", [line])


@pytest.mark.parametrize(
    ("reply", "part"),
    [
        ("All is well.", "All is well."),
        ("<analysis>a</analysis>\n<summary>\n One <b>two</b>.\n</summary>", "One <b>two</b>."),
        ("<summary></summary>", "<summary></summary>"),
        ("ends with </summary>", "ends with </summary>"),
    ],
)
def test_what_comes_back_of_a_summary_is_what_stands_in_its_tag(reply: str, part: str) -> None:
    assert quotable(reply) == part
