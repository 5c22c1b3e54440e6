"""Tests of features and classification shared among ranks: the files of one process, bit for bit."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from scripts import exits
from scripts import extract as run_extract
from teams import together

from nbcnn.classify import pairs, pipeline
from nbcnn.classify.blocks import Blocks
from nbcnn.classify.feature_writer import FeaturePart, FeatureWriter
from nbcnn.classify.features import read_features
from nbcnn.cli.extract import extract
from nbcnn.ranks.team import ALONE, TeamError

FLAGS = {
    "images": None,
    "mirror": True,
    "at": None,
    "device": None,
    "checkpoint": None,
    "data_dir": None,
    "limit": 5,
    "mode": "cpu",
    "precision": None,
    "batch": 2,
    "format": None,
    "json": None,
    "quiet": True,
}


def test_ranks_write_the_features_of_one_process(finished, tmp_path, capsys):
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    assert exits(run_extract, [finished, "--mode", "cpu", "--batch", "2", "--limit", "5", "--out", alone, "--quiet", "--mirror"]) == 0
    work = extract
    # Of 5 images in batches of 2 three ranks have one each, and three none.
    codes = together(6, lambda team: work(SimpleNamespace(run=str(finished), out=str(shared), **FLAGS), team))
    assert codes == [0] * 6
    expected, got = read_features(alone), read_features(shared)
    assert np.array_equal(got.train, expected.train)
    assert np.array_equal(got.test, expected.test)
    assert np.array_equal(got.test_mirrored, expected.test_mirrored)
    assert got.sha256 == expected.sha256
    assert capsys.readouterr().out.count("images ×") == 2
    assert not list(shared.glob(".*"))


def test_a_rank_that_fails_leaves_the_features_as_they_were(finished, tmp_path):
    out, work = tmp_path / "features", extract

    def fails(team):
        if team.rank == 1:
            raise OSError("no disk")
        return work(SimpleNamespace(run=str(finished), out=str(out), **FLAGS), team)

    found = together(2, fails)
    assert all(isinstance(error, Exception) for error in found)
    assert not out.exists() or not list(out.iterdir())


def test_several_ranks_cannot_write_csv(finished):
    work = extract
    with pytest.raises(ValueError, match="several ranks cannot share it") as raised:
        work(SimpleNamespace(run=str(finished), out=None, **(FLAGS | {"format": "csv", "mirror": None})), SimpleNamespace(size=2, leads=True))
    assert raised.value.exit_code == 2


def test_rows_of_a_part_come_in_order_and_missing_ones_are_noticed(tmp_path):
    with FeatureWriter(tmp_path, "train", 4, 3) as writer:
        writer.write(0, np.ones((2, 3)))
        with FeaturePart(writer.partial, "train", 2, 3) as part:
            with pytest.raises(ValueError, match="of 3 values is due"):
                part.write(3, np.ones((1, 3)))
            part.write(2, np.full((2, 3), 2.0))
        writer.adopt(4)
        assert writer.rows == 4
        with pytest.raises(ValueError, match="another rank's rows are missing"):
            writer.adopt(5)


def samples():
    """Training features of three classes, their labels, and test features."""
    random = np.random.default_rng(3)
    labels = np.repeat([0, 1, 2], (20, 17, 14)).astype(np.int32)
    train = random.standard_normal((len(labels), 6)).astype(np.float32) + labels[:, None].astype(np.float32)
    return train, labels, random.standard_normal((9, 6)).astype(np.float32) + 1


def outcome(folder, team):
    """The classifier of the samples on rank 0; None from the others, which help."""
    train, labels, test = samples()
    settings = pipeline.Settings()
    if not team.leads:
        return pipeline.assist(labels, len(test), settings=settings, scratch=folder, team=team)
    return pipeline.classify(lambda: (train, test), labels, settings=settings, scratch=folder, team=team)


@pytest.mark.parametrize("size", [2, 5])
def test_ranks_solve_the_pairs_of_one_process(tmp_path, size):
    alone = outcome(tmp_path, ALONE)
    found, *others = together(size, lambda team: outcome(tmp_path, team))
    assert others == [None] * (size - 1)
    assert np.array_equal(found.test_decisions, alone.test_decisions)
    for mine, expected in zip(found.machine.machines, alone.machine.machines, strict=True):
        assert np.array_equal(mine.support, expected.support)
        assert np.array_equal(mine.dual, expected.dual)
        assert (mine.intercept, mine.iterations) == (expected.intercept, expected.iterations)
    assert list(tmp_path.iterdir()) == []


def test_ranks_of_several_machines_cannot_share_the_kernel_matrix(tmp_path):
    with Blocks((2, 2), 1, tmp_path) as blocks, pytest.raises(TeamError, match="launch classify on one machine"):
        blocks.share(SimpleNamespace(size=4, beside=2))


def test_ranks_of_a_machine_share_its_cores():
    two = SimpleNamespace(beside=2, mine=lambda tasks: range(0, tasks, 2))
    sizes = (3000, 3000)
    assert pairs.default_jobs((10, 10), 1, two) == 1
    assert 1 <= pairs.default_jobs(sizes, 9, two) <= pairs.default_jobs(sizes, 9, ALONE)
