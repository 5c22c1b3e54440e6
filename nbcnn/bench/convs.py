"""Our convolutions beside cuDNN's, in one run: every layer of the autoencoder, every pass, verified and then timed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from nbcnn import gradcheck
from nbcnn.bench import peers
from nbcnn.bench.timing import Timing, sensible_count, time_calls
from nbcnn.cuda import Gpu
from nbcnn.ops import MODES
from nbcnn.ops.cases import Case, conv_cases
from nbcnn.ops.run import Bound, Unsupported, run_op
from nbcnn.shapes import ConvShape, numel

LAYERS = {
    "conv1": ConvShape(1, 3, 32, 32, 256, 3, 3, 1, 1),
    "conv2": ConvShape(1, 256, 16, 16, 128, 3, 3, 1, 1),
    "conv3": ConvShape(1, 128, 8, 8, 128, 3, 3, 1, 1),
    "conv4": ConvShape(1, 128, 16, 16, 256, 3, 3, 1, 1),
    "conv5": ConvShape(1, 256, 32, 32, 3, 3, 3, 1, 1),
}
ROTATE_BYTES = 256 * 2**20
"""Operands are rotated through at least this much memory: several times the largest L2 cache."""


def passes(mode: str, batch: int, layers: tuple[str, ...] = tuple(LAYERS), beside_cudnn: bool = True) -> Iterator[dict[str, Any]]:
    """One row per layer and pass: our time, cuDNN's, the ratio, and the rate. conv1 needs no dgrad."""
    place = Gpu()
    for name in layers:
        shape = replace(LAYERS[name], N=batch)
        for path in ("fprop", "dgrad", "wgrad"):
            if (name, path) == ("conv1", "dgrad"):
                continue
            ours = time_pass(mode, shape, path, place)
            peer = peers.convolution(shape, path) if beside_cudnn else None
            yield {
                "layer": name,
                "path": path,
                "batch": batch,
                "mode": mode,
                "ms": ours.as_dict(),
                "tflops": shape.flops() / ours.median / 1e9,
                "gbytes_per_second": shape.bytes() / ours.median / 1e6,
                "cudnn_ms": peer.as_dict() if peer else None,
                "ratio": peer.median / ours.median if peer else None,
            }


def _case(shape: ConvShape, path: str) -> Case:
    """The case of one pass with a bias."""
    return next(case for case in conv_cases(shape) if case.op == f"conv_{path}")


def _operand(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random normal float32: 4 million fresh values, repeated where more are needed (never zeros: they run faster)."""
    fresh = np.random.default_rng(seed).standard_normal(min(numel(shape), 1 << 22)).astype(np.float32)
    return np.resize(fresh, shape)


def time_pass(mode: str, shape: ConvShape, path: str, place: Any) -> Timing:
    """Milliseconds of one pass, weights packed beforehand. Raises RuntimeError instead if it fails parity with its tile."""
    row = MODES[mode, "fp32"]
    small = _case(replace(shape, N=min(4, shape.N)), path)
    ins, outs = _full(small, shape)
    for _, impl in row.chain(small.op):
        options: dict[str, Any] = {"attrs": small.attrs, "place": place, "layout": row.layout, "multiprocessors": place.multiprocessors}
        try:
            first = Bound(impl, small.op, ins, outs, **options)
            break
        except Unsupported:
            continue
    tile = first.call.tile
    got = run_op(impl, small.op, small.ins, small.outs, tile=tile, **options)
    error = max(gradcheck.relative_error(g, r) for g, r in zip(got, gradcheck.reference(small), strict=True))
    if not error <= gradcheck.bound(small):
        raise RuntimeError(f"{mode} conv_{path} {shape} is not timed: error {error:.1e} is over its bound {gradcheck.bound(small):.1e}")
    count = int(max(2, min(4, ROTATE_BYTES // shape.bytes() + 1)))
    sets = [first] + [Bound(impl, small.op, ins, outs, **options) for _ in range(count - 1)]
    launches = [launch for bound in sets for launch in bound.launches]
    for launch in launches:
        launch.run(place.stream)
    replay = place.replayable(launches)
    timing = time_calls(replay, place, 10)
    return time_calls(replay, place, sensible_count(timing.median, 0.3), 0.1).per(count)


def _full(small: Case, shape: ConvShape) -> tuple[list[np.ndarray], list[Any]]:
    """Operands and outputs of `small` at the full batch."""

    def grown(old: tuple[int, ...]) -> tuple[int, ...]:
        is_images = old[1:] in (shape.x_shape[1:], shape.y_shape[1:])
        return (shape.N, *old[1:]) if is_images else old

    ins = [_operand(grown(array.shape), seed) for seed, array in enumerate(small.ins)]
    return ins, [(grown(out[0]), out[1]) for out in small.outs if not isinstance(out, int)]
