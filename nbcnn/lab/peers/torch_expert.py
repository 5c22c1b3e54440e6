"""This module is the autoencoder's training step as an expert would write it in PyTorch for this one network, beside what a user would write.

The algebra is that of our fused plan (`nbcnn.plan.merging`), the backward pass is written by hand, Inductor compiles the whole step, and it is
replayed as one CUDA graph. Images are NHWC.

    conv1    products of gathered patches, four pixels per row, pooled in the same Triton kernel (`triton_first_layer`); without Triton by matmul
    conv2,3  cuDNN; the data gradient by itself, or as a convolution with flipped filters
    conv4    the doubled image is never made: a transposed 4×4 convolution of stride 2 makes 16 products per pixel where 36 are written
    conv5    the same, as one product 256 → 48 columns and sums of shifted slices; the error is taken where the columns lie

fp32 means products of operands in two tf32 parts, three products each: the fastest that PyTorch has of this accuracy. Where a pass can be computed in
several ways (`WAYS`), each is timed alone first, and the fastest is taken.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from nbcnn.lab.measure.timing import each_ms
from nbcnn.lab.peers.nets import Problem
from nbcnn.lab.peers.torch_step import captured, timer

MOMENTUM = 0.9
LAYERS = ("conv1", "conv2", "conv3", "conv4", "conv5")
PARAMETERS = tuple(f"{layer}.{name}" for layer in LAYERS for name in ("weight", "bias"))
TRANSPOSED = ((2,), (1, 2), (0, 1), (0,))
"""The taps of a 3-tap filter over doubled pixels that add up to each of the 4 taps of the transposed filter of stride 2."""
PHASES = ((0,), (1, 2), (0, 1), (2,))
"""The same by phase: two taps for the even pixels of the doubled row, then two for the odd ones."""
WAYS = {
    "conv2 dgrad": ("native", "flipped"),
    "conv3 dgrad": ("native", "flipped"),
    "conv4 fprop": ("transposed", "four"),
    "conv4 dgrad": ("strided", "doubled"),
    "conv4 wgrad": ("strided", "doubled"),
}
"""By pass, the ways to compute it; the first of each where nothing can be timed."""
NOTHING = 4
"""The index of a pooled pixel of which no source is positive."""
TRIES, REPLAYS = 5, 5


def summed(w: Any, axis: int, rows: Sequence[Sequence[int]]) -> Any:
    """`w` with the three taps along `axis` replaced by the sums that `rows` name."""
    return torch.stack([sum((w.select(axis, tap) for tap in row[1:]), w.select(axis, row[0])) for row in rows], axis)


def spread(g: Any, axis: int, rows: Sequence[Sequence[int]]) -> Any:
    """The transpose of `summed`: the gradient of three taps from that of their sums."""
    parts = [[g.select(axis, at) for at, row in enumerate(rows) if tap in row] for tap in range(3)]
    return torch.stack([sum(part[1:], part[0]) for part in parts], axis)


class Arithmetic:
    """Convolutions and products of NHWC tensors in one precision; in fp32 operands are split into two tf32 parts."""

    def __init__(self, precision: str) -> None:
        self.precision, self.split = precision, precision == "fp32"
        self.dtype = {"bf16": torch.bfloat16, "fp64": torch.float64}.get(precision, torch.float32)
        self.exact = torch.float64 if precision == "fp64" else torch.float32
        self.dot = {"bf16": "ieee", "tf32": "tf32", "fp32": "tf32x3"}.get(precision, "ieee")

    def switch(self) -> None:
        """Let PyTorch multiply in this precision."""
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self.precision in ("tf32", "fp32")

    def pair(self, x: Any, y: Any, axis_x: int, axis_y: int) -> tuple[Any, Any]:
        """Operands whose product, summed over these axes, is that of x and y: high·high + high·low + low·high where they are split."""
        x, y = x.to(self.dtype), y.to(self.dtype)
        if not self.split:
            return x, y
        (high_x, low_x), (high_y, low_y) = _halves(x), _halves(y)
        return torch.cat([high_x, high_x, low_x], axis_x), torch.cat([high_y, low_y, high_y], axis_y)

    def product(self, a: Any, b: Any) -> Any:
        """a (M,K) · b (K,N)."""
        a, b = self.pair(a, b, 1, 0)
        return a @ b

    def fprop(self, x: Any, w: Any, stride: int = 1, pad: int = 1) -> Any:
        """The convolution of x with filters w (K,C,R,S)."""
        x, w = self.pair(x, w, 3, 1)
        return _nhwc(F.conv2d(_nchw(x), _filters(w), None, stride, pad))

    def transposed(self, x: Any, w: Any) -> Any:
        """The transposed convolution of stride 2 and pad 1 of x with w (C,K,4,4)."""
        x, w = self.pair(x, w, 3, 0)
        return _nhwc(F.conv_transpose2d(_nchw(x), _filters(w), None, 2, 1))

    def dgrad(self, dy: Any, w: Any) -> Any:
        """The data gradient of a 3×3 convolution that keeps the size."""
        dy, w = self.pair(dy, w, 3, 0)
        x = torch.empty((*dy.shape[:3], w.shape[1]), dtype=dy.dtype, device=dy.device)
        return _nhwc(self._backward(dy, x, w, 1, (True, False, False))[0])

    def flipped(self, dy: Any, w: Any) -> Any:
        """The same as a convolution of dy with the flipped filters."""
        return self.fprop(dy, w.flip(2, 3).transpose(0, 1))

    def wgrad(self, x: Any, dy: Any, w: Any, stride: int = 1) -> Any:
        """The gradient of filters of the shape of `w`, pad 1."""
        x, dy = self.pair(x, dy, 0, 0)
        return self._backward(dy, x, w.to(self.dtype), stride, (False, True, False))[1].to(self.exact)

    @staticmethod
    def _backward(dy: Any, x: Any, w: Any, stride: int, wanted: tuple[bool, bool, bool]) -> Any:
        geometry = ([stride] * 2, [1, 1], [1, 1], False, [0, 0], 1)
        return torch.ops.aten.convolution_backward(_nchw(dy), _nchw(x), _filters(w), None, *geometry, list(wanted))


def _halves(x: Any) -> tuple[Any, Any]:
    """x rounded to tf32, and what that leaves."""
    high = ((x.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
    return high, x - high


def _nchw(x: Any) -> Any:
    return x.permute(0, 3, 1, 2)


def _nhwc(x: Any) -> Any:
    return x.permute(0, 2, 3, 1)


def _filters(w: Any) -> Any:
    return w.contiguous(memory_format=torch.channels_last)


# -- pooling


def pooled(sources: Sequence[Any]) -> tuple[Any, Any]:
    """ReLU and maximum of four tensors, and which of them it was."""
    best, index = sources[0], torch.zeros_like(sources[0], dtype=torch.uint8)
    for at, source in enumerate(sources[1:], 1):
        index = torch.where(source > best, torch.full_like(index, at), index)
        best = torch.maximum(best, source)
    return F.relu(best), torch.where(best > 0, index, torch.full_like(index, NOTHING))


def quarters(y: Any) -> list[Any]:
    """(N,2H,2W,C) as the four tensors (N,H,W,C) that are pooled."""
    n, h, w, c = y.shape
    windows = y.reshape(n, h // 2, 2, w // 2, 2, c)
    return [windows[:, :, down, :, across] for down in (0, 1) for across in (0, 1)]


def unpooled(dy: Any, index: Any) -> Any:
    """The gradient (N,2H,2W,C) of what `pooled` read."""
    n, h, w, c = dy.shape
    sources = torch.arange(4, device=dy.device, dtype=torch.uint8).view(1, 1, 2, 1, 2, 1)
    dx = torch.where(index.view(n, h, 1, w, 1, c) == sources, dy.view(n, h, 1, w, 1, c), torch.zeros((), dtype=dy.dtype, device=dy.device))
    return dx.reshape(n, 2 * h, 2 * w, c)


# -- the layers


def patches(x: Any, dtype: Any) -> Any:
    """(N·256, 4, 32): the rows that `triton_first_layer` describes, of images x (N,32,32,3)."""
    n = x.shape[0]
    wide, columns = F.pad(x, (0, 0, 1, 1, 1, 1)), []
    for down in (0, 1):
        for across in (0, 1):
            columns += [wide[:, down + r : down + r + 31 : 2, across + s : across + s + 31 : 2] for r in range(3) for s in range(3)]
            columns += [torch.ones((n, 16, 16, 1), dtype=x.dtype, device=x.device), torch.zeros((n, 16, 16, 4), dtype=x.dtype, device=x.device)]
    return torch.cat(columns, 3).to(dtype).view(n * 256, 4, 32)


def _first_matrix(w: Any, b: Any) -> Any:
    taps = w.permute(2, 3, 1, 0).reshape(27, 256)
    return torch.cat([taps, b[None], taps.new_zeros((4, 256))])


def first_forward(m: Arithmetic, rows: Any, w: Any, b: Any, triton: Any) -> tuple[Any, Any]:
    """conv1, ReLU and pooling of `patches`: (N,16,16,256) and its index."""
    matrix = _first_matrix(w, b)
    if triton:
        y, index = triton.forward(rows, matrix.to(m.dtype), m.dot)
    else:
        y, index = pooled(m.product(rows.view(-1, 32), matrix).view(-1, 4, 256).unbind(1))
    return y.view(-1, 16, 16, 256), index.view(-1, 16, 16, 256)


def first_gradients(m: Arithmetic, rows: Any, dy: Any, index: Any, triton: Any) -> tuple[Any, Any]:
    """The gradients of conv1's weight and bias."""
    if triton:
        g = triton.gradient(rows, dy.reshape(-1, 256), index.view(-1, 256), m.dot)
    else:
        sources = torch.arange(4, device=dy.device, dtype=torch.uint8).view(1, 4, 1)
        zero = torch.zeros((), dtype=dy.dtype, device=dy.device)
        g = m.product(rows.view(-1, 32).t(), torch.where(index.view(-1, 1, 256) == sources, dy.reshape(-1, 1, 256), zero).view(-1, 256)).to(m.exact)
    return g[:27].view(3, 3, 3, 256).permute(3, 2, 0, 1), g[27]


