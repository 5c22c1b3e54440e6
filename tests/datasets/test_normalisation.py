"""Tests of mean and deviation of channels, and the words of an augmentation."""

from __future__ import annotations

import numpy as np
import pytest

import nbcnn
from nbcnn.datasets.augment import Augment
from nbcnn.datasets.normalisation import Normalisation
from nbcnn.files.errors import UsageError


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_mean_and_deviation_are_numpys(rng, monkeypatch, dtype):
    monkeypatch.setattr("nbcnn.datasets.normalisation._BLOCK", 100)  # several blocks
    images = rng.integers(0, 256, (7, 3, 5, 4)).astype(dtype)
    made = Normalisation.of(images)
    values = images.astype(np.float64) / (255.0 if dtype == np.uint8 else 1.0)
    # Float64 sums of 140 integers are exact; the quotients round a few times: 1e-12 is thousands of roundings.
    np.testing.assert_allclose(made.mean, values.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(made.deviation, values.std((0, 2, 3)), rtol=1e-12)
    attrs = made.attributes(images.dtype.name)
    seen = (images - np.array(attrs["shift"])[:, None, None]) * np.array(attrs["factor"])[:, None, None]
    np.testing.assert_allclose(seen.mean((0, 2, 3)), 0, atol=1e-12)
    np.testing.assert_allclose(made.undone(seen), values, rtol=1e-5, atol=1e-5 * values.max())  # float32: 2^-24 of values up to 255


def test_a_channel_of_one_value_has_deviation_1():
    assert Normalisation.of(np.full((3, 1, 2, 2), 51, np.uint8)) == Normalisation((0.2,), (1.0,))


def test_a_normalisation_survives_its_text():
    made = Normalisation((0.1, 1 / 3), (0.2, 0.7))
    assert Normalisation.parse(made.text()) == made
    for wrong in ("", "[]", '{"mean": 3}', '{"mean": ["a"], "deviation": [1]}', '{"mean": [1], "deviation": [0]}'):
        with pytest.raises(UsageError):
            Normalisation.parse(wrong)


@pytest.mark.parametrize(("mean", "deviation"), [((), ()), ((1,), (1, 2)), ((0,), (-1,)), ((float("nan"),), (1,)), ((0,), (float("inf"),))])
def test_what_is_no_normalisation(mean, deviation):
    with pytest.raises(UsageError):
        Normalisation(mean, deviation)


@pytest.mark.parametrize("text", ["", "flip", "flip:alternate", "crop:4", "flip,crop:4,cutout:8", "flip,crop:4:reflect,cutout:8", "cutout:3"])
def test_an_augmentation_survives_its_text(text):
    assert Augment.parse(text).text() == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("flop", "did you mean flip"),
        ("crop", "as in crop:4"),
        ("crop:x", "as in"),
        ("crop:-1", "as in"),
        ("crop:2:reflex", "did you mean reflect"),
        ("cutout:2:reflect", "no augmentation"),
        ("flip,flip", "twice"),
        ("flip:often", "flip is"),
    ],
)
def test_what_is_no_augmentation(text, message):
    with pytest.raises(UsageError, match=message):
        Augment.parse(text)


def test_an_augmentation_must_fit_the_images():
    Augment.parse("crop:3").check((1, 4, 9))
    for text, shape, message in (
        ("crop:4", (1, 4, 9), "leaves nothing"),
        ("cutout:9", (1, 9, 9), "leaves nothing"),
        ("crop:1", (5,), "vectors of 5"),
    ):
        with pytest.raises(UsageError, match=message):
            Augment.parse(text).check(shape)


@pytest.mark.parametrize(("mean", "deviation"), [((1e38,), (1.0,)), ((0.0,), (1e38,)), ((0.0,), (1e-44,)), ((float("nan"),), (1.0,))])
def test_numbers_that_leave_no_float32_are_refused(mean, deviation):
    with pytest.raises(nbcnn.UsageError, match="within float32"):
        nbcnn.Normalisation(mean, deviation)


@pytest.mark.parametrize("make", [lambda: nbcnn.WhitenPatches(norm=1e38), lambda: nbcnn.Whiten(contrast=1e38), lambda: nbcnn.Whiten(eps=1e38)])
def test_what_is_added_to_variances_leaves_room_for_sums(make):
    with pytest.raises(nbcnn.UsageError, match=r"below 1e\+30"):
        make()
