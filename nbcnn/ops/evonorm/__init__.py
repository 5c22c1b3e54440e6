"""EvoNorm: normalisation and activation in one layer, found by search (H. Liu, A. Brock, K. Simonyan, Q. V. Le, "Evolving
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

    reference.py  both layers in NumPy           plane.py  how blocks share an image, in both layouts, and add
    s0.py         the kernels of S0              b0.py     the kernels of B0            rows.py  sums over the images of a batch
"""
