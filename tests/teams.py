"""This module runs several ranks as threads of one process, for the tests of what they do together."""

from __future__ import annotations

import socket
import threading

from nbcnn.ranks.environment import Rank
from nbcnn.ranks.team import Ranks

TOKEN = "the secret of these ranks"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ranks(size, timeout=20.0, port=None):
    port = port or free_port()
    return [Rank(rank, size, rank, "127.0.0.1", port, TOKEN, timeout) for rank in range(size)]


def together(size, work):
    """What `work(team)` gives on each of `size` ranks, in threads of this process; an exception is a result."""
    results = [None] * size

    def one(me):
        try:
            team = Ranks(me)
            try:
                results[me.rank] = work(team)
                team.barrier()
                team.leave(0)
            finally:
                team.leave(1)
        except Exception as error:
            results[me.rank] = error

    threads = [threading.Thread(target=one, args=(me,)) for me in ranks(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return results
