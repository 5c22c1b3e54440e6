"""This package is the performance laboratory: it measures, compares with peers, studies, and reports.

A time is measured in these steps: `op` verifies an implementation and binds it to operands; `caches` says where those lie when a call
begins; `steady` warms up until times and the clock stand still; `sampling` takes repetitions of all variants in turn, and throws away
sets in which the clock fell (`clocks`); `timing` has the statistics. `selftest` measures quantities that are known beforehand by the same steps.
"""
