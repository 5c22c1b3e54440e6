"""This module says how far a right result may be from the reference: the bounds that gradcheck, the tests and the autotuner share."""

from __future__ import annotations

from nbcnn.plan.storage import UNIT_ROUNDOFF

STORE = {"fp32": "float32", "tf32": "tfloat32", "bf16": "bfloat16", "fp16": "float16"}
"""By precision, the type in which a row stores activations and their gradients: rounded as its products take them."""

EPS = 2.0**-23
"""Float32's machine epsilon."""


def parity_bound(terms: int, precision: str) -> float:
    """4·(u + ε·√terms) for ‖got − ref‖ / ‖ref‖ of a sum of `terms` products.

    Rounding errors of the sum grow like a random walk; u is the unit roundoff of what `precision` stores in between (a
    result, a sum of weights), 0 for fp32.
    """
    unit = 0.0 if precision == "fp32" else UNIT_ROUNDOFF[STORE[precision]]
    return 4 * (unit + EPS * max(terms, 1) ** 0.5)
