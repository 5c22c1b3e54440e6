"""The special function unit's 2^x, 1/x and tanh x: `ex2.approx.ftz`, `rcp.approx.ftz`, `tanh.approx`.

The first two are right to 2 ulp and take every operand: 2^x goes to 0 and ∞, 1/∞ is 0, NaN stays NaN; subnormal numbers count as 0. The
compiler's own exp and division add steps for subnormal numbers, of which there are none in 1 + 2^x or in a deviation.
"""

from __future__ import annotations

from nbcnn.gpu.language import NUMBA_SIMULATOR, f4, jit

LOG2E = 1.4426950408889634

if NUMBA_SIMULATOR:
    import numpy as np

    @jit(device=True)
    def exp2(x):
        with np.errstate(over="ignore", under="ignore"):
            return np.exp2(np.float32(x))

    @jit(device=True)
    def reciprocal(x):
        return np.float32(1) / np.float32(x)

    @jit(device=True)
    def larger(a, b):
        return np.maximum(a, b)

    @jit(device=True)
    def tanh(x):
        return np.tanh(np.float32(x))
else:
    from nbcnn.ops.ptx.asm import instruction

    exp2 = instruction("ex2_approx", "ex2.approx.ftz.f32 $0, $1;", f4, (f4,), pure=True)
    """2^x of a float32."""
    reciprocal = instruction("rcp_approx", "rcp.approx.ftz.f32 $0, $1;", f4, (f4,), pure=True)
    """1/x of a float32."""
    tanh = instruction("tanh_approx", "tanh.approx.f32 $0, $1;", f4, (f4,), pure=True)
    """tanh x of a float32, to a relative error of 2⁻¹¹."""
    larger = instruction("larger", "{ .reg .s32 a, b; mov.b32 a, $1; mov.b32 b, $2; max.s32 a, a, b; mov.b32 $0, a; }", f4, (f4, f4), pure=True)
    """The larger of two float32 of which one is positive, NaN if either is; `max` drops a NaN.

    It compares bits as integers: positive numbers then stand in their order, the GPU's NaN (0x7fffffff) above ∞, negative numbers below zero. One
    instruction as `max` is, on every GPU; `max.NaN` needs compute capability 8.0.
    """
