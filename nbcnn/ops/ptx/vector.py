"""Loads and stores of 128 bits, four float32 or eight halves (bfloat16 or float16, uint16 arrays): `ld.global.v4`, `st.global.v4`, `ld.shared.v4`,
`st.shared.v4`; of 64 bits, four halves; and predicated loads.

Each takes (array, element offset), never a raw address, and the offset must be a multiple of the elements moved: the same
kernel source then runs in the simulator, where these are plain Python on the same arrays. Halves come and go as uint32
words of two, the first in the lower half; `nbcnn.ops.ptx.cvt` makes floats of them.
"""

from __future__ import annotations

from nbcnn.gpu.language import NUMBA_SIMULATOR, f4, i4, i8, jit, types, u4

if NUMBA_SIMULATOR:

    @jit(device=True)
    def load4(array, offset):
        return array[offset], array[offset + 1], array[offset + 2], array[offset + 3]

    @jit(device=True)
    def load4_if(array, offset, wanted):
        if wanted:
            return array[offset], array[offset + 1], array[offset + 2], array[offset + 3]
        return 0.0, 0.0, 0.0, 0.0

    @jit(device=True)
    def load1_if(array, offset, wanted):
        return array[offset] if wanted else 0.0

    @jit(device=True)
    def store4(array, offset, a, b, c, d):
        array[offset], array[offset + 1], array[offset + 2], array[offset + 3] = a, b, c, d

    @jit(device=True)
    def store2(array, offset, a, b):
        array[offset], array[offset + 1] = a, b

    @jit(device=True)
    def shared_store1(array, offset, a):
        array[offset] = a

    shared_load4, shared_load4_any, shared_store4 = load4, load4, store4

    def _word(array, i):
        return u4(int(array[i]) | int(array[i + 1]) << 16)

    def _put(array, i, word):
        array[i], array[i + 1] = int(word) & 0xFFFF, int(word) >> 16

    @jit(device=True)
    def load_halves8(array, offset):
        return tuple(_word(array, offset + 2 * i) for i in range(4))

    @jit(device=True)
    def load_halves8_if(array, offset, wanted):
        return tuple(_word(array, offset + 2 * i) if wanted else u4(0) for i in range(4))

    @jit(device=True)
    def load_halves4(array, offset):
        return _word(array, offset), _word(array, offset + 2)

    @jit(device=True)
    def load_halves4_if(array, offset, wanted):
        return (_word(array, offset), _word(array, offset + 2)) if wanted else (u4(0), u4(0))

    @jit(device=True)
    def store_halves8(array, offset, a, b, c, d):
        for i, word in enumerate((a, b, c, d)):
            _put(array, offset + 2 * i, word)

    @jit(device=True)
    def store_halves4(array, offset, a, b):
        _put(array, offset, a)
        _put(array, offset + 2, b)

    shared_load_halves8, shared_store_halves8 = load_halves8, store_halves8
