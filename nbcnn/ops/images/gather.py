"""Gather: the batch's images, and their labels or targets, out of the data set, by the epoch's shuffled order, augmented and normalised on the way.

    x[i, c, h, w] = (images[order[POSITION + i], c, h + down, w' + right] − shift[c]) · factor[c],  w' = W − 1 − w if mirrored, else w
    x[i, c, h, w] = 0 where the source lies outside the image, and inside the square that is cut out
    y[i]          = labels[order[POSITION + i]]; of pixels y[i, h, w] = labels[order[POSITION + i], h, w']

Targets that are images are gathered as images are, with the flip and crop of their inputs: the random numbers are the image's, not the array's.

    flip      False; True: mirrored if a coin of (image, epoch) says so; "alternate": in the even epochs or in the odd ones, by a coin of the image
    crop      down and right are uniform in −crop … crop: the image is padded by that many zeros on each side and cropped at random
    reflect   what lies outside the image is not zero but its reflection at the outermost row or column: −1 is 1, H is H − 2
    cutout    side of the square; its centre is uniform over the image, so part of it may lie outside
    shift, factor   by channel; without them uint8 is divided by 255 and float32 is taken as it is
    own       what a user's augmentation then does to the image (`nbcnn.ops.images.pixels`)
    ring      0: `images` is the whole data set. Else it is a ring of so many images in the order of the epoch, which a feeder fills
              (`nbcnn.run.streaming`): image i of the batch is row (POSITION + i) mod ring

Zero is what the network sees: black without normalisation, the mean colour with it.

Random numbers are words of element 0 of the image (`nbcnn.ops.update.random`). Stream 0: bit 0 of the first word is the coin of `flip`.
Stream 1: down, right, centre row and centre column; a word w becomes ⌊w·n / 2³²⌋, uniform over 0 … n − 1 to within n / 2³². Stream 2, in epoch 0:
the coin of "alternate". Stream 3: the four numbers of `own`.

Sources: Cutout from T. DeVries and G. W. Taylor, arXiv:1708.04552. Alternating flip from K. Jordan, "94% on CIFAR-10 in 3.29 seconds on a single
GPU", arXiv:2404.00498.

    gather            images (M,C,H,W) uint8, or flat float32; order (E) int32, state (8) int64 -> x (N,C,H,W)
                      flip, crop, reflect, cutout, shift, factor, own, ring
    gather_labels     labels (M) or (M,H,W) int32 or uint8, order (E) int32, state -> y (N) or (N,H,W) int32         flip, ring
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from nbcnn.gpu.device import constant
from nbcnn.gpu.language import cuda, f4, i8, jit, types, u4
from nbcnn.ops.images.pixels import STREAM, Pixels, applied, number, rounded, unit_of, units_of, whole
from nbcnn.ops.kernel.call import Call, Impl, Launch, blocks, host
from nbcnn.ops.kernel.case import Case
from nbcnn.ops.kernel.loops import quotient
from nbcnn.ops.kernel.stored import kinds, scalar_io, vector_io
from nbcnn.ops.kernel.traffic import Traffic, once, outputs
from nbcnn.ops.update.advance import EPOCH, POSITION, SEED, example_state
from nbcnn.ops.update.random import WORD_BITS, chosen, philox_words, u8, words_of
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel
from nbcnn.plan.storage import ITEMSIZE

THREADS = 256
SCALE = np.float32(1 / 255)
ALTERNATE = "alternate"


def mirrored(index: np.ndarray, state: np.ndarray, flip: bool | str = True) -> np.ndarray:
    """Which of the images `index` are mirrored in the epoch of `state`: bool."""
    if flip == ALTERNATE:
        return ((words_of(index, state, 2, epoch=False)[0] + np.uint32(int(state[EPOCH]) & 1)) & 1).astype(bool)
    return (words_of(index, state, 0)[0] & 1).astype(bool)


def uniform(words: np.ndarray, count: int) -> np.ndarray:
    """Words as integers, int64, uniform over 0 … count − 1."""
    return ((words.astype(np.uint64) * np.uint64(count)) >> np.uint64(WORD_BITS)).astype(np.int64)


def gather(
    images: np.ndarray,
    order: np.ndarray,
    state: np.ndarray,
    x: np.ndarray,
    *,
    flip: bool | str = False,
    crop: int = 0,
    reflect: bool = False,
    cutout: int = 0,
    shift: tuple[float, ...] = (),
    factor: tuple[float, ...] = (),
    own: Pixels | None = None,
    ring: int = 0,
) -> None:
    """x (N,C,H,W) or (N,F) from images (M,C,H,W) or (M,F) uint8, or flat float32 (M·C·H·W), order (E) int32, state (8) int64.

    The arithmetic is float32 whatever the dtype of x. POSITION + N must not exceed E. The options are above.
    """
    first, index = int(state[POSITION]), chosen(order, state, len(x))
    rows = np.arange(first, first + len(x)) % ring if ring else index
    batch = images.reshape(-1, *x.shape[1:])[rows]
    if flip:
        coins = mirrored(index, state, flip)
        batch[coins] = batch[coins, :, :, ::-1]
    outside = None
    if crop or cutout:
        mirror = mirrored(index, state, flip) if flip else None
        batch, outside = _shifted(batch, words_of(index, state, 1), mirror, crop, reflect, cutout)
    if factor:
        by_channel = (1, -1, *(1,) * (x.ndim - 2))
        batch = (batch - np.array(shift, np.float32).reshape(by_channel)) * np.array(factor, np.float32).reshape(by_channel)
    elif batch.dtype == np.uint8:
        batch = np.multiply(batch, SCALE, dtype=np.float32)
    if outside is not None:
        batch = np.where(outside[:, None], np.float32(0), batch)
    if own is not None:
        nothing = np.zeros((len(x), *x.shape[2:]), bool)
        batch, _ = applied(own, batch.astype(np.float32, copy=False), nothing if outside is None else outside, units_of(index, state))
    np.copyto(x, batch)


def _shifted(
    batch: np.ndarray, words: tuple[np.ndarray, ...], mirror: np.ndarray | None, crop: int, reflect: bool, cutout: int
) -> tuple[np.ndarray, np.ndarray]:
    """`batch` (N,C,H,W), already mirrored where `mirror` says so, at its random places; and where it is to be zero, (N,H,W)."""
    N, _, H, W = batch.shape
    down, right = ((uniform(word, 2 * crop + 1) - crop)[:, None] for word in words[:2])
    # Of a mirrored image the source is right of the mirrored column, which is left of it in the mirrored image.
    right = right if mirror is None else np.where(mirror[:, None], -right, right)
    row, column = np.arange(H) + down, np.arange(W) + right  # (N, H), (N, W)
    if reflect:
        row, column = (extent - 1 - np.abs(extent - 1 - np.abs(at)) for at, extent in ((row, H), (column, W)))
    outside = ((row < 0) | (row >= H))[:, :, None] | ((column < 0) | (column >= W))[:, None, :]
    moved = batch[np.arange(N)[:, None, None], :, row.clip(0, H - 1)[:, :, None], column.clip(0, W - 1)[:, None, :]]  # (N, H, W, C)
    if cutout:
        top, left = ((uniform(word, extent) - cutout // 2)[:, None] for word, extent in zip(words[2:], (H, W), strict=True))
        across = (np.arange(H) >= top) & (np.arange(H) < top + cutout)
        along = (np.arange(W) >= left) & (np.arange(W) < left + cutout)
        outside |= across[:, :, None] & along[:, None, :]
    return moved.transpose(0, 3, 1, 2), outside


def gather_labels(labels: np.ndarray, order: np.ndarray, state: np.ndarray, y: np.ndarray, *, flip: bool | str = False, ring: int = 0) -> None:
    """y (N) or (N,H,W) = labels (M) or (M,H,W), int32 or uint8, of the images that `gather` takes with the same `flip` and `ring`."""
    first, index = int(state[POSITION]), chosen(order, state, len(y))
    batch = labels[np.arange(first, first + len(y)) % ring if ring else index]
    if flip:
        coins = mirrored(index, state, flip)
        batch[coins] = batch[coins, :, ::-1]
    np.copyto(y, batch)


@jit(device=True)
def image_words(index, epoch, stream, state):
    """The four random words of image `index` in `stream`."""
    seed = state[SEED]
    return philox_words(index, epoch, stream, 0, seed, seed >> i8(WORD_BITS))


@jit(device=True)
def coin_of(index, state):
    """Bit 0 of the first word of image `index` in this epoch, as uint32."""
    word, _, _, _ = image_words(index, state[EPOCH], 0, state)
    return word & 1


@jit(device=True)
def alternate_of(index, state):
    """1 in every other epoch, the even or the odd ones by a coin of image `index`, as uint32."""
    word, _, _, _ = image_words(index, 0, 2, state)
    return (word + u4(state[EPOCH] & i8(1))) & 1


@jit(device=True)
def uniform_of(word, count):
    """⌊word · count / 2³²⌋, as uint32."""
    return u4((u8(word) * u8(count)) >> u8(WORD_BITS))


@jit(device=True)
def reflected(at, extent):
    """The row or column `at`, uint32, reflected into 0 … extent − 1 if it lies outside by less than the extent; below 0 it has wrapped around."""
    if at >= extent:
        # The reflection at the far end is right of an `at` beyond it, and too large of one below 0; the reflection at 0 the other way round.
        at = min(2 * (extent - 1) - at, 0 - at)
    return at


@functools.cache
def gather_kernel(
    kind: str,
    layout: str,
    flip: bool | str,
    width: int,
    crop: int,
    reflect: bool,
    cutout: int,
    source: str,
    ring: bool,
    place: Any = None,
    change: Any = None,
) -> Any:
    """The kernel that writes `layout` stored as `kind`, `width` neighbours (4 or 1) per thread, with the options of this module.

    source  what an element becomes: "bytes" are divided by 255, "floats" are taken as they are, "normalised" has shift and factor.
    place, change  the device functions of a user's augmentation (`nbcnn.ops.images.pixels`), where there is one: its source and its value.
    """
    (_, store), (_, store4) = scalar_io(kind), vector_io(kind)
    channels_last = layout == "NHWC"
    placed, changed = place is not None, change is not None
    normalised, bytes_, moved, own = source == "normalised", source == "bytes", bool(crop or cutout or placed or changed), placed or changed
    coin = alternate_of if flip == ALTERNATE else coin_of
    mirrors, half = bool(flip), cutout // 2

    @jit()
    def gather_kernel(images, order, state, x, shift, factor, C, plane, H, W, rows):
        """x[n, e] = what the formula of this module says, e = place within the stored image; `rows` is the length of the ring.

        grid (N, ceil(C·H·W / (256·width))), block 256, a block owns 256·width neighbours of image blockIdx.x; moves
        5·N·C·H·W bytes (uint8 to float32). Writes are contiguous; reads run along rows of one image (of C planes in turn for NHWC).
        """
        n = cuda.blockIdx.x
        volume = u4(C * plane)
        first = (u4(cuda.blockIdx.y) * THREADS + cuda.threadIdx.x) * width
        if first < volume:
            index = order[state[POSITION] + i8(n)]
            if ring:
                image = (state[POSITION] + i8(n)) % i8(rows) * volume
            else:
                image = i8(index) * volume
            mirror = 0
            if mirrors:
                mirror = coin(index, state)
            if moved:
                # Where a difference would be negative, uint32 wraps around to more than any extent.
                a, b, c, d = image_words(index, state[EPOCH], 1, state)
                down, right = uniform_of(a, 2 * crop + 1) - crop, uniform_of(b, 2 * crop + 1) - crop
                top, left = uniform_of(c, H) - half, uniform_of(d, W) - half
            if own:
                p, q, r, s = image_words(index, state[EPOCH], STREAM, state)
                p, q, r, s = unit_of(p), unit_of(q), unit_of(r), unit_of(s)
            values = cuda.local.array(4, types.float32)
            for j in range(width):
                # Unsigned: Numba's signed division is carried out in 64 bits.
                e = first + j
                source = e % C * plane + e // C if channels_last else e
                seen = True
                if moved:
                    channel, pixel = source // plane, source % plane
                    row, column = pixel // W, pixel % W
                    h, w, high, wide = number(row), number(column), number(H), number(W)
                    if placed:
                        y, z = place(h, w, high, wide, p, q, r, s)
                        y, z = rounded(y), rounded(z)
                        seen = (y >= 0.0) & (y < high) & (z >= 0.0) & (z < wide)
                        row, column = whole(y if seen else 0.0), whole(z if seen else 0.0)
                    seen = seen & (not ((row - top < cutout) & (column - left < cutout)))
                    if mirror != 0:
                        column = W - 1 - column
                    row, column = row + down, column + right
                    if reflect:
                        row, column = reflected(row, H), reflected(column, W)
                    seen = seen & (row < H) & (column < W)
                    source = channel * plane + row * W + column
                elif mirrors and mirror != 0:
                    # H·W is a multiple of W, so the column survives the modulus in any plane.
                    source = source + W - 1 - 2 * (source % W)
                value = 0.0
                if seen:
                    value = f4(images[image + i8(source)])
                    if bytes_:
                        value = value * SCALE
                    if normalised:
                        # A difference, then a product: nothing that could be contracted to one rounding, so the reference has the same bits.
                        value = (value - shift[source // plane]) * factor[source // plane]
                values[j] = value
                if changed and seen:
                    values[j] = change(value, number(channel), h, w, p, q, r, s)
            at = i8(n) * volume + first
            if width == 4:
                store4(x, at, values[0], values[1], values[2], values[3])
            else:
                store(x, at, values[0])

    return gather_kernel


@functools.cache
def gather_labels_kernel(flip: bool | str, ring: bool) -> Any:
    """The kernel of labels with the options of this module."""
    coin = alternate_of if flip == ALTERNATE else coin_of
    mirrors = bool(flip)

    @jit()
    def gather_labels_kernel(labels, order, state, y, count, plane, W, rows):
        """y[n, e] = labels[order[POSITION + n], e'] for the `plane` = H·W labels e of an image, of which there is 1 where the image itself has one.

        grid ceil(N·plane / 256), block 256, a thread owns a label; moves 12·N·plane bytes. `rows` is the length of the ring.
        """
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i < count:
            n = quotient(i, plane)
            source = i - n * plane
            index = order[state[POSITION] + i8(n)]
            if mirrors and coin(index, state) != 0:
                source = source + W - 1 - 2 * (source - quotient(source, W) * W)
            if ring:
                image = (state[POSITION] + i8(n)) % i8(rows)
            else:
                image = i8(index)
            y[i] = labels[image * i8(plane) + i8(source)]

    return gather_labels_kernel


def bind(call: Call) -> list[Launch]:
    images, order, state = call.ins
    attrs = call.attrs
    N, C, H, W = (*call.out_shapes[0], 1, 1)[:4]  # vectors (N, F) are images of one pixel
    width = 1 if C * H * W % 4 else 4
    crop, cutout, ring = (int(attrs.get(name, 0)) for name in ("crop", "cutout", "ring"))
    shift = factor = order  # an array that is there, for kernels that read neither
    if attrs.get("factor"):
        shift, factor = (constant(np.array(attrs[name], np.float32)) for name in ("shift", "factor"))
    source = "normalised" if attrs.get("factor") else "bytes" if images.dtype == np.uint8 else "floats"
    flip, reflect = attrs.get("flip", False), bool(attrs.get("reflect"))
    own: Any = attrs.get("own") or Pixels("")
    kernel = gather_kernel(kinds(call)[1], call.layout, flip, width, crop, reflect, cutout, source, ring > 0, own.source, own.value)
    grid = (N, blocks(C * H * W, THREADS * width))
    extents = (np.uint32(extent) for extent in (C, H * W, H, W, ring))
    return [Launch(kernel, grid, THREADS, (images, order, state, call.outs[0], shift, factor, *extents))]


def bind_labels(call: Call) -> list[Launch]:
    labels, order, state = call.ins
    shape, flip, ring = call.out_shapes[0], call.attrs.get("flip", False), int(call.attrs.get("ring", 0))
    extents = (np.int32(extent) for extent in (numel(shape), numel(shape[1:]), shape[-1], ring))
    return [Launch(gather_labels_kernel(flip, ring > 0), blocks(numel(shape), THREADS), THREADS, (labels, order, state, call.outs[0], *extents))]


def traffic(call: Call) -> list[Traffic]:
    """Bytes of `bind`: the images that are taken, as if nothing of them were cropped or cut out, and what they become."""
    stored = call.in_dtypes[0] if call.in_dtypes else "uint8"
    return [once(numel(call.out_shapes[0]) * ITEMSIZE[stored], outputs(call))]


def traffic_labels(call: Call) -> list[Traffic]:
    """Bytes of `bind_labels`: the place of its image for each label, labels, labels."""
    shape = call.out_shapes[0]
    labels = numel(shape) * ITEMSIZE[call.in_dtypes[0] if call.in_dtypes else "int32"]
    return [Traffic(4 * numel(shape) + labels, outputs(call), 4 * shape[0] + labels)]


HOST = {Op("gather"): host(gather), Op("gather_labels"): host(gather_labels)}
OPS = {Op("gather"): Impl(bind, traffic=traffic), Op("gather_labels"): Impl(bind_labels, traffic=traffic_labels)}


def cases(image: tuple[int, ...] = (3, 3, 5, 4)) -> Iterator[Case]:
    """A batch of shape `image` with every option once; three labels."""
    images = np.random.default_rng(16).integers(0, 256, (image[0] + 3, *image[1:])).astype(np.uint8)
    order, labels = np.random.default_rng(23).permutation(image[0] + 3).astype(np.int32), np.arange(6, dtype=np.int32) * 7
    for flip in (False, True):
        yield Case(Op("gather"), f"flip {flip}", (images, order, example_state()), ((image, "float32"),), {"flip": flip})
    channels = image[1]
    normal = {"shift": tuple(range(100, 100 + channels)), "factor": tuple(1 / (50 + c) for c in range(channels))}
    moved = {"flip": ALTERNATE, "crop": 2, "cutout": 3}
    yield Case(Op("gather"), "augmented", (images, order, example_state()), ((image, "float32"),), moved)
    yield Case(Op("gather"), "augmented, normalised", (images, order, example_state()), ((image, "float32"),), moved | normal | {"flip": True})
    reflected = moved | {"crop": min(image[2:]) - 1, "reflect": True}
    yield Case(Op("gather"), "reflected", (images, order, example_state()), ((image, "float32"),), reflected)
    floats = (images.reshape(-1) / np.float32(7)).astype(np.float32)
    yield Case(Op("gather"), "floats in a ring", (floats, order, example_state()), ((image, "float32"),), {"ring": image[0] + 1})
    order = np.array([4, 0, 5, 1, 3, 2], np.int32)
    yield Case(Op("gather_labels"), "3 of 6", (labels, order, example_state()), (((3,), "int32"),))
    pixels = np.random.default_rng(24).integers(0, 256, (6, 3, 5)).astype(np.uint8)
    yield Case(Op("gather_labels"), "of pixels, mirrored", (pixels, order, example_state()), (((3, 3, 5), "int32"),), {"flip": True})
    yield Case(Op("gather_labels"), "of pixels, in a ring", (pixels.astype(np.int32), order, example_state()), (((3, 3, 5), "int32"),), {"ring": 4})
