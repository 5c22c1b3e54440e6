"""Convolution: one op, several engines; each package below stands for itself and shares `frame` with the others.

reference.py, fused.py   what is computed, in NumPy: the plain ops, and those that fusion makes
naive.py, tiled.py       the teaching modes: one thread per element; tiles in shared memory and reductions
simt/                    implicit-im2col GEMM on CUDA cores: register tiles, loaders, split sums
thin/, winograd/         few channels on one side; fewer multiplications for 3×3
mma/, wgmma/, thin_mma/  tensor cores: the portable engine, Hopper's, first and last layers
frame/                   what engines share: the geometry of a pass, its epilogue, split sums, weight gradients, composed ops
"""
