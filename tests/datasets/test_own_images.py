"""Tests of data sets of one's own, folders of images and files of arrays: what becomes of every kind of image, and what is said of everything
else."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from nbcnn import datasets
from nbcnn.datasets import DataError, DataMissing, folder, own
from nbcnn.files.errors import UsageError


def put(path, pixels, **options):
    """Save an image, in the folders that it needs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(path, **options)


@pytest.fixture
def pets(tmp_path, rng):
    """20 cats and 10 dogs of 8×6 pixels, colour; the first pixel says which is which."""
    pixels = rng.integers(0, 256, (30, 8, 6, 3), np.uint8)
    pixels[:, 0, 0, 0] = np.arange(30)
    for at, each in enumerate(pixels):
        put(tmp_path / "pets" / ("cats" if at < 20 else "dogs") / f"{at:02}.png", each)
    return tmp_path / "pets", pixels


def load(path, *said, **options):
    notes = []
    return datasets.load(f"folder:{path}{''.join(said)}", log=notes.append, **options), notes


def test_a_folder_becomes_images_labels_and_names(pets):
    path, pixels = pets
    data, notes = load(path)
    assert data.classes == ("cats", "dogs")
    assert (len(data.train_images), len(data.test_images)) == (27, 3)
    assert np.bincount(data.test_labels).tolist() == [2, 1]  # a tenth of each class
    for images, labels in ((data.train_images, data.train_labels), (data.test_images, data.test_labels)):
        which = images[:, 0, 0, 0]
        np.testing.assert_array_equal(images, pixels[which].transpose(0, 3, 1, 2))
        np.testing.assert_array_equal(labels, which >= 20)
    assert sorted([*data.train_images[:, 0, 0, 0], *data.test_images[:, 0, 0, 0]]) == list(range(30))
    assert notes == []
    again, _ = load(path)
    np.testing.assert_array_equal(again.train_images, data.train_images)


def test_the_name_reads_the_same_again(pets, monkeypatch):
    path, _ = pets
    monkeypatch.chdir(path.parent)
    name = own.named("folder:pets", "4", 0.5)
    data = datasets.load(name)
    assert data.name == name == f"folder:{path}?size=4x4&test-share=0.5"
    assert data.train_images.shape == (15, 3, 4, 4)
    monkeypatch.chdir("/")
    np.testing.assert_array_equal(datasets.load(data.name).train_images, data.train_images)
    assert own.short(data.name) == "pets"
    assert own.named("digits") == "digits"


def test_a_limit_takes_some_of_every_class(pets):
    data, _ = load(pets[0], "?test-share=0.5", limit=8)
    assert len(data.train_images) == len(data.test_images) == 8
    assert set(data.train_labels) == {0, 1}
    whole, _ = load(pets[0], "?test-share=0.5")
    np.testing.assert_array_equal(data.train_images, whole.train_images[:8])


def test_a_file_that_is_added_does_not_move_the_others_apart(pets, rng):
    path, _ = pets
    before, _ = load(path)
    put(path / "dogs" / "new.png", rng.integers(100, 256, (8, 6, 3), np.uint8))
    after, _ = load(path)
    ones, others = ([int(image[0, 0, 0]) for image in data.train_images] for data in (before, after))
    both = set(ones) & set(others)
    assert [one for one in ones if one in both] == [other for other in others if other in both]
    assert len(both) >= len(ones) - 1


def test_train_and_test_folders(tmp_path):
    for part, values in (("train", range(6)), ("val", range(6, 8))):
        for value in values:
            put(tmp_path / part / "ab"[value % 2] / "deeper" / f"{value}.bmp", np.full((4, 4), value, np.uint8))
    data, _ = load(tmp_path)
    assert data.train_images.shape == (6, 1, 4, 4)  # all grey: one channel
    for images, labels in ((data.train_images, data.train_labels), (data.test_images, data.test_labels)):
        np.testing.assert_array_equal(images[:, 0, 0, 0] % 2, labels)
    assert sorted(data.test_images[:, 0, 0, 0]) == [6, 7]
    with pytest.raises(DataError, match="has its own val/"):
        load(tmp_path, "?test-share=0.2")
    put(tmp_path / "val" / "c" / "9.bmp", np.zeros((4, 4), np.uint8))
    with pytest.raises(DataError, match="classes that train/ has not: c"):
        load(tmp_path)


