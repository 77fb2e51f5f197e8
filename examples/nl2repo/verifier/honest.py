"""An object that equals everything passes most tests. Each comparison of upstream's tests has its operands go through `honest` (see suite.py)."""

from unittest import mock

PLAIN = (str, bytes, int, float, complex, bool, type(None))
CONTAINERS = (list, tuple, set, frozenset)
DEPTH, MEMBERS = 4, 1000


def honest(value, depth=DEPTH):
    """`value` itself. `AssertionError` if it, or a member of a plain container, claims to equal an object that it has never seen."""
    kind = type(value)
    if kind in PLAIN or value is mock.ANY:
        return value
    if kind in CONTAINERS or kind is dict:
        if depth and len(value) <= MEMBERS:
            for member in value:
                honest(member, depth - 1)
                if kind is dict:
                    honest(value[member], depth - 1)
        return value
    try:
        lies = bool(value == object())
    except Exception:
        lies = False
    if lies:
        raise AssertionError(f"an object of {kind.__name__!r} equals everything")
    return value
