"""128-bit loads and stores of four float32: `ld.global.v4`, `st.global.v4`, `ld.shared.v4`, `st.shared.v4`; predicated loads.

Each takes (array, element offset), never a raw address, and the offset of four floats must be a multiple of four: the
same kernel source then runs in the simulator, where these are plain Python on the same arrays.
"""

from __future__ import annotations

from nbcnn.cuda import SIMULATOR, cuda, f4, i4, i8, jit, types

if SIMULATOR:

    @cuda.jit(device=True)
    def load4(array, offset):
        return array[offset], array[offset + 1], array[offset + 2], array[offset + 3]

    @cuda.jit(device=True)
    def load4_if(array, offset, wanted):
        if wanted:
            return array[offset], array[offset + 1], array[offset + 2], array[offset + 3]
        return f4(0), f4(0), f4(0), f4(0)

    @cuda.jit(device=True)
    def load1_if(array, offset, wanted):
        return array[offset] if wanted else f4(0)

    @cuda.jit(device=True)
    def store4(array, offset, a, b, c, d):
        array[offset], array[offset + 1], array[offset + 2], array[offset + 3] = a, b, c, d

    @cuda.jit(device=True)
    def shared_store1(array, offset, a):
        array[offset] = a

    shared_load4, shared_store4 = load4, store4
else:
    from nbcnn.ops.ptx.asm import byte_address_global, byte_address_shared, instruction

    _u8, _u4 = types.uint64, types.uint32
    _ld = instruction("ld_global_v4", "ld.global.v4.f32 {$0,$1,$2,$3}, [$4];", (f4,) * 4, (_u8,))
    _ld_if = instruction(
        "ld_global_nc_v4_if",
        "{ .reg .pred p; setp.ne.s32 p, $5, 0; mov.f32 $0, 0f00000000; mov.f32 $1, 0f00000000; mov.f32 $2, 0f00000000;"
        " mov.f32 $3, 0f00000000; @p ld.global.nc.v4.f32 {$0,$1,$2,$3}, [$4]; }",
        (f4,) * 4,
        (_u8, i4),
    )
    _ld1_if = instruction(
        "ld_global_nc_if",
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.f32 $0, 0f00000000; @p ld.global.nc.f32 $0, [$1]; }",
        f4,
        (_u8, i4),
    )
    _st = instruction("st_global_v4", "st.global.v4.f32 [$0], {$1,$2,$3,$4};", None, (_u8, f4, f4, f4, f4))
    _lds = instruction("ld_shared_v4", "ld.shared.v4.f32 {$0,$1,$2,$3}, [$4];", (f4,) * 4, (_u4,))
    _sts1 = instruction("st_shared", "st.shared.f32 [$0], $1;", None, (_u4, f4))
    _sts = instruction("st_shared_v4", "st.shared.v4.f32 [$0], {$1,$2,$3,$4};", None, (_u4, f4, f4, f4, f4))

    # An address that the compiler takes for unknown. Of the real one, a constant, it would make a new constant with every offset,
    # and an addition with each, instead of one register and the offset in the instruction.
    _hold = instruction("hold", "mov.b32 $0, $1;", _u4, (_u4,), pure=True)

    @jit(device=True)
    def load4(array, offset):
        """array[offset : offset+4] of a device array as four floats, one LDG.128."""
        return _ld(byte_address_global(array) + _u8(i8(offset) * i8(4)))

    @jit(device=True)
    def load4_if(array, offset, wanted):
        """As `load4` through the read-only path, or four zeros where `wanted` is 0 (nothing is then read)."""
        return _ld_if(byte_address_global(array) + _u8(i8(offset) * i8(4)), i4(wanted))

    @jit(device=True)
    def load1_if(array, offset, wanted):
        """array[offset] of a device array, or zero where `wanted` is 0: a load that no branch holds back."""
        return _ld1_if(byte_address_global(array) + _u8(i8(offset) * i8(4)), i4(wanted))

    @jit(device=True)
    def store4(array, offset, a, b, c, d):
        """array[offset : offset+4] = a, b, c, d of a device array, one STG.128."""
        _st(byte_address_global(array) + _u8(i8(offset) * i8(4)), a, b, c, d)

    @jit(device=True)
    def shared_load4(array, offset):
        """array[offset : offset+4] of a shared array as four floats, one LDS.128."""
        return _lds(_hold(byte_address_shared(array)) + _u4(i4(offset) * i4(4)))

    @jit(device=True)
    def shared_store4(array, offset, a, b, c, d):
        """array[offset : offset+4] = a, b, c, d of a shared array, one STS.128."""
        _sts(_hold(byte_address_shared(array)) + _u4(i4(offset) * i4(4)), a, b, c, d)

    @jit(device=True)
    def shared_store1(array, offset, a):
        """array[offset] = a of a shared array, with a 32-bit address (indexing would compute it in 64 bits)."""
        _sts1(_hold(byte_address_shared(array)) + _u4(i4(offset) * i4(4)), a)
