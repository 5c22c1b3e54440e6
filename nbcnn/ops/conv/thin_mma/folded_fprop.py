"""Upsampling folded into the convolution of a last layer, forward, on tensor cores: nine products where the plain form has 36.

    parts[(a,b,k)][pixel] = Σ_c w[k,c,a,b] · x[pixel][c]        (this file: one GEMM over x, read once)
    y from parts, with bias, and then the ReLU or the loss      (thin_up.py, as in fp32)

GN = 9·K ≤ 32 columns stand in the rows of the product, pixels in its columns: then two neighbouring results of a lane are
neighbouring pixels of one plane of parts, and a lane's 16 bytes of x are its operands as they come from memory. GK may be
walked in any order, so the filters are packed in the order in which those bytes arrive (last_shape.py).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbcnn.bounds import STORE
from nbcnn.cuda import cuda, f4, i4, i8, jit, types, u4
from nbcnn.ops.call import Call, Impl, Launch, blocks
from nbcnn.ops.conv.thin_mma.last_shape import last_layer, pack_columns_by_channels, refusal, word_elements
from nbcnn.ops.conv.thin_up import collect_kernel, collect_traffic
from nbcnn.ops.ptx.asm import byte_address_shared
from nbcnn.ops.ptx.mma import mma_bf16, mma_tf32
from nbcnn.ops.ptx.shared import load_words_4, store_words_4
from nbcnn.ops.ptx.vector import store2
from nbcnn.ops.ptx.words import load_4_words
from nbcnn.ops.reduce import THREADS as SUM_THREADS
from nbcnn.ops.reduce import add_partials
from nbcnn.ops.traffic import Traffic, size
from nbcnn.shapes import numel

WARPS, GROUPS = 8, 4
THREADS = 32 * WARPS
OF_WARP = 8 * GROUPS
PIXELS = OF_WARP * WARPS
"""Pixels of a block."""
STEP_WORDS = 512
"""Words of filters for 16·E channels: two products of two tiles of 16 columns, four words a lane."""
ALIGNMENT = 256


@functools.cache
def product_kernel(E: int) -> Any:
    """The kernel for E elements a word: 2 of bfloat16, 1 of tf32."""
    BYTES, CHANNELS, LOADED, SUMS = 4 // E, 4 * E, 4 * GROUPS, 8 * GROUPS
    mma = mma_bf16 if E == 2 else mma_tf32

    @jit(launch_bounds=(THREADS, 3))
    def last_product_kernel(x, packed, parts, M, C, steps, columns, plane):
        """parts[column·plane + m] = Σ_c w[column][c] · x[m][c] for `columns` ≤ 32 columns.

        gemm   32 columns × M pixels × C; grid ⌈M/256⌉, block 256
        owns   warp: 32 columns × 32 pixels, four products wide; block: 256 pixels
        shared 2,048·⌈C/16E⌉ bytes: all filters, in fragment order
        moves  x once, 4·columns·M bytes of parts; needs compute capability 8.0
        """
        shared = cuda.shared.array(0, types.uint32)
        base = byte_address_shared(shared)
        acc = cuda.local.array(SUMS, f4)
        words = cuda.local.array(LOADED, u4)
        tid = i4(cuda.threadIdx.x)
        i = tid
        while i < steps * i4(STEP_WORDS // 4):
            w = load_4_words(packed, i8(i) * i8(16), i4(1))
            store_words_4(base + u4(i) * u4(16), w[0], w[1], w[2], w[3])
            i = i4(i + i4(THREADS))
        for j in range(SUMS):
            acc[j] = f4(0)
        lane, warp = i4(tid & i4(31)), i4(tid >> i4(5))
        g, t = i4(lane >> i4(2)), i4(lane & i4(3))
        m0 = i4(i4(cuda.blockIdx.x) * i4(PIXELS) + warp * i4(OF_WARP))
        cuda.syncthreads()
        step, channel = i4(0), i4(t * i4(CHANNELS))
        while step < steps:
            for j in range(GROUPS):
                m = i4(m0 + i4(8 * j) + g)
                at = i8(i8(m) * i8(C) + i8(channel)) * i8(BYTES)
                v = load_4_words(x, at, (m < M) & (channel < C))
                words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3] = v[0], v[1], v[2], v[3]
            filters = base + u4(i4(step * i4(STEP_WORDS) + lane * i4(4))) * u4(4)
            for s in range(2):
                for tile in range(2):
                    a = load_words_4(filters + u4(512 * (2 * s + tile)))
                    for j in range(GROUPS):
                        at = 4 * (2 * j + tile)
                        acc[at], acc[at + 1], acc[at + 2], acc[at + 3] = mma(
                            a[0], a[1], a[2], a[3], words[4 * j + 2 * s], words[4 * j + 2 * s + 1], acc[at], acc[at + 1], acc[at + 2], acc[at + 3]
                        )
            step, channel = i4(step + i4(1)), i4(channel + i4(4 * CHANNELS))
        for tile in range(2):
            for half in range(2):
                column = i4(i4(16 * tile + 8 * half) + g)
                if column < columns:
                    for j in range(GROUPS):
                        e = 4 * (2 * j + tile) + 2 * half
                        store2(parts, i8(column) * i8(plane) + i8(m0 + i4(8 * j) + i4(2) * t), acc[e], acc[e + 1])

    return last_product_kernel


def _plane(call: Call) -> int:
    """Elements of a plane of parts: all pixels, in whole blocks."""
    return blocks(last_layer(call).pixels, PIXELS) * PIXELS


def _parts_bytes(call: Call) -> int:
    return -(-4 * last_layer(call).columns * _plane(call) // ALIGNMENT) * ALIGNMENT


def scratch(call: Call) -> int:
    """Bytes of the products, and of the partial losses behind them."""
    return _parts_bytes(call) + (8 * blocks(last_layer(call).pixels, SUM_THREADS) if "mse" in call.op else 0)


def bind(call: Call, precision: str) -> list[Launch]:
    """x (N,C,H,W), w (K,C,3,3), b (K)[, target] -> [loss (),] y (N,K,2H,2W)."""
    layer, E, mse = last_layer(call), word_elements(precision), "mse" in call.op
    M, steps = layer.pixels, -(-layer.C // (16 * E))
    parts = call.scratch[: _parts_bytes(call)].view(np.float32)
    sizes = map(np.int32, (M, layer.C, steps, layer.columns, _plane(call)))
    product = Launch(product_kernel(E), blocks(M, PIXELS), THREADS, (call.ins[0], call.packed, parts, *sizes), 4 * STEP_WORDS * steps)
    after = "mse" if mse else "relu" if "relu" in call.op else ""
    y, size, grid = call.outs[-1], numel(call.out_shapes[-1]), blocks(M, SUM_THREADS)
    total = call.scratch[_parts_bytes(call) : scratch(call)].view(np.float64) if mse else call.scratch.view(np.float64)
    target = call.ins[3] if mse else y
    numbers = map(np.int32, (M, layer.H, layer.W, _plane(call)))
    collected = (parts, call.ins[2], target, y, total, *numbers, np.float32(2 / size))
    made = [product, Launch(collect_kernel(layer.K, 1, after, STORE[precision]), grid, SUM_THREADS, collected)]
    return [*made, add_partials(total, grid, 1 / size, call.outs[0])] if mse else made


def traffic(call: Call, precision: str) -> list[Traffic]:
    """Bytes of `bind`: all filters once a block, x once; columns of parts end with a whole block."""
    layer, grid = last_layer(call), blocks(last_layer(call).pixels, PIXELS)
    filters, x = 4 * STEP_WORDS * -(-layer.C // (16 * word_elements(precision))), size(call, "in", 0)
    product = Traffic(filters * grid + x, 4 * layer.columns * _plane(call), filters + x)
    return [product, *collect_traffic(call, blocks(layer.pixels, SUM_THREADS), 1, layer.K)]


def implementation(precision: str) -> Impl:
    """upconv_fprop, upconv_relu_fprop or upconv_mse_fprop of a last layer in bf16 or tf32."""
    E = word_elements(precision)
    return Impl(
        bind=lambda call: bind(call, precision),
        scratch=scratch,
        supports=lambda call: refusal(call, precision),
        pack=lambda call: pack_columns_by_channels(call, E),
        packed=STORE[precision],
        needs=(8, 0),
        traffic=lambda call: traffic(call, precision),
    )
