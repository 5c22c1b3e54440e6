"""Tests of a caller's own arrays: which are taken, as what, and what the others are told."""

from __future__ import annotations

import numpy as np
import pytest

import nbcnn
import nbcnn.sklearn
from nbcnn.datasets import arrays
from nbcnn.files.errors import UsageError


@pytest.fixture
def pixels(rng):
    return rng.integers(0, 256, (5, 3, 6, 8), np.uint8)


def test_a_fitting_array_is_passed_on_uncopied(pixels, tmp_path):
    assert arrays.images(pixels) is pixels
    np.save(tmp_path / "x.npy", pixels)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert arrays.images(mapped) is mapped


@pytest.mark.parametrize("channels_last", [None, True])
def test_channels_last_are_moved(pixels, channels_last):
    made = arrays.images(pixels.transpose(0, 2, 3, 1), channels_last=channels_last)
    np.testing.assert_array_equal(made, pixels)
    assert made.flags.c_contiguous


def test_lists_grey_images_and_vectors(pixels):
    np.testing.assert_array_equal(arrays.images(list(pixels)), pixels)
    np.testing.assert_array_equal(arrays.images(pixels[:, 0]), pixels[:, :1])
    np.testing.assert_array_equal(arrays.images(pixels.reshape(5, -1)), pixels.reshape(5, -1))


@pytest.mark.parametrize(
    ("shape", "given", "expected"),
    [
        ((3, 6, 8), (3, 6, 8), (1, 3, 6, 8)),
        ((3, 6, 8), (6, 8, 3), (1, 3, 6, 8)),
        ((3, 6, 8), (2, 6, 8, 3), (2, 3, 6, 8)),
        ((1, 6, 8), (6, 8), (1, 1, 6, 8)),
        ((1, 6, 8), (4, 6, 8), (4, 1, 6, 8)),
        ((1, 6, 8), (6, 8, 1), (1, 1, 6, 8)),
        ((7,), (7,), (1, 7)),
        ((7,), (2, 7), (2, 7)),
    ],
)
def test_what_a_network_takes_decides(shape, given, expected):
    values = np.arange(np.prod(given), dtype=np.uint8).reshape(given)
    made = arrays.images(values, shape=shape)
    assert made.shape == expected
    if given[-1:] == shape[:1] and len(shape) == 3 and given[-3:] != shape:
        np.testing.assert_array_equal(made, values.reshape(-1, *given[-3:]).transpose(0, 3, 1, 2))
    else:
        np.testing.assert_array_equal(made.reshape(-1), values.reshape(-1))


def test_number_types(pixels):
    for dtype in (np.int64, np.uint16, np.int16):
        made = arrays.images(pixels.astype(dtype))
        assert made.dtype == np.uint8
        np.testing.assert_array_equal(made, pixels)
    assert arrays.images(pixels > 99).max() == 255
    for dtype in (np.float16, np.float32, np.float64):
        made = arrays.images(pixels.astype(dtype))
        assert made.dtype == np.float32
        np.testing.assert_array_equal(made, pixels)


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        (np.zeros((0, 3, 4, 4), np.uint8), {}, "there are no images"),
        ([], {}, "there are no images"),
        (np.zeros((2, 3, 9, 3), np.uint8), {}, "both its second and its last axis"),
        (np.zeros((2, 7, 9, 5), np.uint8), {}, "neither its second nor its last"),
        (np.zeros((2, 3, 3, 3), np.uint8), {"shape": (3, 3, 3)}, "channels first and channels last"),
        (np.zeros((2, 3, 4, 5), np.uint8), {"shape": (3, 4, 4)}, r"must be \(M, 3, 4, 4\)"),
        (np.zeros((2, 6), np.uint8), {"shape": (7,)}, "vectors"),
        (np.zeros(6, np.uint8), {}, r"must be \(M, C, H, W\)"),
        (np.zeros((1, 2, 1, 3, 4, 4), np.uint8), {"shape": (3, 4, 4)}, "for this network"),
        (np.full((2, 3, 5, 5), 256, np.uint16), {}, "divide 16 bits by 65535"),
        (np.full((2, 3, 5, 5), -1), {}, "a byte holds 0 to 255"),
        (np.full((2, 3, 5, 5), np.nan, np.float32), {}, "no finite float32"),
        (np.full((2, 3, 5, 5), 1e39), {}, "no finite float32"),
        (np.full((2, 3, 5, 5), "x"), {}, "takes bytes"),
        ([np.zeros((3, 4)), np.zeros((4, 3))], {}, "of one size"),
        ("pictures", {}, "not str"),
        (7, {}, "not int"),
    ],
)
def test_what_cannot_be_images(values, options, message):
    with pytest.raises(UsageError, match=message):
        arrays.images(values, **options)


