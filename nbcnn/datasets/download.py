"""This module downloads one file from the first of several mirrors that delivers it: resumed, checked, then renamed into place.

Mirrors need not be trusted: a file is kept only if its size and MD5 are the published ones. Standard library only.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
import queue
import shutil
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nbcnn.datasets.dataset import DataMissing, Log
from nbcnn.files import atomic, lock, regular
from nbcnn.files.errors import Whole
from nbcnn.files.quote import brief

_CHUNK = 1 << 16
_REPORT_S = 30.0

# A mirror that broke off is asked again if it brought this share of the file: so it is asked 200 times at most.
_WORTHWHILE = 1 / 200


@dataclass(frozen=True)
class Patience:
    """When to give up on a mirror: `connect_s` without a connection, `silence_s` without an answer or then without a byte, or less than
    `min_rate` bytes per second (0: any rate will do) over a window of `window_s` seconds."""

    connect_s: float
    silence_s: float
    min_rate: float
    window_s: float = 10.0


QUICK = Patience(connect_s=10, silence_s=10, min_rate=1e6)
PATIENT = Patience(connect_s=30, silence_s=60, min_rate=1e4, window_s=60)
"""A tenth of what the home of CIFAR-10 gives since June 2026: its archive takes five hours at this rate, and for ever at none."""


class DownloadFailed(DataMissing):
    """No mirror delivered the file; the message has one reason per mirror. What did arrive stays beside the target as NAME.part."""


class MirrorFailed(Whole, Exception):
    """One mirror did not deliver; `again` says that it may if asked again."""

    def __init__(self, reason: str, again: bool = False) -> None:
        super().__init__(reason)
        self.again = again


class WrongFile(MirrorFailed):
    """A mirror delivered a complete file that is not the published one; it is not asked again."""


def fetch(urls: Sequence[str], target: Path, *, size: int, md5: str, passes: Sequence[Patience] = (QUICK, PATIENT), log: Log | None) -> Path:
    """Download `target`, a file of `size` bytes with checksum `md5` (hexadecimal), from the first of `urls` that delivers it.

    Every pass goes through all mirrors with one patience, so a fast mirror is used before a slow one is waited for. Bytes collect in
    NAME.part beside `target`; a later mirror or a later call goes on from there. NAME.part is deleted only when it is complete and its
    checksum is wrong. `target` appears complete or not at all. If another process downloads it already, it is waited for and its file taken.
    Without a `log` nothing is said, and there is no bar. Raises DownloadFailed: no mirror, no space, or no right to write; `lock.Held` if a
    process of another host, which cannot be waited for, has begun it.
    """
    with ExitStack() as held:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(lock.writing(target.parent, f".{target.name}.writer", waiting=log or (lambda _: None)))
        except OSError as error:
            raise _disk_failure(target, error) from error
        return target if target.is_file() else _fetch(urls, target, size, md5, passes, log)


def _fetch(urls: Sequence[str], target: Path, size: int, md5: str, passes: Sequence[Patience], log: Log | None) -> Path:
    """Download like `fetch`, which holds the lock of `target`."""
    part = target.with_name(target.name + ".part")
    if _bytes_in(part) >= size and _finish(part, target, size, md5):
        return target
    _check_space(target, size - _bytes_in(part))
    reasons: dict[str, str] = {}
    wrong: set[str] = set()
    for patience in passes:
        candidates = [url for url in urls if url not in wrong]
        while candidates:
            for url, unreachable in reachable(tuple(candidates), patience.connect_s):
                before = _bytes_in(part)
                try:
                    if unreachable:
                        raise MirrorFailed(unreachable)
                    _deliver(url, part, target, size, md5, patience, log)
                    return target
                except MirrorFailed as failure:
                    reasons[url] = str(failure)
                    if isinstance(failure, WrongFile):
                        wrong.add(url)
                    if not (failure.again and _bytes_in(part) - before >= size * _WORTHWHILE):
                        candidates.remove(url)
    kept = f"\n{_bytes_in(part):,} of {size:,} bytes are kept in {part}; the next attempt goes on from there." if _bytes_in(part) else ""
    raise DownloadFailed(f"{target.name} could not be downloaded:\n" + "\n".join(f"  {url}: {reason}" for url, reason in reasons.items()) + kept)


def reachable(urls: Sequence[str], seconds: float) -> Iterator[tuple[str, str | None]]:
    """Each of `urls` in order, with None if its server (or its proxy) takes connections, else the reason.

    All are asked at once, in threads: neither name look-up, which knows no timeout, nor several dead servers can cost more than `seconds`.
    """
    answers: dict[str, str | None] = {}

    def ask(url: str) -> None:
        try:
            socket.create_connection(_address(url), timeout=seconds).close()
            answers[url] = None
        except (OSError, ValueError) as error:
            answers[url] = f"no connection ({brief(error)})"

    threads = [threading.Thread(target=ask, args=(url,), daemon=True) for url in urls]
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for url, thread in zip(urls, threads, strict=True):
        thread.join(max(0.0, deadline - time.monotonic()))
        yield url, answers.get(url, f"no connection within {seconds:g} s")


def _address(url: str) -> tuple[str, int]:
    """Host and port to connect to for `url`: its server, or the proxy that the environment names for it."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("not an http or https address")
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and not urllib.request.proxy_bypass(parts.netloc):
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _deliver(url: str, part: Path, target: Path, size: int, md5: str, patience: Patience, log: Log | None) -> None:
    """Complete `part` from `url`, check it and rename it to `target`. Raises MirrorFailed, or DownloadFailed when the disk is the problem."""
    have = _bytes_in(part)
    resuming = f", resuming at {have / 2**20:,.0f} MiB" if have else ""
    if log:
        log(f"downloading {target.name} ({size / 2**20:,.0f} MiB) from {urlsplit(url).hostname}{resuming}")
    _download(url, part, size, patience, log)
    if _finish(part, target, size, md5):
        return
    # A part begun elsewhere may be to blame: the mirror gets one chance to deliver it all.
    if have:
        _download(url, part, size, patience, log)
        if _finish(part, target, size, md5):
            return
    raise WrongFile("delivered a file with a wrong MD5")


