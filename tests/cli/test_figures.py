"""Figures drawn in text."""

from __future__ import annotations

from gyre.report.figures import chart, clock, moving_average, plain


def test_numbers() -> None:
    assert moving_average([1, 3, 5, 7], 2) == [1, 2, 4, 6]
    assert [clock(s) for s in (0, 61.9, 3661)] == ["00:00", "01:01", "1:01:01"]


def test_drawings() -> None:
    assert chart([0, 0.5, 1], 10, 2, 0, 1) == ["  █", " ██"]
    assert chart([], 10, 2, 0, 1) == ["", ""]


def test_agents_text_loses_its_control_sequences() -> None:
    assert plain("a\x1b[31mred\x1b[0m\x07\x1b]0;title\x07b\tc\n") == "aredb\tc\n"
