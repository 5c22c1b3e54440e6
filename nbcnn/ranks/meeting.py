"""This module connects the ranks of one job at rank 0's port, where strangers may call, too.

Both sides of a connection prove that they know the job's token, without saying it:

    rank 0 → rank    MAGIC, nonce
    rank → rank 0    which connection this is, rank, number of ranks, nonce, HMAC-SHA256(token, "rank" and all of that)
    rank 0 → rank    HMAC-SHA256(token, "zero" and the same)
    rank 0 → rank    MET, on the connection `talk`, when everyone has come

The nonces are new for every connection, so that a recorded message proves nothing. Every message has a fixed length, so that nothing is allocated
for a stranger, and rank 0 reads from all callers at once, so that a silent or slow one keeps nobody waiting. One deadline, `timeout` seconds
after the start, holds for the whole meeting. What is said after it is neither encrypted nor signed: that takes a private network.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import selectors
import socket
import struct
import sys
import time
from contextlib import ExitStack, suppress
from ipaddress import ip_address

from nbcnn.files.errors import Whole
from nbcnn.ranks.environment import NO_TOKEN, LaunchError, Rank

MAGIC = b"nbcnn-2\n"
TALK, WATCH = b"talk", b"wait"
MET = b"all here"
GREETING = struct.Struct("<8s32s")
HELLO = struct.Struct("<4sII32s32s")
PROOF_SIZE = 32
PROOF_SECONDS = 5.0
"""How long a caller may take to prove that it belongs to the job."""
CALL_SECONDS, ANSWER_SECONDS = 5.0, 30.0
"""How long a rank waits at rank 0's port for a connection, and then for a proof, before it calls again."""
CROWD = 256
"""So many callers may be without a proof at a time; then the oldest has to go, and calls again if it belongs to the job."""
BACKLOG = 4096
"""Connections that the kernel may hold until they are accepted; a rank that finds no room there tries again after a second."""
RETRY = 0.05
"""Seconds between two attempts to reach rank 0."""

LOST = 1
"""The exit code of a rank that lost another which did not say why."""

Peers = dict[int, socket.socket]


class RankLost(Whole, RuntimeError):
    """Another rank failed, vanished or never came; `exit_code` is its own where it said one."""

    def __init__(self, message: str, code: int = LOST) -> None:
        super().__init__(message)
        self.exit_code = code


def meet(me: Rank) -> tuple[Peers, Peers]:
    """The connections `talk` and `watch` to every other rank on rank 0, to rank 0 elsewhere, when all ranks have met.

    Raises RankLost if one is missing when `me.timeout` seconds are over, or ends meanwhile; OSError if rank 0 cannot listen;
    LaunchError without a token.
    """
    if not me.token:
        raise LaunchError(NO_TOKEN)
    until = time.monotonic() + me.timeout
    return _Host(me, until).meet() if me.rank == 0 else _call(me, until)


# -- rank 0


class _Caller:
    """A connection that has not proved yet whose it is."""

    def __init__(self) -> None:
        self.until = time.monotonic() + PROOF_SECONDS
        self.greeting = GREETING.pack(MAGIC, secrets.token_bytes(32))
        self.said = b""


