"""Our convolutions beside cuDNN's, in one run: every layer of the autoencoder, every pass, verified and then timed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from nbcnn import gradcheck
from nbcnn.bench import peers
from nbcnn.bench.timing import Timing, sensible_count, time_calls
from nbcnn.cuda import Gpu
from nbcnn.net import choose_mode
from nbcnn.ops import Row
from nbcnn.ops.cases import Case, conv_cases
from nbcnn.ops.fused_cases import pooled_cases, relu_cases, up_cases
from nbcnn.ops.run import Bound, Unsupported, is_filter
from nbcnn.shapes import ConvShape, numel
from nbcnn.storage import ITEMSIZE

LAYERS = {
    "conv1": ConvShape(1, 3, 32, 32, 256, 3, 3, 1, 1),
    "conv2": ConvShape(1, 256, 16, 16, 128, 3, 3, 1, 1),
    "conv3": ConvShape(1, 128, 8, 8, 128, 3, 3, 1, 1),
    "conv4": ConvShape(1, 128, 16, 16, 256, 3, 3, 1, 1),
    "conv5": ConvShape(1, 256, 32, 32, 3, 3, 3, 1, 1),
}
PATHS = ("fprop", "dgrad", "wgrad")
FUSED = {
    "conv1": {"fprop": "conv_relu_pool_fprop", "wgrad": "conv_pool_wgrad"},
    "conv2": {"fprop": "conv_relu_pool_fprop", "dgrad": "conv_dgrad_relu", "wgrad": "conv_wgrad"},
    "conv3": {"fprop": "conv_relu_fprop", "dgrad": "conv_dgrad_relu", "wgrad": "conv_wgrad"},
    "conv4": {"fprop": "upconv_relu_fprop", "dgrad": "upconv_dgrad_relu", "wgrad": "upconv_wgrad"},
    "conv5": {"fprop": "upconv_mse_fprop", "dgrad": "upconv_dgrad_relu", "wgrad": "upconv_wgrad"},
}
"""The op that the fused autoencoder runs for each layer and pass."""
ROTATE_BYTES = 256 * 2**20
"""Operands are rotated through at least this much memory: several times the largest L2 cache."""


def passes(
    mode: str,
    batch: int,
    layers: tuple[str, ...] = tuple(LAYERS),
    beside_cudnn: bool = True,
    *,
    precision: str | None = None,
    engine: str = "auto",
    fused: bool = False,
) -> Iterator[dict[str, Any]]:
    """One row per layer and pass: our time, cuDNN's convolution alone in the same precision, the ratio, and the rate.

    conv1 needs no dgrad. `fused` times the ops of the fused plan (with ReLU, pooling, folded upsampling, loss); their
    TFLOP/s count the direct convolution, so a folded one may exceed the GPU's peak.
    """
    place = Gpu()
    row, _ = choose_mode(mode, precision, engine)
    for name in layers:
        shape = replace(LAYERS[name], N=batch)
        for path in PATHS:
            if (name, path) == ("conv1", "dgrad"):
                continue
            op = FUSED[name][path] if fused else f"conv_{path}"
            ours, part = _timed(row, shape, op, place)
            peer = peers.convolution(shape, path, row.precision) if beside_cudnn else None
            yield {
                "layer": name,
                "path": path,
                "op": op,
                "batch": batch,
                "mode": mode,
                "precision": row.precision,
                "runs_as": part,
                "ms": ours.as_dict(),
                "tflops": shape.flops() / ours.median / 1e9,
                "gbytes_per_second": shape.bytes(ITEMSIZE[row.store]) / ours.median / 1e6,
                "cudnn_ms": peer.as_dict() if peer else None,
                "ratio": peer.median / ours.median if peer else None,
            }


def _timed(row: Row, shape: ConvShape, op: str, place: Any) -> tuple[Timing, str]:
    """`time_op` with parity on four images, or on as many more as the implementation of the full batch wants (Winograd's does)."""
    images = min(4, shape.N)
    while True:
        try:
            return time_op(row, _case(replace(shape, N=images), op), shape.N, place)
        except Unsupported:
            if images == shape.N:
                raise
            images = min(4 * images, shape.N)


def _case(shape: ConvShape, op: str) -> Case:
    """The case of `op` on the convolution `shape`, with a bias."""
    small = replace(shape, H=shape.H // 2, W=shape.W // 2)
    made = up_cases(small) if op.startswith("upconv") else chain(conv_cases(shape), relu_cases(shape), pooled_cases(shape))
    return next(case for case in made if case.op == op)


def _operand(shape: tuple[int, ...], dtype: np.dtype, seed: int) -> np.ndarray:
    """Random values, 4 million fresh ones repeated where more are needed (never zeros: they run faster)."""
    rng, count = np.random.default_rng(seed), min(numel(shape), 1 << 22)
    fresh = rng.integers(0, 256, count) if dtype.kind == "u" else rng.standard_normal(count)
    return np.resize(fresh.astype(dtype), shape)


def time_op(row: Row, small: Case, batch: int, place: Any) -> tuple[Timing, str]:
    """Milliseconds of one op at `batch` images, weights packed beforehand, and the part of the row that runs it.

    Raises RuntimeError instead if it fails parity on the case `small` with the tile of the full batch.
    """
    ins, outs = _grown(small, batch)
    options: dict[str, Any] = {"attrs": small.attrs, "place": place, "layout": row.layout, "store": row.store}
    options["multiprocessors"] = place.multiprocessors
    part, impl, first = _first(row, small, ins, outs, options)
    tile = first.call.tile
    error, limit = gradcheck.parity(row, impl, small, place, tile), gradcheck.bound(small, row.precision)
    if not error <= limit:
        raise RuntimeError(f"{row.mode} {row.precision} {small.op} {small.label} is not timed: error {error:.1e} is over its bound {limit:.1e}")
    moved = sum(a.size * a.dtype.itemsize for a in (*first.call.ins, *first.call.outs))
    count = int(max(2, min(4, ROTATE_BYTES // moved + 1)))
    sets = [first] + [Bound(impl, small.op, ins, outs, **options) for _ in range(count - 1)]
    launches = [launch for bound in sets for launch in bound.launches]
    for launch in launches:
        launch.run(place.stream)
    replay = place.replayable(launches)
    timing = time_calls(replay, place, 10)
    return time_calls(replay, place, sensible_count(timing.median, 0.3), 0.1).per(count), part


def _first(row: Row, small: Case, ins: list[np.ndarray], outs: list[Any], options: dict[str, Any]) -> tuple[str, Any, Bound]:
    """The part of the row that runs the op on the full operands here, its implementation, and the bound op."""
    for part, impl in gradcheck.runnable(row, small.op, options["place"]):
        try:
            return part, impl, Bound(impl, small.op, ins, outs, **options)
        except Unsupported:
            continue
    raise RuntimeError(f"{row.mode} {row.precision} has no {small.op} for {small.label}")


def _grown(small: Case, batch: int) -> tuple[list[np.ndarray], list[Any]]:
    """Operands and outputs of `small` at the full batch."""

    def grown(side: str, position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (batch, *shape[1:]) if len(shape) >= 3 and not is_filter(small.op, side, position) else shape

    ins = [_operand(grown("in", i, array.shape), array.dtype, i) for i, array in enumerate(small.ins)]
    return ins, [(grown("out", i, out[0]), out[1]) for i, out in enumerate(small.outs) if not isinstance(out, int)]