def _download(url: str, part: Path, size: int, patience: Patience, log: Log | None) -> None:
    """Bring `part` to `size` bytes from `url`. Raises MirrorFailed, or DownloadFailed when the disk is the problem."""
    have = _bytes_in(part)
    headers = {"User-Agent": "nbcnn", "Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        with _answer(url, headers, patience.silence_s) as response:
            start = _start(response, have, size)
            with _open(part, start) as file, _Progress(part.stem, start, size, log) as progress:
                _copy(response, file, start, size, patience, progress)
    except urllib.error.HTTPError as error:
        raise MirrorFailed(f"HTTP {error.code} {brief(error.reason)}") from error
    except TimeoutError as error:
        raise MirrorFailed(f"no byte for {patience.silence_s:g} s", again=True) from error
    except (OSError, http.client.HTTPException) as error:
        raise MirrorFailed(f"connection failed ({brief(error)})", again=True) from error


def _answer(url: str, headers: dict[str, str], seconds: float) -> Any:
    """The response of `url`, its headers read. Raises TimeoutError if that takes more than `seconds` altogether, else what urllib raises.

    A socket's timeout counts from byte to byte, so headers that drip would defeat it. The request is made in a thread that can be left,
    as in `reachable`: it covers names, proxies, TLS and redirections alike.
    """
    arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
    left = threading.Event()

    def ask() -> None:
        try:
            # An opener of its own reads the proxy variables as they are now, as `_address` does; of the web alone, so no redirection
            # leads to a file or to FTP.
            opener = urllib.request.OpenerDirector()
            for handler in _WEB:
                opener.add_handler(handler())
            answer: Any = opener.open(urllib.request.Request(url, headers=headers), timeout=seconds)  # noqa: S310 - see above
        except Exception as error:  # whatever it is, it is raised in the caller's thread
            answer = error
        arrived.put(answer)
        if left.is_set():
            _close(answer)

    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = arrived.get(timeout=seconds)
    except BaseException as error:
        left.set()
        with suppress(queue.Empty):
            _close(arrived.get_nowait())
        raise TimeoutError if isinstance(error, queue.Empty) else error from None
    if isinstance(answer, Exception):
        raise answer
    return answer


_WEB: tuple[type[urllib.request.BaseHandler], ...] = (
    urllib.request.ProxyHandler,
    urllib.request.HTTPHandler,
    urllib.request.HTTPSHandler,
    urllib.request.HTTPRedirectHandler,
    urllib.request.HTTPDefaultErrorHandler,
    urllib.request.HTTPErrorProcessor,
)


def _close(answer: Any) -> None:
    if not isinstance(answer, Exception):
        answer.close()


def _start(response: Any, have: int, size: int) -> int:
    """The byte of the file at which `response` starts: `have` if the server resumes, 0 if it does not. Raises MirrorFailed for another file."""
    if response.headers["Transfer-Encoding"]:
        # The sizes between chunks are read without a bound on time; servers of files do not need them.
        raise MirrorFailed("sends the file in chunks, not whole")
    if response.status == http.HTTPStatus.PARTIAL_CONTENT:
        if response.headers["Content-Range"] != f"bytes {have}-{size - 1}/{size}":
            raise MirrorFailed(f"resumes with another file ({brief(response.headers['Content-Range'])})")
        return have
    # Asked before anything is written: a login page of a hotel network must not cost the part that is there.
    if response.headers["Content-Length"] != str(size):
        length, kind = (brief(response.headers[f"Content-{name}"]) for name in ("Length", "Type"))
        raise MirrorFailed(f"has another file ({length} bytes, {kind}; expected {size:,} bytes)")
    return 0


def _copy(response: Any, file: Any, start: int, size: int, patience: Patience, progress: _Progress) -> None:
    have = start
    window_start, window_bytes = time.monotonic(), 0
    while have < size:
        # read1 returns what has arrived; read would wait for the whole chunk and hide a trickle.
        chunk = response.read1(min(_CHUNK, size - have))
        if not chunk:
            raise MirrorFailed(f"connection closed after {have:,} of {size:,} bytes", again=True)
        try:
            rest = memoryview(chunk)
            while rest:
                rest = rest[file.write(rest) :]
        except OSError as error:
            raise _disk_failure(Path(file.name), error, size - have) from error
        have += len(chunk)
        window_bytes += len(chunk)
        progress.advance(len(chunk))
        elapsed = time.monotonic() - window_start
        if elapsed >= patience.window_s:
            if window_bytes < patience.min_rate * elapsed:
                raise MirrorFailed(f"too slow: {window_bytes / elapsed / 1e6:.2f} MB/s over {elapsed:.0f} s, wanted {patience.min_rate / 1e6:g}")
            window_start, window_bytes = time.monotonic(), 0


def _open(part: Path, start: int) -> Any:
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        if not start:
            part.unlink(missing_ok=True)  # it may be no regular file
        return open(part, "ab", buffering=0)
    except OSError as error:
        raise _disk_failure(part, error) from error


def _finish(part: Path, target: Path, size: int, md5: str) -> bool:
    """Rename the complete `part` to `target` and return True if its checksum is right; else delete it and return False."""
    with regular.opened(part) as file:
        digest = hashlib.md5(usedforsecurity=False)
        while chunk := file.read(1 << 20):
            digest.update(chunk)
        if file.tell() == size and digest.hexdigest() == md5:
            with atomic.named(target):
                os.fsync(file.fileno())
                os.replace(part, target)
            return True
    part.unlink()
    return False


def _bytes_in(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _check_space(target: Path, needed: int) -> None:
    folder = target.parent
    while not folder.is_dir():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DownloadFailed(
            f"{target.name} needs {needed:,} more bytes in {target.parent}, and {free:,} are free. Free some space or name another --data-dir."
        )


def _disk_failure(path: Path, error: OSError, needed: int = 0) -> DownloadFailed:
    what = f"the disk is full, {needed:,} more bytes are needed" if error.errno == errno.ENOSPC else error.strerror or str(error)
    return DownloadFailed(f"{path} cannot be written: {what}. Free some space or name another --data-dir.")


class _Progress:
    """A bar with the time that is left, on stderr, if that is a terminal; else a line in the log, if there is one, every half minute."""

    def __init__(self, name: str, start: int, size: int, log: Log | None) -> None:
        self.name, self.have, self.size, self.log = name, start, size, log
        self.bar: Any = None
        self.since, self.at_since = time.monotonic(), start

    def __enter__(self) -> _Progress:
        if self.log and sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=self.size, initial=self.have, unit="B", unit_scale=True, desc=self.name, leave=False)
        return self

    def advance(self, count: int) -> None:
        self.have += count
        if self.bar is not None:
            self.bar.update(count)
            return
        elapsed = time.monotonic() - self.since
        if self.log and elapsed >= _REPORT_S:
            rate = max((self.have - self.at_since) / elapsed, 1.0)
            self.log(f"{self.name}: {self.have / self.size:.0%}, {rate / 1e6:.2f} MB/s, {(self.size - self.have) / rate:,.0f} s left")
            self.since, self.at_since = time.monotonic(), self.have

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            self.bar.close()
