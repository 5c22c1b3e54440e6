"""This study times our convolutions beside cuDNN's, in turn: every layer and pass of the autoencoder, verified first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from nbcnn.lab.measure.clocks import Watch
from nbcnn.lab.measure.op import Choice, prepare, timed_in_turn
from nbcnn.lab.measure.opcases import LAYERS, conv_problem
from nbcnn.lab.measure.steady import warm_up
from nbcnn.lab.peers import cudnn_plans
from nbcnn.lab.peers import torch_step as peers
from nbcnn.plan.storage import ITEMSIZE

PATHS = ("fprop", "dgrad", "wgrad")
FUSED = {
    "conv1": {"fprop": "conv_relu_pool_fprop", "wgrad": "conv_pool_wgrad"},
    "conv2": {"fprop": "conv_relu_pool_fprop", "dgrad": "conv_dgrad_relu", "wgrad": "conv_wgrad"},
    "conv3": {"fprop": "conv_relu_fprop", "dgrad": "conv_dgrad_relu", "wgrad": "conv_wgrad"},
    "conv4": {"fprop": "upconv_relu_fprop", "dgrad": "upconv_dgrad_relu", "wgrad": "upconv_wgrad"},
    "conv5": {"fprop": "upconv_mse_fprop", "dgrad": "upconv_dgrad_relu", "wgrad": "upconv_wgrad"},
}
"""The op that the fused autoencoder runs for each layer and pass."""
CALLS = 10
"""Calls in one captured graph, unless all sets of operands take more."""
SECONDS = 0.5
"""A figure is sampled for at most so long."""


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

    cuDNN is what PyTorch runs of it, and beside that its best plan, where its frontend is installed (`cudnn_plans`).

    conv1 needs no dgrad. `fused` times the ops of the fused plan (with ReLU, pooling, folded upsampling, loss); their
    TFLOP/s count the direct convolution, so a folded one may exceed the GPU's peak. Weights are packed beforehand.

    Raises NotTimed for an op that fails parity.
    """
    for name in layers:
        shape = replace(LAYERS[name], N=batch)
        for path in PATHS:
            if (name, path) == ("conv1", "dgrad"):
                continue
            op = FUSED[name][path] if fused else f"conv_{path}"
            made = prepare(Choice(mode, precision, engine), conv_problem(op, shape))
            works = [made.work("rotate", graph=True)]
            if beside_cudnn:
                works.append(peers.convolution(shape, path, made.row.precision, made.device))
            why = None
            if beside_cudnn and cudnn_plans.available():
                try:
                    works.append(cudnn_plans.convolution(shape, path, made.row.precision, made.device))
                except cudnn_plans.NoPlan as error:
                    why = str(error)
            with Watch(made.device) as watch:
                warm = warm_up(works, watch)
                ours, *peer = timed_in_turn(works, max(CALLS, len(made.bounds)), warm, watch, SECONDS)
            timing = ours.timing
            ratio = peer[0].against(ours) if peer else None
            yield {
                "layer": name,
                "path": path,
                "op": op,
                "batch": batch,
                "mode": mode,
                "precision": made.row.precision,
                "runs_as": made.part,
                "ms": timing.as_dict(),
                "tflops": shape.flops() / timing.median / 1e9,
                "gbytes_per_second": shape.bytes(ITEMSIZE[made.row.store]) / timing.median / 1e6,
                "cudnn_ms": peer[0].timing.as_dict() if peer else None,
                "ratio": 1 / ratio[0] if ratio else None,
                "ratio_interval": [1 / ratio[2], 1 / ratio[1]] if ratio else None,
                **_best(ours, peer[1:], why),
                **ours.samples.gpu,
                "steady": ours.samples.steady,
            }


def _best(ours: Any, found: Sequence[Any], why: str | None) -> dict[str, Any]:
    """Fields of cuDNN's best plan: its time and how many times as fast ours is, or why it has none; nothing where it was not looked for."""
    if not found:
        return {"best_plan_why": why} if why else {}
    return {"best_plan_ms": found[0].timing.as_dict(), "best_plan_ratio": 1 / found[0].against(ours)[0]}
