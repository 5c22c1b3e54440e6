"""Global memory by words, whatever the array holds: `ld.global.nc`, `st.global` at a byte offset, a multiple of the bytes moved.

Words are uint32; a float32 or two bfloat16 each (`nbcnn.ops.ptx.cvt` makes floats of them). A predicated load gives zeros where
`wanted` is 0, and reads nothing then; no branch holds it back.
"""

from __future__ import annotations

from typing import Any

from nbcnn.gpu.language import i4, i8, jit, types, u4
from nbcnn.ops.ptx.asm import byte_address_global, instruction

_u8 = types.uint64


def _load(kind: str, count: int) -> Any:
    results = ",".join(f"${i}" for i in range(count))
    zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(count))
    vector = f"v{count}." if count > 1 else ""
    target = f"{{{results}}}" if count > 1 else results
    return instruction(
        f"ld_global_nc_{vector.replace('.', '_')}{kind}_wanted",
        f"{{ .reg .pred p; setp.ne.s32 p, ${count + 1}, 0; {zeros} @p ld.global.nc.{vector}{kind} {target}, [${count}]; }}",
        (u4,) * count if count > 1 else u4,
        (_u8, i4),
    )


_ld1, _ld2, _ld4 = _load("b32", 1), _load("b32", 2), _load("b32", 4)
word_at, words_4_at = _ld1, _ld4
"""(global address, wanted) -> the word, or the four words, there."""
_ld_half = instruction(
    "ld_global_nc_b16_wanted",
    "{ .reg .pred p; .reg .b16 h; setp.ne.s32 p, $2, 0; mov.b16 h, 0; @p ld.global.nc.b16 h, [$1]; cvt.u32.u16 $0, h; }",
    u4,
    (_u8, i4),
)
_ld_byte = instruction(
    "ld_global_nc_u8_wanted",
    "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; @p ld.global.nc.u8 $0, [$1]; }",
    u4,
    (_u8, i4),
)
_st4 = instruction("st_global_v4_b32_words", "st.global.v4.b32 [$0], {$1,$2,$3,$4};", None, (_u8, u4, u4, u4, u4))
_st_half = instruction("st_global_b16_words", "{ .reg .b16 h; cvt.u16.u32 h, $1; st.global.b16 [$0], h; }", None, (_u8, u4))


@jit(device=True)
def load_word(array, offset, wanted):
    """The word at byte `offset` of a device array."""
    return _ld1(byte_address_global(array) + _u8(i8(offset)), wanted)


@jit(device=True)
def load_2_words(array, offset, wanted):
    """Two words, 8 bytes."""
    return _ld2(byte_address_global(array) + _u8(i8(offset)), wanted)


@jit(device=True)
def load_4_words(array, offset, wanted):
    """Four words, 16 bytes."""
    return _ld4(byte_address_global(array) + _u8(i8(offset)), wanted)


@jit(device=True)
def load_half(array, offset, wanted):
    """Two bytes, in the lower half of a word."""
    return _ld_half(byte_address_global(array) + _u8(i8(offset)), wanted)


@jit(device=True)
def load_byte(array, offset, wanted):
    """One byte."""
    return _ld_byte(byte_address_global(array) + _u8(i8(offset)), wanted)


@jit(device=True)
def store_4_words(array, offset, a, b, c, d):
    """Four words, 16 bytes."""
    _st4(byte_address_global(array) + _u8(i8(offset)), a, b, c, d)


@jit(device=True)
def store_half(array, offset, word):
    """The lower half of a word, two bytes."""
    _st_half(byte_address_global(array) + _u8(i8(offset)), word)
