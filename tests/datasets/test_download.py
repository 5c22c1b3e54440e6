"""Tests of downloads from servers on this machine that resume, do not resume, break off, dawdle, or serve something else."""

import contextlib
import gzip
import hashlib
import io
import os
import re
import shutil
import socket
import sys
import tarfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from nbcnn import datasets
from nbcnn.datasets import cifar10, download
from nbcnn.datasets.download import DownloadFailed, Patience
from nbcnn.files.lock import Held

CONTENT = bytes(range(256)) * 1200  # 300 KiB
SIZE = len(CONTENT)
MD5 = hashlib.md5(CONTENT).hexdigest()
PATIENT = Patience(connect_s=5, silence_s=5, min_rate=0)


class Mirror:
    """A server of one file; its behaviour is set by attributes, and `ranges` lists the Range header of every request."""

    def __init__(self):
        self.content = CONTENT
        self.resumes = True
        self.status = 200
        self.states_length = True
        self.break_after = None  # bytes of one response
        self.pause = None  # (bytes, seconds): how much is sent between two pauses
        self.content_range = None
        self.drip = None  # seconds between the bytes of an endless header
        self.chunked = False
        self.left = threading.Event()
        self.ranges = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/file.bin"

    def close(self):
        self.left.set()
        self.server.shutdown()
        self.server.server_close()

    def _handler(mirror):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                wanted = self.headers["Range"]
                mirror.ranges.append(wanted)
                start, status = 0, mirror.status
                if wanted and mirror.resumes and status == 200:
                    start, status = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]), 206
                body, total = mirror.content[start:], len(mirror.content)
                self.send_response(status)
                if mirror.drip:
                    self.flush_headers()
                    with contextlib.suppress(OSError):
                        while not mirror.left.wait(mirror.drip):
                            self.wfile.write(b"x")
                    return
                if mirror.chunked:
                    self.send_header("Transfer-Encoding", "chunked")
                if mirror.states_length:
                    self.send_header("Content-Length", str(len(body)))
                if status == 206:
                    self.send_header("Content-Range", mirror.content_range or f"bytes {start}-{total - 1}/{total}")
                self.end_headers()
                body = body[: mirror.break_after]
                step, seconds = mirror.pause or (len(body) or 1, 0)
                try:
                    for position in range(0, len(body), step):
                        self.wfile.write(body[position : position + step])
                        time.sleep(seconds)
                except OSError:
                    pass  # the client had enough

            def log_message(self, *args):
                """Silence."""

        return Handler


@pytest.fixture
def mirrors(monkeypatch):
    """A function that starts a mirror; all are stopped at the end."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    started = []

    def start():
        started.append(Mirror())
        return started[-1]

    yield start
    for mirror in started:
        mirror.close()


@pytest.fixture
def mirror(mirrors):
    return mirrors()


@pytest.fixture
def target(tmp_path):
    return tmp_path / "new" / "file.bin"


def part_of(target, content=None):
    part = target.with_name("file.bin.part")
    if content is not None:
        part.parent.mkdir(exist_ok=True)
        part.write_bytes(content)
    return part


def fetch(urls, target, passes=(PATIENT,), log=lambda message: None):
    return download.fetch(urls, target, size=SIZE, md5=MD5, passes=passes, log=log)


def assert_complete(target):
    assert target.read_bytes() == CONTENT
    assert [entry.name for entry in target.parent.iterdir()] == ["file.bin"]


def dead_url():
    """An address at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/file.bin"


def test_plain_download(mirror, target):
    said = []
    assert fetch([mirror.url], target, log=said.append) == target
    assert_complete(target)
    assert mirror.ranges == [None]
    assert said == ["downloading file.bin (0 MiB) from 127.0.0.1"]


def test_resumes_a_part(mirror, target):
    part_of(target, CONTENT[:100_000])
    fetch([mirror.url], target)
    assert_complete(target)
    assert mirror.ranges == ["bytes=100000-"]


def test_starts_over_where_the_server_cannot_resume(mirror, target):
    mirror.resumes = False
    part_of(target, CONTENT[:100_000])
    fetch([mirror.url], target)
    assert_complete(target)


