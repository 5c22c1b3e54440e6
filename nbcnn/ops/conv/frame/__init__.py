"""This package has the parts that all convolution engines share: geometry, epilogues, split sums, fused ops composed of plain ones."""
