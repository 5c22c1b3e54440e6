"""A weight gradient as a correlation of two images along their pixels: what the engines of mma and wgmma share.

conv_wgrad    shifted x, stationary dy: dw[k][c][r,s] = Σ dy[n,k,p,q] · x[n,c, stride·p + r − pad, stride·q + s − pad]
upconv_wgrad  shifted dy, stationary x: dG[u,v] = Σ dy[2i + u − 1, 2j + v − 1] · x[i, j], 16 products of small images instead of nine of
              doubled ones (36 in the same measure); dW = Sᵀ dG S while the parts are added.
"""

from __future__ import annotations

from typing import Any

from nbcnn.ops.conv.frame.correlation import Correlation
from nbcnn.ops.kernel.call import Call


def is_up(call: Call) -> bool:
    return call.op == "upconv_wgrad"


def correlation(call: Call) -> Correlation:
    """The correlation behind a call: source = the shifted operand, K = channels of the stationary one."""
    N, C, H, W = call.in_shapes[0]
    _, K, P, Q = call.in_shapes[1]
    if is_up(call):
        return Correlation(N, P, Q, K, H, W, C, 4, 4, 2, 1, 1)
    R, S = call.out_shapes[0][2:]
    return Correlation(N, H, W, C, P, Q, K, R, S, call.attrs["stride"], call.attrs["pad"], call.attrs["pad"])


def operands(call: Call) -> tuple[Any, Any]:
    """(stationary, shifted)."""
    x, dy = call.ins
    return (x, dy) if is_up(call) else (dy, x)
