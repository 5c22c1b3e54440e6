"""Ops on series: depthwise and pointwise convolutions, state-space kernels, windows."""
