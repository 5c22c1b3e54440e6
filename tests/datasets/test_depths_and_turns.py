"""Images and masks as files hold them: grey of 2 and 4 bits, TIFF files that lie on their side, names behind a byte-order mark."""

import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from nbcnn.datasets import image_files, masks


def grey_png(path, values, bits):
    """A grey PNG of 1, 2, 4 or 8 bits a pixel, written by the specification; Pillow writes 8 alone."""
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
