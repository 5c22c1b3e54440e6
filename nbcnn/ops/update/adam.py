"""Adam over the flat parameter buffer, as torch.optim.Adam (L2 decay inside the gradient, no AMSGrad):

    g ← clipped g + weight_decay · w                     (as in rule.py)
    m ← m + (1 - beta1) (g - m)
    v ← beta2 · v + (1 - beta2) g²
    w ← w - lr / (1 - beta1^t) · m / (√v / √(1 - beta2^t) + eps),   t = STEP + 1

`decoupled` is AdamW, as torch.optim.AdamW: the decay leaves the gradient, and so the moments, alone, and w ← w − lr·weight_decay·w comes before the
last line. Sources: D. P. Kingma, J. Ba, "Adam: a method for stochastic optimization", ICLR 2015, algorithm 1; I. Loshchilov, F. Hutter, "Decoupled
weight decay regularization", arXiv:1711.05101.

    adam              w, g, m, v, lr (steps), state[, norm ()] -> w, m, v, state (in place)         beta1, beta2, eps, decoupled, then as sgd
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, i8, jit, types
from nbcnn.ops.kernel.call import Call, Impl, Launch, host
from nbcnn.ops.kernel.case import Case, normal
from nbcnn.ops.update.advance import example_state
from nbcnn.ops.update.rule import CLIPPED, PLAIN, Rule, example_rates
from nbcnn.plan.op import Op

f8: Any = types.float64


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
def _each_step(rate, t, numbers):
    """scale, widen, and the shares of g and g², for training step t."""
    beta1, beta2, eps = numbers
    corrections = cuda.shared.array(2, types.float32)
    # Once per block: float64 is slow on many GPUs.
    if cuda.threadIdx.x == 0:
        corrections[0] = f8(rate) / (f8(1) - power(beta1, t))
        corrections[1] = f8(1) / math.sqrt(f8(1) - power(beta2, t))
    cuda.syncthreads()
    return corrections[0], corrections[1], f4(f8(1) - beta1), f4(beta2), f4(f8(1) - beta2), eps


@jit(device=True)
def _adam(w, g, m, v, scale, widen, of_g, kept, of_square, eps):
    m = m + of_g * (g - m)
    v = kept * v + of_square * (g * g)
    return w - scale * (m / (math.sqrt(v) * widen + eps)), m, v


def _arrays(
    w: np.ndarray,
    g: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    *,
    rate: Any,
    t: int,
    beta1: float,
    beta2: float,
    eps: float,
) -> tuple[np.ndarray, ...]:
    number = w.dtype.type
    m = m + (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * (g * g)
    scale = number(float(rate) / (1 - beta1**t))
    return w - scale * (m / (np.sqrt(v) * number((1 - beta2**t) ** -0.5) + number(eps))), m, v


_NUMBERS = {"beta1": np.float64(0.9), "beta2": np.float64(0.999), "eps": np.float32(1e-8)}
ADAM = Rule("adam", _adam, ("m", "v"), _NUMBERS, each_step=_each_step, arrays=_arrays)
ADAMW = Rule("adam", _adam, ("m", "v"), _NUMBERS, decoupled=True, each_step=_each_step, arrays=_arrays)


def adam(*operands: np.ndarray, decoupled: bool = False, **attrs: Any) -> None:
    """One update in place (`Rule.reference`)."""
    (ADAMW if decoupled else ADAM).reference(*operands, **attrs)


def bind(call: Call) -> list[Launch]:
    """One launch."""
    return (ADAMW if call.attrs.get("decoupled") else ADAM).bind(call)


HOST, OPS = {Op("adam"): host(adam)}, {Op("adam"): Impl(bind, traffic=ADAM.traffic)}


def cases(count: int = 1003) -> Iterator[Case]:
    """`count` weights, plain and regularised."""
    w, g, m, v, state = normal(17, count), normal(18, count), normal(19, count), normal(20, count) ** 2, example_state()
    norm, betas = np.array(np.linalg.norm(g.astype(np.float64))), {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    yield Case(Op("adam"), "plain", (w, g, m, v, example_rates(), state), (0, 2, 3, 5), betas | PLAIN, 4)
    yield Case(Op("adam"), "clipped, decayed", (w, g, m, v, example_rates(), state, norm), (0, 2, 3, 5), betas | CLIPPED, 4)
    yield Case(Op("adam"), "decoupled", (w, g, m, v, example_rates(), state, norm), (0, 2, 3, 5), betas | CLIPPED | {"decoupled": True}, 4)
