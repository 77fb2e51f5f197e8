"""The "shown by" cells of docs/guarantees.md: a test says itself which kinds of fault it shows, `@pytest.mark.pain(3, 14)`.

Tests are read, not imported. A row that no test names, and a test that names no row, are a `ValueError`; the sentences of a row are kept by hand.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROW = re.compile(r"^\| (\d+) \|(.*) \|([^|]*)\|$", re.M)


def shown(root: Path) -> dict[int, list[str]]:
    """Kind of fault -> the tests that show it, by file and line."""
    found: dict[int, list[str]] = {}
    for file in sorted((root / "tests").rglob("test_*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            for mark in getattr(node, "decorator_list", ()):
                if isinstance(node, ast.FunctionDef) and isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.pain":
                    for number in mark.args:
                        found.setdefault(ast.literal_eval(number), []).append(f"{file.relative_to(root).as_posix()}::{node.name}")
    return found


def fill(page: str, tests: dict[int, list[str]]) -> str:
    """The page, with the last cell of each numbered row made of `tests`."""
    rows = {int(m[1]) for m in ROW.finditer(page)}
    if lacking := rows - tests.keys():
        raise ValueError(f"no test shows {sorted(lacking)}: mark one with @pytest.mark.pain(N), or delete the row")
    if unknown := {n: tests[n] for n in sorted(tests.keys() - rows)}:
        raise ValueError(f"no row has these numbers: {unknown}")
    return ROW.sub(lambda m: f"| {m[1]} |{m[2]} | {' '.join(f'`{t}`' for t in tests[int(m[1])])} |", page)
