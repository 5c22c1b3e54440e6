"""This module counts the multiplications, additions and bytes of a step, whatever kernel runs it."""

from __future__ import annotations

from nbcnn.plan.graph import Step
from nbcnn.plan.shapes import ConvShape, numel


def conv_shape(step: Step) -> ConvShape | None:
    """The convolution of which a step computes a pass, fused or not; None for another op, and for one with groups or dilation.

    Of a folded convolution it is the direct one, on the doubled image.
    """
    if "conv" not in step.op or step.op == "convert" or step.op.startswith(("dwconv1d", "gconv")):
        return None
    weight_at = step.outs[0] if "wgrad" in step.op else step.ins[1]
    x = step.outs[0] if "dgrad" in step.op else step.ins[0]
    if step.op.startswith("pwconv1d"):
        n, c, length = x.shape
        return ConvShape(n, c, length, 1, weight_at.shape[0], 1, 1)
    n, c, height, width = x.shape
    k, _, r, s = weight_at.shape
    if step.op.startswith("upconv"):
        return ConvShape(n, c, 2 * height, 2 * width, k, r, s, 1, 1)
    return ConvShape(n, c, height, width, k, r, s, step.attrs["stride"], step.attrs["pad"])


def step_flops(step: Step) -> int:
    """Multiplications and additions of the step in direct form; 0 for everything that is no convolution and no matrix product."""
    if step.op == "gemm":
        return 2 * numel(step.ins[0].shape) * step.ins[1].shape[0]
    if step.op.startswith("dwconv1d"):
        return dwconv1d_flops(step)
    if step.op.startswith("gconv"):
        # A product and a sum for every weight of a filter at every pixel of its output.
        output, weight = (step.ins[1], step.outs[0]) if "wgrad" in step.op else (step.ins[0] if "dgrad" in step.op else step.outs[0], step.ins[1])
        return 2 * numel(output.shape) * numel(weight.shape[1:])
    shape = conv_shape(step)
    return shape.flops() if shape else 0


def dwconv1d_flops(step: Step) -> int:
    """Flops of a depthwise convolution: a product and a sum for every tap inside the series, for every pass that the step computes."""
    (n, c, length), both = step.ins[0].shape, step.op == "dwconv1d_bwd"
    taps = (step.outs[0] if step.op.endswith("wgrad") else step.ins[2 if both else 1]).shape[1]
    right = 0 if step.attrs["padding"] == "causal" else taps - 1 - taps // 2
    met = sum(max(0, length - abs(j)) for j in range(right - taps + 1, right + 1))
    return (4 if both else 2) * n * c * met


def fewest_flops(step: Step) -> int:
    """The fewest flops of a step: those of the direct form, and behind an upsampling nine of its 36 products (difference and box form).

    Winograd's form, which fp32 takes in large batches, needs 16 of 36 and does not count here.
    """
    return step_flops(step) // 4 if step.op.startswith("upconv") else step_flops(step)


def step_bytes(step: Step) -> int:
    """Compulsory bytes of a step: every operand once. A gather counts the images that it takes, not the resident set."""
    ins = step.ins if not step.op.startswith("gather") else ()
    return sum(buf.nbytes for buf in (*ins, *step.outs))
