"""MODES: the one table. A row is what a mode and precision run for each op; read it from top to bottom.

Ops and their signatures (logical shapes; inputs, then outputs, then attributes). References have the same order.

    conv_fprop        x (N,C,H,W), w (K,C,R,S)[, b (K)] -> y (N,K,P,Q)                        stride, pad
    conv_dgrad        dy (N,K,P,Q), w (K,C,R,S) -> dx (N,C,H,W)                               stride, pad
    conv_wgrad        x (N,C,H,W), dy (N,K,P,Q) -> dw (K,C,R,S)[, db (K)]                     stride, pad
    relu_fprop        x -> y                              relu_dgrad        dy, y -> dx
    leaky_relu_fprop  x -> y   slope                      leaky_relu_dgrad  dy, y -> dx       slope
    sigmoid_fprop     x -> y                              sigmoid_dgrad     dy, y -> dx
    swish_fprop       x -> y                              swish_dgrad       dy, x -> dx
    add               a, b -> y
    maxpool_fprop     x (N,C,H,W) -> y (N,C,P,Q), index (N,C,P,Q) uint8 or int32              size, stride
    maxpool_dgrad     dy, index -> dx (N,C,H,W)                                               size, stride
    avgpool_fprop     x -> y                              avgpool_dgrad     dy -> dx          size, stride
    upsample_fprop    x (N,C,H,W) -> y (N,C,fH,fW)        upsample_dgrad    dy -> dx          factor
    flatten_fprop     x (N,C,H,W) -> y (N,CHW)            flatten_dgrad     dy -> dx          (y in C,H,W order in every layout)
    convert           x (N,C,H,W) -> y (N,C,H,W)                                              source, target layouts
    mse_fprop         y, target -> loss () float64                                            mean over all elements
    mse_dgrad         y, target -> dy
    softmax_xent_fprop  logits (N,F), labels (N) int32 -> p (N,F), loss () float64            mean over N
    softmax_xent_dgrad  p, labels -> dlogits
    gather            images (M,C,H,W) uint8, order (E) int32, state (8) int64 -> x (N,C,H,W)  flip; x in [0,1]
    gather_labels     labels (M) int32, order (E) int32, state -> y (N) int32
    sgd               w, g, m, lr (steps), state[, norm ()] -> w, m, state      (in place)          momentum, weight_decay, clip_value,
                                                                                                clip_norm, decayed
    adam              w, g, m, v, lr (steps), state[, norm ()] -> w, m, v, state (in place)         beta1, beta2, eps, then as sgd
    grad_norm         g -> norm () float64
    pack_weights      params (P), map (n) int32 -> packed (n)
    advance           loss () float64, state, sums (4) float64 -> state, sums   (in place)          count

GPU rows keep images in one layout throughout; `convert` stands only at the two doors of a net.
"""

from __future__ import annotations
