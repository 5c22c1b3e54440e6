"""The same work done by PyTorch, Triton and others, to measure beside."""
