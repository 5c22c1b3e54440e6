"""Tests of masks: those of `shapes`, folders of images and masks, arrays, what is read of a mask file, and what is written."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from nbcnn import datasets
from nbcnn.datasets import DataError, masks, shapes
from nbcnn.datasets.dataset import VOID, Masks


def put(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(path)
    return path


def test_masks_of_shapes_say_where_the_figure_is():
    images, labels, found = shapes.with_masks(600, 3, size=16)
    same, numbers = shapes.generate(600, 3, size=16)
    np.testing.assert_array_equal(images, same)
    np.testing.assert_array_equal(labels, numbers)
    for mask, label in zip(found, labels, strict=True):
        assert set(np.unique(mask)) == {0, label + 1}
    # Figure and ground have colours 32 or more apart, or neither is darker: the mean over an image's halves tells them, noise is below 16.
    inside = (found > 0)[:, None]
    ground, figure = (np.where(part, images, 0).sum((2, 3)) / part.sum((2, 3)) for part in (~inside, inside))
    assert (np.abs(ground - figure).max(1) > 16).all()


def test_shapes_brings_masks_and_a_limit_cuts_them():
    data = datasets.load("shapes", limit=5)
    assert data.masks.classes == ("background", *shapes.CLASSES)
    assert data.masks.train.shape == data.masks.test.shape == (5, 32, 32)
    assert [mask.max() - 1 for mask in data.masks.train] == data.train_labels.tolist()


@pytest.fixture
def scans(tmp_path, rng):
    """12 grey images of 8×6 pixels; the first pixel says which, and their masks have classes 0 to 2 by the images' brightness."""
    images = rng.integers(0, 256, (12, 8, 6), np.uint8)
    images[:, 0, 0] = np.arange(12)
    for at, image in enumerate(images):
        put(tmp_path / "scans" / "images" / "deep" / f"{at:02}.tif", image)
        put(tmp_path / "scans" / "masks" / "deep" / f"{at:02}.png", image // 86)
    return tmp_path / "scans", images


def load(path, said="", **options):
    notes = []
    return datasets.load(f"folder:{path}{said}", log=notes.append, **options), notes


def test_masks_are_found_by_name_and_stay_with_their_images(scans):
    path, _ = scans
    data, notes = load(path, "?test-share=0.25")
    assert notes == []
    assert (len(data.masks.train), len(data.masks.test), data.classes, data.train_labels) == (9, 3, None, None)
    assert data.masks.classes == ("0", "1", "2")
    for part, found in ((data.train_images, data.masks.train), (data.test_images, data.masks.test)):
        np.testing.assert_array_equal(found, part[:, 0] // 86)
    (path / "classes.txt").write_text("dark\n\ngrey\nbright\nblinding\n")
    assert load(path)[0].masks.classes == ("dark", "grey", "bright", "blinding")


def test_masks_are_scaled_and_cut_as_their_images_by_nearest_neighbours(scans):
    data, _ = load(scans[0], "?size=4x2")
    assert data.train_images.shape[1:] == (1, 4, 2)
    assert set(np.unique(data.masks.train)) <= {0, 1, 2}
    # 8×6 covers 4×2 at half its size: rows 0, 2, 4, 6 or their neighbours, of the 4 columns in the middle.
    whole, _ = load(scans[0])
    for image, mask in zip(whole.train_images, data.masks.train, strict=True):
        window = (image[0] // 86)[:, 1:5].reshape(4, 2, 2, 2)
        assert (window == mask[:, None, :, None]).any((1, 3)).all()


def test_train_and_test_have_masks_of_their_own(tmp_path):
    for part, values in (("train", range(4)), ("test", range(4, 6))):
        for value in values:
            put(tmp_path / part / "images" / f"{value}.png", np.full((4, 4), value, np.uint8))
            put(tmp_path / part / "masks" / f"{value}.png", np.full((4, 4), value % 2, np.uint8))
    data, _ = load(tmp_path)
    np.testing.assert_array_equal(data.masks.test, data.test_images[:, 0] % 2)
    (tmp_path / "test" / "masks").rename(tmp_path / "test" / "other")
    with pytest.raises(DataError, match="must both have images/ and masks/, or neither"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("values", "classes", "expected", "said"),
    [
        ([0, 255], ("background", "figure"), [0, 1], "255 is taken for class 1"),
        ([0, 1, 255], ("0", "1"), [0, 1, 255], ""),
        ([0, 3], ("0", "1", "2", "3"), [0, 3], ""),
    ],
    ids=["figure and ground", "void", "a class without pixels"],
)
def test_what_the_values_of_masks_mean(tmp_path, values, classes, expected, said):
    for at in range(4):
        put(tmp_path / "images" / f"{at}.png", np.zeros((2, 6, 3), np.uint8))
        put(tmp_path / "masks" / f"{at}.png", np.resize(np.array(values, np.uint8), (2, 6)))
    data, notes = load(tmp_path)
    assert data.masks.classes == classes
    assert np.unique(data.masks.train).tolist() == expected
    assert data.masks.has_void == (VOID in expected)
    assert said in "".join(notes)


def palette_image(values):
    image = Image.frombytes("P", (3, 2), bytes(values))
    image.putpalette([at * 7 % 256 for at in range(768)])
    return image


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (palette_image([0, 1, 2, 3, 4, 255]), [[0, 1, 2], [3, 4, 255]]),
        (Image.fromarray(np.array([[True, False, True], [False, True, True]])), [[255, 0, 255], [0, 255, 255]]),
        (Image.fromarray(np.array([[0, 1, 2], [3, 4, 254]], np.uint16)), [[0, 1, 2], [3, 4, 254]]),
    ],
    ids=["palette", "black and white", "16 bits"],
)
def test_kinds_of_mask_files(tmp_path, image, expected):
    assert masks.read(put(tmp_path / "m.png", image), (2, 3)).tolist() == expected


@pytest.mark.parametrize(
    ("name", "image", "said"),
    [
        ("1.jpg", np.zeros((8, 6), np.uint8), "JPEG file does not keep"),
        ("1.png", np.zeros((8, 6, 3), np.uint8), "is RGB, save it as grey"),
        ("1.png", np.zeros((6, 8), np.uint8), "it is 6×8, and its image 8×6"),
        ("1.png", np.full((8, 6), 999, np.uint16), "values go from 999 to 999"),
    ],
)
def test_a_file_that_is_no_mask_is_named(scans, name, image, said):
    path, _ = scans
    put(path / "images" / "1.png", np.zeros((8, 6), np.uint8))
    put(path / "masks" / name, image)
    with pytest.raises(DataError, match=f"(?s)masks/{name}: .*{said}"):
        load(path)


def test_what_a_folder_of_masks_lacks(scans):
    path, _ = scans
    put(path / "masks" / "more.png", np.zeros((8, 6), np.uint8))
    assert "masks of no image in" in load(path)[1][0]
    put(path / "images" / "lost.png", np.zeros((8, 6), np.uint8))
    with pytest.raises(DataError, match=r"without a mask of their name .*: images/lost\.png"):
        load(path)
    put(path / "masks" / "lost.png", np.zeros((8, 6), np.uint8))
    put(path / "masks" / "lost.bmp", np.zeros((8, 6), np.uint8))
    with pytest.raises(DataError, match="two files called lost"):
        load(path)
    (path / "masks" / "lost.bmp").unlink()
    for text, said in (("a\nb\n", "hold class 2, and there are names of 2"), ("a\na\nb", "each once"), ("one", "2 to 255 classes")):
        (path / "classes.txt").write_text(text)
        with pytest.raises(DataError, match=said):
            load(path)


def test_masks_of_one_class_tell_nothing_apart(tmp_path):
    for at in range(3):
        put(tmp_path / "images" / f"{at}.png", np.zeros((2, 2), np.uint8))
        put(tmp_path / "masks" / f"{at}.png", np.zeros((2, 2), np.uint8))
    with pytest.raises(DataError, match="nothing to tell apart"):
        load(tmp_path)


def test_arrays_with_masks(tmp_path, rng):
    images = rng.integers(0, 256, (10, 1, 6, 5), np.uint8)
    np.savez(tmp_path / "all.npz", images=images, masks=(images[:, 0] > 99).astype(np.int64), mask_classes=["low", "high"])
    data = datasets.load(f"npz:{tmp_path / 'all.npz'}")
    assert data.masks.classes == ("low", "high")
    np.testing.assert_array_equal(data.masks.test, data.test_images[:, 0] > 99)
    np.savez(tmp_path / "half.npz", train_images=images, test_images=images, train_masks=images[:, 0] // 128)
    with pytest.raises(DataError, match="masks of one part only"):
        datasets.load(f"npz:{tmp_path / 'half.npz'}")
    np.savez(tmp_path / "odd.npz", images=images, masks=np.zeros((10, 5, 5), np.uint8))
    with pytest.raises(DataError, match="masks are"):
        datasets.load(f"npz:{tmp_path / 'odd.npz'}")


def test_what_masks_must_be():
    with pytest.raises(ValueError, match=r"uint8 \(M, H, W\)"):
        Masks(np.zeros((2, 3, 3), np.int32), np.zeros((1, 3, 3), np.uint8), ("a", "b"))
    with pytest.raises(ValueError, match="neither one of 2 classes"):
        Masks(np.full((2, 3, 3), 2, np.uint8), np.zeros((1, 3, 3), np.uint8), ("a", "b"))


def test_a_written_mask_lies_where_its_image_was(tmp_path):
    mask = np.array([[0, 1], [2, 3]], np.uint8)
    masks.write(tmp_path / "new" / "a.png", mask)
    assert masks.read(tmp_path / "new" / "a.png", (2, 2)).tolist() == mask.tolist()
    with Image.open(tmp_path / "new" / "a.png") as image:
        assert image.convert("RGB").getpixel((1, 0)) == (243, 195, 0)  # class 1 of the palette
    # An image of 4×8 was scaled to 2×4 and cut to 2×2: two columns on either side were cut off.
    masks.write(tmp_path / "wide.png", mask, (4, 8))
    read = masks.read(tmp_path / "wide.png", (4, 8))
    np.testing.assert_array_equal(read[:, 2:6], mask.repeat(2, 0).repeat(2, 1))
    assert (read[:, [0, 1, 6, 7]] == VOID).all()
