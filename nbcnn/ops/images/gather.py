"""Gather: the batch's images and labels out of the resident data set, by the epoch's shuffled order.

    x[i] = images[order[POSITION + i]] / 255,  mirrored left to right if `flip` and the coin of that image says so
    y[i] = labels[order[POSITION + i]]

The coin is bit 0 of the first word of Philox4x32-10 with key SEED and counter (image index, EPOCH, 0, 0): it depends on
nothing else, so it is the same in every mode, for every batch size, and after a resume. The last two counter words are
0 for these coins; other random streams of the same seed need another value there.

Philox source: J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

    gather            images (M,C,H,W) uint8, order (E) int32, state (8) int64 -> x (N,C,H,W)  flip; x in [0,1]
    gather_labels     labels (M) int32, order (E) int32, state -> y (N) int32
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, f4, i8, jit, types, u4
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks, host
from nbcnn.ops.kernel.case import Case
from nbcnn.ops.kernel.stored import kinds, scalar_io, vector_io
from nbcnn.ops.kernel.traffic import Traffic, once, outputs
from nbcnn.ops.update.advance import EPOCH, POSITION, SEED, example_state
from nbcnn.plan.shapes import numel

THREADS = 256
SCALE = np.float32(1 / 255)

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


def mirrored(index: np.ndarray, state: np.ndarray) -> np.ndarray:
    """The coins of the images `index` in the epoch of `state`: bool, True where the image is mirrored."""
    words = philox4x32((index, int(state[EPOCH]) & LOW_WORD, 0, 0), key_of(int(state[SEED])))
    return (words[0] & 1).astype(bool)


def gather(images: np.ndarray, order: np.ndarray, state: np.ndarray, x: np.ndarray, *, flip: bool = False) -> None:
    """x (N,C,H,W) or (N,F) in [0,1] from images (M,C,H,W) or (M,F) uint8, order (E) int32, state (8) int64.

    The products are float32 whatever the dtype of x. POSITION + N must not exceed E.
    """
    first = int(state[POSITION])
    chosen = order[first : first + len(x)]
    batch = images[chosen]
    if flip:
        coins = mirrored(chosen, state)
        batch[coins] = batch[coins, :, :, ::-1]
    np.multiply(batch, SCALE, out=x)


def gather_labels(labels: np.ndarray, order: np.ndarray, state: np.ndarray, y: np.ndarray) -> None:
    """y (N) = labels (M) int32 of the images that `gather` takes."""
    first = int(state[POSITION])
    y[...] = labels[order[first : first + len(y)]]


@jit(device=True)
def philox_words(c0, c1, c2, c3, k0, k1):
    """The four uint32 words of Philox4x32-10 for uint32 counter and key words."""
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
def coin_of(index, state):
    """Bit 0 of the first Philox word of image `index`, as uint32."""
    seed = state[SEED]
    low, high = u4(seed & i8(LOW_WORD)), u4((seed >> i8(WORD_BITS)) & i8(LOW_WORD))
    word, _, _, _ = philox_words(u4(index), u4(state[EPOCH] & i8(LOW_WORD)), u4(0), u4(0), low, high)
    return word & u4(1)


@functools.cache
def gather_kernel(kind: str, layout: str, flip: bool, width: int) -> Any:
    """The kernel that writes `layout` stored as `kind`, with or without coins, `width` neighbours (4 or 1) a thread."""
    (_, store), (_, store4) = scalar_io(kind), vector_io(kind)
    channels_last = layout == "NHWC"

    @jit()
    def gather_kernel(images, order, state, x, C, plane, W):
        """x[n, e] = images[order[POSITION + n], source of e] / 255, e = place within the stored image.

        grid (N, ceil(C·H·W / (256·width))), block 256, a block owns 256·width neighbours of image blockIdx.x; moves
        5·N·C·H·W bytes (to float32). Writes are contiguous; reads run along rows of one image (of C planes in turn for NHWC).
        """
        n = cuda.blockIdx.x
        volume = u4(C * plane)
        first = (u4(cuda.blockIdx.y) * THREADS + cuda.threadIdx.x) * width
        if first < volume:
            index = order[state[POSITION] + i8(n)]
            image = i8(index) * volume
            mirror = u4(0)
            if flip:
                mirror = coin_of(index, state)
            values = cuda.local.array(4, types.float32)
            for j in range(width):
                # Unsigned: Numba's signed division is carried out in 64 bits.
                e = first + j
                source = e % C * plane + e // C if channels_last else e
                if flip and mirror != u4(0):
                    # H·W is a multiple of W, so the column survives the modulus in any plane.
                    source = source + W - 1 - 2 * (source % W)
                values[j] = f4(images[image + i8(source)]) * f4(SCALE)
            place = i8(n) * volume + first
            if width == 4:
                store4(x, place, values[0], values[1], values[2], values[3])
            else:
                store(x, place, values[0])

    return gather_kernel


@jit()
def gather_labels_kernel(labels, order, state, y, count):
    """y[n] = labels[order[POSITION + n]].

    grid ceil(N / 256), block 256, a thread owns a label; moves 12·N bytes.
    """
    n = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if n < count:
        y[n] = labels[order[state[POSITION] + i8(n)]]


def bind(call: Call) -> list[Launch]:
    images, order, state = call.ins
    N, C, H, W = (*call.out_shapes[0], 1, 1)[:4]  # vectors (N, F) are images of one pixel
    width = 1 if C * H * W % 4 else 4
    kernel = gather_kernel(kinds(call)[1], call.layout, bool(call.attrs.get("flip", False)), width)
    grid = (N, blocks(C * H * W, THREADS * width))
    return [Launch(kernel, grid, THREADS, (images, order, state, call.outs[0], np.uint32(C), np.uint32(H * W), np.uint32(W)))]


def bind_labels(call: Call) -> list[Launch]:
    labels, order, state = call.ins
    count = numel(call.out_shapes[0])
    return [Launch(gather_labels_kernel, blocks(count, THREADS), THREADS, (labels, order, state, call.outs[0], np.int32(count)))]


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`: the images that are taken, a byte an element, and what they become."""
    return [once(numel(call.out_shapes[0]), outputs(call))]


def traffic_labels(call: Call) -> list[Traffic]:
    """Bytes of `bind_labels`: places, labels, labels."""
    return [once(2 * outputs(call), outputs(call))]


HOST = {"gather": host(gather), "gather_labels": host(gather_labels)}
OPS = {"gather": Impl(bind, traffic=traffic), "gather_labels": Impl(bind_labels, traffic=traffic_labels)}


def cases(image: tuple[int, ...] = (3, 3, 5, 4)) -> Iterator[Case]:
    """A batch of shape `image`, flipped and not; three labels."""
    images = np.random.default_rng(16).integers(0, 256, (image[0] + 3, *image[1:])).astype(np.uint8)
    order, labels = np.random.default_rng(23).permutation(image[0] + 3).astype(np.int32), np.arange(6, dtype=np.int32) * 7
    for flip in (False, True):
        yield Case("gather", f"flip {flip}", (images, order, example_state()), ((image, "float32"),), {"flip": flip})
    order = np.array([4, 0, 5, 1, 3, 2], np.int32)
    yield Case("gather_labels", "3 of 6", (labels, order, example_state()), (((3,), "int32"),))
