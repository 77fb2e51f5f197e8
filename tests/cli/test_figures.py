"""Figures drawn in text."""

from __future__ import annotations

import io

from rich.console import Console
from rich.text import Text

from gyre.report.figures import chart, clock, moving_average, ordinal, packed, plain, table


def test_numbers() -> None:
    assert moving_average([1, 3, 5, 7], 2) == [1, 2, 4, 6]
    assert [clock(s) for s in (0, 61.9, 3661, -0.5, -75)] == ["00:00", "01:01", "1:01:01", "00:00", "-01:15"]
    assert [ordinal(n) for n in (2, 3, 4, 11, 21, 112)] == ["2nd", "3rd", "4th", "11th", "21st", "112th"]


def test_drawings() -> None:
    assert chart([0, 0.5, 1], 10, 2, 0, 1) == ["  █", " ██"]
    assert chart([], 10, 2, 0, 1) == ["", ""]


def test_entries_are_broken_only_where_they_are_longer_than_a_line() -> None:
    entries = [Text(e) for e in ("a one", "b two", "c a long one", "d is longer than a whole line")]
    assert packed(entries, 16, indent=2).plain.split("\n") == ["a one   b two", "  c a long one", "  d is longer", "  than a whole", "  line"]


def test_columns_without_room_stand_below() -> None:
    out = io.StringIO()
    Console(file=out, width=20).print(table(("run", "", "first", "second", "third"), [("r", "x", "1", "2", "3")], 20, labels=2))
    assert [line.split() for line in out.getvalue().splitlines()] == [
        ["run", "first"], ["r", "x", "1"], ["run", "second"], ["r", "x", "2"], ["run", "third"], ["r", "x", "3"],
    ]  # fmt: skip


def test_agents_text_loses_its_control_sequences() -> None:
    assert plain("a\x1b[31mred\x1b[0m\x07\x1b]0;title\x07b\tc\n") == "aredb\tc\n"
