"""This module defines the team of processes that train together, and the share of the work of each.

    team = join()            the ranks have met; a process of its own is a team of one, for which every call below does nothing
    team.connect(device)     NCCL for a GPU, sockets elsewhere
    …
    team.leave(0)

All ranks take the same training steps on the same global batches; of each batch a rank computes its share, a run of neighbours in the
epoch's order. So a batch is the same images whatever the number of ranks.
"""

from __future__ import annotations

import json
import os
import socket
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbcnn.ranks import environment as ranks
from nbcnn.ranks.meeting import RankLost
from nbcnn.ranks.sockets import Star, broadcast, gather

LONG = 86_400.0
"""Seconds to wait for a rank that downloads or computes something for the others."""


class TeamError(ValueError):
    """The ranks do not agree on what they do; the message says in what."""

    exit_code = 2


@dataclass(frozen=True)
class Share:
    """A rank's part of a batch: `count` images from its `first` on, computed as `images` (at least one, which then counts for nothing).

    `weight` is what its mean gradient counts in that of the whole batch.
    """

    first: int
    count: int
    images: int
    weight: float


def share(batch: int, rank: int, size: int) -> Share:
    """What `rank` of `size` computes of `batch` images: neighbours, as many as the others' or one less."""
    first, end = batch * rank // size, batch * (rank + 1) // size
    return Share(first, end - first, max(end - first, 1), (end - first) / batch)


class Team:
    """The team of a single process: rank 0 of 1."""

    rank, size, local, beside = 0, 1, 0, 1
    """This rank, the number of ranks, this rank's number on its machine, and the number of ranks there."""

    @property
    def leads(self) -> bool:
        """True on the one rank that writes files and speaks to people."""
        return self.rank == 0

    def share(self, batch: int) -> Share:
        """What this rank computes of a batch."""
        return share(batch, self.rank, self.size)

    def places(self, count: int, batch: int) -> np.ndarray:
        """The positions in an order of `count` images that this rank computes in batches of `batch`, ascending, int64.

        One more follows where there are several ranks: a last batch may be too small for a part for each, and is then computed for nothing.
        """
        if self.size == 1:
            return np.arange(count)
        shares = [(start, self.share(min(batch, count - start))) for start in range(0, count, batch)]
        return np.concatenate([*(np.arange(start + mine.first, start + mine.first + mine.count) for start, mine in shares), [count - 1]])

    def mine(self, tasks: int) -> range:
        """Which of so many equal tasks are this rank's: every `size`-th."""
        return range(self.rank, tasks, self.size)

    def connect(self, device: Any) -> None:
        """Make ready for `all_reduce` on arrays of `device`."""

    def all_reduce(self, array: Any, weight: float) -> Any:
        """The work that adds up `array` over all ranks; see `collectives.Collective.all_reduce`."""
        raise TeamError("a process of its own has nobody to add its gradients to")

    def wait(self, device: Any) -> None:
        """Wait like `device.synchronize()`, but raise RankLost if a rank is lost meanwhile.

        The GPU waits for that rank for ever, so the process must then end, by `os._exit`; if it does not, it is ended after `sockets.GRACE` seconds.
        """
        device.synchronize()

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Σ over ranks, in their order, of float64 arrays of one shape."""
        return values

    def broadcast(self, content: bytes, patience: float | None = None) -> bytes:
        """Rank 0's `content`; `patience` as in `barrier`."""
        return content

    def gather(self, content: bytes, patience: float | None = None) -> list[bytes]:
        """Every rank's `content`, by rank, on rank 0; elsewhere an empty list. `patience` as in `barrier`."""
        return [content]

    def all_min(self, value: float) -> float:
        """The least of all ranks' values."""
        return value

    def agree(self, parts: Mapping[str, bytes]) -> None:
        """Raise TeamError, on every rank, unless all have the same content in all of `parts`; the message names the first one that differs."""

    def barrier(self, patience: float | None = None) -> None:
        """Return when every rank has come here. One that is alive is waited for `patience` seconds (None: NBCNN_TIMEOUT)."""

    @contextmanager
    def first_on_machine(self) -> Iterator[None]:
        """A context that the first rank of each machine enters first; the others find its work done."""
        yield

    def leave(self, code: int) -> None:
        """Leave the team: with 0 when all have done their part, else to let the others end with `code`, too."""


