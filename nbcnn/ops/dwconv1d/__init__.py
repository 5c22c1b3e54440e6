"""Depthwise 1-D convolution of series (N, C, L): every channel has its own filter of T taps, and an optional skip.

`reference.py` has the formulas, `series.py` the one sum behind all passes; then one file a variant.
"""
