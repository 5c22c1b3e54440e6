"""The optimizers over the flat parameter buffer; rule.py has what all of them share, clipping, decay and learning rates.

SGD with momentum, as torch.optim.SGD without dampening:

    m ← momentum · m + g                  (m starts at 0, so the first m is g)
    w ← w − lr · m, or with `nesterov` w ← w − lr · (g + momentum · m)

Adam, as torch.optim.Adam (L2 decay inside the gradient, no AMSGrad):

    m ← m + (1 − beta1) (g − m)
    v ← beta2 · v + (1 − beta2) g²
    w ← w − lr / (1 − beta1^t) · m / (√v / √(1 − beta2^t) + eps),   t = STEP + 1

`decoupled` is AdamW, as torch.optim.AdamW: the decay leaves the gradient, and so the moments, alone, and w ← w − lr·weight_decay·w comes before the
last line.

Sources: I. Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML 2013, for this form of Nesterov's momentum;
D. P. Kingma, J. Ba, "Adam: a method for stochastic optimization", ICLR 2015, algorithm 1; I. Loshchilov, F. Hutter, "Decoupled weight decay
regularization", arXiv:1711.05101.

    sgd               w, g, m, lr (steps), state[, norm ()] -> w, m, state      (in place)          momentum, nesterov, then as in rule.py
    adam              w, g, m, v, lr (steps), state[, norm ()] -> w, m, v, state (in place)         beta1, beta2, eps, decoupled, then as in rule.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, i8, jit, types
from nbcnn.ops.kernel.call import Impl, host
from nbcnn.ops.kernel.case import Case, normal
from nbcnn.ops.update.advance import example_state
from nbcnn.ops.update.rule import CLIPPED, PLAIN, Either, Rule, example_rates, scaled_states
from nbcnn.plan.op import Op

f8: Any = types.float64


@jit(device=True)
def _sgd(w, g, m, rate, momentum):
    m = momentum * m + g
    return w - rate * m, m


@jit(device=True)
def _nesterov(w, g, m, rate, momentum):
    m = momentum * m + g
    return w - rate * (g + momentum * m), m


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
    """scale, widen, the shares of g and g², and eps, for training step t."""
    beta1, beta2, eps = numbers
    corrections = cuda.shared.array(2, types.float32)
    # Once per block: float64 is slow on many GPUs.
    if cuda.threadIdx.x == 0:
        corrections[0] = f8(rate) / (f8(1) - power(beta1, t))
        corrections[1] = f8(1) / math.sqrt(f8(1) - power(beta2, t))
    cuda.syncthreads()
    return corrections[0], corrections[1], f4(f8(1) - beta1), f4(beta2), f4(f8(1) - beta2), eps


def _on_host(rate: float, t: int, beta1: float, beta2: float, eps: float) -> tuple[float, ...]:
    """`_each_step` in Python."""
    return rate / (1 - beta1**t), (1 - beta2**t) ** -0.5, 1 - beta1, beta2, 1 - beta2, eps


@jit(device=True)
def _adam(w, g, m, v, scale, widen, of_g, kept, of_square, eps):
    m = m + of_g * (g - m)
    v = kept * v + of_square * (g * g)
    return w - scale * (m / (math.sqrt(v) * widen + eps)), m, v


_SGD = Rule("sgd", _sgd, ("m",), {"momentum": np.float32(0)})
SGD = Either("nesterov", _SGD, replace(_SGD, function=_nesterov))
_NUMBERS = {"beta1": np.float64(0.9), "beta2": np.float64(0.999), "eps": np.float32(1e-8)}
_ADAM = Rule("adam", _adam, ("m", "v"), _NUMBERS, each_step=_each_step, on_host=_on_host)
ADAM = Either("decoupled", _ADAM, replace(_ADAM, decoupled=True))

HOST = {Op("sgd"): host(SGD.reference), Op("adam"): host(ADAM.reference)}
OPS = {Op("sgd"): Impl(SGD.bind, traffic=_SGD.traffic), Op("adam"): Impl(ADAM.bind, traffic=_ADAM.traffic)}


def cases(count: int = 1003) -> Iterator[Case]:
    """`count` weights, plain, regularised, and by the other form of the rule."""
    w, g, state, rates = normal(17, count), normal(18, count), example_state(), example_rates()
    norm, moments = np.array(np.linalg.norm(g.astype(np.float64))), (normal(19, count), normal(20, count) ** 2)
    for each, numbers in ((SGD, {"momentum": 0.9}), (ADAM, {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8})):
        op, kept = Op(each.plain.name), len(each.plain.states)
        ins, outs = (w, g, *moments[:kept], rates, state), (0, *range(2, 2 + kept), 3 + kept)
        yield Case(op, "plain", ins, outs, numbers | PLAIN, 4)
        yield Case(op, "clipped, decayed", (*ins, norm), outs, numbers | CLIPPED, 4)
        yield Case(op, each.flag, (*ins, norm), outs, numbers | CLIPPED | {each.flag: True}, 4)
        for label, scaled in scaled_states():
            yield Case(op, label, (*ins[:-1], scaled, norm), outs, numbers | CLIPPED | {"scaled": True}, 4)
