"""This package is the language of kernels (`language`), the door to their compiler (`compiler` alone imports Numba), and the device."""
