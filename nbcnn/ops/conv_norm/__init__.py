"""A convolution with the EvoNorm layer behind it."""
