"""Tests of how work is divided among ranks: for every number of images, batches, tasks and ranks, all of it, once, and as evenly as promised."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbcnn.cli.extract import rows_of
from nbcnn.ranks.team import Team, share

SIZES = st.integers(1, 12)
quick = settings(deadline=None, max_examples=60, derandomize=True)


def teams(size):
    """A team of every rank of so many, without connections."""
    made = [Team() for _ in range(size)]
    for rank, team in enumerate(made):
        team.rank, team.size = rank, size
    return made


def even(counts):
    """True if none has more than one more than another."""
    return max(counts) - min(counts) <= 1


@quick
@given(st.integers(1, 1 << 20), SIZES)
def test_a_batch_is_shared_whole_and_evenly_by_neighbours(batch, size):
    shares = [share(batch, rank, size) for rank in range(size)]
    ends = [one.first + one.count for one in shares]
    assert [one.first for one in shares] == [0, *ends[:-1]]
    assert ends[-1] == batch
    assert even([one.count for one in shares])
    assert all(one.images == max(one.count, 1) for one in shares)
    assert [one.weight * batch for one in shares] == pytest.approx([one.count for one in shares])
    # The mean of means is the mean, whoever has how many.
    assert sum(one.weight for one in shares) == pytest.approx(1)
    if batch % size == 0:
        assert {one.count for one in shares} == {batch // size}


@quick
@given(st.integers(1, 200), st.integers(1, 60), SIZES)
def test_an_epoch_visits_every_place_on_one_rank_and_batch_by_batch(count, batch, size):
    places = [team.places(count, batch) for team in teams(size)]
    if size > 1:
        assert all(each[-1] == count - 1 for each in places)
        places = [each[:-1] for each in places]
    assert np.array_equal(np.sort(np.concatenate(places)), np.arange(count))
    for start in range(0, count, batch):
        counts = [int(((start <= each) & (each < start + batch)).sum()) for each in places]
        assert even(counts)
        assert counts == [team.share(min(batch, count - start)).count for team in teams(size)]
    assert all((np.diff(each) > 0).all() for each in places)


@quick
@given(st.integers(0, 5000), SIZES)
def test_every_task_is_one_ranks(tasks, size):
    mine = [team.mine(tasks) for team in teams(size)]
    assert sorted(task for each in mine for task in each) == list(range(tasks))
    assert even([len(each) for each in mine])


@quick
@given(st.integers(1, 5000), st.integers(1, 300), SIZES)
def test_every_row_of_features_is_one_ranks_in_whole_batches(images, batch, size):
    slices = [rows_of(team, images, batch) for team in teams(size)]
    assert [one.start for one in slices] == [0, *(one.stop for one in slices[:-1])]
    assert slices[-1].stop == images
    assert all(one.start % batch == 0 for one in slices)
    assert even([-(-(one.stop - one.start) // batch) for one in slices])
