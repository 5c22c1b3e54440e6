"""A simulator of kernels that runs all threads of many blocks in step, as lanes of NumPy arrays; it needs neither a GPU nor Numba.

A statement of a kernel is executed once, for all lanes: `x = a[i] + 1` is one gather and one addition of arrays that have one element per thread.
Where
threads part (`if`, loops of different length, `return`), a mask says which of them a statement is for. So a barrier has nothing to wait for, shuffles
are gathers, and what a warp asks of memory in one instruction is there to be counted.

    lanes         who is active; where threads part and meet again
    numbers       arithmetic by the rules of `nbcnn.gpu.typing32`
    storage       global, shared and local arrays; addresses
    rewrite       a kernel's source, rewritten statement by statement
    names         what `cuda`, `types` and `math` are inside a kernel
    instructions  the PTX instructions that can be simulated
    tma           boxes of tensors on their way, and the barriers that count their bytes
    launch        a launch, a group of blocks after the other
    check         races, out-of-bounds and uninitialised accesses, and what memory is asked for
    watched       the arrays that show their accesses to it
    findings      what it gives: faults, and reports of launches
    host          device arrays and events of the host's side
"""
