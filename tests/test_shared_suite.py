"""Tests of how processes of pytest share the suite."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from sharing import LONGEST, dealt


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("others", [0, 1, 100])
def test_each_process_begins_with_its_part_of_the_longest_tests(others, workers):
    names = [f"tests/test_other.py::test_{i}" for i in range(others)] + [f"tests/{LONGEST[0]}[{i}]" for i in range(20)]
    made = [item.nodeid for item in dealt([SimpleNamespace(nodeid=name) for name in names], workers)]
    assert sorted(made) == sorted(names)
    left, longest = made, names[others:]
    for worker in range(workers if others == 100 else 0):
        run, left = left[: len(left) // (workers - worker)], left[len(left) // (workers - worker) :]
        mine = longest[worker::workers]
        assert run[: len(mine)] == mine
        assert not set(run[len(mine) :]) & set(longest)


def test_no_two_files_of_tests_have_the_same_name():
    """pytest imports them by their names, and stops at the second one before it has run any."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
