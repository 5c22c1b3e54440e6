"""The PTX instructions that the simulator has, by the names that `nbcnn.ops.ptx` gives them.

Addresses are `storage.Pointer`: an array and a distance from its start. What a warp does together (`mma.sync`, `ldmatrix`) wants all its lanes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from nbcnn.gpu.lockstep import names, tma
from nbcnn.gpu.lockstep.lanes import I4, active, lane_array, now, truth
from nbcnn.gpu.lockstep.launch import WARP, NotSimulated
from nbcnn.gpu.lockstep.numbers import F4, U4, cast, where
from nbcnn.gpu.lockstep.storage import Pointer
from nbcnn.plan.storage import encode

U2 = np.dtype(np.uint16)
_KINDS = {"f32": F4, "b32": U4, "u32": U4, "b16": U2, "u8": np.dtype(np.uint8), "f64": np.dtype(np.float64)}


def _only(wanted: Any, work: Callable[[], Any]) -> tuple[Any, Any]:
    """(lanes, what `work` gives) with only the active lanes where `wanted` is not 0; lanes is True or False where it is the same in all."""
    if type(wanted) is not np.ndarray:
        return (True, work()) if wanted else (False, None)
    mask, lanes = now.mask, truth(wanted)
    now.mask = lanes if mask is None else mask & lanes
    try:
        return lanes, work() if now.mask.any() else None
    finally:
        now.mask = mask


def load(dtype: np.dtype, count: int, gives: np.dtype) -> Callable[[Pointer], Any]:
    """A load of `count` elements, widened to `gives`."""

    def apply(address: Pointer) -> Any:
        array, at = address.element(dtype, count)
        values = tuple(cast(value, gives) for value in array.load(at, count))
        return values if count > 1 else values[0]

    return apply


def load_if(dtype: np.dtype, count: int, gives: np.dtype) -> Callable[[Pointer, Any], Any]:
    """`load` with zeros where `wanted` is 0: nothing is then read."""
    plain, zero = load(dtype, count, gives), gives.type(0)

    def apply(address: Pointer, wanted: Any) -> Any:
        lanes, values = _only(wanted, lambda: plain(address))
        if values is None:
            return (zero,) * count if count > 1 else zero
        if lanes is True:
            return values
        return tuple(where(lanes, value, zero) for value in values) if count > 1 else where(lanes, values, zero)

    return apply


def store(dtype: np.dtype, count: int) -> Callable[..., None]:
    def apply(address: Pointer, *values: Any) -> None:
        array, at = address.element(dtype, count)
        array.store(at, tuple(cast(value, dtype) for value in values))

    return apply


def _float_bits(x: Any) -> Any:
    return cast(x, F4).view(U4)


def _bits_float(word: Any) -> Any:
    return cast(word, U4).view(F4)


def bf16(x: Any) -> Any:
    """float32 -> bfloat16 in the lower half of a uint32: to nearest, ties to even."""
    return encode(np.asarray(cast(x, F4)).reshape(-1), "bfloat16").astype(U4).reshape(np.shape(x))[()]


def _bf16x2(high: Any, low: Any) -> Any:
    return bf16(low) | bf16(high) << np.uint32(16)


def _f16(x: Any) -> Any:
    with np.errstate(over="ignore"):
        return cast(x, F4).astype(np.float16).view(U2)


def _f16x2(low: Any, high: Any) -> Any:
    return _f16(low).astype(U4) | _f16(high).astype(U4) << np.uint32(16)


def _f16_float(half: Any) -> Any:
    return np.asarray(half).astype(U2).view(np.float16).astype(F4)[()]


def _relu_bf16x2(high: Any, low: Any) -> Any:
    def rectified(x: Any) -> Any:
        x = np.asarray(cast(x, F4))
        return np.where(x < 0, np.float32(0), x)

    return _bf16x2(rectified(high), rectified(low))


def _tf32(x: Any) -> Any:
    return encode(np.asarray(cast(x, F4)).reshape(-1), "tfloat32").reshape(np.shape(x))[()]


def _halves(word: Any) -> tuple[Any, Any]:
    word = np.asarray(cast(word, U4))
    return word & np.uint32(0xFFFF), word >> np.uint32(16)


def _max_bf16x2(a: Any, b: Any) -> Any:
    parts = [np.fmax(_bits_float(x << np.uint32(16)), _bits_float(y << np.uint32(16))) for x, y in zip(_halves(a), _halves(b), strict=True)]
    low, high = (part.view(U4) >> np.uint32(16) for part in parts)
    return low | high << np.uint32(16)


def _greater_f16x2(a: Any, b: Any) -> Any:
    low, high = (np.where(x.astype(U2).view(np.float16) > y.astype(U2).view(np.float16), np.uint32(0xFFFF), np.uint32(0))
                 for x, y in zip(_halves(a), _halves(b), strict=True))  # fmt: skip
    return (low | high << np.uint32(16)).astype(U4)


def _permute_bytes(a: Any, b: Any, selector: Any) -> Any:
    both = np.asarray(cast(a, U4)).astype(np.uint64) | np.asarray(cast(b, U4)).astype(np.uint64) << np.uint64(32)
    made: Any = np.uint32(0)
    for i in range(4):
        nibble = np.asarray(cast(selector, U4)) >> np.uint32(4 * i) & np.uint32(15)
        byte = (both >> (np.uint64(8) * (nibble & np.uint32(7)).astype(np.uint64)) & np.uint64(0xFF)).astype(U4)
        byte = np.where(nibble & np.uint32(8), np.where(byte & np.uint32(0x80), np.uint32(0xFF), np.uint32(0)), byte)
        made = made | byte << np.uint32(8 * i)
    return made


def _same(value: Any) -> Any:
    return value


def _larger(a: Any, b: Any) -> Any:
    return np.maximum(cast(a, F4), cast(b, F4))


def _unwatched(work: Callable[..., Any]) -> Callable[..., Any]:
    """A message between blocks: its sequence number puts it in order, so the checking mode does not look at it."""

    def apply(*operands: Any) -> Any:
        watch = now.block.launch.watch
        if watch is not None:
            watch.quiet = True
        try:
            return work(*operands)
        finally:
            if watch is not None:
                watch.quiet = False

    return apply


def _of_anything(work: Callable[..., Any]) -> Callable[..., Any]:
    """A load whose value may be left unused: the checking mode lets it read what nobody has written."""

    def apply(*operands: Any) -> Any:
        watch = now.block.launch.watch
        if watch is None:
            return work(*operands)
        watch.anything = True
        try:
            return work(*operands)
        finally:
            watch.anything = False

    return apply


@_unwatched
def _send(address: Pointer, a: Any, b: Any, sequence: Any) -> None:
    array, at = address.element(I4, 4)
    array.store(at, (_float_bits(a).view(I4), cast(sequence, I4), _float_bits(b).view(I4), cast(sequence, I4)))


@_unwatched
def _receive(address: Pointer, sequence: Any) -> Any:
    array, at = address.element(I4, 4)
    a, first, b, second = array.load(at, 4)
    late = np.asarray((first != sequence) | (second != sequence))
    if (late if now.mask is None or not late.ndim else late & now.mask).any():
        raise NotSimulated("a block waits for a message that has not been sent: blocks of the simulator run in step")
    return a.view(F4), b.view(F4)


# -- clusters of blocks


def _cluster_rank() -> Any:
    return now.block.cluster_rank


def _load_of_block(address: Pointer, rank: Any) -> Any:
    """What another block of the cluster has at the same place."""
    array, at = address.element(F4, 1)
    cluster, block = now.block.launch.cluster, now.block
    wanted = np.asarray(lane_array(rank)).astype(np.int64)
    lanes = active()
    if (wanted[lanes] >= cluster).any() or (wanted[lanes] < 0).any():
        raise NotSimulated(f"a block of a cluster of {cluster} that there is not")
    here = np.where(now.mask, at, 0) if now.mask is not None else lane_array(at)
    if len(lanes) and not (here[lanes].min() >= 0 and here[lanes].max() < array.size):
        array[at]  # which refuses
    if now.mask is not None:
        wanted = np.where(now.mask, wanted, 0)
    owner = block.number - block.number % cluster + wanted
    if block.launch.watch is not None:
        block.launch.watch.of_block(array, here, owner)
    return array.flat.take(owner * array.pitch + here)


def _cluster_arrive(releases: bool) -> Callable[[], None]:
    def run() -> None:
        if now.block.launch.watch is not None:
            now.block.launch.watch.cluster_arrive(releases)

    return run


def _cluster_wait() -> None:
    if now.block.launch.watch is not None:
        now.block.launch.watch.cluster_wait()


# -- what a warp does together


def _warps(value: Any, what: str) -> np.ndarray:
    """A value as (warps, 32). Raises ValueError unless all lanes of the warps that are here take part."""
    if now.block.threads % WARP:
        raise NotSimulated(f"{what} in blocks of {now.block.threads} threads, which are no whole warps")
    return np.ascontiguousarray(lane_array(value)).reshape(-1, WARP)


def _whole_warps(what: str) -> None:
    if now.mask is not None:
        here = _warps(now.mask, what).sum(1)
        if ((here != 0) & (here != WARP)).any():
            raise ValueError(f"{what}: lanes of a warp are missing")


_G, _T = np.arange(WARP) // 4, np.arange(WARP) % 4


def _mma(a: list[Any], b: list[Any], c: list[Any], wide: bool, parts: Callable[[Any], tuple[Any, Any]]) -> tuple[Any, ...]:
    """D (16×8) = A·B + C of every warp. `wide`: a word is one tf32; else two halves, of which `parts` makes float32."""
    _whole_warps("mma.sync")
    words_a, words_b = ([_warps(cast(word, U4), "mma.sync") for word in part] for part in (a, b))
    warps, k = len(words_a[0]), 8 if wide else 16
    left, right = np.zeros((warps, 16, k), np.float32), np.zeros((warps, k, 8), np.float32)
    for i, word in enumerate(words_a):
        rows, columns = _G + 8 * (i % 2), _T + 4 * (i // 2)
        if wide:
            left[:, rows, columns] = (word & np.uint32(0xFFFFE000)).view(F4)
        else:
            left[:, rows, 2 * columns], left[:, rows, 2 * columns + 1] = parts(word)
    for i, word in enumerate(words_b):
        ks = _T + 4 * i
        if wide:
            right[:, ks, _G] = (word & np.uint32(0xFFFFE000)).view(F4)
        else:
            right[:, 2 * ks, _G], right[:, 2 * ks + 1, _G] = parts(word)
    product = left @ right
    return tuple(
        (product[:, _G + 8 * (i // 2), 2 * _T + i % 2] + _warps(cast(c[i], F4), "mma.sync")).reshape(-1).astype(np.float32) for i in range(4)
    )


def _two_bf16(word: Any) -> tuple[Any, Any]:
    return (word << np.uint32(16)).view(F4), (word & np.uint32(0xFFFF0000)).view(F4)


def _two_f16(word: Any) -> tuple[Any, Any]:
    return _f16_float(word & np.uint32(0xFFFF)), _f16_float(word >> np.uint32(16))


def _product(wide: bool, parts: Callable[[Any], tuple[Any, Any]] = _two_bf16) -> Callable[..., Any]:
    return lambda *words: _mma(list(words[:4]), list(words[4:6]), list(words[6:]), wide, parts)


def _ldmatrix(count: int, transposed: bool) -> Callable[[Pointer], Any]:
    """Lane 8i + j has the address of row j of matrix i; of it lane l gets the (l mod 4)-th word of row l/4."""

    def apply(address: Pointer) -> Any:
        _whole_warps("ldmatrix")
        array, at = Pointer(address.array, lane_array(address.offset)).element(np.dtype(np.uint16), 8)
        # A row of eight 16-bit elements for each lane that gives an address.
        mask = now.mask
        if count < 4:
            here = np.tile(np.arange(WARP) < 8 * count, now.lanes // WARP)
            now.mask = here if mask is None else mask & here
        rows = np.stack(array.load(at, 8), 1).reshape(-1, WARP, 8)
        now.mask = mask
        found = []
        for i in range(count):
            matrix = rows[:, 8 * i : 8 * i + 8, :]
            if transposed:
                matrix = matrix.transpose(0, 2, 1)
            low, high = matrix[:, _G, 2 * _T].astype(U4), matrix[:, _G, 2 * _T + 1].astype(U4)
            found.append((low | high << np.uint32(16)).reshape(-1))
        return tuple(found)

    return apply


def _stmatrix_x4_trans(address: Pointer, *words: Any) -> None:
    """Lane 8i + j has the address to which column j of matrix i goes; lane l has elements 2(l mod 4) of column l/4 and the next as a word."""
    _whole_warps("stmatrix")
    matrices = np.empty((now.lanes // WARP, WARP, 8), np.uint16)
    for i, word in enumerate(words):
        word = _warps(cast(word, U4), "stmatrix")
        # Element (row, column) of the untransposed fragment is what ldmatrix gives; a stored row is a column of it.
        matrices[:, 8 * i + 2 * _T, _G] = (word & np.uint32(0xFFFF)).astype(np.uint16)
        matrices[:, 8 * i + 2 * _T + 1, _G] = (word >> np.uint32(16)).astype(np.uint16)
    array, at = Pointer(address.array, lane_array(address.offset)).element(np.dtype(np.uint16), 8)
    rows = matrices.reshape(-1, 8)
    array.store(at, tuple(rows[:, k] for k in range(8)))


def _copy_async(nbytes: int) -> Callable[[Pointer, Pointer, Any], None]:
    """The copy arrives when its group is waited for; the rest of the width is filled with zeros."""
    dtype = U2
    count = nbytes // dtype.itemsize

    def apply(to: Pointer, source: Pointer, wanted: Any) -> None:
        def read() -> Any:
            array, at = source.element(dtype, count)
            return array.load(at, count)

        there, target = to.element(dtype, count)
        if type(wanted) is not np.ndarray:
            wanted = np.full(now.lanes, wanted)
        partial = ((wanted != 0) & (wanted != nbytes)).any() if now.mask is None else ((wanted != 0) & (wanted != nbytes))[now.mask].any()
        if partial:
            raise NotSimulated("cp.async of a part of its width")
        lanes, values = _only(wanted != 0, read)
        zero = dtype.type(0)
        now.block.copies.issue(there, target, (zero,) * count if values is None else tuple(where(lanes, value, zero) for value in values))

    return apply


def _commit_group() -> None:
    now.block.copies.commit()


def _wait_group(running: int) -> Callable[[], None]:
    return lambda: now.block.copies.wait(running)


def _nothing(*operands: Any) -> None:
    """A fence, or the end of what is done already."""


_TABLE: dict[str, Any] = {
    "float_bits": _float_bits,
    "bits_float": _bits_float,
    "cvt_rn_f16_f32": _f16,
    "cvt_f32_f16": _f16_float,
    "cvt_rn_f16x2_f32": _f16x2,
    "cvt_f32_f16_low": lambda word: _f16_float(_halves(word)[0]),
    "cvt_f32_f16_high": lambda word: _f16_float(_halves(word)[1]),
    "unknown": _same,
    "unknown_word": _same,
    "hold": _same,
    "cvt_rn_bf16x2_f32": _bf16x2,
    "cvt_rn_relu_bf16x2_f32": _relu_bf16x2,
    "cvt_rna_tf32_f32": _tf32,
    "max_bf16x2": _max_bf16x2,
    "set_gt_u32_f16x2": _greater_f16x2,
    "prmt_b32": _permute_bytes,
    "ex2_approx": lambda x: np.exp2(cast(x, F4)),
    "rcp_approx": lambda x: np.float32(1) / cast(x, F4),
    "tanh_approx": lambda x: np.tanh(cast(x, F4)),
    "larger": _larger,
    "shfl_bfly": lambda word, mask: names.shuffle_xor(0, cast(word, U4), mask),
    "send_message": _send,
    "receive_message": _receive,
    "ld_relaxed_gpu": _unwatched(load(F4, 1, F4)),
    "read_clock64": names.nanoseconds,
    "read_globaltimer": names.nanoseconds,
    "st_shared": store(F4, 1),
    "st_global_b16_words": lambda address, word: store(U2, 1)(address, cast(word, U4)),
    "st_shared_b16": lambda address, word: store(U2, 1)(address, cast(word, U4)),
    "mma_m16n8k16_bf16": _product(wide=False),
    "mma_two_m16n8k8_f16": _product(wide=False, parts=_two_f16),
    "mma_m16n8k8_tf32": _product(wide=True),
    "stmatrix_x4_trans": _stmatrix_x4_trans,
    "cp_async_cg_16": _copy_async(16),
    "cp_async_ca_4": _copy_async(4),
    "cp_async_ca_8": _copy_async(8),
    "cp_async_ca_16": _copy_async(16),
    "cp_async_commit_group": _commit_group,
    "cluster_rank": _cluster_rank,
    "cluster_arrive": _cluster_arrive(True),
    "cluster_arrive_relaxed": _cluster_arrive(False),
    "cluster_wait": _cluster_wait,
    "ld_of_block": _load_of_block,
    "mbarrier_init": tma.init,
    "mbarrier_arrive": tma.arrive,
    "mbarrier_arrive_expect_tx": tma.arrive,
    "mbarrier_try_wait_parity": tma.wait,
    "cp_async_bulk_commit_group": tma.commit,
    "cp_async_bulk_wait_group": tma.wait_stores,
    "cp_async_bulk_wait_group_read": tma.wait_stores,
    **dict.fromkeys(("fence_mbarrier_init", "fence_proxy_async", "fence_proxy_tensormap"), _nothing),
    **{f"cp_async_bulk_tensor_{axes}d": tma.load for axes in (2, 3, 4)},
    **{f"cp_async_bulk_tensor_{axes}d_store": tma.store for axes in (2, 3, 4)},
    "byte_address_shared": Pointer,
    "byte_address_global": Pointer,
}
for _count in (2, 4):
    for _transposed in (False, True):
        _TABLE[f"ldmatrix_x{_count}{'_trans' * _transposed}"] = _ldmatrix(_count, _transposed)

_ACCESS = re.compile(r"(ld|st)_(global|shared)(_nc)?(_v(\d))?(_\w?(\d+))?(_if|_wanted|_at|_words)*(_any)?")
_ASM = re.compile(r"(ld|st)\.(?:global|shared)(?:\.nc)?(?:\.v(\d))?\.(f32|b32|b16|u8) ")


def named(name: str, made_by: list[Any]) -> Any:
    """What stands for an instruction: from the table, or by its text if it loads or stores; else a function that raises NotSimulated."""
    if name in _TABLE:
        return _TABLE[name]
    if name.startswith("cp_async_wait_group_"):
        return _wait_group(int(name.removeprefix("cp_async_wait_group_")))
    if made_by[0] == "instruction" and (found := _ASM.search(made_by[2])) and _ACCESS.fullmatch(name):
        what, count, kind = found[1], int(found[2] or 1), found[3]
        if what == "st":
            return store(_KINDS[kind], count)
        gives = F4 if kind == "f32" else U4
        made = (load_if if "setp.ne" in made_by[2] else load)(_KINDS[kind], count, gives)
        return _of_anything(made) if name.endswith("_any") else made

    def missing(*operands: Any) -> Any:
        raise NotSimulated(f"the simulator has no instruction {name}")

    return missing
