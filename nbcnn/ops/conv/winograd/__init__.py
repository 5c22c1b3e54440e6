"""Winograd's convolution F(2×2, 3×3), and the nine products of an upsampling convolution."""
