"""Nearest 2× upsampling folded into the 3×3 convolution behind it: which taps of the filter W fall onto one low-resolution pixel.

An output pixel (2i+r, 2j+s) of the doubled image sees only 2×2 pixels of x, and a pixel of x reaches 4×4 output pixels. So

    fprop   y[2i+r, 2j+s] = Σ_{d,e < 2} V^rs[d,e] · x[i+d-1+r, j+e-1+s]     V^rs = T_r W T_sᵀ    four phases, 16 products, not 36
    dgrad   dx[i,j] = Σ_{u,v < 4} G[u,v]ᵀ · dy[2i+u-1, 2j+v-1]              G = S W Sᵀ           one 4×4 window of stride 2
    wgrad   dG[u,v] = Σ_{i,j} dy[2i+u-1, 2j+v-1] · x[i,j]ᵀ                  dW = Sᵀ dG S; u, v in {1, 2} see each dy once: db

or, with the 2×2 gradients that one tap meets summed beforehand (box.py), s[p,q] = Σ_{u,v < 2} dy[p-1+u, q-1+v]:

    dgrad   dx[i,j] = Σ_{a,b < 3} W[2-a,2-b]ᵀ · s[2i+a, 2j+b]               nine products
    wgrad   dW[2-a,2-b] = Σ_{i,j} s[2i+a, 2j+b] · x[i,j]ᵀ                   nine products; a = b = 1 see each dy once: db

A row of T_r or S adds up to two taps; the sums are made where weights are packed. The border needs no special case: zeros
around the doubled image are the doubled zeros around x.
"""

from __future__ import annotations

import numpy as np

PHASE_TAPS = (((0,), (1, 2)), ((0, 1), (2,)))
"""T: the taps of a 3-tap filter that fall on tap d of the 2-tap filter of phase r."""
GRADIENT_TAPS = ((2,), (1, 2), (0, 1), (0,))
"""S: the taps of a 3-tap filter that fall on tap u of the 4-tap filter that carries the gradient back."""
TERMS = 4
"""Most taps that a sum has, in two dimensions."""


def summed(index: np.ndarray, rows: tuple[tuple[int, ...], ...], columns: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """(4,K,C,R,S): positions in `index` (K,C,3,3) of the taps that each tap of an R×S filter is the sum of; -1 for none."""
    K, C = index.shape[:2]
    made = np.full((TERMS, K, C, len(rows), len(columns)), -1, np.int32)
    for u, over in enumerate(rows):
        for v, across in enumerate(columns):
            for term, (a, b) in enumerate((a, b) for a in over for b in across):
                made[term, :, :, u, v] = index[:, :, a, b]
    return made


def phase_filters(index: np.ndarray) -> np.ndarray:
    """(4,phases,K,C,2,2): positions of the taps behind V of the phases (r,s), row by row."""
    return np.stack([summed(index, PHASE_TAPS[r], PHASE_TAPS[s]) for r in (0, 1) for s in (0, 1)], 1)


def gradient_filters(index: np.ndarray) -> np.ndarray:
    """(4,K,C,4,4): positions of the taps behind G."""
    return summed(index, GRADIENT_TAPS, GRADIENT_TAPS)
