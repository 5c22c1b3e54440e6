"""Strangers at the port where ranks meet: two ranks, as threads, must find each other, add their numbers and leave, whoever else calls.

One to four of the strangers below call rank 0 before rank 1 does, and go on until the ranks have left; in one attempt of six another one
listens at the port first, and answers rank 1. The ranks must be done within their deadline, with less than 50 MB allocated.
"""

from __future__ import annotations

import io
import random
import socket
import struct
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from nbcnn.cli.launch import free_ports
from nbcnn.ranks import meeting, sockets
from nbcnn.ranks.environment import Rank
from nbcnn.ranks.team import Ranks

TIMEOUT = 20.0
MAX_BYTES = 50_000_000
"""Bytes that an attempt may allocate."""
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing sends a reset."""
OLD_HELLO = struct.pack("<8s4sIII64s", b"nbcnn-1\n", b"talk", 1, 2, 1, b"")


class Stranger:
    """One that calls at `port`, again and again until `over` is set; `begun` is set when it has said something for the first time."""

    def __init__(self, draw: random.Random, port: int, me: Rank) -> None:
        self.draw, self.port, self.me = draw, port, me
        self.over, self.begun = threading.Event(), threading.Event()

    def call(self) -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT)
        if self.draw.random() < 0.3:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        return made

    def hello(self, token: str, greeting: bytes) -> bytes:
        """What a rank that knows `token` says to `greeting`."""
        kind, rank, size = self.draw.choice((b"talk", b"wait")), self.draw.choice((0, 1, 2, 1 << 31)), self.draw.choice((2, 2, 3, (1 << 32) - 1))
        said = meeting.HELLO.pack(kind, rank, size, self.draw.randbytes(32), b"")
        other = Rank(1, 2, 1, self.me.address, self.me.port, token)
        return said[: -meeting.PROOF_SIZE] + meeting._proof(other, b"rank", greeting, said)

    def say(self, *parts: bytes, pause: float = 0.0) -> None:
        """Call, hear the greeting or not, say all parts, wait to be turned away or leave."""
        with self.call() as peer:
            if self.draw.random() < 0.5:
                peer.recv(100)
            for part in parts:
                peer.sendall(part)
                self.begun.set()
                if self.over.wait(pause):
                    return
            if self.draw.random() < 0.5:
                peer.recv(1)


def noise(one: Stranger) -> None:
    """Random bytes."""
    one.say(one.draw.randbytes(one.draw.choice((1, 7, 8, 75, 76, 77, 5000, 300_000))))


def silent(one: Stranger) -> None:
    """Connections on which nothing is said."""
    with ExitStack() as held:
        for _ in range(one.draw.choice((1, 20, 100))):
            held.enter_context(one.call())
        one.begun.set()
        one.over.wait()


def crowd(one: Stranger) -> None:
    """More connections than rank 0 hears at a time."""
    with ExitStack() as held:
        for _ in range(meeting.CROWD + 20):
            held.enter_context(one.call())
        one.begun.set()
        one.over.wait(0.05)


def slow(one: Stranger) -> None:
    """A hello byte by byte."""
    one.say(*(bytes([byte]) for byte in one.hello("not the secret at all", one.draw.randbytes(meeting.GREETING.size))), pause=0.005)


def wrong_token(one: Stranger) -> None:
    """A hello as it should be, with another job's token."""
    with one.call() as peer:
        peer.sendall(one.hello("not the secret at all", peer.recv(meeting.GREETING.size)))
        one.begun.set()
        peer.recv(meeting.PROOF_SIZE)


def replayed(one: Stranger) -> None:
    """A hello that a rank of this job said to another greeting."""
    one.say(one.hello(one.me.token, one.draw.randbytes(meeting.GREETING.size)))


def huge(one: Stranger) -> None:
    """Lengths of frames beyond all bounds, and what an older nbcnn said."""
    length = struct.pack("<Q", one.draw.choice((1 << 32, (1 << 32) - 1, 1 << 63, (1 << 64) - 1)))
    one.say(one.draw.choice((b"", OLD_HELLO, meeting.MAGIC)), length * one.draw.choice((1, 10, 10_000)))


def early_close(one: Stranger) -> None:
    """A hello that ends too soon."""
    with one.call() as peer:
        said = one.hello("not the secret at all", bytes(meeting.GREETING.size))
        peer.sendall(said[: one.draw.randrange(len(said))])
    one.begun.set()


STRANGERS = (noise, silent, crowd, slow, wrong_token, replayed, huge, early_close)


