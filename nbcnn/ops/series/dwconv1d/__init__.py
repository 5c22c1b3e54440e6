"""Depthwise 1-D convolution of series (N, C, L): every channel has its own filter of T taps, and an optional skip.

`reference.py` has the formulas, `series.py` the one sum behind all passes; then one file a variant, each an overlay of a GPU
row that `--dwconv` chooses:

    naive      one thread per result, series of the batch side by side: nothing coalesces
    coalesced  neighbouring threads on neighbouring elements
    shared     sixteen series and the filter staged in shared memory
    warp      a warp works alone on several series; windows of elements in registers
    best      ours. On Hopper TMA moves the series: short ones in boxes of 32, a lane has one whole in registers (`boxes`); long ones in rows of
              128 bytes, a lane has 32 elements and what the taps reach (`segments`). Elsewhere, stored as bfloat16, or of other extents:
              short ones through shared memory into registers (`whole`), long ones in tiles in shared memory, twelve results per thread
              (`sliding`). And both gradients from one load of x and dy

after arXiv:2604.25422 ("CUDA Kernel Optimization and Counter-Free Performance Analysis for Depthwise Convolution"), with partial
sums in a fixed order where the paper has atomics.
"""

from nbcnn.ops.series.dwconv1d import best, best_backward, coalesced, naive, shared, warp

VARIANTS = {"naive": naive.OPS, "coalesced": coalesced.OPS, "shared": shared.OPS, "warp": warp.OPS, "best": best.OPS | best_backward.OPS}
"""By the name that `--dwconv` takes."""