def test_images_without_classes_have_no_labels(tmp_path):
    for value in range(4):
        put(tmp_path / f"{value}.png", np.full((4, 4), value, np.uint8))
    data, _ = load(tmp_path)
    assert data.classes is None
    assert data.train_labels is None
    assert (len(data.train_images), len(data.test_images)) == (3, 1)


def as_read(tmp_path, image, name="x.png", **options):
    """The pixels (C, H, W) of one image between plain ones of its size, read from a folder."""
    put(tmp_path / "f" / name, image, **options)
    with Image.open(tmp_path / "f" / name) as opened:
        upright = opened.size[::-1] if opened.getexif().get(0x0112, 1) >= 5 else opened.size
    for other in range(4):
        put(tmp_path / "f" / f"plain{other}.png", np.full((*upright[::-1], 3), 7, np.uint8))
    data, _ = load(tmp_path / "f")
    images = [*data.train_images, *data.test_images]
    (odd,) = [image for image in images if (image != 7).any()]
    return odd


def test_transparent_parts_are_white(tmp_path):
    pixels = np.zeros((2, 3, 4), np.uint8)
    pixels[0, :, 3] = 255  # the upper row is black, the lower one transparent
    made = as_read(tmp_path, pixels)
    assert made[:, 0].max() == 0
    assert made[:, 1].min() == 255


def test_a_palette_with_transparency_is_on_white(tmp_path):
    image = Image.new("P", (3, 2), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    image.putpixel((0, 0), 0)
    made = as_read(tmp_path, image, transparency=0)
    assert made[:, 0, 0].tolist() == [255, 255, 255]
    assert made[:, 1, 1].tolist() == [10, 20, 30]


def test_16_bits_are_rounded_to_8(tmp_path):
    values = np.array([[0, 65535, 257 * 100], [128, 129, 65535 - 129]], np.uint16)
    made = as_read(tmp_path, values)
    # v/257 to the nearest: 128/257 is 0.498, 129/257 is 0.502.
    np.testing.assert_array_equal(made[0], [[0, 255, 100], [0, 1, 254]])


def test_an_image_is_turned_as_its_exif_data_say(tmp_path):
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3) * 10
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned a quarter clockwise
    made = as_read(tmp_path, Image.fromarray(pixels), exif=exif)
    np.testing.assert_array_equal(made, np.rot90(pixels, -1).transpose(2, 0, 1))


def test_other_modes(tmp_path):
    cmyk = Image.new("CMYK", (3, 2), (0, 0, 0, 0))
    assert as_read(tmp_path / "cmyk", cmyk, "x.jpg").min() >= 250  # JPEG is not exact
    one = Image.new("1", (3, 2), 1)
    assert as_read(tmp_path / "one", one).min() == 255
    frames = [Image.new("L", (3, 2), 50), Image.new("L", (3, 2), 200)]
    assert as_read(tmp_path / "gif", frames[0], "x.gif", save_all=True, append_images=frames[1:]).max() == 50


def test_a_size_is_covered_and_cut_at_the_centre(tmp_path):
    wide = np.zeros((4, 12), np.uint8)
    wide[:, 4:8] = 200
    for at in range(2):
        put(tmp_path / f"{at}.png", wide)
    data, _ = load(tmp_path, "?size=4")
    np.testing.assert_array_equal(data.train_images[0, 0], np.full((4, 4), 200))


def test_what_is_passed_over_is_said(pets):
    path, _ = pets
    (path / "cats" / "notes.txt").write_text("x")
    (path / "cats" / ".hidden.png").write_text("x")
    (path / "empty").mkdir()
    put(path / "lost.png", np.zeros((8, 6, 3), np.uint8))
    put(path / "birds" / "only.png", np.zeros((8, 6, 3), np.uint8))
    data, notes = load(path)
    assert data.classes == ("birds", "cats", "dogs")
    said = "\n".join(notes)
    for words in ("no images: cats/notes.txt", "hold no images: empty", "in no class folder: lost.png", "birds has one image"):
        assert words in said
    assert "hidden" not in said


