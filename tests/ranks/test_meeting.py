"""Tests of how ranks meet: who is missing, who is let in, and what strangers at the port can do, which is nothing."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace

import pytest
from teams import TOKEN, ranks

from nbcnn.ranks import meeting
from nbcnn.ranks.environment import LaunchError, Rank, from_environment
from nbcnn.ranks.meeting import GREETING, HELLO, MAGIC, RankLost
from nbcnn.ranks.sockets import Star

RANK = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "gpu01"}


class Meeting(threading.Thread):
    """`Star(me)` in a thread: `outcome()` is what came of it, the connections or the exception."""

    def __init__(self, me):
        super().__init__(daemon=True)
        self._me, self._found = me, None
        self.start()

    def run(self):
        try:
            self._found = Star(self._me)
        except Exception as error:
            self._found = error

    def outcome(self, within=20.0):
        self.join(within)
        assert not self.is_alive(), "the meeting hangs"
        return self._found


def calling(port):
    """A connection to rank 0, which may be about to listen."""
    for _ in range(2000):
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=10)
        except OSError:
            time.sleep(0.005)
    raise AssertionError("rank 0 does not listen")


def hello(me, greeting, kind=b"talk"):
    """What a rank says to rank 0's greeting, with the proof of its token."""
    said = HELLO.pack(kind, me.rank, me.size, b"nonce", b"")
    return said[: -meeting.PROOF_SIZE] + meeting._proof(me, b"rank", greeting, said)


def met(*meetings):
    """The connections of ranks that must have met; they leave."""
    stars = [one.outcome() for one in meetings]
    assert all(isinstance(star, Star) for star in stars), stars
    for star in stars:
        star.leave(0)


def test_a_missing_rank_is_named():
    me = ranks(3, timeout=0.5)
    with pytest.raises(RankLost, match=r"after 0 s ranks 1, 2 of 3 are missing.* 127.0.0.1 port \d+$") as raised:
        Star(me[0])
    assert raised.value.exit_code == 1
    with pytest.raises(RankLost, match=rf"rank 1 could not reach rank 0 at 127.0.0.1 port {me[0].port}"):
        Star(me[1])


def test_a_port_that_is_taken_is_said_with_the_host_and_what_to_do():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            OSError, match=rf"cannot listen at 127.0.0.1 port {port} \(Address already in use\); end what holds it, or set NBCNN_PORT"
        ):
            Star(ranks(2, port=port)[0])


def test_rank_0_listens_at_its_own_address_alone():
    (me, other) = (replace(one, address="127.0.0.2") for one in ranks(2))
    first = Meeting(me)
    with socket.create_server(("127.0.0.1", me.port)):  # which would be taken if rank 0 listened everywhere
        met(first, Meeting(other))


@pytest.mark.parametrize(
    ("address", "error", "says"),
    [
        ("0.0.0.0", LaunchError, "which names no machine"),
        ("::", LaunchError, "which names no machine"),
        ("192.0.2.1", OSError, r"192.0.2.1 port \d+ \(Cannot assign requested address\); this machine has no such address"),
        ("no such machine", OSError, "no such machine is no address"),
    ],
)
def test_an_address_that_is_not_rank_0s_is_said(address, error, says):
    with pytest.raises(error, match=says):
        Star(replace(ranks(2)[0], address=address))


def test_without_a_token_nobody_listens_or_calls():
    for me in ranks(2):
        with pytest.raises(LaunchError, match="NBCNN_TOKEN is not set"):
            Star(replace(me, token=""))
    assert TOKEN not in repr(me)


