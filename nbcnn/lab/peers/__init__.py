"""This package has the peers: the same work done by PyTorch, cuDNN and Triton, to be timed in the same run."""
