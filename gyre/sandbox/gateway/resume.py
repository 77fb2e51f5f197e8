"""A conversation that grew is rendered from where it grew: a chat template's loop over the messages goes on at the one that was last before.

Invariants
- The text is the one that the whole template would write. What a loop's round reads, it reads the same now as when it wrote the text that is used
  again: its item and the next one, the elements of lists that it looks up by number, the variables set outside, the namespaces as they were.
- Whatever cannot be told so is not used again, or a loop is left as it is: one that asks how long it or a list is, that lies in a macro or a block,
  a template with state of its own (`cycler`, `joiner`, `loop.changed`) or with chance in it.

How it works: `weave` wraps each outermost loop of a template's tree. The loop's items go through `Trace.begin`, each of its rounds asks `Trace.step`
whether to run. At the last item a `Mark` is made of the text so far and the namespaces; a later rendering, whose items begin with the same ones,
skips the rounds before it and puts that text in their place. Items are the same if they are the same objects: nobody changes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import is_
from typing import Any, Final, NamedTuple

from jinja2 import Undefined, nodes
from jinja2.runtime import Macro
from jinja2.utils import Namespace

TRACE: Final = "gyre_trace"
_LOOP: Final = frozenset(("index", "index0", "first", "last", "previtem", "nextitem", "depth", "depth0", "cycle"))  # equal in all rounds but the last
_SPECIAL: Final = frozenset(("loop", "self", "super", "caller", "varargs", "kwargs"))
_STATEFUL: Final = frozenset(("cycler", "joiner", "lipsum"))
_APART: Final = (nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)
_SCALARS: Final = (str, int, bool, type(None))
_ALL: Final = 1 << 60


class Indexed(list[Any]):
    """A list that notes which elements are looked up by number: those below `reach`."""

    reach = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        return Indexed(found) if isinstance(key, slice) else found

    def note(self, key: Any) -> None:
        self.reach = max(self.reach, key + 1 if type(key) is int and key >= 0 else _ALL)


class Mark(NamedTuple):
    """A loop before the round of its last item: its items, what it depended on, the text it had written, the namespaces as they were."""

    items: list[Any]
    watched: list[Any]
    indexed: list[tuple[Indexed, int]]
    text: str
    spaces: list[dict[str, Any]]


class Trace:
    """One rendering. `marks` are those of an earlier one, by loop, and are replaced by its own."""

    def __init__(self, marks: dict[int, Mark]) -> None:
        self.out: list[str] = []
        self._marks = marks

    def begin(self, iterable: Iterable[Any], loop: int, watched: list[Any], indexed: list[Any]) -> list[Any]:
        self._loop, self._items, self._round, self._start = loop, list(iterable), 0, len(self.out)
        self._indexed = [v if isinstance(v, Indexed) else Indexed() for v in indexed]
        for v in self._indexed:
            v.reach = 0
        values = [*watched, *(None if isinstance(v, Indexed) else v for v in indexed)]
        self._spaces = [v for v in values if isinstance(v, Namespace)]
        self._watched = [_attributes(v) if isinstance(v, Namespace) else v for v in values]
        mark = self._marks.get(loop)
        self._mark = mark if mark is not None and self._fits(mark) else None
        self._skipped = len(mark.items) - 1 if mark is not None and self._mark is not None else 0
        return self._items

    def step(self) -> bool:
        now = self._round
        self._round += 1
        if now < self._skipped:
            return False
        if now == self._skipped and self._mark is not None:
            self.out.append(self._mark.text)
            for space, attributes in zip(self._spaces, self._mark.spaces, strict=True):
                _attributes(space, attributes)
        if now == len(self._items) - 1:
            self._remember()
        return True

    def _fits(self, mark: Mark) -> bool:
        return (
            _begins(self._items, mark.items)
            and all(_same(a, b) or type(a) is type(b) is Macro for a, b in zip(self._watched, mark.watched, strict=True))
            and all(_begins(a, b[:reach]) for a, (b, reach) in zip(self._indexed, mark.indexed, strict=True))
        )

    def _remember(self) -> None:
        if self._mark is not None:  # its rounds looked up elements too
            for v, (_, reach) in zip(self._indexed, self._mark.indexed, strict=True):
                v.reach = max(v.reach, reach)
        reached = [(v, v.reach) for v in self._indexed]
        spaces = [_attributes(space) for space in self._spaces]
        if any(reach > len(v) for v, reach in reached) or any(isinstance(v, Namespace) for space in spaces for v in space.values()):
            self._marks.pop(self._loop, None)
            return
        self._marks[self._loop] = Mark(self._items, self._watched, reached, "".join(self.out[self._start :]), spaces)


def _attributes(space: Namespace, replaced: dict[str, Any] | None = None) -> dict[str, Any]:
    """A copy of a namespace's attributes, which are replaced first if others are given."""
    attributes: dict[str, Any] = object.__getattribute__(space, "_Namespace__attrs")
    if replaced is not None:
        attributes.clear()
        attributes.update(replaced)
    return dict(attributes)


