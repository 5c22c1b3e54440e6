"""This module says what a pass over images does with its sums before it stores them: the epilogue, in the words of the engines mma and wgmma.

"rows"     sums with the bias and the activation become pixels of y; of four phases, each every second pixel of every second line
"mask"     the gradient behind a ReLU: zero where x, the ReLU's output, is not positive
"pool"     ReLU and 2×2 max pooling: maxima to y, their argmax to index
"partial"  sums as they are, to scratch, for a second launch that does one of the others (mma alone splits GK)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nbcnn.ops.activations.table import epilogue_of
from nbcnn.ops.kernel.call import Call


@dataclass(frozen=True)
class Epilogue:
    """What a call wants done with its sums, and the operands for it; None where there is none.

    kind   "rows", "mask" or "pool"
    after  the activation of rows, or ""; a pooling has its ReLU
    b      the bias (K); x: the mask; index: where the argmax goes
    """

    kind: str
    after: str
    b: Any
    x: Any
    index: Any


def epilogue(call: Call) -> Epilogue:
    """The epilogue of a bound call of a pass over images."""
    kind = "mask" if call.op.endswith("dgrad_relu") else "pool" if "pool" in call.op else "rows"
    third = call.ins[2] if len(call.ins) > 2 else None
    return Epilogue(
        kind,
        epilogue_of(call.op) if kind == "rows" else "",
        third if "fprop" in call.op else None,
        third if kind == "mask" else None,
        call.outs[1] if kind == "pool" else None,
    )
