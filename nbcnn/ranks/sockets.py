"""A star of TCP connections: every rank to rank 0. What a few hundred bytes, and at worst a small network's gradients, need.

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

MAGIC = b"nbcnn-1\n"
HELLO = struct.Struct("<8s4sIII64s")
LENGTH = struct.Struct("<Q")
END = struct.Struct("<Ii")
"""Which rank ended, and its exit code; VANISHED if it did not say one."""
VANISHED = -1
MOST = 1 << 32
"""No frame is longer: whoever says so is not one of us."""
GRACE = 3.0
"""Seconds that a rank has to end by itself once another is lost."""
SLICE = 0.2


LOST = 1
"""The exit code of a rank that lost another which did not say why."""


class RankLost(RuntimeError):
    """Another rank failed, vanished or never came; `exit_code` is its own where it said one."""

    def __init__(self, message: str, code: int = LOST) -> None:
        super().__init__(message)
        self.exit_code = code


class Star:
    """This rank's connections; made by `Star(rank)`, which returns when all ranks have met.

    Raises RankLost naming the ranks that are missing after `rank.timeout` seconds, OSError if rank 0 cannot listen.
    """

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self._ended = threading.Event()
        self._lost: tuple[int, int] | None = None
        self.talk: dict[int, socket.socket] = {}
        self._watch: dict[int, socket.socket] = {}
        (self._listen if rank.rank == 0 else self._connect)()
        selector = selectors.DefaultSelector()
        for other, peer in self._watch.items():
            selector.register(peer, selectors.EVENT_READ, other)
        threading.Thread(target=self._guard, args=(selector,), name="nbcnn watch", daemon=True).start()

    # -- meeting

    def _listen(self) -> None:
        me, until = self.rank, time.monotonic() + self.rank.timeout
        local = me.address == "localhost" or me.address.startswith("127.")
        try:
            listener = socket.create_server(("127.0.0.1" if local else "", me.port), backlog=2 * me.size)
        except OSError as error:
            raise OSError(
                error.errno, f"rank 0 cannot listen at port {me.port} ({error.strerror}); set NBCNN_PORT to a free one for all ranks"
            ) from None
        with listener:
            while missing := [r for r in range(1, me.size) if r not in self.talk or r not in self._watch]:
                listener.settimeout(max(0.0, until - time.monotonic()) or 1e-3)
                try:
                    came, _ = listener.accept()
                except TimeoutError:
                    raise RankLost(
                        f"after {me.timeout:.0f} s rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {me.size} "
                        f"{'are' if len(missing) > 1 else 'is'} missing: not started, ended early, or without a way to {me.address} port {me.port}"
                    ) from None
                self._welcome(came)
        for peer in self.talk.values():
            _send(peer, b"all here")

    def _welcome(self, came: socket.socket) -> None:
        """Take a connection in if it is one of us; a stranger is turned away."""
        came.settimeout(5.0)
        try:
            magic, kind, rank, size, _, job = HELLO.unpack(_exactly(came, HELLO.size))
        except (OSError, EOFError):
            came.close()
            return
        known = {b"talk": self.talk, b"wait": self._watch}.get(kind)
        if magic != MAGIC or known is None or job.rstrip(b"\0") != self.rank.job.encode()[:64]:
            came.close()
            return
        if size != self.rank.size or not 0 < rank < size or rank in known:
            twice = rank in known
            raise RankLost(
                f"two processes say that they are rank {rank}"
                if twice
                else f"a process says that it is rank {rank} of {size}, this is 0 of {self.rank.size}",
                2,
            )
        known[rank] = _prepared(came)

    def _connect(self) -> None:
        me, until = self.rank, time.monotonic() + self.rank.timeout
        for kind, known in ((b"talk", self.talk), (b"wait", self._watch)):
            why: object = "no answer"
            while 0 not in known:
                try:
                    made = socket.create_connection((me.address, me.port), timeout=max(0.1, min(5.0, until - time.monotonic())))
                    known[0] = _prepared(made)
                except OSError as error:
                    why = error.strerror or error
                    if time.monotonic() >= until:
                        raise RankLost(
                            f"rank {me.rank} could not reach rank 0 at {me.address} port {me.port} within {me.timeout:.0f} s ({why})"
                        ) from None
                    time.sleep(0.05)
            known[0].sendall(HELLO.pack(MAGIC, kind, me.rank, me.size, me.local, me.job.encode()[:64]))
        try:
            _receive(self.talk[0], lambda: self._patience(0, until, me.timeout))
        except (EOFError, OSError):
            raise RankLost(f"rank 0 at {me.address} port {me.port} turned rank {me.rank} away: it belongs to another job, or gave up") from None

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


def _prepared(made: socket.socket) -> socket.socket:
    """Blocking, without delay for small frames, and asking now and then whether the other machine is still there."""
    made.settimeout(None)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
    return made


def _send(peer: socket.socket, content: Any) -> None:
    data = memoryview(content).cast("B")
    peer.sendall(LENGTH.pack(len(data)))
    peer.sendall(data)


def _receive(peer: socket.socket, waiting: Callable[[], None]) -> bytes:
    """A frame; `waiting` is called now and then, and may raise."""
    (count,) = LENGTH.unpack(_exactly(peer, LENGTH.size, waiting))
    if count > MOST:
        raise ConnectionError(f"a frame of {count} bytes")
    return _exactly(peer, count, waiting)


def _exactly(peer: socket.socket, count: int, waiting: Callable[[], None] | None = None) -> bytes:
    """The next `count` bytes. Raises EOFError if the other side has closed, TimeoutError as the socket is set."""
    made = bytearray(count)
    view = memoryview(made)
    if waiting is not None:
        peer.settimeout(SLICE)
    try:
        while view:
            try:
                got = peer.recv_into(view)
            except TimeoutError:
                if waiting is None:
                    raise
                waiting()
                continue
            if not got:
                raise EOFError
            view = view[got:]
    finally:
        if waiting is not None:
            peer.settimeout(None)
    return bytes(made)


def gathered(star: Star, mine: bytes, patience: float | None = None) -> Sequence[bytes]:
    """What every rank gave, by rank, on rank 0; an empty list elsewhere."""
    if star.rank.rank:
        star.send(0, mine)
        return []
    return [mine, *(star.receive(r, patience) for r in range(1, star.rank.size))]


def told(star: Star, content: bytes, patience: float | None = None) -> bytes:
    """Rank 0's `content`, on every rank."""
    if star.rank.rank:
        return star.receive(0, patience)
    for r in range(1, star.rank.size):
        star.send(r, content)
    return content
