"""Loads and stores of shared memory by byte address, for kernels whose shared memory is laid out in bytes: `ld.shared`, `st.shared`.

Values are 32-bit words (`nbcnn.ops.ptx.cvt` makes them); an address is a multiple of the bytes moved.
"""

from __future__ import annotations

from nbcnn.gpu.language import u4
from nbcnn.ops.ptx.asm import instruction

store_words_1 = instruction("st_shared_b32", "st.shared.b32 [$0], $1;", None, (u4, u4))
"""(address, word)."""
store_half_words_1 = instruction("st_shared_b16", "{ .reg .b16 h; cvt.u16.u32 h, $1; st.shared.b16 [$0], h; }", None, (u4, u4))
"""(address, word): the lower half of the word, 2 bytes."""
store_words_2 = instruction("st_shared_v2_b32", "st.shared.v2.b32 [$0], {$1,$2};", None, (u4, u4, u4))
"""(address, word, word): 8 bytes."""
store_words_4 = instruction("st_shared_v4_b32_at", "st.shared.v4.b32 [$0], {$1,$2,$3,$4};", None, (u4,) * 5)
"""(address, word, word, word, word): 16 bytes."""
load_words_1 = instruction("ld_shared_b32_at", "ld.shared.b32 $0, [$1];", u4, (u4,))
"""(address) -> word."""
load_any_words_1 = instruction("ld_shared_b32_at_any", "ld.shared.b32 $0, [$1];", u4, (u4,))
"""(address) -> word, of a place that perhaps nobody has written, whose value the caller then leaves unused."""
load_words_2 = instruction("ld_shared_v2_b32_at", "ld.shared.v2.b32 {$0,$1}, [$2];", (u4,) * 2, (u4,))
"""(address) -> two words, 8 bytes."""
load_words_4 = instruction("ld_shared_v4_b32_at", "ld.shared.v4.b32 {$0,$1,$2,$3}, [$4];", (u4,) * 4, (u4,))
"""(address) -> four words, 16 bytes."""
