"""This module says what a pass over images does with its sums before it stores them: the epilogue, in the words of the engines mma and wgmma.

"rows"     sums with the bias and the activation become pixels of y; of four phases, each every second pixel of every second line
"mask"     the gradient behind a ReLU: zero where x, the ReLU's output, is not positive; wgmma's patch kernel may add a second gradient of x before
"pool"     ReLU and 2×2 max pooling: maxima to y, their argmax to index
"moments"  rows as they are stored, and the moments of their channels (moments.py), for a batch normalisation
"sums"     an input gradient, and for the batch normalisation in front of it the sums of its gradient (wgmma alone, by its patch kernel)
"partial"  sums as they are, to scratch, for a second launch that does one of the others (mma alone splits GK)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nbcnn.ops.activations.table import epilogue_function
from nbcnn.ops.kernel.call import Call
from nbcnn.plan.op import Add, Mask, Op, Partials, Pool

WITH_MOMENTS = Op("conv", "fprop", after=(Partials("moments"),))
"""x, w[, b] -> y, partials (2,K,chunks) float32. No op of the table: how many chunks there are is the tile's business (`chunk_of`)."""
WITH_SECOND = Op("conv", "dgrad", after=(Add(), Mask("relu")))
"""The masked gradient to which a second one is added (`nbcnn.ops.conv.fused`)."""
WITH_SUMS = Op("conv", "dgrad", after=(Partials("sums"),))
"""dy, w, x, weight, bias, mean, rstd[, y][, more] -> dx, partials (2,K,chunks) float32, and attributes activation, masked, added; not of the table.

What they are says `nbcnn.ops.conv_norm.gradient_sums`.
"""


@dataclass(frozen=True)
class Epilogue:
    """What a call wants done with its sums, and the operands for it; None where there is none.

    kind   "rows", "mask", "pool", "moments" or "sums"
    after  the device function of the activation of rows, or None; a pooling has its ReLU
    b      the bias (K); x: the mask; second: the second output, where the argmax goes, the moments or the sums
    """

    kind: str
    after: Any
    b: Any
    x: Any
    second: Any


def kind_of(call: Call) -> str:
    """The kind of epilogue that a pass over images has."""
    if call.op in (WITH_MOMENTS, WITH_SUMS):
        return "moments" if call.op == WITH_MOMENTS else "sums"
    return "mask" if call.op.mask else "pool" if call.op.has(Pool) else "rows"


def epilogue(call: Call) -> Epilogue:
    """The epilogue of a bound call of a pass over images."""
    kind = kind_of(call)
    third = call.ins[2] if len(call.ins) > 2 else None
    return Epilogue(
        kind,
        epilogue_function(call) if kind == "rows" else None,
        third if call.op.direction == "fprop" else None,
        third if kind == "mask" else None,
        call.outs[1] if kind in ("pool", "moments", "sums") else None,
    )
