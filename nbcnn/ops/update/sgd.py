"""SGD with momentum over the flat parameter buffer, as torch.optim.SGD without dampening (rule.py has clipping and decay):

    m ← momentum · m + g                  (m starts at 0, so the first m is g)
    w ← w - lr · m, or with `nesterov` w ← w − lr · (g + momentum · m)

Nesterov's momentum in this form: I. Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML 2013.

    sgd               w, g, m, lr (steps), state[, norm ()] -> w, m, state      (in place)          momentum, nesterov,
                                                                      weight_decay, clip_value, clip_norm, decayed
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from nbcnn.gpu.language import jit
from nbcnn.ops.kernel.call import Call, Impl, Launch, host
from nbcnn.ops.kernel.case import Case, normal
from nbcnn.ops.update.advance import example_state
from nbcnn.ops.update.rule import CLIPPED, PLAIN, Rule, example_rates
from nbcnn.plan.op import Op


@jit(device=True)
def _sgd(w, g, m, rate, momentum):
    m = momentum * m + g
    return w - rate * m, m


@jit(device=True)
def _nesterov(w, g, m, rate, momentum):
    m = momentum * m + g
    return w - rate * (g + momentum * m), m


def _sgd_arrays(w: np.ndarray, g: np.ndarray, m: np.ndarray, *, rate: Any, t: int, momentum: float) -> tuple[np.ndarray, ...]:
    m = momentum * m + g
    return w - rate * m, m


def _nesterov_arrays(w: np.ndarray, g: np.ndarray, m: np.ndarray, *, rate: Any, t: int, momentum: float) -> tuple[np.ndarray, ...]:
    m = momentum * m + g
    return w - rate * (g + momentum * m), m


SGD = Rule("sgd", _sgd, ("m",), {"momentum": np.float32(0)}, arrays=_sgd_arrays)
NESTEROV = Rule("sgd", _nesterov, ("m",), {"momentum": np.float32(0)}, arrays=_nesterov_arrays)


def sgd(*operands: np.ndarray, nesterov: bool = False, **attrs: Any) -> None:
    """One update in place (`Rule.reference`)."""
    (NESTEROV if nesterov else SGD).reference(*operands, **attrs)


def bind(call: Call) -> list[Launch]:
    """One launch."""
    return (NESTEROV if call.attrs.get("nesterov") else SGD).bind(call)


HOST, OPS = {Op("sgd"): host(sgd)}, {Op("sgd"): Impl(bind, traffic=SGD.traffic)}


def cases(count: int = 1003) -> Iterator[Case]:
    """`count` weights, plain and regularised."""
    w, g, m, state = normal(17, count), normal(18, count), normal(19, count), example_state()
    norm, momentum = np.array(np.linalg.norm(g.astype(np.float64))), {"momentum": 0.9}
    yield Case(Op("sgd"), "momentum", (w, g, m, example_rates(), state), (0, 2, 4), momentum | PLAIN, 4)
    yield Case(Op("sgd"), "clipped, decayed", (w, g, m, example_rates(), state, norm), (0, 2, 4), momentum | CLIPPED, 4)
    yield Case(Op("sgd"), "Nesterov", (w, g, m, example_rates(), state, norm), (0, 2, 4), momentum | CLIPPED | {"nesterov": True}, 4)