def test_the_token_comes_from_a_variable_or_a_file_of_ones_own(tmp_path):
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o600)
    named = RANK | {"NBCNN_TOKEN_FILE": str(file)}
    assert from_environment(named) == from_environment(RANK | {"NBCNN_TOKEN": TOKEN}) == Rank(0, 2, 0, "gpu01", 29501, TOKEN)
    for variables, change, says in (
        (RANK, lambda: None, "NBCNN_TOKEN is not set.*\n.*launch.*\n.*secrets.token_hex.*\n.*export NBCNN_TOKEN_FILE"),
        (RANK | {"NBCNN_TOKEN": "guess me"}, lambda: None, "NBCNN_TOKEN has 8 characters"),
        (named, lambda: file.chmod(0o640), "open to other users: chmod 600"),
        (named, lambda: (file.chmod(0o600), file.write_bytes(b"\xff" * 20)), "cannot be read"),
        (named, lambda: file.write_text(""), "has 0 characters"),
        (named, lambda: file.write_text("x"), "has 1 character:"),
        (named, file.unlink, "cannot be read .No such file"),
        (named, lambda: os.mkfifo(file, 0o600), "cannot be read .it is no regular file"),
    ):
        change()
        with pytest.raises(LaunchError, match=says) as raised:
            from_environment(variables)
        assert raised.value.exit_code == 2


def test_strangers_and_other_jobs_do_not_join():
    me = ranks(2)
    first = Meeting(me[0])
    with calling(me[0].port) as stranger:
        assert len(stranger.recv(100)) == GREETING.size
        stranger.sendall(b"GET / HTTP/1.1\r\n".ljust(HELLO.size))
        assert stranger.recv(1) == b""
    other = Meeting(replace(me[1], token="the secret of another job", timeout=0.5))
    assert "does not prove that it knows this job's token" in str(other.outcome())
    met(first, Meeting(me[1]))


def test_a_job_with_another_token_is_named_where_a_rank_is_missing():
    me = ranks(2, timeout=1.0)
    first = Meeting(me[0])
    Meeting(replace(me[1], token="the secret of another job")).outcome()
    assert "who called from 127.0.0.1 did not know this job's token" in str(first.outcome())


def test_a_recorded_proof_proves_nothing():
    me = ranks(2)
    first = Meeting(me[0])
    with calling(me[0].port) as once, calling(me[0].port) as again:
        recorded = hello(me[1], once.recv(GREETING.size))
        again.recv(GREETING.size)
        again.sendall(recorded)
        assert again.recv(1) == b""
    met(first, Meeting(me[1]))


def test_what_answers_a_rank_must_prove_the_token_too():
    me = ranks(2)
    with socket.create_server(("127.0.0.1", me[0].port)) as listener:
        second = Meeting(me[1])
        for answer in (b"HTTP/1.1 400 \r\n".ljust(200), MAGIC + bytes(32) + bytes(meeting.PROOF_SIZE), b""):
            with listener.accept()[0] as peer, suppress(ConnectionError):
                peer.sendall(answer)
                while answer and peer.recv(100):
                    pass
    met(Meeting(me[0]), second)


def test_a_rank_that_a_silent_stranger_holds_calls_again(monkeypatch):
    monkeypatch.setattr(meeting, "ANSWER_SECONDS", 0.2)
    me = ranks(2)
    with socket.create_server(("127.0.0.1", me[0].port)) as listener:
        second = Meeting(me[1])
        held = listener.accept()[0]
    met(Meeting(me[0]), second)
    held.close()


def test_a_call_that_reaches_itself_has_reached_nobody(monkeypatch):
    """It would keep rank 0 from listening at its own port."""

    me = ranks(2)[1]

    class FromThere(socket.socket):
        def connect(self, place):
            self.bind(place)
            super().connect(place)
            assert self.getsockname() == self.getpeername()

    monkeypatch.setattr(socket, "socket", FromThere)
    with pytest.raises(ConnectionRefusedError):
        meeting._dialled(me, time.monotonic() + 1)


def test_silent_and_slow_strangers_keep_nobody_waiting():
    me = ranks(2)
    first, began = Meeting(me[0]), time.monotonic()
    strangers = [calling(me[0].port) for _ in range(20)]
    strangers[0].sendall(b"t")
    met(first, Meeting(me[1]))
    assert time.monotonic() - began < meeting.PROOF_SECONDS / 2
    for stranger in strangers:
        stranger.close()


