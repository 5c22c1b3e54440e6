"""SGD with momentum over the flat parameter buffer, as torch.optim.SGD without dampening:

    g ← clipped g + weight_decay · w      (decay only for the first `decayed` elements)
    m ← momentum · m + g                  (m starts at 0, so the first m is g)
    w ← w - lr · m, or with `nesterov` w ← w − lr · (g + momentum · m)

`lr` is a table indexed by StepState's STEP; past its end it keeps its last value. Clipping comes before the decay:
first by norm, g · min(1, clip_norm / (norm + 1e-6)) with the norm of the unclipped gradient, as
torch.nn.utils.clip_grad_norm_; then by value to ±clip_value. 0 turns either off; a NaN stays a NaN.
The zeros between two parameters of the buffer are updated like anything else, and stay zeros.
Nesterov's momentum in this form: I. Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML 2013.

    sgd               w, g, m, lr (steps), state[, norm ()] -> w, m, state      (in place)          momentum, nesterov,
                                                                      weight_decay, clip_value, clip_norm, decayed
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, i8, jit
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks, host
from nbcnn.ops.kernel.case import Case, normal
from nbcnn.ops.kernel.traffic import Traffic, size
from nbcnn.ops.ptx.vector import load4, store4
from nbcnn.ops.update.advance import NONFINITE, STEP, example_state
from nbcnn.plan.shapes import numel

THREADS = 256
NORM_EPS = 1e-6
NORM_MISSING = "clip_norm needs the gradient norm as the last input"


def learning_rate(lr: np.ndarray, state: np.ndarray) -> np.floating:
    """The entry of the table `lr` (steps) for the training step that `state` is at."""
    return lr[min(int(state[STEP]), lr.size - 1)]


def effective_gradient(
    g: np.ndarray,
    w: np.ndarray,
    norm: np.ndarray | None,
    *,
    weight_decay: float = 0.0,
    clip_value: float = 0.0,
    clip_norm: float = 0.0,
    decayed: int = 0,
) -> np.ndarray:
    """`g` clipped by norm, then by value, plus weight_decay · w in its first `decayed` elements; `g` itself if all are off.

    Raises ValueError for clip_norm without norm.
    """
    if clip_norm > 0:
        if norm is None:
            raise ValueError(NORM_MISSING)
        g = g * g.dtype.type(np.minimum(1, clip_norm / (norm + NORM_EPS)))
    if clip_value > 0:
        g = np.clip(g, -clip_value, clip_value)
    if weight_decay > 0:
        g = g.copy()
        g[:decayed] += weight_decay * w[:decayed]
    return g


def sgd(*operands: np.ndarray, momentum: float = 0.0, nesterov: bool = False, **regularisation: Any) -> None:
    """One update in place.

    Operands: w, g, m (P), lr (steps), state (8) int64[, norm () float64]; then the outputs w, m, state, the same arrays.
    Keywords: momentum, nesterov, and those of `effective_gradient`. Sets state[NONFINITE] to 1 if an updated weight is not finite.
    """
    w, g, m, lr, state, *norm = operands[:-3]
    w_out, m_out, state_out = operands[-3:]
    g = effective_gradient(g, w, norm[0] if norm else None, **regularisation)
    np.multiply(m, momentum, out=m_out)
    np.add(m_out, g, out=m_out)
    step = g + momentum * m_out if nesterov else m_out
    np.subtract(w, learning_rate(lr, state) * step, out=w_out)
    if not np.isfinite(w_out).all():
        state_out[NONFINITE] = 1


@jit(device=True)
def current_rate(lr, state):
    """lr[state[STEP]], or the last entry past the end of the table."""
    return lr[min(state[STEP], i8(lr.size) - 1)]


@jit(device=True)
def norm_factor(norm, clip_norm):
    """min(1, clip_norm / (norm + 1e-6)), NaN for a NaN; 1 where clip_norm is 0 (norm is then not read)."""
    factor = 1.0
    if clip_norm > 0.0:
        factor = clip_norm / (f4(norm[0]) + NORM_EPS)
        if factor > 1.0:
            factor = 1.0
    return factor


@jit(device=True)
def effective(g, w, index, factor, clip_value, weight_decay, decayed):
    """Element `index` of the gradient: factor · g, cut to ±clip_value unless that is 0, plus the weight decay."""
    g = factor * g
    # Comparisons, because min and max of a NaN would give the bound.
    if clip_value > 0.0:
        if g > clip_value:
            g = clip_value
        if g < -clip_value:
            g = -clip_value
    if index < decayed:
        g = g + weight_decay * w
    return g


@jit(device=True)
def sgd_one(w, g, m, rate, momentum):
    """(w, m) of one element after an update with its effective gradient g."""
    m = momentum * m + g
    return w - rate * m, m


@jit(device=True)
def nesterov_one(w, g, m, rate, momentum):
    """(w, m) of one element after an update with Nesterov's momentum and its effective gradient g."""
    m = momentum * m + g
    return w - rate * (g + momentum * m), m


