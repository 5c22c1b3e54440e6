"""2^x, 1/x, √x and tanh x as the GPU's special function unit makes them: `ex2.approx.ftz`, `rcp.approx.ftz`, `sqrt.approx.ftz`, `tanh.approx`.

The first three are right to 2 ulp and take every operand: 2^x goes to 0 and ∞, 1/∞ is 0, NaN stays NaN; subnormal numbers count as 0. The
compiler's own exp, division and root add steps for subnormal numbers, of which there are none in 1 + 2^x or in a deviation.
"""

from __future__ import annotations

from nbcnn.gpu.language import SIMULATOR, cuda, f4

LOG2E = 1.4426950408889634

if SIMULATOR:
    import numpy as np

    @cuda.jit(device=True)
    def exp2(x):
        with np.errstate(over="ignore", under="ignore"):
            return np.exp2(np.float32(x))

    @cuda.jit(device=True)
    def reciprocal(x):
        return np.float32(1) / np.float32(x)

    @cuda.jit(device=True)
    def squashed(x, slope):
        return x * reciprocal(f4(1) + exp2(slope * x))

    @cuda.jit(device=True)
    def larger(a, b):
        return np.maximum(a, b)

    @cuda.jit(device=True)
    def root(x):
        return np.sqrt(np.float32(x))

    @cuda.jit(device=True)
    def tanh(x):
        return np.tanh(np.float32(x))
else:
    from nbcnn.ops.ptx.asm import instruction

    exp2 = instruction("ex2_approx", "ex2.approx.ftz.f32 $0, $1;", f4, (f4,), pure=True)
    """2^x of a float32."""
    reciprocal = instruction("rcp_approx", "rcp.approx.ftz.f32 $0, $1;", f4, (f4,), pure=True)
    """1/x of a float32."""
    root = instruction("sqrt_approx", "sqrt.approx.ftz.f32 $0, $1;", f4, (f4,), pure=True)
    """√x of a float32."""
    tanh = instruction("tanh_approx", "tanh.approx.f32 $0, $1;", f4, (f4,), pure=True)
    """tanh x of a float32, to a relative error of 2⁻¹¹."""
    larger = instruction("max_nan", "max.NaN.f32 $0, $1, $2;", f4, (f4, f4), pure=True)
    """The larger of two float32, NaN if either is; `max` drops a NaN."""
    squashed = instruction(
        "squashed",
        "{ .reg .f32 t; mul.f32 t, $1, $2; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 t, t; mul.f32 $0, $1, t; }",
        f4,
        (f4, f4),
    )
    """x/(1 + 2^(slope·x)) of (x, slope), where this stands."""
