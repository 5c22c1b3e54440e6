"""Tests of CIFAR-10: good files and archives, every kind of bad one, and what "auto" makes of them. No test touches the network."""

import gzip
import io
import tarfile
import tracemalloc

import numpy as np
import pytest

from nbcnn import datasets
from nbcnn.datasets import DataCorrupt, DataError, DataMissing, cifar10, download
from nbcnn.files import regular

RECORD = cifar10.RECORD


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("NBCNN_OFFLINE", "1")


def quiet(message):
    """A log for tests that look at something else."""


def batch(count, first=0):
    """`count` CIFAR-10 records: record i has label i % 10 and pixels that depend on channel, row and column."""
    table = np.empty((count, RECORD), np.uint8)
    index = np.arange(first, first + count)
    table[:, 0] = index % 10
    table[:, 1:] = (np.arange(3072) * 7 + index[:, None] * 13) % 251
    return table.tobytes()


def write_cifar(folder, count=3):
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(cifar10.FILES):
        (folder / name).write_bytes(batch(count, number * count))
    return folder


def write_archive(folder, members, compress=True):
    """An archive of (name, bytes or TarInfo) pairs."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
            else:
                info.type, info.linkname = tarfile.SYMTYPE, content
                tar.addfile(info)
    path = folder / cifar10.ARCHIVE
    path.write_bytes(gzip.compress(plain.getvalue(), 1) if compress else plain.getvalue())
    return path


def members(count=4):
    return [(f"{cifar10.FOLDER}/{name}", batch(count, number * count)) for number, name in enumerate(cifar10.FILES)]


@pytest.fixture
def four_records(monkeypatch):
    """Archives whose members hold 4 records instead of 10,000."""
    monkeypatch.setattr(cifar10, "RECORDS", 4)


# CIFAR-10, plain files


@pytest.mark.parametrize("below", ["", cifar10.FOLDER])
def test_cifar10_plain_files(tmp_path, below):
    write_cifar(tmp_path / below, 3)
    data = datasets.load("cifar10", data_dir=tmp_path)
    assert data.name == "cifar10"
    assert data.train_images.shape == (15, 3, 32, 32)
    assert data.test_images.shape == (3, 3, 32, 32)
    assert data.train_images.flags.c_contiguous
    assert data.train_labels.dtype == np.int32
    assert data.train_labels.tolist() == [i % 10 for i in range(15)]
    assert data.test_labels.tolist() == [i % 10 for i in range(15, 18)]
    # Image 4, channel 2, row 5, column 6 is byte 2·1024 + 5·32 + 6 of its pixels.
    assert data.train_images[4, 2, 5, 6] == ((2 * 1024 + 5 * 32 + 6) * 7 + 4 * 13) % 251
    assert data.classes[0] == "airplane"
    assert "not the official size: 15 training and 3 test" in data.source


def test_cifar10_reads_the_real_record_count_without_a_remark(tmp_path, four_records):
    write_cifar(tmp_path, 4)
    assert "official" not in datasets.load("cifar10", data_dir=tmp_path).source


@pytest.mark.parametrize(("keep", "offset"), [(2 * RECORD + 100, 2 * RECORD), (3 * RECORD - 1, 2 * RECORD), (1, 0), (0, 0)])
def test_cifar10_truncated_file_is_named_with_the_offset(tmp_path, keep, offset):
    path = write_cifar(tmp_path) / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataCorrupt, match=r"data_batch_3\.bin, byte ") as caught:
        datasets.load("cifar10", data_dir=tmp_path)
    assert caught.value.path == path
    assert caught.value.offset == offset
    assert caught.value.exit_code == 3


def test_cifar10_label_10_is_named_with_the_offset(tmp_path):
    path = write_cifar(tmp_path) / "test_batch.bin"
    content = bytearray(path.read_bytes())
    content[1 * RECORD] = 10
    path.write_bytes(content)
    with pytest.raises(DataCorrupt, match=r"test_batch\.bin, byte 3,073: record 1 has label 10") as caught:
        datasets.load("cifar10", data_dir=tmp_path)
    assert caught.value.offset == RECORD


def test_cifar10_flipped_label_bit_is_found_in_the_last_record(tmp_path):
    path = write_cifar(tmp_path) / "data_batch_1.bin"
    content = bytearray(path.read_bytes())
    content[2 * RECORD] ^= 0x80
    path.write_bytes(content)
    with pytest.raises(DataCorrupt, match="label 130"):
        datasets.load("cifar10", data_dir=tmp_path)


def test_cifar10_incomplete_set_names_the_absent_files(tmp_path):
    write_cifar(tmp_path)
    (tmp_path / "data_batch_4.bin").unlink()
    for name in ("cifar10", "auto"):
        with pytest.raises(DataMissing, match=r"not data_batch_4\.bin"):
            datasets.load(name, data_dir=tmp_path)


def test_cifar10_wrong_directory_says_what_is_there_and_what_would_do(tmp_path):
    (tmp_path / "holiday.jpg").touch()
    with pytest.raises(DataMissing) as caught:
        datasets.load("cifar10", data_dir=tmp_path)
    for part in (str(tmp_path), "holiday.jpg", cifar10.ARCHIVE, cifar10.FOLDER, "data_batch_1.bin", cifar10.ARCHIVE_MD5):
        assert part in str(caught.value)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("name", ["cifar10", "auto"])
def test_a_folder_that_does_not_exist_is_an_error_and_is_not_made(tmp_path, name, monkeypatch):
    monkeypatch.setenv("NBCNN_OFFLINE", "0")
    with pytest.raises(DataMissing, match="which does not exist"):
        datasets.load(name, data_dir=tmp_path / "tpyo")
    assert not (tmp_path / "tpyo").exists()


def test_a_file_instead_of_a_folder(tmp_path):
    (tmp_path / "x").touch()
    with pytest.raises(DataMissing, match="a file, not a folder"):
        datasets.load("cifar10", data_dir=tmp_path / "x")


@pytest.mark.parametrize("where", ["data_batch_1", "cifar-10-batches-py/data_batch_1", "cifar-10-python.tar.gz"])
def test_the_python_version_is_refused_and_explained(tmp_path, where):
    (tmp_path / where).parent.mkdir(exist_ok=True)
    (tmp_path / where).touch()
    with pytest.raises(DataMissing, match=r"only the binary version \(cifar-10-binary.tar.gz\) is read"):
        datasets.load("cifar10", data_dir=tmp_path)


def test_a_file_that_cannot_be_opened(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    write_cifar(tmp_path)
    monkeypatch.setattr(regular, "opened", refuse)
    with pytest.raises(DataError, match=r"data_batch_1\.bin cannot be read: Permission denied"):
        datasets.load("cifar10", data_dir=tmp_path)


# CIFAR-10, the archive


def test_archive_equals_plain_files_and_nothing_is_written(tmp_path, four_records):
    extras = [(f"{cifar10.FOLDER}/batches.meta.txt", b"airplane\n"), (f"{cifar10.FOLDER}/readme.html", b"x" * 88)]
    (tmp_path / "a").mkdir()
    write_archive(tmp_path / "a", extras + members()[::-1])
    write_cifar(tmp_path / "b", 4)
    packed, plain = (datasets.load("cifar10", data_dir=tmp_path / name) for name in "ab")
    np.testing.assert_array_equal(packed.train_images, plain.train_images)
    np.testing.assert_array_equal(packed.train_labels, plain.train_labels)
    np.testing.assert_array_equal(packed.test_images, plain.test_images)
    np.testing.assert_array_equal(packed.test_labels, plain.test_labels)
    assert [entry.name for entry in (tmp_path / "a").iterdir()] == [cifar10.ARCHIVE]


@pytest.mark.parametrize("name", ["../evil.bin", "cifar-10-batches-bin/../../evil.bin", "/tmp/evil.bin", "../cifar-10-batches-bin/test_batch.bin"])
def test_archive_with_a_member_that_points_outside_is_refused(tmp_path, four_records, name):
    inner = tmp_path / "inner"
    inner.mkdir()
    write_archive(inner, [(name, b"evil"), *members()])
    with pytest.raises(DataCorrupt, match="points outside"):
        datasets.load("cifar10", data_dir=inner)
    assert [entry.name for entry in tmp_path.rglob("*")] == ["inner", cifar10.ARCHIVE]


def test_archive_member_of_the_wrong_size(tmp_path, four_records):
    changed = members()
    changed[2] = (changed[2][0], changed[2][1] + b"\0")
    write_archive(tmp_path, changed)
    with pytest.raises(DataCorrupt, match=r"data_batch_3\.bin' has 12,293 bytes; it must be one file of 12,292 bytes"):
        datasets.load("cifar10", data_dir=tmp_path)


def test_archive_with_a_link_instead_of_a_file(tmp_path, four_records):
    write_archive(tmp_path, [*members()[:5], (f"{cifar10.FOLDER}/test_batch.bin", "/etc/passwd")])
    with pytest.raises(DataCorrupt, match="is not a regular file"):
        datasets.load("cifar10", data_dir=tmp_path)


def test_archive_with_a_member_twice(tmp_path, four_records):
    write_archive(tmp_path, [members()[0], *members()])
    with pytest.raises(DataCorrupt, match="is there twice"):
        datasets.load("cifar10", data_dir=tmp_path)


def test_archive_without_one_member(tmp_path, four_records):
    write_archive(tmp_path, members()[:5])
    with pytest.raises(DataCorrupt, match=r"ends without cifar-10-batches-bin/test_batch\.bin"):
        datasets.load("cifar10", data_dir=tmp_path)


def test_archive_with_a_large_foreign_member(tmp_path, four_records):
    write_archive(tmp_path, [("film.mp4", b"\0" * (2 << 20)), *members()])
    with pytest.raises(DataCorrupt, match="does not belong"):
        datasets.load("cifar10", data_dir=tmp_path)


def header(name, size, kind=b"0"):
    """A header of tar with any bytes as its size."""
    fields = name.encode().ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + size.ljust(12, b"\0") + b"00000000000\0"
    rest = kind + bytes(100) + b"ustar\0" + b"00" + bytes(247)
    return fields + b"%06o\0 " % (sum(fields) + sum(rest) + 8 * 32) + rest


BACK_1024 = b"\xff" * 10 + b"\xfc\x00"  # base 256, as GNU tar writes sizes from 8 GiB on
GIB_3 = b"%011o" % (3 << 30)
SPARSE = b"39 GNU.sparse.size=not a whole number\n"
HOSTILE = {
    "goes back": (header(f"{cifar10.FOLDER}/x", BACK_1024), "is no octal number"),
    "goes back at a member of ours": (header(f"{cifar10.FOLDER}/{cifar10.FILES[0]}", BACK_1024), "is no octal number"),
    "extended header of 3 GiB": (header("PaxHeaders/x", GIB_3, b"x"), "does not belong"),
    "long name of 3 GiB": (header("././@LongLink", GIB_3, b"L"), "does not belong"),
    "many members": (header("x", b"0") * 10_000, "more than 256 members"),
    "checksum": (header("x", b"1", b"0").replace(b"ustar", b"USTAR"), "wrong checksum"),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_an_archive_made_to_harm_is_refused_at_once(tmp_path, four_records, how):
    content, says = HOSTILE[how]
    (tmp_path / cifar10.ARCHIVE).write_bytes(gzip.compress(content + bytes(1 << 20), 1))
    tracemalloc.start()
    try:
        with pytest.raises(DataCorrupt, match=says):
            datasets.load("cifar10", data_dir=tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_extended_headers_are_skipped(tmp_path, four_records):
    path = write_archive(tmp_path, members())
    plain = gzip.decompress(path.read_bytes())
    extended = header("PaxHeaders/x", b"%o" % len(SPARSE), b"x") + SPARSE.ljust(512, b"\0")
    path.write_bytes(gzip.compress(extended + plain, 1))
    assert datasets.load("cifar10", data_dir=tmp_path).train_images.shape == (20, 3, 32, 32)


def test_archive_label_10(tmp_path, four_records):
    changed = members()
    changed[5] = (changed[5][0], b"\x0a" + changed[5][1][1:])
    path = write_archive(tmp_path, changed)
    with pytest.raises(DataCorrupt, match="label 10") as caught:
        datasets.load("cifar10", data_dir=tmp_path)
    assert caught.value.path == path / "test_batch.bin"


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.999])
def test_truncated_archive(tmp_path, four_records, share):
    path = write_archive(tmp_path, members())
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(DataCorrupt, match=cifar10.ARCHIVE) as caught:
        datasets.load("cifar10", data_dir=tmp_path)
    assert caught.value.offset <= len(content)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9, 1.0])
def test_bit_flip_in_the_archive(tmp_path, four_records, share):
    path = write_archive(tmp_path, members())
    content = bytearray(path.read_bytes())
    # The last 8 bytes are the checksum and length of the stream.
    content[int((len(content) - 8) * share)] ^= 0x10
    path.write_bytes(content)
    with pytest.raises(DataCorrupt):
        datasets.load("cifar10", data_dir=tmp_path)


def test_archive_that_is_not_compressed(tmp_path, four_records):
    write_archive(tmp_path, members(), compress=False)
    with pytest.raises(DataCorrupt, match="damaged"):
        datasets.load("cifar10", data_dir=tmp_path)


# The choice of "auto"


def test_auto_takes_cifar10_if_it_is_there(tmp_path):
    write_cifar(tmp_path)
    said = []
    assert datasets.load("auto", data_dir=tmp_path, log=said.append).name == "cifar10"
    assert said == []


@pytest.mark.parametrize("switch", ["variable", "argument"])
def test_auto_offline_falls_back_with_a_notice(tmp_path, monkeypatch, switch):
    def no_network(*args, **kwargs):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(download, "fetch", no_network)
    monkeypatch.setenv("NBCNN_OFFLINE", "1" if switch == "variable" else "0")
    said = []
    data = datasets.load("auto", data_dir=tmp_path, download=switch == "variable", log=said.append)
    assert data.name == "digits"
    assert data.train_labels is not None, "the steps after training need labels"
    assert "CIFAR-10 was not available" in data.source
    assert len(said) == 1
    for part in ("NOT CIFAR-10", "digits", "switched off", cifar10.ARCHIVE, cifar10.MIRRORS[-1], "--dataset cifar10"):
        assert part in said[0]


def test_explicit_cifar10_offline_says_that_it_may_not_download(tmp_path, monkeypatch):
    monkeypatch.setenv("NBCNN_OFFLINE", "1")
    with pytest.raises(DataMissing, match=r"(?s)--data-dir.*switched off"):
        datasets.load("cifar10", data_dir=tmp_path, log=quiet)


def test_auto_falls_back_when_the_download_fails_and_says_why(tmp_path, monkeypatch):
    def fail(urls, target, *, passes, **rest):
        assert passes == (download.QUICK,)
        raise download.DownloadFailed("the moon is in the way")

    monkeypatch.setenv("NBCNN_OFFLINE", "0")
    monkeypatch.setattr(download, "fetch", fail)
    said = []
    assert datasets.load("auto", data_dir=tmp_path, log=said.append).name == "digits"
    assert "the moon is in the way" in said[-1]


def test_explicit_cifar10_never_falls_back(tmp_path, monkeypatch):
    def fail(urls, target, *, passes, **rest):
        assert passes == (download.QUICK, download.PATIENT)
        assert urls[:2] == ("https://one.example/a", "https://two.example/b")
        assert urls[2:] == cifar10.MIRRORS
        raise download.DownloadFailed("the moon is in the way")

    monkeypatch.setenv("NBCNN_OFFLINE", "")
    monkeypatch.setenv("NBCNN_CIFAR10_URLS", "https://one.example/a, https://two.example/b")
    monkeypatch.setattr(download, "fetch", fail)
    with pytest.raises(DataMissing, match=r"(?s)the moon is in the way.*Any one of these would do") as caught:
        datasets.load("cifar10", data_dir=tmp_path, log=quiet)
    assert caught.value.exit_code == 3


def test_auto_does_not_hide_damaged_files(tmp_path):
    (write_cifar(tmp_path) / "test_batch.bin").write_bytes(b"\x0b" * RECORD)
    with pytest.raises(DataCorrupt, match="label 11"):
        datasets.load("auto", data_dir=tmp_path, log=quiet)
