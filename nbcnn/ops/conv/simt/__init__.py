"""The implicit-im2col GEMM on CUDA cores."""
