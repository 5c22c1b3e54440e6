"""This module times PyTorch's DistributedDataParallel beside our training on several GPUs: in the same processes, on the same GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from nbcnn.lab.measure.timing import Timing, each_ms, summarise
from nbcnn.lab.peers.torch_step import _prepare, autoencoder, noise, reconstruction_error, timer
from nbcnn.ranks.team import Team

WARM_STEPS = 15
"""DistributedDataParallel rebuilds its buckets after the first step; torch.compile compiles in it."""
WARM_SECONDS = 1.5


class Peer:
    """PyTorch's process group over NCCL on the ranks of `team`; a context. A team of one trains without it."""

    def __init__(self, team: Team) -> None:
        self._team = team

    def __enter__(self) -> Peer:
        if self._team.size > 1:
            import torch

            torch.distributed.init_process_group("nccl", device_id=torch.device("cuda:0"))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._team.size > 1 and error is None:
            import torch

            torch.distributed.destroy_process_group()

    def step(self, batch: int, precision: str, form: str, seconds: float) -> Timing:
        """Milliseconds of a training step on `batch` images per rank: eager or compile."""
        torch, layout = _prepare(precision)

        class Loss(torch.nn.Module):  # type: ignore[name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.net = autoencoder(layout)

            def forward(self, images: Any) -> Any:
                return reconstruction_error(self.net, images, precision, layout)

        loss: Any = Loss()
        if self._team.size > 1:
            loss = torch.nn.parallel.DistributedDataParallel(loss, device_ids=[0], gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(loss.parameters(), lr=0.01, momentum=0.9, fused=True)
        images = noise(batch, layout)
        if form == "compile":
            loss = torch.compile(loss, dynamic=False)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            loss(images).backward()
            optimizer.step()

        between(step, WARM_STEPS)
        begun = time.perf_counter()
        between(step, 10)
        each = self._first((time.perf_counter() - begun) / 10)
        between(step, max(1, int(WARM_SECONDS / each)))
        return summarise(between(step, max(10, int(seconds / each))))

    def all_reduce(self, count: int, calls: int, replays: int) -> dict[str, Timing]:
        """Milliseconds of an all-reduce of `count` float32: enqueued one by one, and as one of `calls` in a CUDA graph."""
        import torch

        values = torch.zeros(count, device="cuda")

        def several() -> None:
            for _ in range(calls):
                torch.distributed.all_reduce(values)

        between(several, 5)
        eager = summarise(between(several, replays)).per(calls)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            several()
        self._team.barrier()
        between(graph.replay, 1)
        return {"eager": eager, "graph": summarise(between(graph.replay, replays)[1:]).per(calls)}

    def _first(self, value: float) -> float:
        """Rank 0's value: every step is a collective, so all ranks must take as many."""
        return float(self._team.broadcast(repr(value).encode()))


def between(call: Callable[[], Any], count: int) -> list[float]:
    """Milliseconds of each of `count` calls, by PyTorch's events at every boundary."""
    return each_ms(call, count, timer())
