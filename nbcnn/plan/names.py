"""This module lists the names that the command line offers, so that `--help` answers without importing NumPy or a kernel.

`nbcnn.modes` refuses to be imported if its rows are others than MODES, and tests hold the other names against what they name.
"""

from __future__ import annotations

MODES = {
    "cpu": ("fp32",),
    "naive": ("fp32",),
    "tiled": ("fp32",),
    "im2col": ("fp32",),
    "cudacore": ("fp32",),
    "tensorcore": ("bf16", "tf32", "fp32", "fp16"),
}
"""Modes, each faster than the one before, with their precisions. Default: the first precision that the GPU supports."""

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
"""The formats to which operands of a product can be rounded."""

TENSOR_CORES = {"bf16": (8, 0), "tf32": (8, 0), "fp32": (8, 0), "fp16": (7, 5)}
"""Precisions of mode tensorcore, with the compute capability that each needs."""

ENGINES = {"wgmma": (9, 0), "mma": min(TENSOR_CORES.values())}
"""Tensor-core engines that `--engine` can force, with the compute capability from which each has a precision."""

DWCONV = ("naive", "coalesced", "shared", "warp", "best")
"""Depthwise convolutions of series that `--dwconv` can choose (`nbcnn.ops.series.dwconv1d.VARIANTS`)."""

MODELS = ("autoencoder", "small-autoencoder", "mnist-cnn", "mnist-cnn-b0", "patches", "patches2", "resnet18", "mobilenet", "unet", "s4convd")
"""Ready-made models (`nbcnn.nn.models`)."""

ARCHITECTURES = ("75", "80", "86", "87", "89", "90a", "100", "103", "110", "120", "121")
"""GPU architectures, sm_…, for which kernels can be compiled without such a GPU (`nbcnn.lab.measure.occupancy.LIMITS`)."""
REPORTED = ("75", "80", "86", "89", "90a", "100", "120")
"""Architectures for which `nbcnn kernels` compiles where no flag says otherwise: the four others have the instructions of one of these."""
FITTED = ("patches", "patches2")
"""Models without a loss, which are fitted to images in one pass instead of being trained."""
