"""This package checks kernels: the gradient check, its cases, one op run alone, kernels compiled without a GPU."""