def _begins(items: Sequence[Any], beginning: Sequence[Any]) -> bool:
    return len(items) >= len(beginning) and all(map(is_, items, beginning))


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(_same, a.values(), b.values()))
    return isinstance(a, Undefined) or (type(a) in _SCALARS and bool(a == b))


def weave(tree: nodes.Template) -> nodes.Template:
    """A template's tree with its outermost loops wrapped, where that can be done. Rendering it takes a `Trace` as the variable `TRACE`."""
    names = {n.name for n in tree.find_all(nodes.Name)} | {n.name for n in tree.find_all(nodes.Filter)}
    if next(tree.find_all(_APART), None) is None and not names & (_STATEFUL | {"random"}):
        macros = list(tree.find_all(nodes.Macro))
        for number, loop in enumerate(_loops(tree.body)):
            uses = _Uses()
            for node in [*loop.body, *macros]:
                uses.visit(node)
            if not (uses.refused or loop.recursive or loop.test):
                _wrap(loop, number, uses)
    return tree


def _loops(body: Iterable[nodes.Node]) -> Iterator[nodes.For]:
    for node in body:
        if isinstance(node, nodes.For):
            yield node
        elif isinstance(node, nodes.If):
            yield from _loops([*node.body, *node.elif_, *node.else_])


def _wrap(loop: nodes.For, number: int, uses: _Uses) -> None:
    def load(name: str) -> nodes.Expr:
        return nodes.Name(name, "load")

    def names(these: Iterable[str]) -> nodes.Expr:
        return nodes.List([load(n) for n in sorted(these)])

    arguments = [nodes.Const(number), names(uses.whole), names(uses.indexed - uses.whole), load(TRACE)]
    loop.iter = nodes.Filter(loop.iter, "gyre_begin", arguments, [], None, None)
    loop.body = [nodes.If(nodes.Filter(load(TRACE), "gyre_step", [], [], None, None), loop.body, [], [])]
    assert loop.environment is not None, "parsed by one"
    for node in (loop.iter, *loop.body):
        node.set_lineno(loop.lineno).set_environment(loop.environment)


class _Uses:
    """The variables that nodes read: as a whole, or only their elements by number. `refused`: more of a loop than can be told."""

    def __init__(self) -> None:
        self.whole: set[str] = set()
        self.indexed: set[str] = set()
        self.refused = False

    def visit(self, node: nodes.Node, parent: nodes.Node | None = None) -> None:
        if isinstance(node, nodes.NSRef):
            self.whole.add(node.name)
        elif isinstance(node, nodes.Name) and node.ctx == "load":
            if node.name == "loop":
                self.refused |= not (isinstance(parent, nodes.Getattr) and parent.attr in _LOOP)
            elif isinstance(parent, nodes.Getitem) and parent.node is node and not isinstance(parent.arg, nodes.Slice):
                self.indexed.add(node.name)
            elif node.name not in _SPECIAL:
                self.whole.add(node.name)
        for child in node.iter_child_nodes():
            self.visit(child, node)


FILTERS: Final = {
    "gyre_begin": lambda iterable, loop, watched, indexed, trace: trace.begin(iterable, loop, watched, indexed),
    "gyre_step": Trace.step,
}
