"""This module finds cuDNN's best plan of one convolution pass, through its Python frontend: every plan that its heuristics name, verified and timed.

PyTorch's benchmark mode tries cuDNN's algorithms too, but behind an interface of 2015; the graph interface has plans that it does not reach. What is
timed is the convolution alone, as in `torch_step.convolution`: operands in channels_last, rotated past the second-level cache, replayed as a CUDA
graph.

A data gradient has a second form, "dgrad" with `masked`: the graph of the gradient and of the ReLU's behind it, which reads the ReLU's output as ours
does (`conv_dgrad_relu`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

from nbcnn.lab.measure.caches import sets_for
from nbcnn.lab.measure.timing import each_ms
from nbcnn.lab.peers.torch_step import TorchCall, TorchCalls, timer
from nbcnn.plan.bounds import parity_bound
from nbcnn.plan.shapes import ConvShape

MISSING = "cuDNN's Python frontend is not installed, so only the plans that PyTorch takes are timed: pip install nvidia-cudnn-frontend"
LABEL = "cuDNN's best plan"
MASKED_LABEL = "cuDNN's best plan with the mask"
WORKSPACE = 4 << 30
"""A plan that wants more scratch memory than this, in bytes, is left out."""
TRIES, CALLS, MOST_PLANS = 5, 3, 16
"""How often a plan is timed when the best one is sought, calls each time, and how many plans at most, in the order of the heuristics."""
IMAGES = 2
"""fprop and dgrad are verified on so many images; wgrad is a sum over all of them."""
CHUNK = 128


class NoPlan(RuntimeError):
    """No plan of cuDNN's computes the convolution, or none is right."""


def available() -> bool:
    """True if cuDNN's frontend is installed."""
    return importlib.util.find_spec("cudnn") is not None


def convolution(shape: ConvShape, path: str, precision: str, device: Any, *, masked: bool = False) -> TorchCalls:
    """The fastest right plan of a pass, "fprop" (without bias), "dgrad" or "wgrad", as work on our stream; `masked`: dgrad with its ReLU's mask.

    Raises NoPlan where there is none, ValueError for a mask of another pass.
    """
    if masked and path != "dgrad":
        raise ValueError(f"{path} has no mask")
    import torch

    dtype = torch.bfloat16 if precision == "bf16" else torch.float32

    def random(size: tuple[int, ...]) -> Any:
        return torch.randn(size, device="cuda").to(dtype=dtype, memory_format=torch.channels_last)

    w = random(shape.w_shape) * 0.05
    count = sets_for(shape.bytes(dtype.itemsize), device)
    # A mask is read from what a ReLU made: half of it zeros.
    operands = [(random(shape.x_shape).relu_() if masked else random(shape.x_shape), random(shape.y_shape)) for _ in range(count)]
    want = _reference(shape, path, *operands[0], w, masked)
    plans = _plans(shape, path, w, *operands[0], masked)
    bound = parity_bound(shape.gemm(path)[2], precision) + parity_bound(shape.gemm(path)[2], "fp32")
    found: Any = None
    best, why = float("inf"), "the heuristics name no plan"
    for make in plans:
        try:
            run = make()
            got = run(*operands[0])
            torch.cuda.synchronize()
            off = _error(got if path == "wgrad" else got[:IMAGES], want)
            if not off <= bound:
                why = f"a plan is off by {off:.1e}, and {bound:.1e} is allowed"
                continue
            taken = median(each_ms(partial(_calls, run, operands), TRIES, timer()))
        except Exception as error:
            why = f"{type(error).__name__}: {error}"[:200]
            continue
        if taken < best:
            best, found = taken, run
    if found is None:
        raise NoPlan(f"cuDNN has no plan for {path}{' with a mask' if masked else ''} of {shape} in {precision}: {why}")
    return TorchCalls(MASKED_LABEL if masked else LABEL, device, [[TorchCall(found, pair)] for pair in operands], graph=True)


