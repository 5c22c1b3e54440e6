"""The performance laboratory: timing that can be trusted, and what is made of it.

A time comes about like this: `op` verifies an implementation and binds it to operands; `caches` says where those lie when a call
begins; `steady` warms up until times and the clock stand still; `sampling` takes repetitions of all variants in turn, and throws away
sets in which the clock fell (`clocks`); `timing` has the statistics. `selftest` asks all of that for times known beforehand.
"""
