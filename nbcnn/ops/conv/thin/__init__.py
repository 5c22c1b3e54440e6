"""Convolutions with at most four channels on one side, on CUDA cores."""
