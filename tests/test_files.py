"""Tests of the files of tests."""

from __future__ import annotations

from pathlib import Path


def test_no_two_files_of_tests_have_the_same_name():
    """pytest imports them by their names, and stops at the second one before it has run any."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
