"""Tests of image files that are huge, of formats that no suffix names, or no regular files: each is named and refused, at once."""

from __future__ import annotations

import io
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scripts import ROOT

from nbcnn import datasets
from nbcnn.datasets import DataError, DataTooLarge, folder, image_files
from nbcnn.files.errors import UsageError
from nbcnn.model import pictures


def png(width, height, row=None):
    """A PNG of grey zeros, made without its pixels in memory; without `row` its pixels are missing."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)), (b"IDAT", row or b""), (b"IEND", b"")]
    parts = (struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def saved(kind, mode="RGB"):
    file = io.BytesIO()
    Image.new(mode, (16, 16)).save(file, format=kind)
    return file.getvalue()


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (png(13_000, 13_000), "13000×13000 pixels, and images of at most 67,108,864 pixels are decoded"),
        (png(50_000, 50_000), "more pixels than are decoded"),
        (EPS, "another format than PNG, JPEG"),
        (saved("DDS"), "another format than PNG, JPEG"),
        (saved("SPIDER", "F"), "another format than PNG, JPEG"),
        (saved("PDF"), "another format than PNG, JPEG"),
        (saved("TGA"), "another format than PNG, JPEG"),
        (b"", "another format than PNG, JPEG"),
        (saved("PNG")[:45], "image file is truncated"),
        (saved("BMP")[:-99], "image file is truncated"),
    ],
    ids=["huge", "beyond Pillow's bound", "EPS", "DDS", "SPIDER", "PDF", "TGA", "empty", "cut PNG", "cut BMP"],
)
def test_images_that_are_refused_are_named(tmp_path, content, words):
    for name in ("a", "b"):
        (tmp_path / f"{name}.png").write_bytes(saved("PNG"))
    (tmp_path / "holiday.png").write_bytes(content)
    with pytest.raises(DataError, match=r"holiday\.png") as refused:
        datasets.load(f"folder:{tmp_path}?size=8", progress=False)
    assert words in str(refused.value)
    problems = []
    assert not list(pictures.read_all([tmp_path / "holiday.png"], (3, 8, 8), problems))
    assert words in problems[0]


def test_pillow_does_not_warn_of_what_is_refused(tmp_path):
    (tmp_path / "large.png").write_bytes(png(13_000, 13_000))
    code = "import sys\nfrom pathlib import Path\nfrom nbcnn.model import pictures\n"
    code += "problems = []\nassert not list(pictures.read_all([Path(sys.argv[1])], (3, 8, 8), problems))\nprint(problems[0])"
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "large.png"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "images of at most 67,108,864 pixels are decoded" in done.stdout
    assert done.stderr == ""


def test_opened_images_have_no_warning_given_again(tmp_path):
    (tmp_path / "a.png").write_bytes(saved("PNG"))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            with image_files.opened(tmp_path / "a.png"):
                warnings.warn("once for each line", stacklevel=1)
    assert len(seen) == 1


def socket_at(path):
    """The socket's file stays when it is closed. Its name has no folder: it may have 107 characters."""
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


@pytest.mark.parametrize("make", [os.mkfifo, socket_at, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path, make):
    for name in ("a", "b"):
        (tmp_path / f"{name}.png").write_bytes(saved("PNG"))
    make(tmp_path / "holiday.png")
    with pytest.raises(DataError, match=r"holiday\.png: it is no regular file"):
        datasets.load(f"folder:{tmp_path}", progress=False)
    assert tmp_path / "holiday.png" not in pictures.files_in([tmp_path])
    with pytest.raises(UsageError, match=r"holiday\.png is no regular file"):
        pictures.files_in([tmp_path / "holiday.png"])


def test_decoding_is_a_part_of_the_plan_of_memory(tmp_path, monkeypatch):
    for name in ("a", "b"):
        Image.new("RGB", (1000, 1000)).save(tmp_path / f"{name}.png")
    monkeypatch.setattr(folder.memory, "available", lambda: 10 << 20)
    with pytest.raises(DataTooLarge):
        datasets.load(f"folder:{tmp_path}?size=8", progress=False)


def test_threads_together_decode_no_more_than_there_is_room_for():
    room, most, held, seen = image_files._Room(), image_files.MOST_PIXELS, [], []

    def decode(pixels):
        with room.held(pixels):
            held.append(pixels)
            seen.append(sum(held))
            time.sleep(0.002)
            held.remove(pixels)

    threads = [threading.Thread(target=decode, args=(most * part // 10,)) for part in (10, 3, 4, 5, 9, 1, 10, 6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(seen) == 8
    assert max(seen) <= most


def test_a_large_jpeg_is_decoded_at_a_part_of_its_size(tmp_path, monkeypatch):
    picture = np.zeros((400, 600, 3), np.uint8)
    picture[:, 300:] = 255
    Image.fromarray(picture).save(tmp_path / "a.jpg", quality=95)
    plain = image_files.read(tmp_path / "a.jpg", 3, (8, 8))
    monkeypatch.setattr(image_files, "MOST_PIXELS", 400 * 600 - 1)
    reduced = image_files.read(tmp_path / "a.jpg", 3, (8, 8))
    # Scaled down in two steps, only the columns beside the edge differ.
    assert np.abs(reduced[..., [0, 1, 2, 5, 6, 7]].astype(int) - plain[..., [0, 1, 2, 5, 6, 7]]).max() <= 2
    with pytest.raises(ValueError, match="600×400 pixels"):
        image_files.read(tmp_path / "a.jpg", 3)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA"])
def test_eight_images_of_the_largest_size_take_less_than_a_gigabyte(tmp_path, mode):
    """One after the other, by one thread: 0.6 GB. By sixteen threads, each of which keeps what it has freed, it was 2 GB."""
    for at in range(8):
        if at == 0:
            Image.new(mode, (8192, 8192), 7).save(tmp_path / "0.png", compress_level=1)
        else:
            (tmp_path / f"{at}.png").write_bytes((tmp_path / "0.png").read_bytes())
    code = f"""
from nbcnn import datasets
from nbcnn.datasets import folder
from nbcnn.gpu import memory
folder._THREADS = 16
assert len(datasets.load('folder:{tmp_path}?size=8', progress=False).train_images) == 7
print(memory.peak())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1_000_000_000


def test_errors_of_large_and_small_images_are_told_together(tmp_path, monkeypatch):
    for at, side in enumerate((40, 8, 30, 8, 40)):
        (tmp_path / f"{at}.png").write_bytes(png(side, side, b"no zlib"))
    monkeypatch.setattr(image_files, "MOST_PIXELS", 1600)
    with pytest.raises(DataError, match=r"(?s)5 images cannot be used:(\n.*[0-4]\.png: .*){5}"):
        datasets.load(f"folder:{tmp_path}?size=8", progress=False)


def test_a_webp_image_counts_twice(tmp_path, monkeypatch):
    """libwebp holds it four times."""
    Image.new("RGB", (60, 50)).save(tmp_path / "a.webp")
    monkeypatch.setattr(image_files, "MOST_PIXELS", 6000)
    assert image_files.read(tmp_path / "a.webp", 3).shape == (3, 50, 60)
    monkeypatch.setattr(image_files, "MOST_PIXELS", 5999)
    with pytest.raises(ValueError, match=r"60×50 pixels, and WEBP images of at most 2,999 pixels"):
        image_files.read(tmp_path / "a.webp", 3)
