"""This module connects every rank to rank 0 by TCP, a star, which is enough for a few hundred bytes and for a small network's gradients.

Each rank has two connections. On `talk` the ranks exchange frames: eight bytes of length, then the content, raw and never unpickled. On
`watch` nothing is said until a rank ends, so that the others learn at once how: a byte with its exit code, or nothing at all if it
was killed. Rank 0 passes that on.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from nbcnn.ranks.environment import Rank
from nbcnn.ranks.meeting import RankLost, meet

LENGTH = struct.Struct("<Q")
END = struct.Struct("<Ii")
"""Which rank ended, and its exit code; VANISHED if it did not say one."""
VANISHED = -1
MAX_FRAME_BYTES, PIECE = 1 << 32, 1 << 20
"""A frame has at most MAX_FRAME_BYTES. Its memory is allocated piece by piece as it arrives, not when its length does."""
GRACE = 3.0
"""Seconds that a rank has to end by itself once another is lost."""
SLICE = 0.2


class Star:
    """This rank's connections; made by `Star(rank)`, which returns when all ranks have met.

    Raises as `nbcnn.ranks.meeting.meet`.
    """

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self._ended = threading.Event()
        self._lost: tuple[int, int] | None = None
        self.talk, self._watch = meet(rank)
        selector = selectors.DefaultSelector()
        for other, peer in self._watch.items():
            selector.register(peer, selectors.EVENT_READ, other)
        threading.Thread(target=self._guard, args=(selector,), name="nbcnn watch", daemon=True).start()

    # -- talking

    def send(self, to: int, content: Any) -> None:
        """Send bytes to rank 0, or from it to `to`. Raises RankLost if it is gone."""
        try:
            self.talk[to].settimeout(self.rank.timeout)
            _send(self.talk[to], content)
            self.talk[to].settimeout(None)
        except OSError:
            raise self._gone(to) from None

    def receive(self, sender: int, patience: float | None = None) -> bytes:
        """The next bytes of `sender`. Raises RankLost if it is gone, or silent for `patience` seconds (None: `rank.timeout`)."""
        seconds = self.rank.timeout if patience is None else patience
        until = time.monotonic() + seconds
        try:
            return _receive(self.talk[sender], lambda: self._patience(sender, until, seconds))
        except (EOFError, OSError):
            raise self._gone(sender) from None

    def _patience(self, sender: int, until: float, seconds: float) -> None:
        self.check()
        if time.monotonic() >= until:
            raise RankLost(f"rank {self.rank.rank} waited {seconds:.0f} s for rank {sender} in vain (NBCNN_TIMEOUT sets how long)")

    def _gone(self, rank: int) -> RankLost:
        # Its last word may still be on the way, through the other connection.
        until = time.monotonic() + 1.0
        while self._lost is None and time.monotonic() < until:
            time.sleep(0.01)
        return self._error(*(self._lost or (rank, VANISHED)))

    def check(self) -> None:
        """Raise RankLost if any rank has ended before its time."""
        if self._lost is not None:
            raise self._error(*self._lost)

    def _error(self, rank: int, code: int) -> RankLost:
        what = "is gone (killed, or its machine cannot be reached)" if code == VANISHED else f"failed with exit code {code}"
        return RankLost(
            f"rank {rank} of {self.rank.size} {what}, so rank {self.rank.rank} ends too; what was saved stands", 1 if code == VANISHED else code
        )

    # -- ending

    def leave(self, code: int = 0) -> None:
        """Tell the other ranks that this one ends with `code`, and close. With 0 they go on; any other code ends them too.

        Only the first call counts.
        """
        if self._ended.is_set():
            return
        self._ended.set()
        for peer in self._watch.values():
            try:
                peer.sendall(END.pack(self.rank.rank, code))
            except OSError:
                continue  # it has ended before
        for peer in (*self._watch.values(), *self.talk.values()):
            peer.close()

    def _guard(self, selector: selectors.BaseSelector) -> None:
        """In a thread: wait for a rank to end before its time; then let this process end by itself, or end it."""
        with selector:
            while selector.get_map() and not self._ended.is_set():
                for key, _ in selector.select(SLICE):
                    try:
                        rank, code = END.unpack(_exactly(self._watch[key.data], END.size))
                    except (OSError, EOFError):
                        rank, code = key.data, VANISHED
                    if self._ended.is_set():
                        return
                    selector.unregister(key.fileobj)
                    if code != 0:
                        self._report(rank, code, key.data)
                        return

    def _report(self, rank: int, code: int, heard_from: int) -> None:
        self._lost = rank, code
        for other, peer in self._watch.items():
            if other != heard_from:
                try:
                    peer.sendall(END.pack(rank, code))
                except OSError:
                    continue  # it has ended, too
        if self._ended.wait(GRACE):
            return
        error = self._error(rank, code)
        print(f"nbcnn: error: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)


def _send(peer: socket.socket, content: Any) -> None:
    data = memoryview(content).cast("B")
    peer.sendall(LENGTH.pack(len(data)))
    peer.sendall(data)


def _receive(peer: socket.socket, waiting: Callable[[], None]) -> bytes:
    """Receive a frame; `waiting` is called now and then, and may raise."""
    (count,) = LENGTH.unpack(_exactly(peer, LENGTH.size, waiting))
    if count > MAX_FRAME_BYTES:
        raise ConnectionError(f"a frame of {count} bytes")
    return _exactly(peer, count, waiting)


def _exactly(peer: socket.socket, count: int, waiting: Callable[[], None] | None = None) -> bytes:
    """The next `count` bytes. Raises EOFError if the other side has closed, TimeoutError as the socket is set."""
    made = bytearray()
    if waiting is not None:
        peer.settimeout(SLICE)
    try:
        while len(made) < count:
            try:
                got = peer.recv(min(count - len(made), PIECE))
            except TimeoutError:
                if waiting is None:
                    raise
                waiting()
                continue
            if not got:
                raise EOFError
            made += got
    finally:
        if waiting is not None:
            peer.settimeout(None)
    return bytes(made)


def gather(star: Star, mine: bytes, patience: float | None = None) -> Sequence[bytes]:
    """Every rank's content, by rank, on rank 0; an empty list elsewhere."""
    if star.rank.rank:
        star.send(0, mine)
        return []
    return [mine, *(star.receive(r, patience) for r in range(1, star.rank.size))]


def broadcast(star: Star, content: bytes, patience: float | None = None) -> bytes:
    """Rank 0's `content`, on every rank."""
    if star.rank.rank:
        return star.receive(0, patience)
    for r in range(1, star.rank.size):
        star.send(r, content)
    return content
