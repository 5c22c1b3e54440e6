"""This module times PyTorch the way ours is timed, if PyTorch is installed: what its steps (`peers.nets`) share, and convolutions.

fp32 means fp32: TF32 is off; it runs in NCHW, which is faster there. tf32 and bf16 run in channels_last; bf16 is autocast
with fp32 weights in a training step, and bf16 operands in a single convolution. cuDNN chooses its algorithm by trying
(benchmark mode). Times come from CUDA events at every boundary, after warm-up, like our own. Only the modules called peers import torch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from nbcnn.files import extras
from nbcnn.lab.measure.caches import Calls, sets_for
from nbcnn.lab.measure.timing import WARM_SECONDS, Timer, Timing, each_ms, sensible_count, summarise, wall_ms, warm
from nbcnn.plan.shapes import ConvShape

MISSING = f"PyTorch with CUDA is not installed, so there is no peer to compare with: {extras.line('torch')}"


def available() -> bool:
    """True if torch is installed and sees a CUDA device."""
    if not extras.installed("torch"):
        return False
    import torch

    return torch.cuda.is_available()


def _prepare(precision: str) -> tuple[Any, Any]:
    """torch, set to `precision`, and the memory format that suits it."""
    import torch

    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    return torch, torch.contiguous_format if precision == "fp32" else torch.channels_last


def timer() -> Timer:
    """Moments of PyTorch's current stream."""
    import torch

    cuda = torch.cuda
    return Timer(partial(cuda.Event, enable_timing=True), lambda moment: moment.record(), lambda a, b: a.elapsed_time(b), cuda.synchronize)


def _time(call: Callable[[], Any], seconds: float = 0.7) -> Timing:
    clock = timer()
    warm(call, clock.wait, WARM_SECONDS, at_a_time=1)
    return summarise(each_ms(call, sensible_count(wall_ms(call, clock.wait), seconds), clock))


def settled(call: Callable[[], Any], times: int = 3) -> Callable[[], Any]:
    """`call` behind its first times, whose memory does not count: cuDNN tries algorithms in them, with their scratch memory."""
    import torch

    for _ in range(times):
        call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return call


def captured(call: Callable[[], Any], warm: int = 3) -> Callable[[], None]:
    """`call` as a CUDA graph."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        settled(call, warm)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def autoencoder(layout: Any) -> Any:
    """The network, on the GPU in memory format `layout`."""
    import torch

    nn = torch.nn
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(256, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(128, 128, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=2)),
        *(nn.Conv2d(128, 256, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=2)),
        nn.Conv2d(256, 3, 3, padding=1),
    ).to("cuda", memory_format=layout)


def noise(batch: int, layout: Any) -> Any:
    """`batch` uint8 images."""
    import torch

    return torch.randint(0, 256, (batch, 3, 32, 32), dtype=torch.uint8, device="cuda").to(memory_format=layout)


def reconstruction_error(net: Any, images: Any, precision: str, layout: Any) -> Any:
    """The mean squared error of `net` on uint8 images, computed in `precision`."""
    import torch

    x = images.to(torch.float32, memory_format=layout) * (1 / 255)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=precision == "bf16"):
        y = net(x)
    return torch.nn.functional.mse_loss(y.float(), x)


def release() -> None:
    """Free what nobody uses, and count the most memory in use from here on.

    A captured step is part of a cycle. If it is freed while the next form runs, that form's memory, less what there was before, seems too small
    (MobileNet's compiled step 237 MiB); if it stays, too large.
    """
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def convolution(shape: ConvShape, path: str, precision: str, device: Any) -> Calls:
    """cuDNN's form of one pass as work on our stream: bias in fprop only, operands rotated past the second-level cache, graph replay."""
    torch, layout = _prepare(precision)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    aten = torch.ops.aten

    def random(size: tuple[int, ...]) -> Any:
        return torch.randn(size, device="cuda").to(dtype=dtype, memory_format=layout)

    w, b = random(shape.w_shape) * 0.05, torch.randn(shape.K, device="cuda", dtype=dtype)

    def run(x: Any, dy: Any) -> Any:
        if path == "fprop":
            return torch.nn.functional.conv2d(x, w, b, shape.stride, shape.pad)
        mask = [path == "dgrad", path == "wgrad", False]
        geometry = ([shape.stride] * 2, [shape.pad] * 2, [1, 1])
        return aten.convolution_backward(dy, x, w, [shape.K], *geometry, False, [0, 0], 1, mask)

    count = sets_for(shape.bytes(dtype.itemsize), device)
    sets = [[TorchCall(run, (random(shape.x_shape), random(shape.y_shape)))] for _ in range(count)]
    return TorchCalls("cuDNN", device, sets, graph=True)


_lent: list[Any] = []
"""The stream of ours that is PyTorch's current one. PyTorch knows only its number: had its device destroyed it, the next kernel would crash."""


def _share_stream(device: Any) -> None:
    """Let PyTorch work on the stream of `device`, so that our events are around its kernels."""
    import torch

    stream = device.stream
    torch.cuda.set_stream(torch.cuda.ExternalStream(int(getattr(stream.handle, "value", stream.handle))))
    _lent[:] = [stream]


def _capture(launches: Sequence[Any]) -> Callable[[], None]:
    """Launches as a CUDA graph of PyTorch's, whose memory pool then belongs to it."""
    return captured(lambda: [launch.run() for launch in launches], warm=1)


class TorchCall:
    """One call on operands of its own, in the form of a launch; it keeps its result, so that no other call writes to that memory."""

    def __init__(self, function: Callable[..., Any], operands: Sequence[Any]) -> None:
        self.function, self.operands, self.result = function, operands, None

    def run(self, stream: Any = 0) -> None:
        self.result = self.function(*self.operands)


class TorchCalls(Calls):
    """PyTorch's calls as work on the stream of `device`, on which the events around them are.

    Whoever starts them makes that stream PyTorch's first. PyTorch has one current stream, and another device may have set its own since: events on a
    stream that nothing runs on measure nothing.
    """

    def __init__(self, label: str, device: Any, sets: Sequence[Sequence[TorchCall]], *, graph: bool = False, flush: Any = None) -> None:
        super().__init__(label, device, sets, graph=graph, flush=flush, capture=_capture)

    def repeat(self, n: int) -> float:
        _share_stream(self._device)
        return super().repeat(n)

    def enqueue(self, n: int) -> None:
        _share_stream(self._device)
        super().enqueue(n)