def _doubled(x: Any) -> Any:
    n, h, w, c = x.shape
    return x[:, :, None, :, None].expand(n, h, 2, w, 2, c).reshape(n, 2 * h, 2 * w, c)


def _fourth_filters(w: Any) -> Any:
    """conv4's filters (256,128,3,3) as those of the transposed convolution, (128,256,4,4)."""
    return summed(summed(w, 2, TRANSPOSED), 3, TRANSPOSED).transpose(0, 1)


def fourth_forward(m: Arithmetic, way: str, x: Any, w: Any) -> Any:
    """conv4 of the doubled x."""
    if way == "transposed":
        return m.transposed(x, _fourth_filters(w))
    n, h, wide, _ = x.shape
    parts = summed(summed(w, 2, PHASES), 3, PHASES).view(*w.shape[:2], 2, 2, 2, 2)  # K C p u q v
    around = F.pad(x, (0, 0, 1, 1, 1, 1))
    phases = [m.fprop(around[:, p : p + h + 1, q : q + wide + 1].contiguous(), parts[:, :, p, :, q], 1, 0) for p in (0, 1) for q in (0, 1)]
    return torch.stack(phases).view(2, 2, n, h, wide, -1).permute(2, 3, 0, 4, 1, 5).reshape(n, 2 * h, 2 * wide, -1)


