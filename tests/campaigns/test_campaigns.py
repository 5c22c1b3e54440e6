"""This test runs half a minute of all campaigns in .ci/run, ten minutes in .ci/full; hours on demand: `python -m tests.campaigns --minutes 60`."""

from __future__ import annotations

import pytest

from campaigns import CAMPAIGNS
from campaigns.runner import run


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_half_a_minute_of_attacks_loses_nothing(name):
    assert run(name, 30 / len(CAMPAIGNS)).lost == []


@pytest.mark.full
@pytest.mark.parametrize("name", CAMPAIGNS)
def test_ten_minutes_of_attacks_lose_nothing(name):
    assert run(name, 600 / len(CAMPAIGNS), first=10_000).lost == []