else:
    from nbcnn.ops.ptx.asm import byte_address_global, byte_address_shared, instruction

    _u8, _u4 = types.uint64, u4
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
    _st2 = instruction("st_global_v2", "st.global.v2.f32 [$0], {$1,$2};", None, (_u8, f4, f4))
    _lds = instruction("ld_shared_v4", "ld.shared.v4.f32 {$0,$1,$2,$3}, [$4];", (f4,) * 4, (_u4,))
    _lds_any = instruction("ld_shared_v4_any", "ld.shared.v4.f32 {$0,$1,$2,$3}, [$4];", (f4,) * 4, (_u4,))
    _sts1 = instruction("st_shared", "st.shared.f32 [$0], $1;", None, (_u4, f4))
    _sts = instruction("st_shared_v4", "st.shared.v4.f32 [$0], {$1,$2,$3,$4};", None, (_u4, f4, f4, f4, f4))

    _ldw4 = instruction("ld_global_v4_b32", "ld.global.v4.b32 {$0,$1,$2,$3}, [$4];", (u4,) * 4, (_u8,))
    _ldw4_if = instruction(
        "ld_global_nc_v4_b32_if",
        "{ .reg .pred p; setp.ne.s32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
        " @p ld.global.nc.v4.b32 {$0,$1,$2,$3}, [$4]; }",
        (u4,) * 4,
        (_u8, i4),
    )
    _ldw2 = instruction("ld_global_v2_b32", "ld.global.v2.b32 {$0,$1}, [$2];", (u4,) * 2, (_u8,))
    _ldw2_if = instruction(
        "ld_global_nc_v2_b32_if",
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; mov.b32 $0, 0; mov.b32 $1, 0; @p ld.global.nc.v2.b32 {$0,$1}, [$2]; }",
        (u4,) * 2,
        (_u8, i4),
    )
    _stw4 = instruction("st_global_v4_b32", "st.global.v4.b32 [$0], {$1,$2,$3,$4};", None, (_u8, u4, u4, u4, u4))
    _stw2 = instruction("st_global_v2_b32", "st.global.v2.b32 [$0], {$1,$2};", None, (_u8, u4, u4))
    _ldsw4 = instruction("ld_shared_v4_b32", "ld.shared.v4.b32 {$0,$1,$2,$3}, [$4];", (u4,) * 4, (_u4,))
    _stsw4 = instruction("st_shared_v4_b32", "st.shared.v4.b32 [$0], {$1,$2,$3,$4};", None, (_u4, u4, u4, u4, u4))

    # An address that the compiler takes for unknown. Of the real one, a constant, it would make a new constant with every offset,
    # and an addition with each, instead of one register and the offset in the instruction.
    _hold = instruction("hold", "mov.b32 $0, $1;", _u4, (_u4,), pure=True)

    @jit(device=True)
    def load4(array, offset):
        """array[offset : offset+4] of a device array as four floats, one LDG.128."""
        return _ld(byte_address_global(array) + _u8(i8(offset) * 4))

    @jit(device=True)
    def load4_if(array, offset, wanted):
        """array[offset : offset+4] as `load4` gives it, through the read-only path; four zeros where `wanted` is 0 (nothing is then read)."""
        return _ld_if(byte_address_global(array) + _u8(i8(offset) * 4), wanted)

    @jit(device=True)
    def load1_if(array, offset, wanted):
        """array[offset] of a device array, or zero where `wanted` is 0: a load that no branch holds back."""
        return _ld1_if(byte_address_global(array) + _u8(i8(offset) * 4), wanted)

    @jit(device=True)
    def store4(array, offset, a, b, c, d):
        """array[offset : offset+4] = a, b, c, d of a device array, one STG.128."""
        _st(byte_address_global(array) + _u8(i8(offset) * 4), a, b, c, d)

    @jit(device=True)
    def store2(array, offset, a, b):
        """array[offset : offset+2] = a, b of a device array, one STG.64; offset is even."""
        _st2(byte_address_global(array) + _u8(i8(offset) * 4), a, b)

    @jit(device=True)
    def shared_load4(array, offset):
        """array[offset : offset+4] of a shared array as four floats, one LDS.128."""
        return _lds(_hold(byte_address_shared(array)) + _u4(offset * 4))

    @jit(device=True)
    def shared_load4_any(array, offset):
        """`shared_load4` of places that perhaps nobody has written, whose values the caller then leaves unused."""
        return _lds_any(_hold(byte_address_shared(array)) + _u4(offset * 4))

    @jit(device=True)
    def shared_store4(array, offset, a, b, c, d):
        """array[offset : offset+4] = a, b, c, d of a shared array, one STS.128."""
        _sts(_hold(byte_address_shared(array)) + _u4(offset * 4), a, b, c, d)

    @jit(device=True)
    def shared_store1(array, offset, a):
        """array[offset] = a of a shared array, with a 32-bit address (indexing would compute it in 64 bits)."""
        _sts1(_hold(byte_address_shared(array)) + _u4(offset * 4), a)

    @jit(device=True)
    def load_halves8(array, offset):
        """array[offset : offset+8] of a device array of halves as four words, one LDG.128."""
        return _ldw4(byte_address_global(array) + _u8(i8(offset) * 2))

    @jit(device=True)
    def load_halves8_if(array, offset, wanted):
        """array[offset : offset+8] as `load_halves8` gives it, through the read-only path; zeros where `wanted` is 0 (nothing is then read)."""
        return _ldw4_if(byte_address_global(array) + _u8(i8(offset) * 2), wanted)

    @jit(device=True)
    def load_halves4(array, offset):
        """array[offset : offset+4] of a device array of halves as two words, one LDG.64."""
        return _ldw2(byte_address_global(array) + _u8(i8(offset) * 2))

    @jit(device=True)
    def load_halves4_if(array, offset, wanted):
        """array[offset : offset+4] as `load_halves4` gives it, through the read-only path; zeros where `wanted` is 0 (nothing is then read)."""
        return _ldw2_if(byte_address_global(array) + _u8(i8(offset) * 2), wanted)

    @jit(device=True)
    def store_halves8(array, offset, a, b, c, d):
        """array[offset : offset+8] = four words of halves of a device array, one STG.128."""
        _stw4(byte_address_global(array) + _u8(i8(offset) * 2), a, b, c, d)

    @jit(device=True)
    def store_halves4(array, offset, a, b):
        """array[offset : offset+4] = two words of halves of a device array, one STG.64."""
        _stw2(byte_address_global(array) + _u8(i8(offset) * 2), a, b)

    @jit(device=True)
    def shared_load_halves8(array, offset):
        """array[offset : offset+8] of a shared array of halves as four words, one LDS.128."""
        return _ldsw4(_hold(byte_address_shared(array)) + _u4(offset * 2))

    @jit(device=True)
    def shared_store_halves8(array, offset, a, b, c, d):
        """array[offset : offset+8] = four words of halves of a shared array, one STS.128."""
        _stsw4(_hold(byte_address_shared(array)) + _u4(offset * 2), a, b, c, d)
