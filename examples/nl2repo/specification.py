"""A package's written specification: its documents and its public face (signatures and docstrings), never a body."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

CONSTANT_CHARS: Final = 120
DOCUMENT_CHARS: Final = 40_000
INSTRUCTION: Final = """\
# Write the Python package `{name}`

Write `{name}` from the specification below, in this directory (`{work}`): `{statement}` must work from here. These files must be there, and there may
be more:

{files}

- Pure Python 3.11 and its standard library; there is no network, and nothing can be installed.
- Tests that are not here import what you wrote and call it. Your score is the fraction of them that pass. They know nothing but the specification.
- Write the package only: no tests, no packaging, no documentation.

{documents}
## Public interface

Signatures and docstrings of the files, bodies left out. `...` as a value stands for one that is yours to choose.

{interface}"""

_BADGES: Final = re.compile(r"^(\[?!\[.*|\.\. (image|\|.*\| image)::.*(\n +:.*)*|.*shields\.io.*)\n", re.M)


def instruction(name: str, modules: list[str], files: dict[str, Path], documents: list[Path], wanted: set[str]) -> str:
    """The text of instruction.md. `files` are the package's modules by their path in the workspace, `wanted` names that are told though private."""
    faces = {place: outline(file.read_text(encoding="utf-8"), wanted) for place, file in sorted(files.items())}
    return INSTRUCTION.format(
        name=name,
        work="/work",
        statement="; ".join(f"import {module}" for module in modules),
        files="\n".join(f"- `{place}`" for place in faces),
        documents="\n".join(f"## {document.name}\n\n{_document(document)}\n" for document in documents),
        interface="\n\n".join(f"### `{place}`\n\n```python\n{text}\n```" for place, text in faces.items() if text) + "\n",
    )


def _document(file: Path) -> str:
    text = _BADGES.sub("", file.read_text(encoding="utf-8")).strip()
    return text if len(text) <= DOCUMENT_CHARS else text[:DOCUMENT_CHARS].rpartition("\n")[0] + "\n(cut here)"


def outline(source: str, wanted: set[str]) -> str:
    """A module's public face as Python text."""
    tree = ast.parse(source)
    tree.body = [face for node in tree.body for face in _faces(node, wanted)]
    return ast.unparse(tree)


def _faces(node: ast.stmt, wanted: set[str]) -> list[ast.stmt]:
    """What is shown of a statement: at most itself, without bodies."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        if _hidden(node.name, wanted):
            return []
        head = [node.body[0]] if ast.get_docstring(node) else []
        inner = [f for n in node.body[len(head) :] for f in _faces(n, wanted)] if isinstance(node, ast.ClassDef) else []
        node.body = [*head, *inner] if inner else [*head, ast.Expr(ast.Constant(...))]
        return [node]
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if not all(isinstance(t, ast.Name) and not _hidden(t.id, wanted) for t in targets):
            return []
        if node.value is not None and not _short_literal(node.value):
            node.value = ast.Constant(...)
        return [node]
    if isinstance(node, ast.ImportFrom) and node.level:
        return [node]
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return [node] if is_docstring else []


def _hidden(name: str, wanted: set[str]) -> bool:
    return name.startswith("_") and name not in wanted and not (name.startswith("__") and name.endswith("__"))


def _short_literal(value: ast.expr) -> bool:
    try:
        ast.literal_eval(value)
    except ValueError:
        return isinstance(value, ast.Name)  # an alias
    return len(ast.unparse(value)) <= CONSTANT_CHARS or isinstance(value, ast.List)  # __all__