def test_a_part_that_is_no_regular_file_is_replaced(mirror, target):
    target.parent.mkdir()
    os.mkfifo(target.with_name(target.name + ".part"))
    fetch([mirror.url], target)
    assert_complete(target)


def test_a_complete_part_needs_no_server(target):
    part_of(target, CONTENT)
    fetch([dead_url()], target)
    assert_complete(target)


def test_goes_on_after_broken_connections(mirror, target):
    mirror.break_after = SIZE // 3
    fetch([mirror.url], target)
    assert_complete(target)
    assert mirror.ranges == [None, f"bytes={SIZE // 3}-", f"bytes={2 * (SIZE // 3)}-"]


def test_another_mirror_goes_on_where_the_first_stopped(mirrors, target):
    first, second = mirrors(), mirrors()
    first.break_after = 50_000
    fetch([first.url, second.url], target)
    assert_complete(target)
    assert (first.ranges, second.ranges) == ([None], ["bytes=50000-"])


def test_a_mirror_that_brings_next_to_nothing_is_not_asked_for_ever(mirror, target):
    mirror.break_after = 10
    with pytest.raises(DownloadFailed, match=r"connection closed after 10 of") as caught:
        fetch([mirror.url], target)
    assert len(mirror.ranges) == 1
    assert part_of(target).read_bytes() == CONTENT[:10]
    assert str(part_of(target)) in str(caught.value)
    assert caught.value.exit_code == 3


def test_wrong_bytes_are_deleted_and_the_next_mirror_delivers(mirrors, target):
    bad, good = mirrors(), mirrors()
    bad.content = CONTENT[:-1] + b"?"
    fetch([bad.url, good.url], target)
    assert_complete(target)
    assert (bad.ranges, good.ranges) == ([None], [None])


def test_wrong_bytes_everywhere(mirror, target):
    mirror.content = b"?" + CONTENT[1:]
    with pytest.raises(DownloadFailed, match="wrong MD5"):
        fetch([mirror.url], target, passes=(PATIENT, PATIENT))
    assert len(mirror.ranges) == 1
    assert list(target.parent.iterdir()) == []


def test_a_wrong_part_is_not_blamed_on_the_mirror_that_completes_it(mirror, target):
    part_of(target, b"?" * 1000)
    fetch([mirror.url], target)
    assert_complete(target)
    assert mirror.ranges == ["bytes=1000-", None]


@pytest.mark.parametrize("extra", [0, 1])
def test_a_wrong_complete_or_overlong_part_is_replaced(mirror, target, extra):
    part_of(target, b"?" * (SIZE + extra))
    fetch([mirror.url], target)
    assert_complete(target)
    assert mirror.ranges == [None]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"status": 404}, "HTTP 404"),
        ({"status": 503}, "HTTP 503"),
        ({"content": b"<html>please log in</html>", "resumes": False}, r"another file \(26 bytes"),
        ({"states_length": False, "resumes": False}, "another file"),
        ({"content_range": f"bytes 1000-{SIZE}/{SIZE + 1}"}, "resumes with another file"),
        ({"content_range": f"bytes 0-{SIZE - 1}/{SIZE}"}, "resumes with another file"),
    ],
)
def test_a_mirror_with_another_file_does_not_touch_the_part(mirror, target, change, reason):
    for name, value in change.items():
        setattr(mirror, name, value)
    part_of(target, CONTENT[:1000])
    with pytest.raises(DownloadFailed, match=reason):
        fetch([mirror.url], target)
    assert part_of(target).read_bytes() == CONTENT[:1000]
    assert not target.exists()


def test_a_slow_mirror_is_left_for_a_fast_one(mirrors, target):
    slow, fast = mirrors(), mirrors()
    slow.pause = (1000, 0.02)  # at most 50 kB/s
    hurried = Patience(connect_s=5, silence_s=5, min_rate=1e6, window_s=0.2)
    begin = time.monotonic()
    fetch([slow.url, fast.url], target, passes=(hurried,))
    assert_complete(target)
    # The slow one alone would take six seconds.
    assert time.monotonic() - begin < 3
    assert fast.ranges[0].startswith("bytes=")


