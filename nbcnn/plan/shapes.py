"""This module computes shapes and counts of a 2-D convolution: output size, GEMM extents, flops and compulsory bytes.

No arrays and no device here. Names follow the field: images (N, C, H, W), filters (K, C, R, S), output (N, K, P, Q).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from nbcnn.files.quote import quoted


def rows_of(shape: tuple[int, ...], layout: str) -> tuple[int, int]:
    """(rows, elements of a channel in a row) of the matrix that a tensor (N,C,…) is in memory: in NHWC a row is a pixel, elsewhere an example."""
    if layout == "NHWC" and len(shape) == 4:
        return shape[0] * numel(shape[2:]), 1
    return shape[0], numel(shape[2:])


def numel(shape: tuple[int, ...]) -> int:
    """Number of elements of `shape`; 1 for the empty shape of a scalar."""
    return prod(shape)


def window_extent(size: int, window: int, stride: int, pad: int = 0) -> int:
    """Positions of a `window` sliding by `stride` over `size` elements padded by `pad` on both sides.

    Raises ValueError if the window does not fit once.
    """
    span = size + 2 * pad - window
    if span < 0:
        raise ValueError(f"a window of {window} does not fit into {size} elements padded by {pad}")
    return span // stride + 1


def pooled_extent(size: int, window: int, stride: int, pad: int = 0, ceil: bool = False) -> int:
    """Positions of a pooling window, like `window_extent`; with `ceil` also those where a window hangs over the far edge, as in PyTorch.

    A window must begin inside the elements or the padding before them. Raises ValueError if the window does not fit once.
    """
    count = window_extent(size, window, stride, pad)
    beyond = (size + 2 * pad - window) % stride > 0
    return count + (ceil and beyond and count * stride < size + pad)


@dataclass(frozen=True)
class ConvShape:
    """One convolution: N images of C×H×W, K filters of C×R×S, one stride and one zero padding for both axes."""

    N: int
    C: int
    H: int
    W: int
    K: int
    R: int
    S: int
    stride: int = 1
    pad: int = 0

    def __post_init__(self) -> None:
        for name in ("N", "C", "H", "W", "K", "R", "S", "stride"):
            if getattr(self, name) < 1:
                raise ValueError(f"ConvShape.{name} must be at least 1, got {getattr(self, name)}")
        if self.pad < 0:
            raise ValueError(f"ConvShape.pad must not be negative, got {self.pad}")
        window_extent(self.H, self.R, self.stride, self.pad)
        window_extent(self.W, self.S, self.stride, self.pad)

    @property
    def P(self) -> int:
        """Output height."""
        return window_extent(self.H, self.R, self.stride, self.pad)

    @property
    def Q(self) -> int:
        """Output width."""
        return window_extent(self.W, self.S, self.stride, self.pad)

    @property
    def x_shape(self) -> tuple[int, int, int, int]:
        return (self.N, self.C, self.H, self.W)

    @property
    def w_shape(self) -> tuple[int, int, int, int]:
        return (self.K, self.C, self.R, self.S)

    @property
    def y_shape(self) -> tuple[int, int, int, int]:
        return (self.N, self.K, self.P, self.Q)

    def gemm(self, path: str) -> tuple[int, int, int]:
        """(GM, GN, GK) of the implicit GEMM of `path` ("fprop", "dgrad" or "wgrad")."""
        NPQ, CRS = self.N * self.P * self.Q, self.C * self.R * self.S
        if path == "fprop":
            return NPQ, self.K, CRS
        if path == "dgrad":
            return self.N * self.H * self.W, self.C, self.K * self.R * self.S
        if path == "wgrad":
            return self.K, CRS, NPQ
        raise ValueError(f"no convolution path {quoted(path)}; one of fprop, dgrad, wgrad")

    def flops(self) -> int:
        """Multiplications and additions of one path; the same for all three (padding counted as work)."""
        return 2 * self.N * self.P * self.Q * self.K * self.C * self.R * self.S

    def bytes(self, itemsize: int = 4) -> int:
        """Compulsory bytes of one path: each of x, w, y once."""
        return itemsize * (numel(self.x_shape) + numel(self.w_shape) + numel(self.y_shape))
