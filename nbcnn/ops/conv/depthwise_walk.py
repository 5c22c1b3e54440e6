"""The walk of depthwise convolutions as numbers: which element that a thread has loaded goes with which tap into which sum, and where steps lie.

`Walk` is what is frozen into a kernel, `Pass` a walk over the shapes of one call. A step of the walk reads the next rows of the source, as wide as
the windows of its columns, adds their products to the sums of all target rows that they reach, and stores the rows that are complete.

The gradient of the input walks too. With stride 1 it is a convolution of dy with the filters flipped. With a stride U×V a step reads one
row of dy and makes U rows of dx, V columns wide, each from the taps that reach it: zeros between strided pixels are not multiplied.

A dilation of D rows, where it does not divide the stride, splits the target rows into classes modulo D (`phases`), each of which shares source rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from nbcnn.ops.kernel.call import Call
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.plan.op import Op

Pair = tuple[int, int]


@dataclass(frozen=True)
class Walk:
    """What of a pass is frozen into its kernel: which loaded element goes with which tap into which sum.

    A step loads `reads` rows of `across` columns and makes `makes` rows of `wide` columns; `slots` rows of sums are open.
    Tap row r takes row reads − 1 − e mod `over` of what was loaded into slot ⌊e / over⌋, e = turn + r·sign.
    Tap column s takes column ⌊f / even⌋ + j·jump into column f mod even + j, f = s·spread, for each j < `columns`.
    """

    R: int
    S: int
    reads: int
    makes: int
    slots: int
    turn: int
    sign: int
    over: int
    across: int
    wide: int
    spread: int
    even: int
    columns: int = 1
    jump: int = 1

    @property
    def ahead(self) -> int:
        """Steps before the first that completes a row."""
        return ceil_div(self.slots, self.makes) - 1


def forward(R: int, S: int, stride: int, columns: int = 1, jump: int = 1) -> Walk:
    """A convolution whose windows are `stride` tap rows apart, and `jump` tap columns: a step completes one row of `columns` columns."""
    across = (columns - 1) * jump + S
    return Walk(R, S, min(stride, R), 1, ceil_div(R, stride), R - 1, -1, stride, across, columns, 1, 1, columns, jump)


def backward(R: int, S: int, stride: Pair, dilation: Pair) -> Walk:
    """The gradient of a strided convolution by its input: a step completes as many rows, and a thread owns as many columns, as the stride has."""
    (down, right), (deep, wide) = stride, dilation
    slots = max(down, (R - 1) * deep + 1)
    return Walk(R, S, 1, down, slots, 0, deep, 1, (S - 1) * wide // right + 1, right, wide, right)


@dataclass(frozen=True)
class Pass:
    """A walk over one call: source (N, C, H, W), target (N, C, P, Q), and where steps and cells lie.

    Step i of phase f reads rows row0 + f·row_phase + i·row_step + u·row_read, u < reads, and makes rows out_row0 + f + i·out_step + o, o < makes;
    cell j reads columns col0 + j·col_step + v·col_read, and makes columns out_col0 + j·wide + o.
    """

    walk: Walk
    source: tuple[int, ...]
    target: tuple[int, ...]
    phases: int
    steps: int
    cells: int
    row0: int
    row_phase: int
    row_step: int
    row_read: int
    col0: int
    col_step: int
    col_read: int
    out_row0: int
    out_step: int
    out_col0: int


def convolution(source: tuple[int, ...], target: tuple[int, ...], window: Pair, stride: Pair, dilation: Pair, pad: Pair, columns: int) -> Pass:
    """The pass that makes each target pixel from the window around it, `columns` side by side; with more than one the taps are side by side too."""
    (R, S), (down, right), (deep, wide), (top, left) = window, stride, dilation, pad
    common = gcd(down, deep)
    phases, apart = deep // common, down // common
    walk = forward(R, S, apart, columns, right if columns > 1 else 1)
    rows = ((R - walk.reads) * deep - top, down, apart * deep, deep)
    steps, cells = ceil_div(target[2], phases), ceil_div(target[3], columns)
    return Pass(walk, source, target, phases, steps, cells, *rows, -left, right * columns, wide, 0, phases, 0)


def pass_of(call: Call, columns: int = 1) -> Pass:
    """The pass of a call of gconv_*; that of gconv_wgrad is the forward one. A pass over strided gradients has the stride's columns."""
    attrs, source, made = call.attrs, call.in_shapes[0], call.out_shapes[0]
    stride, dilation, pad = tuple(attrs["stride"]), tuple(attrs["dilation"]), tuple(attrs["pad"])
    _, _, R, S = made if call.op == Op("gconv", "wgrad") else call.in_shapes[1]
    window = R, S
    if call.op == Op("gconv", "wgrad"):
        return convolution(source, call.in_shapes[1], window, stride, dilation, pad, columns)
    if call.op == Op("gconv", "fprop"):
        return convolution(source, made, window, stride, dilation, pad, columns)
    (deep, wide), (top, left) = dilation, pad
    if stride == (1, 1):
        return convolution(source, made, window, stride, dilation, ((R - 1) * deep - top, (S - 1) * wide - left), columns)
    walk = backward(R, S, stride, dilation)
    steps, cells = ceil_div(made[2] + top, stride[0]), ceil_div(made[3] + left, stride[1])
    return Pass(walk, source, made, 1, steps, cells, 0, 0, 1, 0, 0, 1, -1, -top, stride[0], -left)


def inside(g: Pass, length: int) -> tuple[int, int]:
    """Rows of one channel of an image that all strips load, and columns that all cells do."""
    rows = columns = 0
    for phase in range(g.phases):
        for first in range(0, g.steps, length):
            for step in range(first - g.walk.ahead, min(first + length, g.steps)):
                row = g.row0 + phase * g.row_phase + step * g.row_step
                rows += sum(0 <= row + u * g.row_read < g.source[2] for u in range(g.walk.reads))
    for cell in range(g.cells):
        columns += sum(0 <= g.col0 + cell * g.col_step + v * g.col_read < g.source[3] for v in range(g.walk.across))
    return rows, columns
