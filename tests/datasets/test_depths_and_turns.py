"""Images and masks as files hold them: grey of 2 and 4 bits, TIFF files that lie on their side, names behind a byte-order mark."""

import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps, TiffImagePlugin

from nbcnn.datasets import image_files, masks

COLOURS = {0: 1, 2: 3, 4: 2, 6: 4}
"""Numbers of a pixel, by the type of colours of a PNG file."""


def deep_png(path, values, kind):
    """A PNG of 16 bits per number, uint16 (H, W, numbers), written by the specification; Pillow writes grey alone."""
    height, width, _ = values.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + b"".join(struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks)
    )


def deep_tiff(path, values, order):
    """An uncompressed TIFF of 16 bits per number, uint16 (H, W, 3 or 4), of one strip, in the byte order `<` or `>`."""
    height, width, count = values.shape
    entries = [(256, 3, 1, width), (257, 3, 1, height), (259, 3, 1, 1), (262, 3, 1, 2), (277, 3, 1, count), (278, 3, 1, height)]
    entries += [(279, 4, 1, values.nbytes), (339, 3, 1, 1), *([(338, 3, 1, 2)] if count == 4 else [])]
    depths = 8 + 2 + 12 * (len(entries) + 2) + 4
    entries = sorted([*entries, (258, 3, count, depths), (273, 4, 1, depths + 2 * count)])
    made = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "IH", 8, len(entries))
    for tag, kind, numbers, value in entries:
        short = kind == 3 and numbers == 1
        made += struct.pack(order + "HHI", tag, kind, numbers) + (struct.pack(order + "HH", value, 0) if short else struct.pack(order + "I", value))
    path.write_bytes(made + bytes(4) + struct.pack(order + "H", 16) * count + values.astype(order + "u2").tobytes())


EDGES = (0, 1, 127, 128, 129, 255, 256, 257, 383, 384, 385, 386, 32767, 32768, 33023, 33024, 65278, 65279, 65407, 65408, 65535)
"""Numbers of 16 bits on both sides of where 8 bits change, and others."""


@pytest.mark.parametrize("kind", COLOURS)
def test_numbers_of_16_bits_in_png_files_are_rounded(tmp_path, kind):
    values = np.random.default_rng(kind).integers(0, 65536, (600, 7, COLOURS[kind])).astype(np.uint16)
    values[: len(EDGES), 0, 0] = EDGES
    if kind in (4, 6):
        values[: len(EDGES), 1, -1] = EDGES
    deep_png(tmp_path / "a.png", values, kind)
    wanted = np.rint(values / 257).astype(np.uint8)
    shown = image_files.read(tmp_path / "a.png", 4)
    assert image_files.header(tmp_path / "a.png").grey == (kind in (0, 4))
    np.testing.assert_array_equal(shown[:3].transpose(1, 2, 0), np.broadcast_to(wanted[..., : 1 if kind in (0, 4) else 3], (600, 7, 3)))
    np.testing.assert_array_equal(shown[3], wanted[..., -1] if kind in (4, 6) else 255)


@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("libtiff", [False, True])
def test_numbers_of_16_bits_in_tiff_files_are_rounded(tmp_path, order, count, libtiff, monkeypatch):
    monkeypatch.setattr(TiffImagePlugin, "READ_LIBTIFF", libtiff)  # which decodes compressed files
    values = np.random.default_rng(count).integers(0, 65536, (len(EDGES), 5, count)).astype(np.uint16)
    values[:, 0, 0] = EDGES
    deep_tiff(tmp_path / "a.tif", values, order)
    wanted = np.rint(values / 257).astype(np.uint8)
    np.testing.assert_array_equal(image_files.read(tmp_path / "a.tif", 4)[:count], wanted.transpose(2, 0, 1))


def test_what_is_transparent_stands_on_white_strip_by_strip(tmp_path):
    pixels = np.random.default_rng(3).integers(0, 256, (2 * image_files._ROWS + 5, 9, 4), np.uint8)
    image = Image.fromarray(pixels)
    image.save(tmp_path / "a.png")
    white = Image.new("RGBA", image.size, "white")
    wanted = np.asarray(Image.alpha_composite(white, image).convert("RGB"))
    np.testing.assert_array_equal(image_files.read(tmp_path / "a.png", 3), wanted.transpose(2, 0, 1))


def grey_png(path, values, bits):
    """A grey PNG of 1, 2, 4 or 8 bits per pixel, written by the specification; Pillow writes 8 alone."""
    height, width = values.shape
    rows = b"".join(
        b"\0" + np.packbits((values[:, :, None] >> np.arange(bits)[::-1] & 1).astype(np.uint8).reshape(height, -1)[row]).tobytes()
        for row in range(height)
    )
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + b"".join(struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks)
    )


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_masks_of_few_bits_keep_their_classes(tmp_path, bits):
    values = np.random.default_rng(bits).integers(0, 2**bits, (5, 7)).astype(np.uint8)
    values[0, :2] = 3, 0
    grey_png(tmp_path / "mask.png", values, bits)
    np.testing.assert_array_equal(masks.read(tmp_path / "mask.png", (5, 7)), values)


@pytest.mark.parametrize("compression", [None, "tiff_lzw"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_tiff_files_on_their_side_are_turned(tmp_path, orientation, compression):
    pixels, told = np.arange(60, dtype=np.uint8).reshape(6, 10) * 4, Image.Exif()
    told[274] = orientation
    image = Image.fromarray(pixels)
    image.save(tmp_path / "a.tif", exif=told, **({"compression": compression} if compression else {}))
    image.save(tmp_path / "a.png", exif=told)
    with Image.open(tmp_path / "a.png") as opened:
        wanted = np.asarray(ImageOps.exif_transpose(opened))
    for name in ("a.tif", "a.png"):
        header = image_files.header(tmp_path / name)
        assert header.size == wanted.shape
        np.testing.assert_array_equal(image_files.read(tmp_path / name, 1, expected=header.size)[0], wanted)
        np.testing.assert_array_equal(masks.read(tmp_path / name, wanted.shape), wanted)


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path):
    (tmp_path / "classes.txt").write_bytes("\ufeffsky\nroad\n".encode())
    assert masks.names_in(tmp_path) == ("sky", "road")
