"""Documentation that can be wrong: docs/guarantees.md has all kinds of fault, each with a test; tests that it names exist; links lead somewhere."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pains
import pytest

ROOT = Path(__file__).resolve().parents[2]
GUARANTEES = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", *(p for p in (ROOT / "examples").rglob("*.md") if "made" not in p.parts)])


@cache
def names_in(file: Path) -> set[str]:
    """Names of the test functions that pytest would collect, without running anything."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_named_test_exists() -> None:
    missing = [f"{path}::{name}" for path, name in NAMED.findall(GUARANTEES) if not (ROOT / path).is_file() or name not in names_in(ROOT / path)]
    assert missing == []
    assert GUARANTEES.count("::") == len(NAMED.findall(GUARANTEES)), "something looks like the name of a test and is not"


def test_every_kind_of_fault_has_its_row_and_a_test() -> None:
    assert sorted(int(m[1]) for m in pains.ROW.finditer(GUARANTEES)) == list(range(1, 42))
    assert pains.fill(GUARANTEES, pains.shown(ROOT)) == GUARANTEES, "run make docs"


def test_a_row_without_a_test_and_a_test_without_a_row_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text("@pytest.mark.pain(1, 2)\ndef test_a(): ...\n\n@pytest.mark.pain(2)\ndef test_b(): ...\n")
    found = pains.shown(tmp_path)
    assert found == {1: ["tests/test_it.py::test_a"], 2: ["tests/test_it.py::test_a", "tests/test_it.py::test_b"]}
    assert pains.fill("| 2 | a | b | |\n| 1 | a | b | c | `x` |\n", found) == (
        "| 2 | a | b | `tests/test_it.py::test_a` `tests/test_it.py::test_b` |\n| 1 | a | b | c | `tests/test_it.py::test_a` |\n"
    )
    with pytest.raises(ValueError, match=r"no test shows \[3\]"):
        pains.fill("| 1 | a | b |\n| 2 | a | b |\n| 3 | a | b |\n", found)
    with pytest.raises(ValueError, match=r"no row has these numbers: \{2: "):
        pains.fill("| 1 | a | b |\n", found)


def test_the_table_of_kills_has_every_kind_and_no_loss() -> None:
    """tests/e2e/test_exact_resume.py writes it."""
    table = GUARANTEES.partition("<!-- kills -->")[2].partition("<!-- /kills -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| gyre-")]
    kinds = ["gyre-buffer", "gyre-coord", "gyre-rollout", "gyre-sandbox", "gyre-train", "gyre-train + gyre-rollout + gyre-buffer + gyre-sandbox"]
    assert sorted(row[0] for row in rows) == sorted(kinds)
    assert all(int(times) > 0 and (lost, doubled) == ("0", "0") and float(differ) < 1e-2 for _, times, _, lost, doubled, _, differ in rows)


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
