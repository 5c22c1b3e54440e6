"""Norms, and dropout. Batch normalisation: batch.py, with its references in batch_reference.py and its kernels in batch_forward.py and
batch_backward.py (how blocks share a batch says `nbcnn.ops.kernel.share`), and fold.py, which folds it into a convolution. Group and instance
normalisation: group.py; layer normalisation: layer.py; dropout.py. The other files are EvoNorm's.

EvoNorm: normalisation and activation in one layer, found by search (H. Liu, A. Brock, K. Simonyan, Q. V. Le, "Evolving
Normalization-Activation Layers", NeurIPS 2020, arXiv:2004.02967). Variances are biased, and x itself is never centred.

    B0   y = γ·x/d + β              d = max(s_B, v·x + s_I)    s_B, s_I: deviation of a channel over the batch, over one image
    S0   y = γ·x·σ(v·x)/s + β                                  s: deviation over a group of channels of one image

Every deviation is √(variance + eps). With g = dy, h = γ·g, k = H·W, m = N·k, K = k·(channels of a group):

    B0   q = −h·x/d², M = 1 where v·x + s_I > s_B, else 0
         dβ = Σ g       dγ = Σ g·x/d      dv = Σ M·q·x
         dx = h·(M·s_I + (1−M)·d)/d² + (Σ_hw M·q)·(x − μ_I)/(k·s_I) + (Σ_nhw (1−M)·q)·(x − μ_B)/(m·s_B)
    S0   p = x·σ, σ = σ(v·x)
         dβ = Σ g       dγ = Σ g·p/s      dv = Σ h·x²·σ(1−σ)/s
         dx = (h/s)·(σ + v·x·σ(1−σ)) − (Σ_group h·p/s²)·(x − μ)/(K·s)

In B0's first term h/d + v·M·q is written h·s_I/d² where M = 1: the difference of two nearly equal numbers would lose what
large x have left. Numerics: statistics are float32. A mean is kept as its distance from the first element of what it is the mean
of (its *shift*), so that x − μ = (x − first) − shift keeps its digits under a large offset; a variance is the mean square of
these (two passes, never E[x²] − μ²); a batch's variance is put together from its planes' by the formula of Chan, Golub and
LeVeque (1979). No order of addition depends on timing.

Kernels hold a slab of an image in registers where it fits, so that every element is loaded once; S0 is then one launch forward and one
backward, and B0, whose channels want all images, is one launch as long as its blocks fit on the GPU together: each sends two numbers of
every plane to the other blocks of the channel and waits for theirs.

    reference.py  both layers in NumPy           held.py   slabs in registers: what a block, a thread group and a thread have
    s0_held.py    S0 on held slabs               b0_held.py, b0_held_grads.py   B0 on held slabs, in one launch or in stages
    b0_batch.py   the batch's statistics, made by every block that needs them
    plane.py      how blocks share any image     s0.py, b0.py   the ops: held, or kernels for any shape      rows.py  sums over the images
    b0_ranks.py   B0 with the statistics of all ranks that train together
    quads.py  what a warp has of a group         traffic.py  bytes
    b0_apply.py   B0's y of large batches stored NHWC
"""
