"""This module counts the multiplications, additions and bytes of a step, whatever kernel runs it."""

from __future__ import annotations

from nbcnn.plan.graph import Buf, Step
from nbcnn.plan.roles import Role, role
from nbcnn.plan.shapes import ConvShape, numel


def operand(step: Step, wanted: Role) -> Buf:
    """The first operand of a step that has this role, read or written. Raises StopIteration if it has none."""
    sides = (("in", step.ins), ("out", step.outs))
    return next(buf for side, bufs in sides for position, buf in enumerate(bufs) if role(step.op, side, position) is wanted)


def conv_shape(step: Step) -> ConvShape | None:
    """The convolution of which a step computes a pass, fused or not; None for another op, and for one with groups or dilation.

    Of a folded convolution it is the direct one, on the doubled image.
    """
    kind = step.op.kind
    if kind not in ("conv", "upconv", "pwconv1d"):
        return None
    x, filters = operand(step, Role.INPUT).shape, operand(step, Role.FILTER).shape
    if kind == "pwconv1d":
        n, c, length = x
        return ConvShape(n, c, length, 1, filters[0], 1, 1)
    n, c, height, width = x
    k, _, r, s = filters
    if kind == "upconv":
        return ConvShape(n, c, 2 * height, 2 * width, k, r, s, 1, 1)
    return ConvShape(n, c, height, width, k, r, s, step.attrs["stride"], step.attrs["pad"])


def step_flops(step: Step) -> int:
    """Multiplications and additions of the step in direct form; 0 for everything that is no convolution and no matrix product."""
    kind = step.op.kind
    if kind == "gemm":
        return 2 * numel(step.ins[0].shape) * step.ins[1].shape[0]
    if kind == "dwconv1d":
        return dwconv1d_flops(step)
    if kind == "gconv":
        # A product and a sum for every weight of a filter at every pixel of its output.
        return 2 * numel(operand(step, Role.OUTPUT).shape) * numel(operand(step, Role.FILTER).shape[1:])
    shape = conv_shape(step)
    return shape.flops() if shape else 0


def dwconv1d_flops(step: Step) -> int:
    """Flops of a depthwise convolution: a product and a sum for every tap inside the series, for every pass that the step computes."""
    (n, c, length), taps = step.ins[0].shape, operand(step, Role.FILTER).shape[1]
    right = 0 if step.attrs["padding"] == "causal" else taps - 1 - taps // 2
    met = sum(max(0, length - abs(j)) for j in range(right - taps + 1, right + 1))
    return (4 if step.op.direction == "bwd" else 2) * n * c * met


def fewest_flops(step: Step) -> int:
    """The fewest flops of a step: those of the direct form, and behind an upsampling nine of its 36 products (difference and box form).

    Winograd's form, which fp32 takes in large batches, needs 16 of 36 and does not count here.
    """
    return step_flops(step) // 4 if step.op.kind == "upconv" else step_flops(step)


def step_bytes(step: Step) -> int:
    """Compulsory bytes of a step: every operand once. A gather counts the images that it takes, not the resident set."""
    ins = () if role(step.op, "in", 0) is Role.TABLE else step.ins
    return sum(buf.nbytes for buf in (*ins, *step.outs))