def fourth_dgrad(m: Arithmetic, way: str, dy: Any, w: Any) -> Any:
    """The gradient of what conv4 read before it was doubled."""
    if way == "strided":
        return m.fprop(dy, _fourth_filters(w), 2, 1)
    n, h, wide, _ = dy.shape
    return m.dgrad(dy, w).reshape(n, h // 2, 2, wide // 2, 2, -1).sum((2, 4))


def fourth_wgrad(m: Arithmetic, way: str, x: Any, dy: Any, w: Any) -> Any:
    """The gradient of conv4's filters."""
    if way == "strided":
        return spread(spread(m.wgrad(dy, x, _fourth_filters(w), 2), 3, TRANSPOSED), 2, TRANSPOSED).transpose(0, 1)
    return m.wgrad(_doubled(x), dy, w)


def _fifth_matrix(w: Any) -> Any:
    """conv5's filters (3,256,3,3) as (256, 48): columns by phase p, q, tap u, v, and colour."""
    return summed(summed(w, 2, PHASES), 3, PHASES).view(3, 256, 2, 2, 2, 2).permute(1, 2, 4, 3, 5, 0).reshape(256, 48)


def fifth_forward(m: Arithmetic, x: Any, w: Any) -> Any:
    """conv5 of the doubled x (N,H,W,256), before the bias, by phases: (N,H,W,2,2,3)."""
    n, h, wide, c = x.shape
    t = m.product(x.reshape(-1, c), _fifth_matrix(w)).view(n, h, wide, 48).to(m.exact)
    t = F.pad(t, (0, 0, 1, 1, 1, 1)).view(n, h + 2, wide + 2, 2, 2, 2, 2, 3)
    phases = []
    for p in (0, 1):
        for q in (0, 1):
            a, b, d, e = (t[:, p + u : p + u + h, q + v : q + v + wide, p, q, u, v] for u in (0, 1) for v in (0, 1))
            phases.append(a + b + d + e)
    return torch.stack(phases, 3).view(n, h, wide, 2, 2, 3)


def fifth_backward(m: Arithmetic, x: Any, dz: Any, w: Any) -> tuple[Any, Any]:
    """The gradient of conv5's filters, and that of x, from dz (N,H,W,2,2,3)."""
    n, h, wide, c = x.shape
    around = F.pad(dz.reshape(n, h, wide, 12), (0, 0, 1, 1, 1, 1)).view(n, h + 2, wide + 2, 2, 2, 3)
    taps = [(p, q, u, v) for p in (0, 1) for q in (0, 1) for u in (0, 1) for v in (0, 1)]
    dt = torch.cat([around[:, 2 - p - u : 2 - p - u + h, 2 - q - v : 2 - q - v + wide, p, q] for p, q, u, v in taps], 3).reshape(-1, 48)
    g = m.product(x.reshape(-1, c).t(), dt).to(m.exact).view(c, 2, 2, 2, 2, 3).permute(5, 0, 1, 3, 2, 4).reshape(3, c, 4, 4)
    return spread(spread(g, 3, PHASES), 2, PHASES), m.product(dt, _fifth_matrix(w).t()).view(n, h, wide, c)


# -- the step


def step_of(m: Arithmetic, ways: dict[str, str], rate: float, triton: Any) -> Callable[[Any, Sequence[Any], Sequence[Any]], Any]:
    """The training step as a function of images (N,32,32,3) uint8, parameters and their moments, which it updates; it returns the loss."""

    def through(way: str) -> Callable[[Any, Any], Any]:
        return m.flipped if ways[way] == "flipped" else m.dgrad

    def bias(y: Any, b: Any) -> Any:
        return y + b.to(m.dtype)

    def column_sums(d: Any) -> Any:
        return d.to(m.exact).sum((0, 1, 2))

    def step(images: Any, parameters: Sequence[Any], moments: Sequence[Any]) -> Any:
        w1, b1, w2, b2, w3, b3, w4, b4, w5, b5 = parameters
        x = images.to(m.exact) * (1 / 255)
        rows = patches(x, m.dtype)
        y1, index1 = first_forward(m, rows, w1, b1, triton)
        y2, index2 = pooled([bias(y, b2) for y in quarters(m.fprop(y1, w2))])
        y3 = F.relu(bias(m.fprop(y2, w3), b3))
        y4 = F.relu(bias(fourth_forward(m, ways["conv4 fprop"], y3, w4), b4))
        z = fifth_forward(m, y4, w5) + b5
        apart = z - x.view(-1, 16, 2, 16, 2, 3).permute(0, 1, 3, 2, 4, 5)
        loss, dz = apart.square().mean(), apart * (2 / apart.numel())
        g5, d4 = fifth_backward(m, y4, dz.to(m.dtype), w5)
        d4 = torch.where(y4 > 0, d4, 0)
        g4 = fourth_wgrad(m, ways["conv4 wgrad"], y3, d4, w4)
        d3 = torch.where(y3 > 0, fourth_dgrad(m, ways["conv4 dgrad"], d4, w4), 0)
        g3 = m.wgrad(y2, d3, w3)
        d2 = through("conv3 dgrad")(d3, w3)
        wide = unpooled(d2, index2)
        g2 = m.wgrad(y1, wide, w2)
        g1, c1 = first_gradients(m, rows, through("conv2 dgrad")(wide, w2), index1, triton)
        c2 = column_sums(torch.where(index2 < NOTHING, d2, 0))
        gradients = (g1, c1, g2, c2, g3, column_sums(d3), g4, column_sums(d4), g5, dz.sum((0, 1, 2, 3, 4)))
        for parameter, moment, gradient in zip(parameters, moments, gradients, strict=True):
            moved = MOMENTUM * moment + gradient.to(m.exact)
            moment.copy_(moved)
            parameter.copy_(parameter - rate * moved)
        return loss

    return step


def fastest_ways(m: Arithmetic, batch: int) -> dict[str, str]:
    """The fastest of the `WAYS` of every pass at this batch, each timed alone as a CUDA graph."""

    def random(*shape: int) -> Any:
        return torch.randn(shape, device="cuda").to(m.dtype)

    w2, w3, w4 = random(128, 256, 3, 3), random(128, 128, 3, 3), random(256, 128, 3, 3)
    small, wide, large = random(batch, 8, 8, 128), random(batch, 16, 16, 128), random(batch, 16, 16, 256)
    runs: dict[str, Callable[[str], Any]] = {
        "conv2 dgrad": lambda way: (m.flipped if way == "flipped" else m.dgrad)(wide, w2),
        "conv3 dgrad": lambda way: (m.flipped if way == "flipped" else m.dgrad)(small, w3),
        "conv4 fprop": lambda way: fourth_forward(m, way, small, w4),
        "conv4 dgrad": lambda way: fourth_dgrad(m, way, large, w4),
        "conv4 wgrad": lambda way: fourth_wgrad(m, way, small, large, w4),
    }

    def milliseconds(run: Callable[[], Any]) -> float:
        replay = captured(run)
        replay()
        return median(each_ms(lambda: [replay() for _ in range(REPLAYS)], TRIES, timer()))

    def of(name: str) -> str:
        return min(WAYS[name], key=lambda way: milliseconds(lambda: runs[name](way)))

    return {name: of(name) for name in WAYS}


def _triton() -> Any:
    """Triton's kernels of the first layer; None where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    from nbcnn.lab.peers import triton_first_layer

    return triton_first_layer


class Expert:
    """The step on the problem's images and weights, ready to be called; `device` "cpu" leaves out what needs a GPU, for tests.

    ways  as in `WAYS`; None: the fastest.
    """

    label = "PyTorch by an expert"

    def __init__(self, problem: Problem, precision: str, rate: float, device: str = "cuda", ways: dict[str, str] | None = None) -> None:
        m = Arithmetic(precision)
        m.switch()
        on_gpu = device == "cuda"
        self._images = torch.from_numpy(np.ascontiguousarray(problem.images.transpose(0, 2, 3, 1))).to(device)
        self._parameters = [torch.from_numpy(np.array(problem.weights[name])).to(device, m.exact) for name in PARAMETERS]
        self._moments = [torch.zeros_like(parameter) for parameter in self._parameters]
        with torch.no_grad():
            self.ways = ways or (fastest_ways(m, len(problem.images)) if on_gpu else {name: ways[0] for name, ways in WAYS.items()})
        step = step_of(m, self.ways, rate, _triton() if on_gpu else None)
        self._step = torch.compile(step, dynamic=False) if on_gpu else step

    def __call__(self) -> Any:
        """One training step; its loss."""
        with torch.no_grad():
            return self._step(self._images, self._parameters, self._moments)

    def first(self) -> tuple[float, dict[str, np.ndarray]]:
        """Take the first step: its loss and gradients by our names, float64. The first moment of a parameter is its gradient."""
        loss = float(self())
        return loss, {name: moment.double().cpu().numpy() for name, moment in zip(PARAMETERS, self._moments, strict=True)}
