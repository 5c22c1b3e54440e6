"""Tests of free host memory: the system's, or what a container may still take."""

from __future__ import annotations

import pytest

from nbcnn.gpu import memory


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A system with 8 GiB available, whose control group is described by files in the returned folder."""
    (tmp_path / "meminfo").write_text("MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_GROUP", tmp_path)
    return tmp_path


def test_without_a_group_it_is_what_the_system_says(system):
    assert memory.available() == 8 << 30


@pytest.mark.parametrize(("limit", "free"), [("max", 8 << 30), (str(3 << 30), 2 << 30), (str(99 << 30), 8 << 30)])
def test_the_limit_of_a_group_counts_if_it_is_less(system, limit, free):
    (system / "memory.max").write_text(limit + "\n")
    (system / "memory.stat").write_text(f"anon {1 << 30}\nfile 12345\n")
    assert memory.available() == free


def test_a_system_that_does_not_say_has_what_is_built_in(system):
    (system / "meminfo").unlink()
    assert memory.available() >= 1 << 28
