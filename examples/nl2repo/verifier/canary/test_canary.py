"""Tests that nothing can pass. If one does, the code under test has changed pytest, unittest or this process, and nothing in it counts."""

import unittest

import pytest
from honest import honest


class Liar:
    __hash__ = None

    def __eq__(self, other):
        return True


def test_false():
    assert False  # noqa: B011


def test_unequal():
    assert honest([1]) == honest([2])


def test_liar():
    assert honest(Liar()) == 1


def test_no_exception():
    with pytest.raises(ValueError):
        pass


def test_exception():
    raise RuntimeError


class TestCase(unittest.TestCase):
    def test_equal(self):
        self.assertEqual(1, 2)
