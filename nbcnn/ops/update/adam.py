"""Adam over the flat parameter buffer, as torch.optim.Adam (L2 decay inside the gradient, no AMSGrad):

    g ← clipped g + weight_decay · w                     (as in sgd.py)
    m ← m + (1 - beta1) (g - m)
    v ← beta2 · v + (1 - beta2) g²
    w ← w - lr / (1 - beta1^t) · m / (√v / √(1 - beta2^t) + eps),   t = STEP + 1

`decoupled` is AdamW, as torch.optim.AdamW: the decay leaves the gradient, and so the moments, alone, and w ← w − lr·weight_decay·w comes before the
last line. Sources: D. P. Kingma, J. Ba, "Adam: a method for stochastic optimization", ICLR 2015, algorithm 1; I. Loshchilov, F. Hutter, "Decoupled
weight decay regularization", arXiv:1711.05101.

    adam              w, g, m, v, lr (steps), state[, norm ()] -> w, m, v, state (in place)         beta1, beta2, eps, decoupled, then as sgd
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, i8, jit, types
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks, host
from nbcnn.ops.kernel.case import Case, normal
from nbcnn.ops.kernel.traffic import Traffic, size
from nbcnn.ops.ptx.vector import load4, store4
from nbcnn.ops.update.advance import NONFINITE, STEP, example_state
from nbcnn.ops.update.sgd import (
    CLIPPED,
    PLAIN,
    THREADS,
    current_rate,
    effective,
    effective_gradient,
    example_rates,
    learning_rate,
    norm_factor,
    regularisation_args,
)
from nbcnn.plan.shapes import numel

f8: Any = types.float64


def adam(*operands: np.ndarray, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, decoupled: bool = False, **regularisation: Any) -> None:
    """One update in place.

    Operands: w, g, m, v (P), lr (steps), state (8) int64[, norm () float64]; then the outputs w, m, v, state, the same
    arrays. Keywords: beta1, beta2, eps, decoupled, and those of `effective_gradient`. Sets state[NONFINITE] to 1 if an updated
    weight is not finite.
    """
    w, g, m, v, lr, state, *norm = operands[:-4]
    w_out, m_out, v_out, state_out = operands[-4:]
    number = w.dtype.type
    if decoupled:
        decay, decayed = regularisation.get("weight_decay", 0.0), regularisation.get("decayed", 0)
        regularisation = regularisation | {"weight_decay": 0.0}
        g = effective_gradient(g, w, norm[0] if norm else None, **regularisation)
        w_out[:decayed] = w[:decayed] - number(learning_rate(lr, state)) * number(decay) * w[:decayed]
        w = w_out
    else:
        g = effective_gradient(g, w, norm[0] if norm else None, **regularisation)
    t = int(state[STEP]) + 1
    np.add(m, (1 - beta1) * (g - m), out=m_out)
    np.multiply(v, beta2, out=v_out)
    np.add(v_out, (1 - beta2) * (g * g), out=v_out)
    scale = number(float(learning_rate(lr, state)) / (1 - beta1**t))
    np.subtract(w, scale * (m_out / (np.sqrt(v_out) * number((1 - beta2**t) ** -0.5) + number(eps))), out=w_out)
    if not np.isfinite(w_out).all():
        state_out[NONFINITE] = 1


@jit(device=True)
def power(base, exponent):
    """base^exponent by repeated squaring in float64, exponent >= 0: at most 62 multiplications, no library call."""
    result = f8(1)
    while exponent > i8(0):
        if exponent & i8(1):
            result *= base
        base *= base
        exponent >>= i8(1)
    return result


@jit(device=True)
def adam_one(w, g, m, v, scale, widen, beta1, beta2, eps):
    """(w, m, v) of one element after an update with its effective gradient g."""
    m = m + f4(f8(1) - beta1) * (g - m)
    v = f4(beta2) * v + f4(f8(1) - beta2) * (g * g)
    return w - scale * (m / (math.sqrt(v) * widen + eps)), m, v


@jit(device=True)
def decay_apart(w, index, amount, decayed):
    """Element `index` of the weights less `amount` times itself, where it decays."""
    return w - amount * w if index < decayed else w


@functools.cache
def kernel_of(decoupled: bool) -> Any:
    """The kernel of Adam, or with `decoupled` that of AdamW."""

    @jit()
    def adam_kernel(w, g, m, v, lr, state, norm, count, beta1, beta2, eps, clip_norm, clip_value, weight_decay, decayed):
        """m ← m + (1-beta1)(g-m); v ← beta2·v + (1-beta2)g²; w ← w - scale · m / (√v · widen + eps), g the effective gradient,

        scale = lr / (1 - beta1^t), widen = 1 / √(1 - beta2^t); decoupled: w ← w − lr·weight_decay·w before.
        grid ceil(P / 1024), block 256, a thread owns four neighbours, and the first threads one each of the last P % 4.
        Shared 8 bytes; moves 28·P bytes. 16-byte aligned w, g, m, v.
        """
        corrections = cuda.shared.array(2, types.float32)
        # Once a block: float64 is slow on many GPUs.
        if cuda.threadIdx.x == 0:
            t = state[STEP] + i8(1)
            corrections[0] = f8(current_rate(lr, state)) / (f8(1) - power(beta1, t))
            corrections[1] = f8(1) / math.sqrt(f8(1) - power(beta2, t))
        cuda.syncthreads()
        scale, widen = corrections[0], corrections[1]
        factor = norm_factor(norm, clip_norm)
        coupled, apart = weight_decay, 0.0
        if decoupled:
            coupled, apart = 0.0, current_rate(lr, state) * weight_decay
        thread = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        quads = count >> 2
        finite = True
        if thread < quads:
            i = 4 * thread
            w0, w1, w2, w3 = load4(w, i)
            g0, g1, g2, g3 = load4(g, i)
            m0, m1, m2, m3 = load4(m, i)
            v0, v1, v2, v3 = load4(v, i)
            g0 = effective(g0, w0, i, factor, clip_value, coupled, decayed)
            g1 = effective(g1, w1, i + 1, factor, clip_value, coupled, decayed)
            g2 = effective(g2, w2, i + 2, factor, clip_value, coupled, decayed)
            g3 = effective(g3, w3, i + 3, factor, clip_value, coupled, decayed)
            if decoupled:
                w0, w1 = decay_apart(w0, i, apart, decayed), decay_apart(w1, i + 1, apart, decayed)
                w2, w3 = decay_apart(w2, i + 2, apart, decayed), decay_apart(w3, i + 3, apart, decayed)
            w0, m0, v0 = adam_one(w0, g0, m0, v0, scale, widen, beta1, beta2, eps)
            w1, m1, v1 = adam_one(w1, g1, m1, v1, scale, widen, beta1, beta2, eps)
            w2, m2, v2 = adam_one(w2, g2, m2, v2, scale, widen, beta1, beta2, eps)
            w3, m3, v3 = adam_one(w3, g3, m3, v3, scale, widen, beta1, beta2, eps)
            store4(w, i, w0, w1, w2, w3)
            store4(m, i, m0, m1, m2, m3)
            store4(v, i, v0, v1, v2, v3)
            finite = math.isfinite(w0) and math.isfinite(w1) and math.isfinite(w2) and math.isfinite(w3)
        j = 4 * quads + thread
        if j < count:
            gj = effective(g[j], w[j], j, factor, clip_value, coupled, decayed)
            wj = w[j]
            if decoupled:
                wj = decay_apart(wj, j, apart, decayed)
            w[j], m[j], v[j] = adam_one(wj, gj, m[j], v[j], scale, widen, beta1, beta2, eps)
            finite = finite and math.isfinite(w[j])
        if not finite:
            state[NONFINITE] = i8(1)

    return adam_kernel


def bind(call: Call) -> list[Launch]:
    w, g, m, v, lr, state, *norm = call.ins
    count = numel(call.in_shapes[0])
    betas = np.float64(call.attrs.get("beta1", 0.9)), np.float64(call.attrs.get("beta2", 0.999))
    scalars = (*betas, np.float32(call.attrs.get("eps", 1e-8)), *regularisation_args(call, norm))
    # Without clipping by norm the kernel reads no norm, and `lr` stands in for it.
    args = (w, g, m, v, lr, state, norm[0] if norm else lr, np.int32(count), *scalars)
    return [Launch(kernel_of(bool(call.attrs.get("decoupled"))), blocks(count, 4 * THREADS), THREADS, args)]


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`: weight, gradient and both moments in, weight and both moments out; the weights of the last P % 4 two more times."""
    distinct, again = sum(size(call, "in", i) for i in range(4)), 2 * 4 * (numel(call.in_shapes[0]) % 4)
    return [Traffic(distinct + again, sum(size(call, "out", i) for i in range(3)), distinct)]


HOST, OPS = {"adam": host(adam)}, {"adam": Impl(bind, traffic=traffic)}


def cases(count: int = 1003) -> Iterator[Case]:
    """`count` weights, plain and regularised."""
    w, g, m, v, state = normal(17, count), normal(18, count), normal(19, count), normal(20, count) ** 2, example_state()
    norm, betas = np.array(np.linalg.norm(g.astype(np.float64))), {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    yield Case("adam", "plain", (w, g, m, v, example_rates(), state), (0, 2, 3, 5), betas | PLAIN, 4)
    yield Case("adam", "clipped, decayed", (w, g, m, v, example_rates(), state, norm), (0, 2, 3, 5), betas | CLIPPED, 4)
    yield Case("adam", "decoupled", (w, g, m, v, example_rates(), state, norm), (0, 2, 3, 5), betas | CLIPPED | {"decoupled": True}, 4)