class _Host:
    """Rank 0 until all ranks have met."""

    def __init__(self, me: Rank, until: float) -> None:
        self._me, self._until = me, until
        self._known: dict[bytes, Peers] = {TALK: {}, WATCH: {}}
        self._callers: dict[socket.socket, _Caller] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._where, self._refused = "", ""

    def meet(self) -> tuple[Peers, Peers]:
        with ExitStack() as undo, self._selector, _listener(self._me) as listener:
            self._where = _where(self._me, listener.getsockname()[0])
            undo.callback(self._close)
            try:
                self._welcome(listener)
            finally:
                for caller in self._callers:
                    caller.close()
            for rank, peer in self._known[TALK].items():
                try:
                    peer.settimeout(max(self._until - time.monotonic(), RETRY))
                    peer.sendall(MET)
                except OSError:
                    raise self._ended(rank) from None
            for peers in self._known.values():
                for peer in peers.values():
                    _prepare(peer)
            undo.pop_all()
        return self._known[TALK], self._known[WATCH]

    def _welcome(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        while missing := [r for r in range(1, self._me.size) if any(r not in peers for peers in self._known.values())]:
            now = time.monotonic()
            if now >= self._until:
                raise self._missing(missing)
            while (oldest := next(iter(self._callers), None)) and self._callers[oldest].until <= now:
                self._refuse(oldest)
            until = min(self._until, self._callers[oldest].until) if oldest else self._until
            for key, _ in self._selector.select(until - now):
                peer = key.fileobj
                assert isinstance(peer, socket.socket)
                if peer is listener:
                    self._accept(listener)
                elif peer in self._callers:
                    self._hear(peer)
                elif isinstance(key.data, int):
                    # Until all have met a rank says nothing more: it has ended.
                    raise self._ended(key.data)

    def _accept(self, listener: socket.socket) -> None:
        try:
            peer, _ = listener.accept()
        except (BlockingIOError, ConnectionError):  # whoever it was has gone
            return
        except OSError:  # this process has no more files
            time.sleep(RETRY)
            return
        if len(self._callers) >= CROWD:
            self._refuse(next(iter(self._callers)))
        caller = self._callers[peer] = _Caller()
        peer.setblocking(False)
        self._selector.register(peer, selectors.EVENT_READ)
        try:
            peer.sendall(caller.greeting)
        except OSError:
            self._refuse(peer)

    def _hear(self, peer: socket.socket) -> None:
        """Read what a caller sends; accept it when that proves that it belongs to the job."""
        caller, me = self._callers[peer], self._me
        try:
            heard = peer.recv(HELLO.size - len(caller.said))
        except BlockingIOError:
            return
        except OSError:
            heard = b""
        caller.said += heard
        if heard and len(caller.said) < HELLO.size:
            return
        if not heard or not hmac.compare_digest(caller.said[-PROOF_SIZE:], _proof(me, b"rank", caller.greeting, caller.said)):
            self._refuse(peer)
            return
        kind, rank, size, _, _ = HELLO.unpack(caller.said)
        if size != me.size or not 0 < rank < size:
            raise RankLost(f"a process says that it is rank {rank} of {size}, this is 0 of {me.size}", 2)
        if rank in self._known[kind]:
            raise RankLost(f"two processes say that they are rank {rank}", 2)
        del self._callers[peer]
        self._known[kind][rank] = peer
        self._selector.modify(peer, selectors.EVENT_READ, rank)
        try:
            peer.sendall(_proof(me, b"zero", caller.greeting, caller.said))
        except OSError:
            raise self._ended(rank) from None

    def _refuse(self, peer: socket.socket) -> None:
        with suppress(OSError):
            self._refused = str(peer.getpeername()[0])
        del self._callers[peer]
        self._selector.unregister(peer)
        peer.close()

    def _close(self) -> None:
        for peers in self._known.values():
            for peer in peers.values():
                peer.close()

    def _ended(self, rank: int) -> RankLost:
        return RankLost(f"rank {rank} of {self._me.size} ended before all ranks had met, so rank 0 ends too")

    def _missing(self, missing: list[int]) -> RankLost:
        me, are = self._me, "s {} of {} are" if len(missing) > 1 else " {} of {} is"
        stranger = f"; who called from {self._refused} did not know this job's token" if self._refused else ""
        return RankLost(
            f"after {me.timeout:.0f} s rank{are.format(', '.join(map(str, missing)), me.size)} missing: "
            f"not started, ended early, or without a way to {self._where}{stranger}"
        )


def _listener(me: Rank) -> socket.socket:
    """A socket that listens at MASTER_ADDR's own address, and at no other of this machine."""
    advice = "MASTER_ADDR must be a name or address of rank 0's machine by which the others reach it"
    try:
        found = socket.getaddrinfo(me.address, me.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise OSError(error.errno, f"rank 0 cannot listen: {me.address} is no address ({error.strerror}); {advice}") from None
    if any(ip_address(str(place[0]).partition("%")[0]).is_unspecified for *_, place in found):
        raise LaunchError(f"MASTER_ADDR is {me.address}, which names no machine; {advice}")
    problem = OSError()
    for family, _, _, _, place in found:
        try:
            return socket.create_server(place, family=family, backlog=BACKLOG)
        except OSError as error:
            problem = error
            if error.errno == errno.EADDRINUSE:
                break  # the name's next address would be another than the one that the other ranks call first
    if problem.errno == errno.EADDRNOTAVAIL:
        todo = f"this machine has no such address: {advice}"
    else:
        todo = "end what holds it, or set NBCNN_PORT to a free port between 1024 and 65535, the same for all ranks"
    raise OSError(problem.errno, f"rank 0 cannot listen at {_where(me, place[0])} ({os.strerror(problem.errno or 0)}); {todo}")


def _where(me: Rank, address: str | int) -> str:
    """Where rank 0 listens; a name may have another address here than elsewhere."""
    return f"{me.address}{'' if address == me.address else f' (here {address})'} port {me.port}"


# -- the other ranks


def _call(me: Rank, until: float) -> tuple[Peers, Peers]:
    with ExitStack() as undo:
        talk, watch = (undo.enter_context(_connected(me, kind, until)) for kind in (TALK, WATCH))
        try:
            if _exactly(talk, len(MET), until) != MET:
                raise EOFError
        except TimeoutError:
            raise RankLost(f"rank {me.rank} waited {me.timeout:.0f} s in vain for all ranks to meet at {me.address} port {me.port}") from None
        except (EOFError, OSError):
            raise RankLost(f"rank 0 at {me.address} port {me.port} ended before all ranks had met, so rank {me.rank} ends too") from None
        for peer in (talk, watch):
            _prepare(peer)
        undo.pop_all()
    return {0: talk}, {0: watch}


def _connected(me: Rank, kind: bytes, until: float) -> socket.socket:
    """A connection to rank 0 that both sides have proved. Whatever else answers there is tried again until the time is over."""
    why, warned = "no answer", False
    while time.monotonic() < until:
        try:
            made = _dialled(me, until)
        except OSError as error:
            why = str(error.strerror or error)
        else:
            try:
                _prove(made, me, kind, until)
                return made
            except (OSError, EOFError):
                made.close()
                why = "what answers there does not prove that it knows this job's token"
                if not warned:
                    warned = True
                    print(f"nbcnn: rank {me.rank} at {me.address} port {me.port}: {why}; trying again", file=sys.stderr, flush=True)
        time.sleep(RETRY)
    raise RankLost(f"rank {me.rank} could not reach rank 0 at {me.address} port {me.port} within {me.timeout:.0f} s ({why})")


def _dialled(me: Rank, until: float) -> socket.socket:
    """A connection to whoever listens at rank 0's port, at the first of its addresses where somebody does. Raises OSError if nobody does."""
    problem = OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    for family, kind, protocol, _, place in socket.getaddrinfo(me.address, me.port, type=socket.SOCK_STREAM):
        with ExitStack() as undo:
            try:
                made = undo.enter_context(socket.socket(family, kind, protocol))
                made.settimeout(max(min(CALL_SECONDS, until - time.monotonic()), 1e-3))
                made.connect(place)
            except OSError as error:
                problem = error
                continue
            # Where nobody listens the kernel may give a call the very port it goes to: it is then its own other end.
            if made.getsockname() != made.getpeername():
                undo.pop_all()
                return made
    raise problem


def _prove(peer: socket.socket, me: Rank, kind: bytes, until: float) -> None:
    """Prove that this is a rank, and have it proved that that is rank 0. Raises OSError or EOFError if it is not."""
    until = min(until, time.monotonic() + ANSWER_SECONDS)
    greeting = _exactly(peer, GREETING.size, until)
    if not greeting.startswith(MAGIC):
        raise EOFError
    hello = HELLO.pack(kind, me.rank, me.size, secrets.token_bytes(32), b"")
    peer.sendall(hello[:-PROOF_SIZE] + _proof(me, b"rank", greeting, hello))
    if not hmac.compare_digest(_exactly(peer, PROOF_SIZE, until), _proof(me, b"zero", greeting, hello)):
        raise EOFError


# -- both


def _proof(me: Rank, whose: bytes, greeting: bytes, hello: bytes) -> bytes:
    """What shows that `whose` side of a connection knows the token; `hello` may hold any proof or none."""
    return hmac.digest(me.token.encode(errors="surrogateescape"), whose + greeting + hello[:-PROOF_SIZE], "sha256")


def _exactly(peer: socket.socket, count: int, until: float) -> bytes:
    """The next `count` bytes, few. Raises EOFError if the other side has closed, TimeoutError when the time is over."""
    made = b""
    while len(made) < count:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        peer.settimeout(left)
        heard = peer.recv(count - len(made))
        if not heard:
            raise EOFError
        made += heard
    return made


def _prepare(made: socket.socket) -> None:
    """Make a connected socket blocking, without delay for small frames, and with keep-alive probes of the other machine."""
    made.settimeout(None)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
