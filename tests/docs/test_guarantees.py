"""Documentation that can be wrong: the tests that docs/guarantees.md names exist, and links lead somewhere."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GUARANTEES = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
DEMANDED = {1, 3, 5, 8, 9, 11, 15, 16, 17, 19, 20, 21, 23, 26, 28, 29, 32, 33, 40, 41}
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", *(p for p in (ROOT / "examples").rglob("*.md") if "made" not in p.parts)])


@cache
def names_in(file: Path) -> set[str]:
    """Names of the test functions that pytest would collect, without running anything."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def rows(title: str) -> dict[int, str]:
    """The numbered rows of a section's table."""
    section = GUARANTEES.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return {int(m[1]): m[0] for m in re.finditer(r"^\| (\d+) \|.*$", section, re.M)}


def test_every_named_test_exists() -> None:
    missing = [f"{path}::{name}" for path, name in NAMED.findall(GUARANTEES) if not (ROOT / path).is_file() or name not in names_in(ROOT / path)]
    assert missing == []
    assert GUARANTEES.count("::") == len(NAMED.findall(GUARANTEES)), "something looks like the name of a test and is not"


def test_every_kind_of_fault_is_accounted_for_once() -> None:
    shown, partly = rows("Shown"), rows("Shown in part")
    later = {int(n) for n in re.findall(r"^- (\d+):", GUARANTEES.partition("\n## Not yet\n")[2], re.M)}
    assert shown.keys() >= DEMANDED
    assert sorted([*shown, *partly, *later]) == list(range(1, 42))
    assert all(NAMED.search(row) for row in [*shown.values(), *partly.values()])


def anchors(text: str) -> set[str]:
    """What headings are called in links, as GitHub does it."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"\[(.+?)\]\(.+?\)", r"\1", heading).lower()).replace(" ", "-")
        found.add(slug if slug not in found else f"{slug}-1")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.M | re.S)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            continue  # another site
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        inside = file.is_relative_to(ROOT) and file.exists()
        if not inside or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
            broken.append(target)
    assert broken == []
