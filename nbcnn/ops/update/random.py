"""Random numbers of training are words of Philox4x32-10 with key SEED and counter (image index, EPOCH, stream, element).

They depend on nothing else, so they are the same in every mode and layout, for every batch size, on any number of ranks and after a resume. Who draws
has a stream of its own.

Source: J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbcnn.gpu.language import i8, jit, types, u4
from nbcnn.ops.update.advance import EPOCH, POSITION, SEED

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # golden ratio and √3 - 1, the Weyl sequence of the key
LOW_WORD, WORD_BITS = 0xFFFFFFFF, 32

u8: Any = types.uint64
M0, M1 = MULTIPLIERS
W0, W1 = KEY_STEPS


def philox4x32(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> tuple[np.ndarray, ...]:
    """The four uint32 words of Philox4x32-10; counter words are uint32 arrays or ints (broadcast), key words ints."""
    c0, c1, c2, c3 = (np.asarray(word).astype(np.uint64) for word in counter)
    k0, k1 = key
    low, bits = np.uint64(LOW_WORD), np.uint64(WORD_BITS)
    for _ in range(ROUNDS):
        a, b = c0 * np.uint64(M0), c2 * np.uint64(M1)
        c0, c1, c2, c3 = (b >> bits) ^ c1 ^ np.uint64(k0), b & low, (a >> bits) ^ c3 ^ np.uint64(k1), a & low
        k0, k1 = (k0 + W0) & LOW_WORD, (k1 + W1) & LOW_WORD
    return tuple(word.astype(np.uint32) for word in np.broadcast_arrays(c0, c1, c2, c3))


def key_of(seed: int) -> tuple[int, int]:
    """(low, high) 32-bit words of an int64 seed."""
    return seed & LOW_WORD, (seed >> WORD_BITS) & LOW_WORD


def words_of(index: np.ndarray, state: np.ndarray, stream: int, element: Any = 0, *, epoch: bool = True) -> tuple[np.ndarray, ...]:
    """The four random words of `element` of the images `index` in `stream`, of the epoch of `state`, or of all epochs; both are broadcast."""
    return philox4x32((index, int(state[EPOCH]) & LOW_WORD if epoch else 0, stream, element), key_of(int(state[SEED])))


def chosen(order: np.ndarray, state: np.ndarray, count: int) -> np.ndarray:
    """The indices of the batch's `count` images."""
    first = int(state[POSITION])
    return order[first : first + count]


def threshold(share: float) -> int:
    """The least word of what is kept where a `share` is dropped."""
    return min(round(share * 2**WORD_BITS), LOW_WORD)


def factor(share: float) -> np.float32:
    """What is kept is multiplied by this, so that sums keep their mean."""
    return np.float32(1 / (1 - share))


@jit(device=True)
def philox_words(c0, c1, c2, c3, k0, k1):
    """The four uint32 words of Philox4x32-10 for counter and key words, of which 32 bits count."""
    # Ten rounds of unsigned 32-bit words and 64-bit products: the casts are the algorithm's own.
    c0, c1, c2, c3, k0, k1 = u4(c0), u4(c1), u4(c2), u4(c3), u4(k0), u4(k1)
    for _ in range(ROUNDS):
        a = u8(u8(c0) * u8(M0))
        b = u8(u8(c2) * u8(M1))
        c0 = u4(b >> u8(WORD_BITS)) ^ c1 ^ k0
        c1 = u4(b & u8(LOW_WORD))
        c2 = u4(a >> u8(WORD_BITS)) ^ c3 ^ k1
        c3 = u4(a & u8(LOW_WORD))
        k0 = u4((u8(k0) + u8(W0)) & u8(LOW_WORD))
        k1 = u4((u8(k1) + u8(W1)) & u8(LOW_WORD))
    return c0, c1, c2, c3


@jit(device=True)
def element_words(index, element, stream, state):
    """The four random words of element `element` of image `index` in `stream`, in this epoch."""
    seed = state[SEED]
    return philox_words(index, state[EPOCH], stream, element, seed, seed >> i8(WORD_BITS))
