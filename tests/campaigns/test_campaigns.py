"""This test runs half a minute of all campaigns in .ci/run, ten minutes in .ci/full; hours on demand: `python -m tests.campaigns --minutes 60`."""

from __future__ import annotations

import re
import time
from collections import Counter

import pytest
from compiled import full

from campaigns import CAMPAIGNS, broken_kernels, memory, mutants, store
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


@pytest.mark.full
@pytest.mark.parametrize("name", memory.KINDS)
def test_a_file_of_each_kind_takes_a_gigabyte_at_most(name, tmp_path):
    """Ten minutes of all campaigns reach a few of the kinds."""
    memory.one(name, 10_000, tmp_path)


def lost(name, seeds, folder, seconds=float("inf")):
    """The complaints about the mutants of a format with the given seeds, for about `seconds` at most."""
    mutants.good(name)  # an error in making the good files is no complaint about a mutant
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


def test_mutants_of_kernels_are_of_all_kinds_and_those_that_may_survive_exist():
    every = broken_kernels.mutants()
    kinds = ["barrier", "bound", "operator", "order", "sign", "wait"]
    assert sorted({mutant.kind for mutant in every}) == kinds
    assert [str(mutant) for mutant in broken_kernels.sample(60)] == [str(mutant) for mutant in broken_kernels.sample(60)]
    assert Counter(mutant.kind for mutant in broken_kernels.sample(60)) == dict.fromkeys(kinds, 10)
    assert set(broken_kernels.SURVIVORS) <= set(map(str, every))


BARRIER, WAIT = "cuda.syncthreads()", "cp_async_wait(STAGES - 2)"
TILED, SCATTER, FEW = "nbcnn/ops/conv/tiled.py", "nbcnn/ops/conv/thin/scatter.py", "nbcnn/ops/conv/simt/few_rows.py"
LAST = "nbcnn/ops/conv/thin_mma/last_dgrad.py"
TESTS = {TILED: "test_conv_naive_tiled.py", SCATTER: "test_conv_thin.py", FEW: "test_few_rows.py", LAST: "test_conv_thin_mma_last.py"}
"""By file a test file of its kernels."""


@pytest.mark.parametrize(
    ("file", "kernel", "before", "number", "after"),
    [
        # Images beyond those of a thread's first trip.
        (TILED, "conv_wgrad_tiled_kernel", "range(first_image, N, teams)", 0, "range(first_image, min(N, teams), teams)"),
        # One group of copies too few.
        (LAST, "last_dgrad_kernel", WAIT, 0, "cp_async_wait(STAGES - 1)"),
        *full((TILED, "conv_image_tiled_kernel", BARRIER, 1, "pass"), (FEW, "few_rows_kernel", BARRIER, 0, "pass")),
        *full((SCATTER, "thin_parts_kernel", BARRIER, 0, "pass"), (SCATTER, "thin_parts_kernel", BARRIER, 1, "pass")),
    ],
)
def test_mutants_that_nothing_noticed_once_are_noticed(file, kernel, before, number, after, tmp_path):
    source = (broken_kernels.ROOT / file).read_bytes()
    start = [found.start() for found in re.finditer(re.escape(before.encode()), source)][number]
    mutant = broken_kernels.Mutant(file, kernel, 0, "by hand", before, after, (start, start + len(before)))
    tests = next((broken_kernels.ROOT / "tests").rglob(TESTS[file])).relative_to(broken_kernels.ROOT)
    assert broken_kernels.noticed(mutant, broken_kernels.copied(tmp_path), [str(tests)])


@pytest.mark.full
def test_a_sample_of_mutants_is_noticed_or_justified():
    """A line for each part of the tests and each mutant, none of which takes more than ten minutes of a core.

    `python -m tests.campaigns.broken_kernels --count 60 --seed 7` is a larger one.
    """
    result = broken_kernels.campaign(18, seed=1)
    assert (result.tried, list(map(str, result.survivors))) == (18, [])
