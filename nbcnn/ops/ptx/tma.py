"""TMA (sm_90): one thread has whole tiles of a tensor copied into shared memory, zeros outside its bounds, swizzled.

A tensor map (128 bytes, made on the host: `cuTensorMapEncode…`) says what the tensor, the tile and the swizzle are. Copies are
asynchronous and count their bytes at an mbarrier. Coordinates run from the innermost axis outwards and may be negative.
Addresses: `to` and `barrier` are shared byte addresses (uint32), `tensor_map` is a global one (uint64).
"""

from __future__ import annotations

from nbcnn.gpu.language import i4, types, u4
from nbcnn.ops.ptx.asm import instruction

_u8, _u2 = types.uint64, types.uint16
_LOAD = "cp.async.bulk.tensor.{}d.shared::cluster.global.{}.mbarrier::complete_tx::bytes"

fence_tensor_map = instruction("fence_proxy_tensormap", "fence.proxy.tensormap::generic.acquire.gpu [$0], 128;", None, (_u8,))
"""(tensor_map): before its first use, because it came to the device by an ordinary copy."""
fence_async_shared = instruction("fence_proxy_async", "fence.proxy.async.shared::cta;", None, ())
"""This thread's ordinary loads from shared memory and stores to it come before what TMA and wgmma do there after a barrier."""
load_tile_2d = instruction("cp_async_bulk_tensor_2d", _LOAD.format(2, "tile") + " [$0], [$1, {$2, $3}], [$4];", None, (u4, _u8, i4, i4, u4))
"""(to, tensor_map, column, row, barrier): a tile of a matrix."""
load_tile_3d = instruction("cp_async_bulk_tensor_3d", _LOAD.format(3, "tile") + " [$0], [$1, {$2, $3, $4}], [$5];", None, (u4, _u8, i4, i4, i4, u4))
"""(to, tensor_map, element, channel, series, barrier): a box of series."""
load_tile_4d = instruction(
    "cp_async_bulk_tensor_4d", _LOAD.format(4, "tile") + " [$0], [$1, {$2, $3, $4, $5}], [$6];", None, (u4, _u8, i4, i4, i4, i4, u4)
)
"""(to, tensor_map, channel, column, row, image, barrier): a box of NHWC images."""
load_im2col_4d = instruction(
    "cp_async_bulk_tensor_4d_im2col",
    _LOAD.format(4, "im2col") + " [$0], [$1, {$2, $3, $4, $5}], [$6], {$7, $8};",
    None,
    (u4, _u8, i4, i4, i4, i4, u4, _u2, _u2),
)
"""(to, tensor_map, channel, column, row, image, barrier, right, down): one tap of consecutive output pixels of NHWC images.

The pixels start at (image, row, column), the corner of the window, walk along the bounding box of the map, and from each the
element `right` columns and `down` rows further is taken.
"""
store_tile_2d = instruction(
    "cp_async_bulk_tensor_2d_store",
    "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [$0, {$1, $2}], [$3];",
    None,
    (_u8, i4, i4, u4),
)
"""(tensor_map, column, row, from): a box of shared memory to a matrix; what lies outside it is not written."""
store_tile_3d = instruction(
    "cp_async_bulk_tensor_3d_store",
    "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [$0, {$1, $2, $3}], [$4];",
    None,
    (_u8, i4, i4, i4, u4),
)
"""(tensor_map, element, channel, series, from): a box of shared memory to series; what lies outside them is not written."""
store_tile_4d = instruction(
    "cp_async_bulk_tensor_4d_store",
    "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [$0, {$1, $2, $3, $4}], [$5];",
    None,
    (_u8, i4, i4, i4, i4, u4),
)
"""(tensor_map, channel, column, row, image, from): a box of shared memory to NHWC images; what lies outside them is not written."""
commit_stores = instruction("cp_async_bulk_commit_group", "cp.async.bulk.commit_group;", None, ())
"""Close the group of stores that this thread has issued."""
wait_stores_read = instruction("cp_async_bulk_wait_group_read", "cp.async.bulk.wait_group.read 0;", None, ())
"""Wait until this thread's stores have read shared memory, which may then be overwritten."""
wait_stores = instruction("cp_async_bulk_wait_group", "cp.async.bulk.wait_group 0;", None, ())
"""Wait until this thread's stores are done."""
