"""The filter of a diagonal state space model (S4D): for every channel a sum of decaying oscillations, sampled at T times.

With dt = exp(log_dt), A = −exp(a_re) + i·a_im, C = c_re + i·c_im, z = A·dt, β = (e^z − 1)/A (zero-order hold, input matrix 1):

    k[c,l] = 2·Re Σ_s C·β·e^{z·l},   l = 0 .. T−1, over the S complex states of channel c (each stands for a conjugate pair)

Backward, with G_w = ∂L/∂Re w + i·∂L/∂Im w, for which G_w = G_f·conj(f′) along a holomorphic f, and C' = C·β:

    G_C' = 2 Σ_l dk_l·conj(e^{zl}),   G_z = 2·conj(C')·Σ_l l·dk_l·conj(e^{zl}) + G_β·conj(e^z/A)
    G_C = G_C'·conj(β),   G_β = G_C'·conj(C),   G_A = −G_β·conj(β/A) + G_z·dt
    dc_re, dc_im = G_C;   da_re = −e^{a_re}·Re G_A,   da_im = Im G_A;   dlog_dt = dt·Σ_s Re(G_z·conj(A))

Everything between the float32 parameters and the float32 filter is float64, here and in the kernels: the angle Im z·l reaches
hundreds of radians, of which float32 would leave four digits, and there are only C·S·T terms per training step. For |z| < 1e-3
β is dt·(1 + z/2 + z²/6), whose next term is 1e-9/24, instead of a difference that cancels.

Source: A. Gu, A. Gupta, K. Goel, C. Ré, "On the Parameterization and Initialization of Diagonal State Space Models", arXiv:2206.11893.

    s4kernel_fprop    log_dt (C), a_re, a_im, c_re, c_im (C,S) -> k (C,T)
    s4kernel_dgrad    dk (C,T), log_dt, a_re, a_im, c_re, c_im -> their five gradients
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from nbcnn.gpu.language import cuda, jit, types
from nbcnn.gpu.target import Target
from nbcnn.ops.kernel.call import Call, Impl, Launch, host
from nbcnn.ops.kernel.case import Case, Gradient, normal
from nbcnn.ops.kernel.reduce import f8
from nbcnn.ops.kernel.traffic import Traffic, outputs, size
from nbcnn.plan.op import Op
from nbcnn.plan.shapes import numel

FPROP_THREADS = 64
MOST_STATES = 512
"""Complex states per channel: their shared memory is 32 bytes each forward, 8 backward."""
SMALL = 1e-3


def _states(log_dt: np.ndarray, a_re: np.ndarray, a_im: np.ndarray, c_re: np.ndarray, c_im: np.ndarray) -> tuple[np.ndarray, ...]:
    """dt (C,1), A, C, z, β (C,S) in float64 and complex128."""
    dt = np.exp(log_dt.astype(np.float64))[:, None]
    a = -np.exp(a_re.astype(np.float64)) + 1j * a_im
    c = c_re.astype(np.float64) + 1j * c_im
    z = a * dt
    beta = np.where(np.abs(z) < SMALL, dt * (1 + z / 2 + z * z / 6), np.expm1(z) / a)
    return dt, a, c, z, beta


def s4kernel_fprop(log_dt: np.ndarray, a_re: np.ndarray, a_im: np.ndarray, c_re: np.ndarray, c_im: np.ndarray, k: np.ndarray) -> None:
    """k (C,T) from log_dt (C) and a_re, a_im, c_re, c_im (C,S)."""
    _, _, c, z, beta = _states(log_dt, a_re, a_im, c_re, c_im)
    waves = np.exp(z[..., None] * np.arange(k.shape[1]))
    k[...] = 2 * np.einsum("cs,cst->ct", c * beta, waves).real


def s4kernel_dgrad(
    dk: np.ndarray, log_dt: np.ndarray, a_re: np.ndarray, a_im: np.ndarray, c_re: np.ndarray, c_im: np.ndarray, *gradients: np.ndarray
) -> None:
    """Five gradients, of the shapes of the five parameters, from dk (C,T) and the parameters."""
    dt, a, c, z, beta = _states(log_dt, a_re, a_im, c_re, c_im)
    times = np.arange(dk.shape[1])
    waves = np.exp(z[..., None] * times).conj()
    sums = np.einsum("ct,cst->cs", dk.astype(np.float64), waves)
    moments = np.einsum("ct,cst->cs", dk * times.astype(np.float64), waves)
    g_product = 2 * sums
    g_beta = g_product * c.conj()
    g_z = 2 * (c * beta).conj() * moments + g_beta * (np.exp(z) / a).conj()
    g_a = -g_beta * (beta / a).conj() + g_z * dt
    g_c = g_product * beta.conj()
    made = (dt[:, 0] * (g_z * a.conj()).real.sum(1), a.real * g_a.real, g_a.imag, g_c.real, g_c.imag)
    for target, gradient in zip(gradients, made, strict=True):
        target[...] = gradient


@jit(device=True)
def _state(log_dt, a_re, a_im):
    """dt, A, z, e^z and β of one state: (dt, Re A, Im A, Re z, Im z, Re e^z, Im e^z, Re β, Im β)."""
    dt = math.exp(f8(log_dt))
    ar, ai = -math.exp(f8(a_re)), f8(a_im)
    zr, zi = ar * dt, ai * dt
    size = math.exp(zr)
    er, ei = size * math.cos(zi), size * math.sin(zi)
    if zr * zr + zi * zi < f8(SMALL * SMALL):
        br = dt * (f8(1) + zr / f8(2) + (zr * zr - zi * zi) / f8(6))
        bi = dt * (zi / f8(2) + zr * zi / f8(3))
    else:
        # Re(e^z − 1) without cancellation: (e^x − 1)·cos y − 2 sin²(y/2).
        half = math.sin(zi / f8(2))
        nr = math.expm1(zr) * math.cos(zi) - f8(2) * half * half
        inverse = f8(1) / (ar * ar + ai * ai)
        br, bi = (nr * ar + ei * ai) * inverse, (ei * ar - nr * ai) * inverse
    return dt, ar, ai, zr, zi, er, ei, br, bi


@functools.cache
def fprop_kernel(states: int) -> Any:
    """The forward kernel for `states` complex states per channel."""

    @jit()
    def s4kernel_fprop_kernel(log_dt, a_re, a_im, c_re, c_im, k, T):
        """k[c,l] = 2·Σ_s Re(C'·e^{zl}).

        grid C, block 64; a block owns a channel: its threads share the states, then a thread owns every 64th l.
        shared 32·S bytes (z and C'); moves 16·C·S + 4·C·T bytes; computes C·S·T sines, cosines and exponentials.
        source: the definition.
        """
        real_z = cuda.shared.array(states, types.float64)
        imag_z = cuda.shared.array(states, types.float64)
        real_c = cuda.shared.array(states, types.float64)
        imag_c = cuda.shared.array(states, types.float64)
        channel = cuda.blockIdx.x
        tid = cuda.threadIdx.x
        s = tid
        while s < states:
            at = channel * states + s
            _, _, _, zr, zi, _, _, br, bi = _state(log_dt[channel], a_re[at], a_im[at])
            cr, ci = f8(c_re[at]), f8(c_im[at])
            real_z[s], imag_z[s] = zr, zi
            real_c[s], imag_c[s] = cr * br - ci * bi, cr * bi + ci * br
            s += FPROP_THREADS
        cuda.syncthreads()
        t = tid
        while t < T:
            total = f8(0)
            for state in range(states):
                angle = imag_z[state] * f8(t)
                wave = real_c[state] * math.cos(angle) - imag_c[state] * math.sin(angle)
                total += math.exp(real_z[state] * f8(t)) * wave
            k[channel * T + t] = f8(2) * total
            t += FPROP_THREADS

    return s4kernel_fprop_kernel


@functools.cache
def dgrad_kernel(states: int, threads: int) -> Any:
    """The backward kernel for `states` complex states per channel, `threads` of a block."""

    @jit()
    def s4kernel_dgrad_kernel(dk, log_dt, a_re, a_im, c_re, c_im, d_log_dt, d_a_re, d_a_im, d_c_re, d_c_im, T):
        """The five gradients of the module's formulas; e^{zl} by repeated multiplication with e^z, l·ε64 off at most.

        grid C, block the states in whole warps (at most 256); a block owns a channel, per thread every `threads`th state.
        shared 8·S bytes (the terms of dlog_dt, summed in order by one thread); moves 32·C·S + 4·C·T bytes. source: the chain rule.
        """
        terms = cuda.shared.array(states, types.float64)
        channel = cuda.blockIdx.x
        tid = cuda.threadIdx.x
        s = tid
        while s < states:
            at = channel * states + s
            dt, ar, ai, _, _, er, ei, br, bi = _state(log_dt[channel], a_re[at], a_im[at])
            cr, ci = f8(c_re[at]), f8(c_im[at])
            # sums of dk·conj(e^{zl}) and of l·dk·conj(e^{zl})
            sr, si, mr, mi = f8(0), f8(0), f8(0), f8(0)
            wr, wi = f8(1), f8(0)
            for t in range(T):
                g = f8(dk[channel * T + t])
                sr += g * wr
                si -= g * wi
                g *= f8(t)
                mr += g * wr
                mi -= g * wi
                wr, wi = wr * er - wi * ei, wr * ei + wi * er
            sr, si = f8(2) * sr, f8(2) * si
            # G_C = G_C'·conj β,  G_β = G_C'·conj C
            d_c_re[at], d_c_im[at] = sr * br + si * bi, si * br - sr * bi
            gr, gi = sr * cr + si * ci, si * cr - sr * ci
            # G_z = 2·conj(C')·moments + G_β·conj(e^z/A)
            pr, pi = cr * br - ci * bi, cr * bi + ci * br
            inverse = f8(1) / (ar * ar + ai * ai)
            qr, qi = (er * ar + ei * ai) * inverse, (ei * ar - er * ai) * inverse
            zr = f8(2) * (pr * mr + pi * mi) + gr * qr + gi * qi
            zi = f8(2) * (pr * mi - pi * mr) + gi * qr - gr * qi
            # G_A = −G_β·conj(β/A) + G_z·dt
            qr, qi = (br * ar + bi * ai) * inverse, (bi * ar - br * ai) * inverse
            d_a_re[at] = ar * (zr * dt - (gr * qr + gi * qi))
            d_a_im[at] = zi * dt - (gi * qr - gr * qi)
            terms[s] = dt * (zr * ar + zi * ai)
            s += threads
        cuda.syncthreads()
        if tid == 0:
            total = f8(0)
            for state in range(states):
                total += terms[state]
            d_log_dt[channel] = total

    return s4kernel_dgrad_kernel


def supports(call: Call, target: Target) -> str | None:
    """None, or why the states do not fit a block's shared memory."""
    states = call.in_shapes[2][1]
    return None if states <= MOST_STATES else f"{states} states per channel are more than {MOST_STATES}"


def bind_fprop(call: Call) -> list[Launch]:
    """One launch."""
    channels, taps = call.out_shapes[0]
    return [Launch(fprop_kernel(call.in_shapes[1][1]), channels, FPROP_THREADS, (*call.ins, *call.outs, np.int32(taps)))]


def bind_dgrad(call: Call) -> list[Launch]:
    """One launch."""
    channels, taps = call.in_shapes[0]
    states = call.in_shapes[2][1]
    threads = min(-(-states // 32) * 32, 256)
    return [Launch(dgrad_kernel(states, threads), channels, threads, (*call.ins, *call.outs, np.int32(taps)))]


def _parameters(call: Call, first: int) -> tuple[int, int]:
    """Bytes of the five parameters from operand `first` on, as they are asked for and different ones: every state reads its channel's log_dt."""
    states = numel(call.in_shapes[first + 1])
    distinct = sum(size(call, "in", at) for at in range(first, first + 5))
    return distinct - size(call, "in", first) + 4 * states, distinct


def traffic_fprop(call: Call) -> list[Traffic]:
    """Bytes of `bind_fprop`: parameters and filter."""
    asked, distinct = _parameters(call, 0)
    return [Traffic(asked, outputs(call), distinct)]


def traffic_dgrad(call: Call) -> list[Traffic]:
    """Bytes of `bind_dgrad`: every state reads its channel's dk."""
    asked, distinct = _parameters(call, 1)
    states = call.in_shapes[2][1]
    return [Traffic(asked + states * size(call, "in", 0), outputs(call), distinct + size(call, "in", 0))]


HOST = {Op("s4kernel", "fprop"): host(s4kernel_fprop), Op("s4kernel", "dgrad"): host(s4kernel_dgrad)}
OPS = {
    Op("s4kernel", "fprop"): Impl(bind_fprop, supports=supports, traffic=traffic_fprop),
    Op("s4kernel", "dgrad"): Impl(bind_dgrad, supports=supports, traffic=traffic_dgrad),
}
GRADIENTS = {Op("s4kernel", "dgrad"): Gradient(Op("s4kernel", "fprop"), lambda ins, outs, v: (v, *ins), of=(0, 1, 2, 3, 4))}


def cases() -> Iterator[Case]:
    """Filters of one state and tap, of odd sizes, of more states and taps than a block has threads, and of slow states (|z| < 1e-3)."""
    for c, states, taps, slow in ((1, 1, 1, 0.0), (2, 3, 7, 0.0), (2, 70, 65, 0.0), (2, 4, 5, -5.0)):
        log_dt = (-3 + 0.5 * normal(39, c) + slow).astype(np.float32)
        a_re, a_im = 0.5 * normal(40, c, states) + np.float32(slow / 2), 2 * normal(41, c, states) * np.float32(np.exp(slow / 2))
        params = (log_dt, a_re, a_im, normal(42, c, states), normal(43, c, states))
        label = f"{c} channels, {states} states, {taps} taps" + (", slow" if slow else "")
        yield Case(Op("s4kernel", "fprop"), label, params, (((c, taps), "float32"),))
        grads = tuple((p.shape, "float32") for p in params)
        yield Case(Op("s4kernel", "dgrad"), label, (normal(44, c, taps), *params), grads)