@contextmanager
def calling(kinds: list[Callable[[Stranger], None]], draw: random.Random, me: Rank) -> Iterator[list[Stranger]]:
    """Strangers of these kinds, which call within."""
    strangers = [Stranger(random.Random(draw.random()), me.port, me) for _ in kinds]

    def go_on(kind: Callable[[Stranger], None], one: Stranger) -> None:
        while not one.over.is_set():
            with suppress(OSError):  # turned away, or too late
                kind(one)
            one.over.wait(0.001)

    threads = [threading.Thread(target=go_on, args=pair, daemon=True) for pair in zip(kinds, strangers, strict=True)]
    for thread in threads:
        thread.start()
    try:
        yield strangers
    finally:
        for one in strangers:
            one.over.set()
        for thread in threads:
            thread.join(TIMEOUT)


def answer(draw: random.Random, port: int, calls: int) -> None:
    """A stranger where rank 0 should be: answers so many calls, each in one of the ways there are, and goes."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        listener.settimeout(TIMEOUT)
        for _ in range(calls):
            with listener.accept()[0] as peer, suppress(OSError):
                peer.settimeout(TIMEOUT)
                greeting = meeting.GREETING.pack(meeting.MAGIC, draw.randbytes(32))
                garbage = (b"", draw.randbytes(500), b"HTTP/1.1 400 Bad Request\r\n\r\n", struct.pack("<Q", 1 << 63) * 20)
                said = draw.choice((*garbage, greeting[:-1], greeting))
                peer.sendall(said)
                if said == greeting:
                    hello = peer.recv(meeting.HELLO.size)
                    # Random, or what the rank itself said, which proves nothing the other way round.
                    peer.sendall(draw.choice((draw.randbytes(meeting.PROOF_SIZE), hello[-meeting.PROOF_SIZE :], hello, b"")))


class Member(threading.Thread):
    """One of the ranks: what came of it is `found`."""

    def __init__(self, me: Rank) -> None:
        super().__init__(daemon=True)
        self.me, self.found = me, Any
        self.start()

    def run(self) -> None:
        try:
            team = Ranks(self.me)
            try:
                self.found = team.sum(np.array([1.0, self.me.rank])).tolist()
                team.barrier()
                team.leave(0)
            finally:
                team.leave(1)
        except Exception as error:
            self.found = error


def attack(seed: int, folder: Path) -> None:
    """Two ranks meet among strangers."""
    draw, exits = random.Random(seed), list[int]()
    port, token = int(free_ports(1)[0]), draw.randbytes(16).hex()
    first, second = (Rank(rank, 2, rank, "127.0.0.1", port, token, TIMEOUT) for rank in range(2))
    kinds = draw.sample(STRANGERS, draw.randint(1, 4))  # no two crowds: this process has files for one
    squatted = draw.random() < 1 / 6
    what = ", ".join([*(["a stranger that listens"] if squatted else []), *(kind.__name__ for kind in kinds)])
    tracemalloc.start()
    began = time.monotonic()
    with ExitStack() as around:
        around.callback(tracemalloc.stop)
        around.enter_context(redirect_stderr(io.StringIO()))  # where rank 1 says that it was answered by a stranger
        # A rank that lost the other ends its process, which is this one here.
        around.enter_context(mock.patch.object(sockets.os, "_exit", lambda code: exits.append(code) or sys.exit()))
        members = []
        if squatted:
            listening = threading.Thread(target=answer, args=(draw, port, draw.randint(1, 4)))
            listening.start()
            members.append(Member(second))
            listening.join(TIMEOUT)
        members.append(Member(first))
        with calling(kinds, draw, first) as strangers:
            if not squatted:
                assert all(one.begun.wait(TIMEOUT) for one in strangers), f"not everyone was heard of {what}"
                members.append(Member(second))
            for member in members:
                member.join(TIMEOUT)
        taken, peak = time.monotonic() - began, tracemalloc.get_traced_memory()[1]
    assert not exits, f"a rank ended its process with {exits}, after {taken:.1f} s, {[member.found for member in members]}, among {what}"
    assert not any(member.is_alive() for member in members), f"a rank hangs among {what}"
    assert [member.found for member in members] == [[2.0, 1.0]] * 2, f"{[member.found for member in members]} among {what}"
    assert taken < TIMEOUT, f"it took {taken:.1f} s among {what}"
    assert peak < MAX_BYTES, f"{peak:,} bytes were allocated among {what}"