@functools.cache
def kernel_of(nesterov: bool) -> Any:
    """The kernel of the update, plain or with Nesterov's momentum."""
    one = nesterov_one if nesterov else sgd_one

    @jit()
    def sgd_kernel(w, g, m, lr, state, norm, count, momentum, clip_norm, clip_value, weight_decay, decayed):
        """m ← momentum·m + effective g; w ← w - lr·m, or with Nesterov's momentum w ← w − lr·(effective g + momentum·m).

        grid ceil(P / 1024), block 256, a thread owns four neighbours, and the first threads one each of the last P % 4.
        Moves 20·P bytes. 16-byte aligned w, g, m.
        """
        rate = current_rate(lr, state)
        factor = norm_factor(norm, clip_norm)
        thread = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        quads = count >> 2
        finite = True
        if thread < quads:
            i = 4 * thread
            w0, w1, w2, w3 = load4(w, i)
            g0, g1, g2, g3 = load4(g, i)
            m0, m1, m2, m3 = load4(m, i)
            g0 = effective(g0, w0, i, factor, clip_value, weight_decay, decayed)
            g1 = effective(g1, w1, i + 1, factor, clip_value, weight_decay, decayed)
            g2 = effective(g2, w2, i + 2, factor, clip_value, weight_decay, decayed)
            g3 = effective(g3, w3, i + 3, factor, clip_value, weight_decay, decayed)
            w0, m0 = one(w0, g0, m0, rate, momentum)
            w1, m1 = one(w1, g1, m1, rate, momentum)
            w2, m2 = one(w2, g2, m2, rate, momentum)
            w3, m3 = one(w3, g3, m3, rate, momentum)
            store4(w, i, w0, w1, w2, w3)
            store4(m, i, m0, m1, m2, m3)
            finite = math.isfinite(w0) and math.isfinite(w1) and math.isfinite(w2) and math.isfinite(w3)
        j = 4 * quads + thread
        if j < count:
            gj = effective(g[j], w[j], j, factor, clip_value, weight_decay, decayed)
            w[j], m[j] = one(w[j], gj, m[j], rate, momentum)
            finite = finite and math.isfinite(w[j])
        # Whichever threads write, they write the same 1.
        if not finite:
            state[NONFINITE] = i8(1)

    return sgd_kernel


def regularisation_args(call: Call, norm: list[Any]) -> tuple[Any, ...]:
    """(clip_norm, clip_value, weight_decay, decayed) of a call as kernel scalars; `norm` holds the norm operand or nothing.

    Raises ValueError for clip_norm without norm.
    """
    get = call.attrs.get
    if get("clip_norm", 0) > 0 and not norm:
        raise ValueError(NORM_MISSING)
    floats = (np.float32(get(name, 0)) for name in ("clip_norm", "clip_value", "weight_decay"))
    return (*floats, np.int32(get("decayed", 0)))


def bind(call: Call) -> list[Launch]:
    w, g, m, lr, state, *norm = call.ins
    count = numel(call.in_shapes[0])
    scalars = (np.float32(call.attrs.get("momentum", 0)), *regularisation_args(call, norm))
    # Without clipping by norm the kernel reads no norm, and `lr` stands in for it.
    args = (w, g, m, lr, state, norm[0] if norm else lr, np.int32(count), *scalars)
    return [Launch(kernel_of(bool(call.attrs.get("nesterov"))), blocks(count, 4 * THREADS), THREADS, args)]


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`: weight, gradient and momentum in, weight and momentum out; the weights of the last P % 4 two more times."""
    distinct, again = sum(size(call, "in", i) for i in range(3)), 2 * 4 * (numel(call.in_shapes[0]) % 4)
    return [Traffic(distinct + again, size(call, "out", 0) + size(call, "out", 1), distinct)]


HOST, OPS = {"sgd": host(sgd)}, {"sgd": Impl(bind, traffic=traffic)}

PLAIN = {"weight_decay": 0.0, "clip_value": 0.0, "clip_norm": 0.0, "decayed": 512}
CLIPPED = {"weight_decay": 0.01, "clip_value": 0.5, "clip_norm": 2.0, "decayed": 512}
"""Regularisation of the cases, of every optimizer."""


def example_rates() -> np.ndarray:
    """Learning rates of the cases."""
    return np.linspace(0.1, 0.01, 8).astype(np.float32)


def cases(count: int = 1003) -> Iterator[Case]:
    """`count` weights, plain and regularised."""
    w, g, m, state = normal(17, count), normal(18, count), normal(19, count), example_state()
    norm, momentum = np.array(np.linalg.norm(g.astype(np.float64))), {"momentum": 0.9}
    yield Case("sgd", "momentum", (w, g, m, example_rates(), state), (0, 2, 4), momentum | PLAIN, 4)
    yield Case("sgd", "clipped, decayed", (w, g, m, example_rates(), state, norm), (0, 2, 4), momentum | CLIPPED, 4)
    yield Case("sgd", "Nesterov", (w, g, m, example_rates(), state, norm), (0, 2, 4), momentum | CLIPPED | {"nesterov": True}, 4)