@pytest.mark.parametrize(
    "values",
    [[2, 0, 1], np.array([2, 0, 1], np.uint8), np.array([2.0, 0.0, 1.0]), [[2], [0], [1]], [[0, 0, 1], [1, 0, 0], [0, 1, 0]], np.eye(3)[[2, 0, 1]]],
)
def test_labels_become_int32(values):
    made = arrays.labels(values, 3, 3)
    assert made.dtype == np.int32
    assert made.tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([0, 1, 3], r"labels\[2\] is 3, and the 3 classes are 0 to 2; classes are counted from 0$|labels\[2\] is 3, and the 3 classes are 0 to 2$"),
        ([1, 2, 3], "counted from 0"),
        ([0, -1, 1], r"labels\[1\] is -1"),
        ([0, 0.5, 1], r"labels\[1\] is 0.5: a class is a whole number"),
        ([0, np.nan, 1], "a class is a whole number"),
        ([0, np.inf, 1], "a class is a whole number"),
        ([0, 1], "there are 2 labels for 3 images"),
        (["a", "b", "c"], "number the classes first"),
        ([[0.5, 0.5, 0], [1, 0, 0], [0, 1, 0]], "not one-hot"),
        ([[0, 1], [1, 0], [0, 1]], "one-hot rows of 2 classes"),
        (np.zeros((3, 4, 4), np.int32), "a class for each pixel"),
        ([1j, 0, 1], "not numbers of classes"),
    ],
)
def test_what_cannot_be_labels(values, message):
    with pytest.raises(UsageError, match=message):
        arrays.labels(values, 3, 3)


# -- classes of pixels, and values to be predicted


@pytest.fixture
def masks(rng):
    return rng.integers(0, 3, (4, 6, 5))


def test_classes_of_pixels_in_every_form(masks):
    one_hot = np.eye(3)[masks]
    for values in (masks, masks[:, None], masks[..., None], one_hot, one_hot.transpose(0, 3, 1, 2), masks.astype(np.float32)):
        made = arrays.labels(values, 4, 3, plane=(6, 5))
        assert made.dtype == np.uint8
        np.testing.assert_array_equal(made, masks)
    assert arrays.labels(masks, 4, 257, plane=(6, 5)).dtype == np.int32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda masks: masks[:, :5], r"labels are \(4, 5, 5\), one class per pixel is \(M, 6, 5\)"),
        (lambda masks: masks[:3], "there are 3 labels for 4 images"),
        (lambda masks: masks * 2, r"labels\[\d, \d, \d\] is \d, and the 3 classes are 0 to 2"),
        (lambda masks: np.eye(3)[masks] / 2, r"row \d, \d, \d is not one-hot"),
        (lambda masks: np.eye(4)[masks], "one-hot rows of 4 classes, and there are 3"),
        (lambda masks: None, "there are no labels"),
    ],
)
def test_what_cannot_be_classes_of_pixels(masks, change, message):
    with pytest.raises(UsageError, match=message):
        arrays.labels(change(masks), 4, 3, plane=(6, 5))


def test_one_hot_along_either_axis_is_not_guessed():
    latin = np.eye(3)[[[[0, 1, 2], [1, 2, 0], [2, 0, 1]]]]
    with pytest.raises(UsageError, match="one-hot along their second and their last axis"):
        arrays.labels(latin, 1, 3, plane=(3, 3))


def test_values_to_be_predicted(pixels):
    for values in ([1, 2.5, -4], np.array([[1], [2.5], [-4]])):
        made = arrays.targets(values, 3, (1,))
        assert (made.dtype, made.shape) == (np.float32, (3, 1))
        np.testing.assert_array_equal(made[:, 0], [1, 2.5, -4])
    np.testing.assert_array_equal(arrays.targets(pixels.transpose(0, 2, 3, 1), 5, (3, 6, 8)), pixels)
    with pytest.raises(UsageError, match=r"targets are \(5, 2\), and the network's output is \(M, 3\)$"):
        arrays.targets(np.zeros((5, 2)), 5, (3,))
    with pytest.raises(UsageError, match="targets are of dtype <U1"):
        arrays.targets(list("abc"), 3, (1,))


def test_masked_arrays_are_refused_wherever_examples_are_taken(pixels):
    masked, numbers = np.ma.masked_array(pixels, pixels > 9), np.ma.masked_array([0, 1, 0, 1, 1], [1, 0, 0, 0, 0])
    vectors = np.ma.masked_array(np.ones((5, 3), np.float32))
    model = nbcnn.Model([nbcnn.Flatten(), nbcnn.Linear(2)], "cross_entropy", mode="cpu")
    network, machine = nbcnn.sklearn.ConvClassifier(mode="cpu", epochs=1), nbcnn.sklearn.RBFSVC(device="cpu")
    machine.fit(vectors.data + np.eye(5, 3), numbers.data)
    built = nbcnn.Model([nbcnn.Linear(2)], "cross_entropy", mode="cpu").build((3,))
    for call in (
        lambda: arrays.images(masked),
        lambda: arrays.images(list(masked)),
        lambda: arrays.labels(numbers),
        lambda: arrays.targets(vectors, 5, (3,)),
        lambda: model.fit(masked, numbers.data),
        lambda: model.fit(pixels, numbers),
        lambda: network.fit(vectors, numbers.data),
        lambda: network.fit(vectors.data, numbers),
        lambda: machine.fit(vectors, numbers.data),
        lambda: machine.predict(vectors),
        lambda: built.set_weights({"linear1.bias": numbers[:2].astype(np.float32)}),
        lambda: nbcnn.SoftmaxCrossEntropy(weight=np.ma.masked_array([1.0, 2.0], [0, 0])),
        lambda: nbcnn.Normalisation.of(masked),
        lambda: nbcnn.datasets.Dataset("own", "", masked, None, pixels, None, None),
        lambda: nbcnn.datasets.Dataset("own", "", pixels, numbers.astype(np.int32), pixels, numbers.data.astype(np.int32), ("a", "b")),
        lambda: nbcnn.datasets.Masks(masked[:, 0], pixels[:, 0], ("a", "b")),
    ):
        with pytest.raises(UsageError, match=r"masked array, whose mask nbcnn does not know: fill in values first"):
            call()
