"""wgmma (sm_90a): a warpgroup multiplies tiles that lie in shared memory and adds into its registers, asynchronously.

Order of use: `wgmma_fence()`; some products; `wgmma_commit()`; … `wgmma_wait(n)` until at most n committed groups are still
running; `wgmma_wait_all(count)(acc)` before the first use of the sums. All four warps of the warpgroup call all of them.

A product reads its operands through descriptors of 64 bits: address, two strides, swizzle. Tiles here are swizzled by
128 bytes, as TMA writes them: 1,024-byte aligned, in rows of 128 bytes (64 bfloat16, 32 tf32), eight rows an atom.

    K-major    a row holds one m (or n) and 64 k (32 in tf32); one instruction's 16 k (8) take 32 bytes: the next is `+ 2`.
    MN-major   a row holds one k and 64 m (or n); one instruction's 16 k take two atoms: the next is `+ 128`. bfloat16 only.

D fragment of m64nN, thread t of the warpgroup, element 4j + 2h + e: row 16·(t/32) + (t mod 32)/4 + 8h, column 8j + 2·(t mod 4) + e.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbcnn.gpu.language import jit, types, u4
from nbcnn.ops.ptx.asm import accumulating, instruction

u8 = types.uint64

K_STEP = 2
"""Added to a K-major descriptor for the next instruction's k: 32 bytes, in units of 16."""
MN_STEP = 128
"""Added to an MN-major descriptor for the next instruction's k: two atoms of 1,024 bytes, in units of 16."""

_SWIZZLE_128 = 1 << 62

wgmma_fence = instruction("wgmma_fence", "wgmma.fence.sync.aligned;", None, ())
"""Before the first product, and after registers of the sums were written: makes them visible to wgmma."""
wgmma_commit = instruction("wgmma_commit_group", "wgmma.commit_group.sync.aligned;", None, ())
"""Close the group of products issued since the last commit."""


@cache
def wgmma_wait(running: int) -> Any:
    """Intrinsic (): wait until at most `running` committed groups have not finished. The sums must not be touched yet."""
    return instruction(f"wgmma_wait_group_{running}", f"wgmma.wait_group.sync.aligned {running};", None, ())


@cache
def wgmma_wait_all(count: int, first: int = 0) -> Any:
    """Intrinsic (acc): wait for every group; acc[first : first + count] pass through it, so that no use can move above it."""
    return accumulating("wgmma_wait_group_all", "wgmma.wait_group.sync.aligned 0;", count, first)


@cache
def wgmma_settle(count: int) -> Any:
    """Intrinsic (acc): acc[0 : count] pass through it without an instruction, so that NVVM makes them before it.

    A product reads them on its own time, behind a `wgmma_fence` that orders only what was written before it.
    """
    return accumulating("wgmma_settle", "", count, 0)


def _product(kind: str, n: int, first: int, tail: str, registers: int = 0) -> Any:
    """Intrinsic (acc, a, b, add): a is the descriptor of A, or so many words of it."""
    count = n // 2
    sums, of_a = ",".join(f"${i}" for i in range(count)), ",".join(f"${count + i}" for i in range(registers or 1))
    b, add = (f"${count + (registers or 1) + i}" for i in range(2))
    asm = (
        f"{{ .reg .pred p; setp.ne.u32 p, {add}, 0;"
        f" wgmma.mma_async.sync.aligned.m64n{n}{kind} {{{sums}}}, {f'{{{of_a}}}' if registers else of_a}, {b}, p, {tail}; }}"
    )
    name = f"wgmma_m64n{n}{kind.replace('.', '_')}{'_registers' if registers else ''}"
    return accumulating(name, asm, count, first, ((u4,) * registers or (u8,)) + (u8, u4))


@cache
def wgmma_bf16(n: int, first: int = 0, a_mn_major: bool = False, b_mn_major: bool = False) -> Any:
    """Intrinsic (acc, a, b, add): acc[first : first + n/2] (+)= A·B of bfloat16, m64 × n × k16; `add` 0 forgets the old sums.

    a and b are descriptors of A (64 × 16) and B (16 × n). n: a multiple of 8, at most 256.
    """
    return _product("k16.f32.bf16.bf16", n, first, f"1, 1, {int(a_mn_major)}, {int(b_mn_major)}")


@cache
def wgmma_f16(n: int, first: int = 0) -> Any:
    """`wgmma_bf16` of float16, both operands K-major."""
    return _product("k16.f32.f16.f16", n, first, "1, 1, 0, 0")


@cache
def wgmma_tf32(n: int, first: int = 0) -> Any:
    """`wgmma_bf16` of tf32, m64 × n × k8; both operands K-major, there is no other form. Bits below tf32's are ignored."""
    return _product("k8.f32.tf32.tf32", n, first, "1, 1")


@cache
def wgmma_tf32_registers(n: int, first: int = 0) -> Any:
    """Intrinsic (acc, a0, a1, a2, a3, b, add): `wgmma_tf32` with A in the registers of the warpgroup.

    Words of A, thread t, for row i = 16·(t/32) + (t mod 32)/4 and column k = t mod 4: a0 is A[i][k], a1 A[i + 8][k], a2 A[i][k + 4],
    a3 A[i + 8][k + 4]. They must not change before the product has ended.
    """
    return _product("k8.f32.tf32.tf32", n, first, "1, 1", registers=4)


@cache
def k_major_rows(next_8: int) -> Any:
    """Device function (address) -> descriptor of a K-major tile whose next eight rows start `next_8` bytes further.

    The address is a multiple of 128, but not necessarily of 1,024: swizzling goes by address, so a tile may start at any row of a larger
    swizzled one.
    """
    HIGH = _SWIZZLE_128 | ((next_8 >> 4) << 32) | (1 << 16)

    @jit(device=True)
    def run(address):
        return u8(HIGH) | u8((u4(address) & 0x3FFFF) >> 4)

    return run


k_major = k_major_rows(1024)
"""Device function (address) -> descriptor of a K-major tile, one row of 128 bytes after another."""


@cache
def mn_major(next_64: int, next_8: int = 1024) -> Any:
    """Device function (address) -> descriptor of an MN-major tile whose next 64 m (or n) start `next_64` bytes further.

    Eight k follow each other in rows of 128 bytes, the next eight start `next_8` bytes further, by default right behind. `next_64` is not used where
    the operand has 64; of overlapping 64s it is less than a tile. As in `k_major_rows` the address is a multiple of 128.
    """
    HIGH = _SWIZZLE_128 | ((next_8 >> 4) << 32) | ((next_64 >> 4) << 16)

    @jit(device=True)
    def run(address):
        return u8(HIGH) | u8((u4(address) & 0x3FFFF) >> 4)

    return run


@cache
def registers_dec(count: int) -> Any:
    """Intrinsic (): each thread of the warpgroup keeps `count` registers, a multiple of 8, and gives the others to the block's pool (setmaxnreg)."""
    return instruction(f"registers_dec_{count}", f"setmaxnreg.dec.sync.aligned.u32 {count};", None, ())


@cache
def registers_inc(count: int) -> Any:
    """Intrinsic (): each thread of the warpgroup has `count` registers from here on, as soon as others have given them."""
    return instruction(f"registers_inc_{count}", f"setmaxnreg.inc.sync.aligned.u32 {count};", None, ())
