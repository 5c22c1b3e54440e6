"""This test runs half a minute of all campaigns in .ci/run, ten minutes in .ci/full; hours on demand: `python -m tests.campaigns --minutes 60`."""

from __future__ import annotations

import time

import pytest

from campaigns import CAMPAIGNS, mutants, store
from campaigns.runner import run


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_half_a_minute_of_attacks_loses_nothing(name):
    assert run(name, 30 / len(CAMPAIGNS)).lost == []


@pytest.mark.full
@pytest.mark.parametrize("name", CAMPAIGNS)
def test_ten_minutes_of_attacks_lose_nothing(name):
    assert run(name, 600 / len(CAMPAIGNS), first=10_000).lost == []


@pytest.mark.full
def test_fifty_processes_use_one_store_of_kernels_for_ten_seconds(tmp_path):
    store.together(50, 10, seed=10_000, folder=tmp_path)


def lost(name, seeds, folder, seconds=float("inf")):
    """The complaints about the mutants of a format with the given seeds, for about `seconds` at most."""
    complaints, begun = [], time.perf_counter()
    for seed in seeds:
        if time.perf_counter() - begun > seconds:
            break
        try:
            mutants.mutated(name, seed, folder / str(seed))
        except AssertionError as complaint:
            complaints.append(f"seed {seed}: {complaint}")
    return complaints


@pytest.mark.parametrize("name", mutants.FORMATS)
def test_dozens_of_mutants_of_each_format_are_read_or_refused_in_words(name, tmp_path):
    assert lost(name, range(36), tmp_path, seconds=2) == []


@pytest.mark.full
@pytest.mark.parametrize("name", mutants.FORMATS)
def test_two_thousand_mutants_of_each_format_are_read_or_refused_in_words(name, tmp_path):
    assert lost(name, range(20_000, 22_000), tmp_path) == []