def _reference(shape: ConvShape, path: str, x: Any, dy: Any, w: Any, masked: bool) -> Any:
    """The pass in float64 by PyTorch: of the first images, or summed over all."""
    import torch

    geometry = ([shape.stride] * 2, [shape.pad] * 2, [1, 1])

    def gradient(at: slice) -> Any:
        mask = [path == "dgrad", path == "wgrad", False]
        made = torch.ops.aten.convolution_backward(dy[at].double(), x[at].double(), w.double(), None, *geometry, False, [0, 0], 1, mask)
        return made[0] if path == "dgrad" else made[1]

    # Trying algorithms in float64 takes longer than the pass; PyTorch's own form, which runs after this, tries them again.
    with torch.backends.cudnn.flags(enabled=True, benchmark=False):
        if path == "fprop":
            return torch.nn.functional.conv2d(x[:IMAGES].double(), w.double(), None, shape.stride, shape.pad)
        if path == "dgrad":
            found = gradient(slice(0, IMAGES))
            return torch.where(x[:IMAGES] > 0, found, 0.0) if masked else found
        return sum(gradient(slice(at, at + CHUNK)) for at in range(0, len(x), CHUNK))


def _error(got: Any, want: Any) -> float:
    return float((got.double() - want).norm() / want.norm())


def _plans(shape: ConvShape, path: str, w: Any, x: Any, dy: Any, masked: bool) -> Sequence[Callable[[], Callable[..., Any]]]:
    """For each plan a function that builds it and returns what runs it: (x, dy) → the result, always in the same memory."""
    import cudnn
    import torch

    handle = cudnn.create_handle()
    kind = cudnn.data_type.BFLOAT16 if x.dtype == torch.bfloat16 else cudnn.data_type.FLOAT
    full = cudnn.data_type.FLOAT
    graph = cudnn.pygraph(handle=handle, io_data_type=kind, intermediate_data_type=full, compute_data_type=full)

    def read(x: Any, dy: Any) -> tuple[Any, ...]:
        return {"fprop": (x, w), "dgrad": (dy, w, x) if masked else (dy, w), "wgrad": (x, dy)}[path]

    first, second, *mask = inputs = [graph.tensor(dim=list(each.shape), stride=list(each.stride()), data_type=kind) for each in read(x, dy)]
    geometry = {"padding": [shape.pad] * 2, "stride": [shape.stride] * 2, "dilation": [1, 1]}
    if path == "fprop":
        out, size = graph.conv_fprop(image=first, weight=second, **geometry), shape.y_shape
    elif path == "dgrad":
        out, size = graph.conv_dgrad(loss=first, filter=second, **geometry), shape.x_shape
    else:
        out, size = graph.conv_wgrad(image=first, loss=second, **geometry), shape.w_shape
    if mask:  # between the two ops the gradient is float32 and never stored
        between = torch.empty(size, device="meta", memory_format=torch.channels_last)
        out.set_data_type(full).set_dim(list(size)).set_stride(list(between.stride()))
        out = graph.relu_backward(loss=out, input=mask[0])
    result = torch.empty(size, device="cuda", dtype=x.dtype, memory_format=torch.channels_last)
    out.set_output(True).set_data_type(kind).set_dim(list(size)).set_stride(list(result.stride()))
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.B, cudnn.heur_mode.FALLBACK])

    def made(at: int) -> Callable[..., Any]:
        graph.build_plan_at_index(at)
        nbytes = graph.get_workspace_size_plan_at_index(at)
        if nbytes > WORKSPACE:
            raise NoPlan(f"a plan wants {nbytes / 2**30:.1f} GiB of scratch memory")
        scratch = torch.empty(max(nbytes, 1), device="cuda", dtype=torch.uint8)

        def run(x: Any, dy: Any) -> Any:
            given = dict(zip(inputs, read(x, dy), strict=True))
            cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
            graph.execute_plan_at_index({**given, out: result}, scratch, at, handle=handle)
            return result

        return run

    return [partial(made, at) for at in range(min(graph.get_execution_plan_count(), MOST_PLANS))]


def _calls(run: Callable[..., Any], operands: Sequence[tuple[Any, Any]]) -> None:
    """Run a plan CALLS times, every time on the next operands."""
    for at in range(CALLS):
        run(*operands[at % len(operands)])
