"""Upstream's tests as a task carries them: copied, each comparison made honest, pytest beside them."""

from __future__ import annotations

import ast
import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

VERIFIER: Final = Path(__file__).with_name("verifier")
VENDORED: Final = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments", "exceptiongroup", "tomli")
LEXERS: Final = ("__init__.py", "_mapping.py", "diff.py", "python.py")  # of pygments, those that pytest imports
IMPORT: Final = "from honest import honest as _honest_"


def write(source: Path, tests: list[str], folder: Path) -> None:
    """Write a task's `tests/` but for expected.json: `tests` are files or directories below `source`, an unpacked sdist."""
    shutil.copytree(VERIFIER / "canary", folder / "canary")
    for name in ("test.sh", "grade.py"):
        shutil.copy(VERIFIER / name, folder)
    lib = folder / "lib"
    lib.mkdir()
    for name in ("run.py", "honest.py"):
        shutil.copy(VERIFIER / name, lib)
    _vendor(lib)
    for name in tests:
        target = folder / "suite" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (source / name).is_dir():
            shutil.copytree(source / name, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source / name, target)
    for file in (folder / "suite").rglob("*.py"):
        file.write_text(honest(file.read_text(encoding="utf-8")), encoding="utf-8")


def names_imported(source: Path, tests: list[str], modules: list[str]) -> set[str]:
    """What upstream's tests import from the package, by name: the specification must tell of it, even if it is private."""
    found: set[str] = set()
    for name in tests:
        for file in [source / name] if (source / name).is_file() else sorted((source / name).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in modules:
                    found |= {alias.name for alias in node.names}
    return found


def honest(text: str) -> str:
    """A test module whose comparisons ask verifier/honest.py about what they compare."""
    tree = _Honest().visit(ast.parse(text))
    head = [n for n, node in enumerate(tree.body) if (n == 0 and _is_docstring(node)) or _is_future(node)]
    tree.body[max(head, default=-1) + 1 : 0] = ast.parse(IMPORT).body
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


class _Honest(ast.NodeTransformer):
    def visit_Compare(self, node: ast.Compare) -> ast.Compare:
        self.generic_visit(node)
        if any(isinstance(op, (ast.Eq, ast.NotEq, ast.In, ast.NotIn)) for op in node.ops):
            node.left = _asked(node.left)
            node.comparators = [_asked(c) for c in node.comparators]
        return node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
        if name.lower().startswith("assert") and any(word in name.lower() for word in ("equal", "in")):
            node.args = [_asked(arg) for arg in node.args]
        return node


def _asked(node: ast.expr) -> ast.expr:
    if isinstance(node, (ast.Constant, ast.Starred)):
        return node
    return ast.Call(ast.Name("_honest_", ast.Load()), [node], [])


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _vendor(lib: Path) -> None:
    """The pytest of this environment, so that no image needs one."""
    for name in VENDORED:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            continue
        origin = Path(spec.origin)
        if origin.name == "__init__.py":
            shutil.copytree(origin.parent, lib / name, ignore=_unneeded)
        else:
            shutil.copy(origin, lib)


def _unneeded(folder: str, names: list[str]) -> Iterator[str]:
    lexers = folder.endswith("pygments/lexers")
    return (name for name in names if name == "__pycache__" or (lexers and name not in LEXERS))