def test_hurried_gives_up_where_patient_goes_on(mirror, target):
    mirror.pause = (15_000, 0.03)
    hurried = Patience(connect_s=5, silence_s=5, min_rate=1e8, window_s=0.1)
    with pytest.raises(DownloadFailed, match=r"too slow: .* MB/s"):
        fetch([mirror.url], target, passes=(hurried,))
    kept = part_of(target).stat().st_size
    assert 0 < kept < SIZE
    fetch([mirror.url], target, passes=(hurried, PATIENT))
    assert_complete(target)
    assert mirror.ranges[1] == f"bytes={kept}-"


def test_silence_is_noticed(mirror, target):
    mirror.pause = (1000, 30)
    begin = time.monotonic()
    with pytest.raises(DownloadFailed, match=r"no byte for 0\.2 s"):
        fetch([mirror.url], target, passes=(Patience(connect_s=5, silence_s=0.2, min_rate=0),))
    assert time.monotonic() - begin < 3


def test_headers_that_drip_do_not_defeat_the_patience(mirrors, target):
    slow, good = mirrors(), mirrors()
    slow.drip = 0.05
    begin = time.monotonic()
    fetch([slow.url, good.url], target, passes=(Patience(connect_s=5, silence_s=0.3, min_rate=0),))
    assert_complete(target)
    assert time.monotonic() - begin < 3


def test_a_file_in_chunks_is_refused(mirror, target):
    mirror.chunked = True
    with pytest.raises(DownloadFailed, match="in chunks"):
        fetch([mirror.url], target)


def test_the_patient_pass_has_a_least_rate():
    hours = cifar10.ARCHIVE_BYTES / download.PATIENT.min_rate / 3600
    assert 1 < hours < 8


def test_dead_and_impossible_addresses_are_passed_over(mirror, target):
    fetch([dead_url(), "ftp://127.0.0.1/x", "file:///etc/passwd", "nonsense", "http://[bad/", mirror.url], target)
    assert_complete(target)


def test_every_reason_is_told(mirror, target):
    mirror.status = 404
    dead = dead_url()
    with pytest.raises(DownloadFailed) as caught:
        fetch([dead, "file:///etc/passwd", mirror.url], target)
    message = str(caught.value)
    assert f"{dead}: no connection" in message
    assert "file:///etc/passwd: no connection (not an http or https address)" in message
    assert f"{mirror.url}: HTTP 404" in message


def test_servers_and_names_that_never_answer_cost_one_wait_together(target, monkeypatch):
    monkeypatch.setattr(socket, "create_connection", lambda address, timeout: time.sleep(20) or io.BytesIO())
    begin = time.monotonic()
    with pytest.raises(DownloadFailed, match=r"no connection within 0\.3 s"):
        fetch([f"http://mirror{number}.example/x" for number in range(5)], target, passes=(Patience(0.3, 1, 0),))
    assert time.monotonic() - begin < 2


def test_a_proxy_is_asked_instead_of_the_server(mirror, target, monkeypatch):
    monkeypatch.setenv("http_proxy", mirror.url.removesuffix("/file.bin"))
    monkeypatch.delenv("no_proxy", raising=False)
    fetch(["http://mirror.invalid/file.bin"], target)
    assert_complete(target)


def test_disk_space_is_checked_first(mirror, target, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, SIZE - 1))
    with pytest.raises(DownloadFailed, match=f"needs {SIZE:,} more bytes in .*, and {SIZE - 1:,} are free"):
        fetch([mirror.url], target)
    assert mirror.ranges == []
    part_of(target, CONTENT[:1000])
    fetch([mirror.url], target)
    assert_complete(target)


def test_a_disk_that_fills_up_keeps_the_part_and_says_what_is_needed(mirror, target, monkeypatch):
    class Full(io.FileIO):
        def write(self, data):
            if self.tell() >= 100_000:
                raise OSError(28, "No space left on device")
            return super().write(data[:1000])  # a raw file may take less than it is given

    monkeypatch.setattr(download, "_open", lambda part, start: Full(part, "wb"))
    with pytest.raises(DownloadFailed, match=r"the disk is full, [\d,]+ more bytes are needed"):
        fetch([mirror.url], target)
    kept = part_of(target).read_bytes()
    assert 100_000 <= len(kept) < 101_000
    assert kept == CONTENT[: len(kept)]


