"""Tests of the casts that are left in kernels: at most a hundred, each with its reason in one table."""

import ast
from collections import Counter
from pathlib import Path

OPS = Path(__file__).parents[2] / "nbcnn" / "ops"
NARROW = {"i4", "u4", "f4"}

UNSIGNED = "a number that is not negative, which the compiler cannot see: unsigned division, shift or comparison"
RANGE = "0 ≤ i < count by one unsigned comparison"
SIGNED = "an unsigned word of memory that holds a signed number"
BITS = "a mask of bits whose highest may be set, or one that begins unsigned"
BOTH = "both branches, or both results, have one type"
FLOAT = "a product or a count of int32 that goes on as float32: as int32 it may overflow"
SINGLE = "float64 becomes float32 here, where it was meant to"
PHILOX = "the random numbers are defined on unsigned words of 32 bits and products of 64"
SIMULATED = "the simulator keeps NumPy's types"
DESCRIPTOR = "a descriptor is 64 unsigned bits"

# File -> (casts, reason).
CASTS: dict[str, tuple[int, str]] = {
    "conv/mma/epilogue.py": (1, SIGNED),
    "conv/mma/loads.py": (1, SIGNED),
    "conv/mma/rows.py": (3, UNSIGNED),
    "conv/mma/wgrad_kernel.py": (2, BITS),
    "conv/mma/wgrad_load.py": (2, f"{BITS}; {SIGNED}"),
    "conv/thin/gather.py": (4, UNSIGNED),
    "conv/thin/scatter.py": (4, RANGE),
    "conv/thin_mma/first_epilogue.py": (2, BITS),
    "conv/thin_mma/last_dgrad.py": (1, BOTH),
    "conv/thin_mma/last_wgrad.py": (2, BITS),
    "conv/wgmma/epilogue.py": (2, BITS),
    "conv/wgmma/patch_gradient.py": (2, BITS),
    "conv/wgmma/wgrad_bias.py": (3, BITS),
    "conv_norm/wgmma_epilogue.py": (2, UNSIGNED),
    "conv_norm/wgmma_kernel.py": (2, FLOAT),
    "images/axis_map.py": (1, "an index out of a table of float32"),
    "images/gather.py": (5, UNSIGNED),
    "images/pixels.py": (3, "functions of the user's take and give float32, of rows, columns and channels that are unsigned"),
    "images/unpool.py": (1, BITS),
    "kernel/loops.py": (5, f"{UNSIGNED}; {RANGE}"),
    "losses/pairs.py": (1, SINGLE),
    "norms/b0.py": (2, FLOAT),
    "norms/b0_batch.py": (3, FLOAT),
    "norms/b0_held.py": (2, FLOAT),
    "norms/b0_held_grads.py": (1, FLOAT),
    "norms/held.py": (1, FLOAT),
    "norms/quads.py": (1, FLOAT),
    "norms/s0.py": (2, FLOAT),
    "norms/s0_held.py": (2, FLOAT),
    "ptx/cvt.py": (1, SIMULATED),
    "ptx/vector.py": (4, SIMULATED),
    "ptx/wgmma.py": (2, DESCRIPTOR),
    "series/dwconv1d/staging.py": (1, SIGNED),
    "series/dwconv1d/warp.py": (1, UNSIGNED),
    "svm/process.py": (1, SINGLE),
    "svm/smo.py": (2, SINGLE),
    "update/accumulate.py": (2, SINGLE),
    "update/optimizers.py": (3, SINGLE),
    "update/ema.py": (1, SINGLE),
    "update/random.py": (12, PHILOX),
    "update/rule.py": (1, SINGLE),
}


def found():
    counts = Counter()
    for path in sorted(OPS.rglob("*.py")):
        text = path.read_text()
        if not any(f"{name}(" in text for name in NARROW):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NARROW:
                counts[path.relative_to(OPS).as_posix()] += 1
    return dict(counts)


def test_every_cast_has_a_reason():
    """A literal, a sum of int32 and a product with float32 need none (`nbcnn/gpu/typing32.py`): take the cast out, or say here why it stays."""
    counts = found()
    assert counts == {path: count for path, (count, _) in CASTS.items()}
    assert sum(counts.values()) <= 100
