"""Tests of views: what they are of an image, how outputs are averaged over them, what cannot be viewed."""

from __future__ import annotations

import numpy as np
import pytest

import nbcnn
from nbcnn.files.errors import UsageError
from nbcnn.model.views import Views


def classifier(outputs=3):
    return nbcnn.Model([nbcnn.Conv2d(4, 3), nbcnn.ReLU(), nbcnn.Flatten(), nbcnn.Linear(outputs)], "cross_entropy", mode="cpu").build((2, 5, 6))


def test_views_are_the_image_its_mirror_image_and_both_shifted(rng):
    images = rng.integers(0, 256, (3, 2, 5, 6)).astype(np.uint8)
    made = list(Views(flip=True, shift=1).of(images))
    assert sum(weight for weight, _ in made) == 1
    assert [weight for weight, _ in made] == [0.25, 0.25, 0.125, 0.125, 0.125, 0.125]
    assert all(view.shape == images.shape and view.dtype == np.uint8 and view.flags.c_contiguous for _, view in made)
    mirrored, plain, _, down, up_mirrored, up = (view for _, view in made)
    np.testing.assert_array_equal(plain, images)
    np.testing.assert_array_equal(mirrored, images[..., ::-1])
    # Row and column −1 are 1 of the image, the last ones before it.
    np.testing.assert_array_equal(down, images[:, :, [1, 0, 1, 2, 3]][..., [1, 0, 1, 2, 3, 4]])
    np.testing.assert_array_equal(up, images[:, :, [1, 2, 3, 4, 3]][..., [1, 2, 3, 4, 5, 4]])
    np.testing.assert_array_equal(up_mirrored, up[..., ::-1])


@pytest.mark.parametrize(("views", "count"), [("", 1), ("flip", 2), ("shift:2", 3), ("flip,shift:1", 6)])
def test_predictions_are_means_over_views(rng, views, count):
    images = rng.integers(0, 256, (7, 2, 5, 6)).astype(np.uint8)
    with classifier() as model:
        each = [(weight, model.predict(view)) for weight, view in Views.parse(views).of(images)]
        assert len(each) == count
        found = model.predict(images, views=views, batch_size=3)
        # Both are float32 sums of at most six products with powers of two.
        wanted = sum(np.float32(weight) * output for weight, output in each)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=6 * 2.0**-24 * np.abs(found).max())
        np.testing.assert_array_equal(model.predict_classes(images, views=views), found.argmax(1))
        np.testing.assert_allclose(model.predict_proba(images, views=views).sum(1), 1, atol=1e-6)


def test_evaluation_counts_what_the_views_predict(rng):
    images, labels = rng.integers(0, 256, (40, 2, 5, 6)).astype(np.uint8), rng.integers(0, 3, 40)
    with classifier() as model:
        found = model.evaluate(images, labels, views="flip,shift:2", batch_size=16)
        assert found["accuracy"] == np.mean(model.predict_classes(images, views="flip,shift:2") == labels)
        logits = model.predict(images, views="flip,shift:2").astype(np.float64)
        losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(40), labels]
        assert found["loss"] == pytest.approx(losses.mean(), rel=1e-6)
        assert found["loss"] != model.evaluate(images, labels)["loss"]


@pytest.mark.parametrize(
    ("views", "words"),
    [("flop", "no view 'flop'"), ("shift", "shift:1"), ("flip:2", "no view"), ("flip,flip", "twice"), ("shift:5", "below 5"), (3, "views")],
)
def test_what_is_no_view_is_refused(rng, views, words):
    with classifier() as model, pytest.raises(UsageError, match=words):
        model.predict(np.zeros((2, 2, 5, 6), np.uint8), views=views)


def test_views_are_of_images_and_of_outputs_that_stay():
    with nbcnn.Model([nbcnn.Linear(3)], "cross_entropy", mode="cpu").build((4,)) as vectors, pytest.raises(UsageError, match="images"):
        vectors.predict(np.zeros((2, 4), np.uint8), views="flip")
    with nbcnn.Model([nbcnn.Conv2d(1, 3, padding=1)], "mse", mode="cpu").build((1, 4, 4)) as painter, pytest.raises(UsageError, match="vectors"):
        painter.evaluate(np.zeros((2, 1, 4, 4), np.uint8), views="flip")
