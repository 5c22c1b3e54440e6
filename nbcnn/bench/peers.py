"""PyTorch as a peer, if it is installed: the same training step, convolutions and single ops, timed the same way.

fp32 means fp32: TF32 is off; it runs in NCHW, which is faster there. tf32 and bf16 run in channels_last; bf16 is autocast
with fp32 weights in a training step, and bf16 operands in a single convolution. cuDNN chooses its algorithm by trying
(benchmark mode). Times come from CUDA events at every boundary, after warm-up, like our own. Only the modules called peers import torch.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from nbcnn.bench.caches import Calls, Flush, sets_for
from nbcnn.bench.op import Prepared, full_bound
from nbcnn.bench.opcases import Problem
from nbcnn.bench.timing import WARM_SECONDS, Timing, sensible_count, summarise
from nbcnn.gradcheck import relative_error
from nbcnn.shapes import ConvShape

MISSING = "PyTorch is not installed, so there is no peer to compare with: pip install torch"


def available() -> bool:
    """True if torch is installed and sees a CUDA device."""
    if importlib.util.find_spec("torch") is None:
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


def _time(call: Callable[[], Any], seconds: float = 0.7) -> Timing:
    import torch

    until = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < until:
        call()
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    count = sensible_count((time.perf_counter() - start) * 1e3, seconds)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return summarise([a.elapsed_time(b) for a, b in pairwise(events)])


def _captured(call: Callable[[], Any], warm: int = 3) -> Callable[[], None]:
    """`call` as a CUDA graph."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
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


