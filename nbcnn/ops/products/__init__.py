"""Matrix products: GEMM and the RBF kernel matrix."""
