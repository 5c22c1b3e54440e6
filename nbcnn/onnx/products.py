"""Ops of ONNX that are products of matrices with a constant: Gemm and MatMul.

A product of one row is a Linear; of several rows it is a convolution of 1×1, and of several matrices one with a group for each of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from nbcnn.nn.layers import Conv2d, Linear
from nbcnn.onnx.errors import BothComputed, Unsupported
from nbcnn.onnx.node import MIXES, Node, op
from nbcnn.onnx.values import Val, limited
from nbcnn.plan.shapes import numel

PRODUCTS = ("Gemm", "MatMul")


def one_constant(operands: Sequence[Any], computed: type | tuple[type, ...] = Val) -> None:
    """Raises BothComputed for a product of two operands of the type `computed`."""
    if all(isinstance(each, computed) for each in operands[:2]):
        raise BothComputed


@op("Gemm", "Linear, or Permute and a Conv2d of 1×1", "a second operand that is computed")
def gemm(node: Node) -> Val:
    one_constant(node.operands)
    x, b, c = node.value(), node.floats(1), node.floats(2)
    if b.ndim != 2 or node.rank(x) != 2:
        raise Unsupported(f"matrices of {node.rank(x)} and {b.ndim} axes")
    b = b.T if node.attributes.get("transB", 0) else b
    alpha, beta = float(node.attributes.get("alpha", 1.0)), float(node.attributes.get("beta", 1.0))
    if c is None or not beta:
        c, beta = None, 1.0
    if node.attributes.get("transA", 0):
        if node.batched:
            raise Unsupported(f"transA: {MIXES}")
        x = node.sheet.permuted(x, (1, 0))
    c, names = None if c is None else node.broadcastable(c, x), node.called(weight=1, bias=2)
    if b.shape[0] != x.dims[-1]:
        raise Unsupported(f"a matrix of {b.shape} for rows of {x.dims[-1]}")
    # alpha·x·b + beta·c is beta·((alpha/beta)·x·b + c): what is trained are b and c themselves, and no copies of a c that is one number.
    x = node.sheet.scaled(x, alpha / beta)
    if c is not None and c.size == b.shape[1] and c.shape[-1:] in ((), (c.size,)):
        y = rows_times(node, x, b, c.reshape(-1), names)
    else:
        y = rows_times(node, x, b, None, names)
        y = y if c is None else node.sheet.affine(y, None, c, {"bias": names.get("bias", "")})
    return node.sheet.scaled(y, beta)


def rows_times(node: Node, x: Val, b: np.ndarray, bias: np.ndarray | None, names: dict[str, str]) -> Val:
    """x·b + bias, x (…, K) and b (K, N); `names` of both, "weight" and "bias"."""
    if bias is not None and node.sheet.apart_of(names):
        return node.sheet.affine(rows_times(node, x, b, None, names), None, bias, names)
    k, n = b.shape
    arrays = {"weight": b.T} | ({} if bias is None else {"bias": bias})
    dims = limited((*x.dims[:-1], n))
    if numel(x.dims[:-1]) == 1:
        return Val(node.sheet.call(Linear(n, bias=bias is not None), node.sheet.shaped(x, (k,)), arrays, names), dims)
    arrays["weight"] = arrays["weight"].reshape(n, k, 1, 1)
    y = node.sheet.call(Conv2d(n, 1, bias=bias is not None), _columns(node, x), arrays, names)
    return node.sheet.permuted(Val(y, (n, numel(dims[:-1]))), (1, 0)).seen(dims)


def _columns(node: Node, x: Val) -> Any:
    """Images (K, M, 1) of rows x (…, K)."""
    k, m = x.dims[-1], numel(x.dims[:-1])
    return node.sheet.shaped(node.sheet.permuted(x.seen((m, k)), (1, 0)), (k, m, 1))


@op("MatMul", "Linear, or Permute and a Conv2d of 1×1, in groups for several matrices", "two operands that are computed")
def matmul(node: Node) -> Val:
    one_constant(node.operands)
    left = isinstance(node.operands[0], Val)
    x, other = node.value(0 if left else 1), node.floats(1 if left else 0)
    gone = list[int]()
    if other.ndim == 1:
        gone.append(-1 if left else -2)
        other = other[:, None] if left else other[None, :]
    if node.rank(x) < 2 + (node.batched and not left):
        if node.batched:
            raise Unsupported(MIXES)
        gone.append(-2 if left else -1)
        x = x.seen((1, *x.dims) if left else (*x.dims, 1))
    if node.batched and other.ndim > 2:
        if other.ndim > node.rank(x) or (other.ndim == node.rank(x) and other.shape[0] != 1) or node.rank(x) == 2:
            raise Unsupported(f"a matrix for every example: {MIXES}")
        other = other[0] if other.ndim == node.rank(x) else other
    names = node.called(weight=1 if left else 0)
    y = _times(node, x, other, names) if left else _transposed(node, _times(node, _transposed(node, x), np.swapaxes(other, -1, -2), names))
    return y.seen([size for axis, size in enumerate(y.dims, -len(y.dims)) if axis not in gone])


def _transposed(node: Node, x: Val) -> Val:
    """The matrices of `x`, transposed."""
    last = len(x.dims) - 1
    return node.sheet.permuted(x, (*range(last - 1), last, last - 1))


def _times(node: Node, x: Val, other: np.ndarray, names: dict[str, str]) -> Val:
    """x (…, M, K) times other (…, K, N)."""
    if other.shape[-2] != x.dims[-1]:
        raise Unsupported(f"matrices of {x.dims} and {other.shape}")
    if math.prod(other.shape[:-2]) > 1:
        return _grouped_times(node, x, other, names)
    more = max(0, other.ndim - max(2, len(x.dims)))
    return rows_times(node, x.seen((*(1,) * more, *x.dims)), other.reshape(other.shape[-2:]), None, names)


def _grouped_times(node: Node, x: Val, other: np.ndarray, names: dict[str, str]) -> Val:
    """x (…, M, K) times other (…, K, N): a grouped convolution of 1×1, a group for each pair of matrices."""
    m, k = x.dims[-2:]
    n = other.shape[-1]
    lead = limited(np.broadcast_shapes(x.dims[:-2], other.shape[:-2]))
    x = node.sheet.expanded(x, (*lead, m, k))
    groups = numel(lead)
    if numel(other.shape[:-2]) < groups:
        # Copies of a trained matrix, a group for each, would be trained apart.
        node.sheet.constant(names)
        names = {}
    weight = np.broadcast_to(np.swapaxes(other, -1, -2), (*lead, n, k)).reshape(groups * n, k, 1, 1)
    columns = node.sheet.permuted(x.seen((groups, m, k)), (0, 2, 1))
    y = node.sheet.call(Conv2d(groups * n, 1, groups=groups, bias=False), node.sheet.shaped(columns, (groups * k, m, 1)), {"weight": weight}, names)
    return node.sheet.permuted(Val(y, (groups, n, m)), (0, 2, 1)).seen((*lead, m, n))