def test_a_folder_that_cannot_be_made(mirror, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DownloadFailed, match="cannot be written"):
        fetch([mirror.url], tmp_path / "file" / "file.bin")


def test_an_interrupt_keeps_the_part(mirror, target, monkeypatch):
    mirror.pause = (50_000, 0.02)

    def interrupt(response, file, start, size, patience, progress):
        file.write(response.read1(1000))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(download, "_copy", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fetch([mirror.url], target)
    kept = part_of(target).stat().st_size
    assert 0 < kept <= 1000
    fetch([mirror.url], target)
    assert_complete(target)
    assert mirror.ranges == [None, f"bytes={kept}-"]


def test_three_downloads_into_one_folder_all_succeed_and_one_downloads(mirror, target):
    mirror.pause = (SIZE // 8, 0.05)  # long enough for all three to begin
    said, found = [], []
    threads = [threading.Thread(target=lambda: found.append(fetch([mirror.url], target, log=said.append))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [target] * 3
    assert mirror.ranges == [None], "one request for all of it"
    assert sum("waiting for process" in line for line in said) == 2
    assert_complete(target)


def test_a_download_of_another_host_is_not_waited_for(mirror, target):
    target.parent.mkdir()
    owner = target.with_name(".file.bin.writer")
    owner.write_text('{"pid": 7, "host": "gpu02", "boot": "another", "since": "2026-01-01T00:00:00+00:00", "command": "train.py"}')
    with pytest.raises(Held, match=rf"process 7 on gpu02 .* remove {owner} and {owner}\.lock"):
        fetch([mirror.url], target)
    owner.unlink()
    fetch([mirror.url], target)
    assert target.read_bytes() == CONTENT


def test_progress_is_a_bar_on_a_terminal_and_lines_in_the_log_elsewhere(mirror, target, monkeypatch, capsys):
    said = []
    mirror.pause = (100_000, 0.02)
    monkeypatch.setattr(download, "_REPORT_S", 0.01)
    fetch([mirror.url], target, log=said.append)
    assert re.fullmatch(r"file\.bin: \d+%, \d+\.\d\d MB/s, \d+ s left", said[1])
    assert capsys.readouterr() == ("", "")
    target.unlink()
    said.clear()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    fetch([mirror.url], target, log=said.append)
    captured = capsys.readouterr()
    assert "file.bin" in captured.err
    assert captured.out == ""
    assert len(said) == 1


def test_without_a_log_nothing_is_shown(mirror, target, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    fetch([mirror.url], target, log=None)
    assert_complete(target)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["auto", "cifar10"])
def test_load_downloads_and_reads_the_archive(mirror, tmp_path, monkeypatch, name):
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for member in cifar10.FILES:
            info = tarfile.TarInfo(f"{cifar10.FOLDER}/{member}")
            info.size = 2 * cifar10.RECORD
            tar.addfile(info, io.BytesIO(bytes(info.size)))
    mirror.content = gzip.compress(plain.getvalue())
    monkeypatch.setattr(cifar10, "RECORDS", 2)
    monkeypatch.setattr(cifar10, "ARCHIVE_BYTES", len(mirror.content))
    monkeypatch.setattr(cifar10, "ARCHIVE_MD5", hashlib.md5(mirror.content).hexdigest())
    monkeypatch.setattr(cifar10, "MIRRORS", ())
    monkeypatch.setenv("NBCNN_CIFAR10_URLS", mirror.url)
    monkeypatch.delenv("NBCNN_OFFLINE", raising=False)
    data = datasets.load(name, data_dir=tmp_path, log=lambda message: None)
    assert data.name == "cifar10"
    assert data.train_images.shape == (10, 3, 32, 32)
    assert [entry.name for entry in tmp_path.iterdir()] == [cifar10.ARCHIVE]
    datasets.load(name, data_dir=tmp_path, log=lambda message: None)
    assert len(mirror.ranges) == 1
