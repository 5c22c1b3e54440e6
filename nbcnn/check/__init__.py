"""Is it right? The gradient check, its cases, one op run alone, kernels compiled without a GPU."""