def test_a_single_class_is_said(tmp_path):
    for at in range(3):
        put(tmp_path / "cats" / f"{at}.png", np.full((4, 4), at, np.uint8))
    _, notes = load(tmp_path)
    assert "one class, cats" in notes[0]


def test_images_of_several_sizes_need_one(pets):
    path, _ = pets
    put(path / "dogs" / "large.png", np.zeros((20, 20, 3), np.uint8))
    with pytest.raises(DataError, match=r"2 sizes .*--size 64"):
        load(path)
    assert load(path, "?size=6")[0].train_images.shape[1:] == (3, 6, 6)


def test_every_damaged_file_is_named_at_once(pets):
    path, _ = pets
    whole = (path / "cats" / "00.png").read_bytes()
    (path / "cats" / "00.png").write_bytes(whole[: len(whole) // 2])
    (path / "cats" / "01.png").write_text("no image")
    (path / "dogs" / "20.png").write_bytes(b"")
    with pytest.raises(DataError) as error:
        load(path)
    assert "2 images cannot be used" in str(error.value)  # whose headers cannot be read; the half one shows when its pixels are read
    assert "01.png: it is no image" in str(error.value)
    for name in ("cats/01.png", "dogs/20.png"):
        (path / name).unlink()
    with pytest.raises(DataError, match=r"1 image cannot be used:\n .*00.png: "):
        load(path)


def test_a_folder_that_changes_while_it_is_read(pets, monkeypatch):
    path, _ = pets
    real = folder.image_files.header

    def header(file):
        made = real(file)
        if file.name == "03.png":
            file.unlink()
        if file.name == "04.png":
            put(file, np.zeros((9, 9, 3), np.uint8))
        return made

    monkeypatch.setattr(folder.image_files, "header", header)
    with pytest.raises(DataError, match="2 images cannot be used") as error:
        load(path)
    assert "03.png: it was there a moment ago" in str(error.value)
    assert "04.png: its size changed" in str(error.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "is no folder. Check the path behind folder:$"),
        (lambda path: path.mkdir(), "holds no images"),
        (lambda path: put(path / "train" / "a" / "x.png", np.zeros((4, 4), np.uint8)), "train/ but not the other"),
        (lambda path: put(path / "a" / "x.png", np.zeros((4, 4), np.uint8)), "leaves no test images"),
        (lambda path: path.write_text("x"), "npz:"),
    ],
)
def test_folders_without_images(tmp_path, make, message):
    make(tmp_path / "x")
    with pytest.raises(DataMissing if "train/" not in message else DataError, match=message):
        load(tmp_path / "x")


def test_images_larger_than_memory_are_refused_before_they_are_read(pets, monkeypatch):
    monkeypatch.setattr("nbcnn.gpu.memory.available", lambda: 1000)
    with pytest.raises(datasets.DataTooLarge, match="GiB as pixels") as error:
        load(pets[0])
    assert error.value.exit_code == 5


def test_progress_is_said(pets, monkeypatch):
    monkeypatch.setattr(folder, "LINE_SECONDS", 0.0)
    _, notes = load(pets[0])
    assert any(note.startswith("reading images: ") and "of 30" in note for note in notes)


@pytest.mark.parametrize(
    ("name", "size", "share", "message"),
    [
        ("digits", "64", None, "--size is for"),
        ("npz:x", "64", None, "--size is for"),
        ("folder:x", "0", None, "no size"),
        ("folder:x", "4x", None, "no size"),
    ]
    + [("folder:x", None, share, "between 0 and 1") for share in (0.0, 1.0, -1.0, float("nan"))],
)
def test_options_that_make_no_sense(name, size, share, message):
    with pytest.raises(UsageError, match=message):
        own.named(name, size, share)


# -- arrays