ALONE = Team()


class Ranks(Team):
    """One rank of several. Raises as `sockets.Star`."""

    def __init__(self, me: ranks.Rank) -> None:
        self.rank, self.size, self.local = me.rank, me.size, me.local
        self._star = Star(me)
        self._collective: Any = None
        hosts = self._everyones(socket.gethostname().encode())
        self.beside = hosts.count(hosts[self.rank])

    def _everyones(self, mine: bytes) -> list[bytes]:
        """What every rank gave, by rank. No content may hold a zero byte."""
        return self.broadcast(b"\0".join(self.gather(mine))).split(b"\0")

    def connect(self, device: Any) -> None:
        from nbcnn.gpu.language import SIMULATOR
        from nbcnn.ranks.collectives import Nccl, Sockets

        self.agree({"device": device.name.encode()})
        if self._collective is None:
            self._collective = Nccl(self._star) if device.name == "gpu" and not SIMULATOR else Sockets(self._star, device)

    def all_reduce(self, array: Any, weight: float) -> Any:
        return self._collective.all_reduce(array, weight)

    def wait(self, device: Any) -> None:
        try:
            device.wait(self._star.check, self._star.rank.timeout)
        except TimeoutError:
            raise RankLost(f"rank {self.rank} waited {self._star.rank.timeout:.0f} s for its GPU: another rank is stuck") from None

    def sum(self, values: np.ndarray) -> np.ndarray:
        parts = self.gather(np.ascontiguousarray(values, np.float64).tobytes())
        total = np.zeros(values.shape)
        for part in parts:
            total += np.frombuffer(part).reshape(values.shape)
        return np.frombuffer(self.broadcast(total.tobytes())).reshape(values.shape).copy()

    def broadcast(self, content: bytes, patience: float | None = None) -> bytes:
        return broadcast(self._star, content, patience)

    def gather(self, content: bytes, patience: float | None = None) -> list[bytes]:
        return list(gather(self._star, content, patience))

    def all_min(self, value: float) -> float:
        least = min((float(np.frombuffer(part)[0]) for part in self.gather(np.float64(value).tobytes())), default=value)
        return float(np.frombuffer(self.broadcast(np.float64(least).tobytes()))[0])

    def agree(self, parts: Mapping[str, bytes]) -> None:
        mine = json.dumps({what: zlib.crc32(content) for what, content in parts.items()})
        first, *others = (json.loads(each) for each in self._everyones(mine.encode()))
        for rank, other in enumerate(others, 1):
            # A part that only one of the two has comes last: the part that says why is among those of both.
            differing = [what for what in first if other.get(what, first[what]) != first[what]] or sorted(first.keys() ^ other.keys())
            if differing:
                raise TeamError(
                    f"rank {rank} differs from rank 0 in its {differing[0]}: every rank must see the same program, flags, data and kind of GPU"
                )

    def barrier(self, patience: float | None = None) -> None:
        gather(self._star, b"", patience)
        broadcast(self._star, b"", patience)

    @contextmanager
    def first_on_machine(self) -> Iterator[None]:
        if self.local:
            self.barrier(LONG)
        yield
        if not self.local:
            self.barrier(LONG)

    def leave(self, code: int) -> None:
        collective, self._collective = self._collective, None
        if code == 0 and collective is not None:
            collective.destroy()
        self._star.leave(code)


def join(variables: dict[str, str] | None = None) -> Team:
    """The team that the environment describes, when all of its ranks have met; this process then sees one GPU.

    Must come before CUDA is touched. Raises LaunchError, RankLost, OSError.
    """
    given = dict(os.environ) if variables is None else variables
    me = ranks.from_environment(given)
    if me is None:
        return ALONE
    os.environ["CUDA_VISIBLE_DEVICES"] = ranks.visible_device(me, given)
    return Ranks(me)
