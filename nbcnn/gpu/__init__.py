"""What kernels are written in (`language`), and what compiles and launches them (`compiler`, the only module that imports Numba)."""