@pytest.fixture
def stored(tmp_path, rng):
    """Arrays as several people would name them, written to a .npz file or a folder of .npy files."""

    def write(form="npz", **arrays):
        if form == "npz":
            np.savez(tmp_path / "set.npz", **arrays)
            return f"npz:{tmp_path / 'set.npz'}"
        (tmp_path / "set").mkdir()
        for name, array in arrays.items():
            np.save(tmp_path / "set" / f"{name}.npy", array)
        return f"npz:{tmp_path / 'set'}"

    return write


@pytest.mark.parametrize("form", ["npz", "npy"])
def test_arrays_with_their_own_test_part(stored, rng, form):
    images = rng.integers(0, 256, (6, 5, 7, 3), np.uint8)
    data = datasets.load(stored(form, x_train=images, y_train=np.arange(6)[:, None] % 3, x_test=images[:2], y_test=np.array([2, 0])))
    np.testing.assert_array_equal(data.train_images, images.transpose(0, 3, 1, 2))
    assert data.train_labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert data.classes == ("0", "1", "2")


def test_a_fitting_array_in_a_folder_stays_on_the_disk(stored, rng):
    images = rng.random((6, 3, 8, 8), np.float32)
    data = datasets.load(stored("npy", train_images=images, test_images=images[:2]))
    assert isinstance(data.train_images, np.memmap)
    assert data.train_images.dtype == np.float32
    assert data.classes is None


def test_arrays_are_shared_out_and_named_by_their_text(stored, rng):
    images = rng.integers(0, 256, (20, 8, 8), np.uint8)
    images[:, 0, 0] = np.arange(20)
    name = stored(images=images, labels=np.array(["cat", "dog"] * 10))
    data = datasets.load(own.named(name, None, 0.25))
    assert (len(data.train_images), len(data.test_images)) == (15, 5)
    assert data.classes == ("cat", "dog")
    np.testing.assert_array_equal(data.test_images[:, 0, 0, 0] % 2, data.test_labels)
    assert sorted([*data.train_images[:, 0, 0, 0], *data.test_images[:, 0, 0, 0]]) == list(range(20))
    narrow = stored(images=images.reshape(20, 4, 16, 1)[:, :, :2], channels_last=True)
    assert datasets.load(narrow).train_images.shape == (18, 1, 4, 2)
    names = datasets.load(stored(images=images, labels=np.zeros(20, int), classes=np.array(["a", "b"])))
    assert names.classes == ("a", "b")


IMAGES = np.zeros((4, 3, 8, 8), np.uint8)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"pictures": IMAGES}, "it needs train_images and test_images, or images"),
        ({"images": IMAGES[:0]}, "has no images"),
        ({"images": IMAGES[:1]}, "at least two"),
        ({"images": IMAGES, "labels": np.zeros(3, int)}, "3 labels for 4 images"),
        ({"images": IMAGES, "labels": np.array([0, 1, 2, 0.5])}, "a class is a whole number"),
        ({"images": IMAGES, "labels": np.zeros(4, int) + 2, "classes": np.array(["a", "b"])}, "the 2 classes are 0 to 1"),
        ({"images": np.array([None] * 4)}, "Python objects"),
        ({"images": IMAGES.astype(np.float32) * np.nan}, "no finite float32"),
        ({"train_images": IMAGES, "test_images": IMAGES[:, :, :7]}, "of one size"),
        ({"train_images": IMAGES, "test_images": IMAGES, "train_labels": np.zeros(4, int)}, "labels of one part only"),
    ],
)
def test_arrays_that_cannot_be_used(stored, arrays, message):
    with pytest.raises(DataError, match=message):
        datasets.load(stored(**arrays))


@pytest.mark.parametrize(
    ("content", "message"), [(b"PK\x03\x04 cut off", "is no .npz file"), (b"", "is no .npz file"), (None, "Check the path behind npz:$")]
)
def test_files_that_are_no_arrays(tmp_path, content, message):
    if content is not None:
        (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(DataError, match=message):
        datasets.load(f"npz:{tmp_path / 'x.npz'}")
