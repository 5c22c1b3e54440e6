"""Winograd's F(2×2, 3×3) in one kernel: points of images and products never leave the chip (fp32, NHWC, 64 filters, Hopper).

winograd.py writes the points to memory, reads them for the products, writes those, reads them again: 16 numbers where an image has four, four
times over. Here a block makes a few tiles of 2×2 pixels of all 64 filters at a time:

    form.py      what a call freezes, and where what lies in shared memory
    fill.py      four warps make points of the source, 8 channels at a time             x → sV[channel][point][tile]
    multiply.py  eight warps multiply, two points each, sums in registers               sV · sU → sD[point][tile][filter]
    finish.py    four warps make pixels of the products, and hand them to an end        sD → z
    kernel.py    the kernel: who waits for whom
    conv.py      the plain convolution, bound

So four fifths of what a multiprocessor issues are products, and what stands behind a convolution, a norm for one, runs on the warps beside those
that multiply.

Source: A. Lavin, S. Gray, arXiv:1509.09308; warps with roles as in CUTLASS (github.com/NVIDIA/cutlass, "Efficient GEMM in CUDA").
"""