def training_step(batch: int, precision: str = "fp32", forms: tuple[str, ...] = ("eager", "graph", "compile")) -> list[dict[str, Any]]:
    """The autoencoder's training step at `batch`: uint8 → [0, 1], forward, MSE, backward, SGD with momentum 0.9.

    forms  eager, graph (CUDA graph of the eager step), compile (torch.compile), compile-max (its max-autotune).
    """
    torch, layout = _prepare(precision)

    def make(mode: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
        net = autoencoder(layout)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True)
        images = noise(batch, layout)

        def loss() -> Any:
            return reconstruction_error(net, images, precision, layout)

        compiled = torch.compile(loss, dynamic=False, mode=mode)

        def step(value: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> None:
                optimizer.zero_grad(set_to_none=True)
                value().backward()
                optimizer.step()

            return run

        return step(loss), step(compiled)

    rows = []
    for form in forms:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        eager, compiled = make("max-autotune" if form == "compile-max" else "default")
        call = {"eager": eager, "graph": eager}.get(form, compiled)
        call = _captured(call) if form == "graph" else call
        timing = _time(call)
        peak = torch.cuda.max_memory_allocated()
        images_per_second = batch / timing.median * 1e3
        rows.append(
            {
                "form": form,
                "precision": precision,
                "batch": batch,
                "step_ms": timing.as_dict(),
                "images_per_second": images_per_second,
                "peak_bytes": peak,
            }
        )
        del eager, compiled, call
    return rows


def convolution(shape: ConvShape, path: str, precision: str, place: Any) -> Calls:
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

    count = sets_for(shape.bytes(dtype.itemsize), place)
    sets = [[TorchCall(run, (random(shape.x_shape), random(shape.y_shape)))] for _ in range(count)]
    return TorchCalls("cuDNN", place, sets, graph=True)


def _share_stream(place: Any) -> None:
    """Let PyTorch work on the stream of `place`, so that our events are around its kernels."""
    import torch

    stream = place.stream
    torch.cuda.set_stream(torch.cuda.ExternalStream(int(getattr(stream.handle, "value", stream.handle))))


def _capture(launches: Sequence[Any]) -> Callable[[], None]:
    """Launches as a CUDA graph of PyTorch's, whose memory pool then belongs to it."""
    return _captured(lambda: [launch.run() for launch in launches], warm=1)


def _function(op: str, attrs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """PyTorch's form of an op on its operands; None where it has none."""
    import torch

    F, aten = torch.nn.functional, torch.ops.aten
    stride, pad, size = attrs.get("stride", 1), attrs.get("pad", 1), attrs.get("size", 2)

    def backward(dy: Any, x: Any, w: Any, *mask: bool) -> Any:
        return aten.convolution_backward(dy, x, w, [w.shape[0]], [stride] * 2, [pad] * 2, [1, 1], False, [0, 0], 1, list(mask))

    def conv(x: Any, w: Any, b: Any = None) -> Any:
        return F.conv2d(x, w, b, stride, pad)

    def up(x: Any, w: Any, b: Any) -> Any:
        return F.conv2d(F.interpolate(x, scale_factor=2), w, b, 1, 1)

    return {
        "conv_fprop": conv,
        "conv_relu_fprop": lambda x, w, b: F.relu(conv(x, w, b)),
        "conv_relu_pool_fprop": lambda x, w, b: F.max_pool2d(F.relu(conv(x, w, b)), 2),
        "upconv_fprop": up,
        "upconv_relu_fprop": lambda x, w, b: F.relu(up(x, w, b)),
        "conv_wgrad": lambda x, dy, w: backward(dy, x, w, False, True, True)[1],
        "conv_dgrad": lambda dy, w, x: backward(dy, x, w, True, False, False)[0],
        "relu_fprop": F.relu,
        "relu_dgrad": lambda dy, y: aten.threshold_backward(dy, y, 0),
        "leaky_relu_fprop": lambda x: F.leaky_relu(x, attrs["slope"]),
        "sigmoid_fprop": torch.sigmoid,
        "sigmoid_dgrad": aten.sigmoid_backward,
        "swish_fprop": F.silu,
        "swish_dgrad": aten.silu_backward,
        "add": torch.add,
        "gemm": lambda a, b: torch.matmul(a, b.T),
        "maxpool_fprop": lambda x: F.max_pool2d(x, size, stride, return_indices=True)[0],
        "avgpool_fprop": lambda x: F.avg_pool2d(x, size, stride),
        "upsample_fprop": lambda x: F.interpolate(x, scale_factor=attrs["factor"]),
        "mse_fprop": F.mse_loss,
    }.get(op)


class TorchCall:
    """One call on operands of its own, in the form of a launch; it keeps its result, so that no other call writes to that memory."""

    def __init__(self, function: Callable[..., Any], operands: Sequence[Any]) -> None:
        self.function, self.operands, self.result = function, operands, None

    def run(self, stream: Any = 0) -> None:
        self.result = self.function(*self.operands)


class TorchCalls(Calls):
    """PyTorch's calls as work on the stream of `place`, on which the events around them are.

    Whoever starts them makes that stream PyTorch's first. It has one at a time, and another place may have lent it its own since: events on a
    stream that nothing runs on measure nothing.
    """

    def __init__(self, label: str, place: Any, sets: Sequence[Sequence[TorchCall]], *, graph: bool = False, flush: Any = None) -> None:
        super().__init__(label, place, sets, graph=graph, flush=flush, capture=_capture)

    def repeat(self, n: int) -> float:
        _share_stream(self._place)
        return super().repeat(n)

    def enqueue(self, n: int) -> None:
        _share_stream(self._place)
        super().enqueue(n)


def op_works(prepared: Prepared, problem: Problem) -> Callable[[str, bool], list[Calls]] | None:
    """PyTorch's eager and compiled forms of the op as work on our stream, for a cache mode, plain or as a CUDA graph; None if it has none.

    Raises RuntimeError if its result is not ours: then they would be two ops.
    """
    torch, layout = _prepare(prepared.row.precision)
    function = _function(prepared.op, problem.small.attrs)
    if function is None:
        return None
    dtype = torch.bfloat16 if prepared.row.precision == "bf16" else torch.float32
    ins, outs = problem.operands()
    # The gradient ops of PyTorch also take the tensor whose gradient they make, for its shape.
    shapes = {"conv_wgrad": [outs[0][0]], "conv_dgrad": [outs[0][0]]}.get(prepared.op, [])

    def on_gpu(array: Any) -> Any:
        tensor = torch.from_numpy(array).cuda().to(dtype)
        return tensor.contiguous(memory_format=layout) if tensor.ndim == 4 else tensor

    def operands() -> list[Any]:
        return [on_gpu(a) for a in ins] + [torch.zeros(s, device="cuda", dtype=dtype).contiguous(memory_format=layout) for s in shapes]

    sets = [operands() for _ in prepared.bounds]
    forms = {"torch eager": function, "torch.compile": torch.compile(function, dynamic=False)}
    _check(prepared, problem, function(*sets[0]))

    def works(cache: str, graph: bool) -> list[Calls]:
        used = sets if cache == "rotate" else sets[:1]
        flush = Flush(prepared.place) if cache == "cold" else None
        return [
            TorchCalls(label, prepared.place, [[TorchCall(form, each)] for each in used], graph=graph, flush=flush) for label, form in forms.items()
        ]

    return works


def _check(prepared: Prepared, problem: Problem, theirs: Any) -> None:
    prepared.bounds[0].run()
    ours = prepared.bounds[0].results()[0].astype(np.float64)
    got = theirs.detach().double().cpu().numpy().reshape(ours.shape)
    error, limit = relative_error(got, ours), 2 * full_bound(problem, prepared.row.precision)
    if not error <= limit:
        raise RuntimeError(f"PyTorch's {prepared.op} is not ours: they differ by {error:.1e}, two bounds allow {limit:.1e}")
