"""This study times our convolutions beside cuDNN's, in turn: every layer and pass of the autoencoder, verified first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nbcnn.lab.measure.clocks import Watch
from nbcnn.lab.measure.op import Choice, Measured, prepare, timed_in_turn
from nbcnn.lab.measure.opcases import LAYERS, conv_problem
from nbcnn.lab.measure.steady import warm_up
from nbcnn.lab.peers import cudnn_plans
from nbcnn.lab.peers import torch_step as peers
from nbcnn.plan.op import Loss, Map, Mask, Op, Pool, Unpool
from nbcnn.plan.shapes import ConvShape
from nbcnn.plan.storage import ITEMSIZE

PATHS = ("fprop", "dgrad", "wgrad")
POOLED, WGRAD = Op("conv", "fprop", after=(Map("relu"), Pool())), Op("conv", "wgrad")
MASKED = Op("conv", "dgrad", after=(Mask("relu"),))
"""The op of the fused plan that is timed with its mask and without it, each beside cuDNN's best plan of the same work."""
UP = {"dgrad": Op("upconv", "dgrad", after=(Mask("relu"),)), "wgrad": Op("upconv", "wgrad")}
FUSED = {
    "conv1": {"fprop": POOLED, "wgrad": Op("conv", "wgrad", before=(Unpool(),))},
    "conv2": {"fprop": POOLED, "dgrad": MASKED, "wgrad": WGRAD},
    "conv3": {"fprop": Op("conv", "fprop", after=(Map("relu"),)), "dgrad": MASKED, "wgrad": WGRAD},
    "conv4": {"fprop": Op("upconv", "fprop", after=(Map("relu"),)), **UP},
    "conv5": {"fprop": Op("upconv", "fprop", after=(Loss("mse"),)), **UP},
}
"""The op that the fused autoencoder runs for each layer and pass."""
CALLS = 10
"""Calls in one captured graph, unless all sets of operands take more."""
SECONDS = 0.5
"""A figure is sampled for at most so long, if nothing else is asked for."""


def passes(
    mode: str,
    batch: int,
    layers: tuple[str, ...] = tuple(LAYERS),
    beside_cudnn: bool = True,
    *,
    precision: str | None = None,
    engine: str = "auto",
    fused: bool = False,
    seconds: float | None = None,
    warmup: float | None = None,
) -> Iterator[dict[str, Any]]:
    """One row per layer and pass: our time, cuDNN's convolution alone in the same precision, the ratio, and the rate.

    cuDNN is what PyTorch runs of it, and beside that its best plan, where its frontend is installed (`cudnn_plans`); `best_plan_op` says what the
    plan computes. Of `MASKED` there is a second row, of the same gradient without the mask: all of both are timed in turn, and each best plan is
    of the row's own work.

    conv1 needs no dgrad. `fused` times the ops of the fused plan (with ReLU, pooling, folded upsampling, loss); their
    TFLOP/s count the direct convolution, so a folded one may exceed the GPU's peak. Weights are packed beforehand. A figure is sampled for
    `seconds` at most (None: SECONDS), after `warmup` seconds, or (None) when times and clock stand still.

    Raises NotTimed for an op that fails parity.
    """
    choice = Choice(mode, precision, engine)
    for name in layers:
        shape = replace(LAYERS[name], N=batch)
        for path in PATHS:
            if (name, path) == ("conv1", "dgrad"):
                continue
            op = FUSED[name][path] if fused else Op("conv", path)
            ours = [prepare(choice, conv_problem(each, shape)) for each in ((op, Op("conv", "dgrad")) if op == MASKED else (op,))]
            device, rounding = ours[0].device, ours[0].row.precision
            peer = [peers.convolution(shape, path, rounding, device)] if beside_cudnn else []
            plans = _plans(shape, path, [made.op for made in ours], rounding, device) if beside_cudnn and cudnn_plans.available() else {}
            best = {each: work for each, work in plans.items() if not isinstance(work, str)}
            works = [*(made.work("rotate", graph=True) for made in ours), *peer, *best.values()]
            with Watch(device) as watch:
                warm = warm_up(works, watch, warmup)
                found = timed_in_turn(works, max(CALLS, len(ours[0].bounds)), warm, watch, SECONDS if seconds is None else seconds)
            its, planned = found[len(ours) : len(ours) + len(peer)], dict(zip(best, found[len(ours) + len(peer) :], strict=True))
            for made, mine in zip(ours, found, strict=False):
                timing = mine.timing
                ratio = its[0].against(mine) if its else None
                yield {
                    "layer": name,
                    "path": path,
                    "op": str(made.op),
                    "batch": batch,
                    "mode": mode,
                    "precision": rounding,
                    "runs_as": made.part,
                    "ms": timing.as_dict(),
                    "tflops": shape.flops() / timing.median / 1e9,
                    "gbytes_per_second": shape.bytes(ITEMSIZE[made.row.store]) / timing.median / 1e6,
                    "cudnn_ms": its[0].timing.as_dict() if its else None,
                    "ratio": 1 / ratio[0] if ratio else None,
                    "ratio_interval": [1 / ratio[2], 1 / ratio[1]] if ratio else None,
                    **_best(str(made.op), mine, planned, plans),
                    **mine.samples.gpu,
                    "steady": mine.samples.steady,
                }


def _plans(shape: ConvShape, path: str, ops: Sequence[Op], precision: str, device: Any) -> dict[str, Any]:
    """cuDNN's best plan by what it computes, or why there is none: the pass, and the masked gradient where it is among `ops`."""
    found: dict[str, Any] = {}
    for op in (Op("conv", path), *([MASKED] if MASKED in ops else [])):
        try:
            found[str(op)] = cudnn_plans.convolution(shape, path, precision, device, masked=op == MASKED)
        except cudnn_plans.NoPlan as error:
            found[str(op)] = str(error)
    return found


def _best(op: str, ours: Measured, planned: Mapping[str, Measured], plans: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of cuDNN's best plan of the op, or of its pass alone: its time and how many times as fast ours is, or why there is none.

    Nothing where no plan was looked for. A masked gradient is never put beside a plan without the mask.
    """
    if not plans:
        return {}
    of = op if op in plans else next(iter(plans))
    if of not in planned:
        return {"best_plan_op": of, "best_plan_why": plans[of]}
    return {"best_plan_op": of, "best_plan_ms": planned[of].timing.as_dict(), "best_plan_ratio": 1 / planned[of].against(ours)[0]}
