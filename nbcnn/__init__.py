"""nbcnn: convolutional networks trained by Numba-CUDA kernels a student can read."""

__version__ = "0.1.0"
