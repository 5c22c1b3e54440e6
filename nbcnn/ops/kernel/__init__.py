"""Shared parts of all kernels: calls and launches, traffic, storage types, reductions, windows, tensor maps, small loops."""
