"""A convolution with the norm behind it: nbcnn/ops/norms has the norms alone.

statistics.py                                    a convolution with the statistics of a batch normalisation, by an engine's epilogue
gradient_sums.py                                 an input gradient with the sums that the batch normalisation in front of it wants
EvoNorm:
two_ops.py                                       what the ops mean; the convolution and the norm one behind the other, for every row
wgmma.py, wgmma_form.py, wgmma_kernel.py, wgmma_epilogue.py   both in one kernel of Hopper's tensor cores
"""