def test_one_deadline_holds_for_the_whole_meeting():
    me, stop = ranks(2, timeout=1.0), threading.Event()

    def drip():
        while not stop.wait(0.05):
            with calling(me[0].port) as stranger:
                try:
                    while not stop.wait(0.05):
                        stranger.sendall(b"t")
                except OSError:
                    continue

    first, began = Meeting(me[0]), time.monotonic()
    dripping = threading.Thread(target=drip, daemon=True)
    dripping.start()
    assert "after 1 s rank 1 of 2 is missing" in str(first.outcome())
    assert time.monotonic() - began < 3
    stop.set()
    # The same of a stranger where rank 0 should be.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        second, began = Meeting(Rank(1, 2, 1, "127.0.0.1", listener.getsockname()[1], TOKEN, 1.0)), time.monotonic()
        with listener.accept()[0] as peer:
            while second.is_alive():
                with suppress(OSError):  # rank 1 hangs up before its thread ends
                    peer.sendall(b"n")
                second.join(0.05)
                if time.monotonic() - began > 3:
                    break
            assert "rank 1 could not reach rank 0" in str(second.outcome())


def test_more_strangers_than_are_heard_at_a_time_keep_nobody_out(monkeypatch):
    monkeypatch.setattr(meeting, "CROWD", 4)
    me = ranks(2)
    first = Meeting(me[0])
    strangers = [calling(me[0].port) for _ in range(12)]
    met(first, Meeting(me[1]))
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize("kind", [b"talk", b"wait"])
def test_a_rank_that_ends_before_all_have_met_is_named(kind):
    me = ranks(3)
    first = Meeting(me[0])
    with calling(me[0].port) as second:
        second.sendall(hello(me[1], second.recv(GREETING.size), kind))
        assert len(second.recv(100)) == meeting.PROOF_SIZE
    found = first.outcome(5.0)
    assert isinstance(found, RankLost)
    assert found.exit_code == 1
    assert str(found) == "rank 1 of 3 ended before all ranks had met, so rank 0 ends too"


def test_a_rank_that_ends_just_before_it_is_told_that_all_have_met_is_lost(monkeypatch):
    """What ended rank 0 with exit code 0: the pipe to a rank that had gone was broken."""
    me = ranks(2)
    monkeypatch.setattr(meeting, "MET", bytes(1 << 24))  # more than the kernel keeps for a reader who does not read
    first = Meeting(me[0])
    held = [calling(me[0].port) for _ in range(2)]
    for peer, kind in zip(held, (b"talk", b"wait"), strict=True):
        peer.sendall(hello(me[1], peer.recv(GREETING.size), kind))
        peer.recv(meeting.PROOF_SIZE)
    for peer in held:
        peer.close()
    found = first.outcome()
    assert isinstance(found, RankLost)
    assert found.exit_code == 1


def test_rank_0_that_ends_before_all_have_met_is_named():
    me = ranks(3, timeout=5.0)
    first, second = Meeting(replace(me[0], timeout=1.0)), Meeting(me[1])
    assert "rank 2 of 3 is missing" in str(first.outcome())
    assert "rank 0 at 127.0.0.1 port" in str(second.outcome())
    assert "ended before all ranks had met" in str(second.outcome())


@pytest.mark.parametrize(("change", "says"), [({}, "two processes say that they are rank 1"), ({"size": 3}, "it is rank 1 of 3, this is 0 of 2")])
def test_ranks_that_contradict_each_other_are_a_usage_error(change, says):
    me = ranks(2)
    first = Meeting(me[0])
    with calling(me[0].port) as one, calling(me[0].port) as two:
        for peer, who in ((one, me[1]), (two, replace(me[1], **change))):
            peer.sendall(hello(who, peer.recv(GREETING.size)))
        found = first.outcome()
    assert isinstance(found, RankLost)
    assert found.exit_code == 2
    assert says in str(found)
