"""Figures drawn in text."""

from __future__ import annotations

from gyre.report.figures import chart, clock, moving_average, percentile, plain, spark


def test_numbers() -> None:
    assert moving_average([1, 3, 5, 7], 2) == [1, 2, 4, 6]
    assert [percentile([1, 2, 3, 4], q) for q in (0.0, 0.25, 0.5, 0.95, 1.0)] == [1, 1, 2, 4, 4]
    assert percentile([], 0.5) is None
    assert [clock(s) for s in (0, 61.9, 3661)] == ["00:00", "01:01", "1:01:01"]


def test_drawings() -> None:
    assert spark([0, 0.5, 1], 10) == "▁▅█" and spark([], 5) == "" and len(spark(range(1000), 20)) == 20
    assert chart([0, 0.5, 1], 10, 2, 0, 1) == ["  █", " ██"]
    assert chart([], 10, 2, 0, 1) == ["", ""]


def test_agents_text_loses_its_control_sequences() -> None:
    assert plain("a\x1b[31mred\x1b[0m\x07\x1b]0;title\x07b\tc\n") == "aredb\tc\n"
