"""This test runs half a minute of all campaigns in .ci/run, ten minutes in .ci/full; hours on demand: `python -m tests.campaigns --minutes 60`."""

from __future__ import annotations

import pytest

from campaigns import CAMPAIGNS, store
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
