"""This module makes the cases of `study gemm`, `study elementwise` and `study evonorm`: ours, verified first, then PyTorch's and Triton's forms."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from nbcnn.lab.measure import opcases
from nbcnn.lab.measure.caches import sets_for
from nbcnn.lab.measure.fusion import FEWEST_OF_CONV, Case, Variant, chained, ours
from nbcnn.lab.measure.op import Choice, Prepared, full_bound, prepare
from nbcnn.plan.flops import step_bytes, step_flops
from nbcnn.plan.op import Norm, Op

PUBLISHED = ((128, 128, 128), (256, 128, 128), (256, 256, 256), (512, 256, 256), (512, 256, 512), (1024, 512, 256))
PRODUCTS = (*PUBLISHED, (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192))
"""The sizes M, K, N of matrix products."""
ACTIVATIONS = ("relu", "sigmoid", "swish")
SIDES = (1024, 4096)
BATCHES = (16, 32, 64, 256, 1024)
IMAGE = (64, 28, 28)
FEW_SETS = 12
EPS = {"s0": 1e-5, "b0": 1e-3}
TRITON_MISSING = "Triton is not installed, so it is no peer here: pip install triton"
MODE = {"fp32": "cudacore", "tf32": "tensorcore", "bf16": "tensorcore"}


def has_triton() -> bool:
    """True if triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def _made(op: str | Op, shape: Sequence[int], mode: str = "cudacore", precision: str | None = None) -> tuple[Prepared, opcases.Problem]:
    problem = opcases.problem(op, ",".join(map(str, shape)))
    moved = 4 * sum(array.size for array in problem.operands()[0])
    choice = Choice(mode, precision)
    first = prepare(choice, problem, sets=1)
    return prepare(choice, problem, sets=min(FEW_SETS, sets_for(moved, first.device))), problem


def _want(made: Prepared, problem: opcases.Problem) -> tuple[np.ndarray, float]:
    """Our result and how far a peer's may be from it: both bounds."""
    made.bounds[0].run()
    return made.bounds[0].results()[0], 2 * full_bound(problem, made.row.precision)


def products(device: Any, sizes: Sequence[Sequence[int]], precisions: Sequence[str], peer: bool) -> Iterator[Case]:
    """Matrix products M×K×N in every precision, beside cuBLAS."""
    for size in sizes:
        variants, first = [], None
        for precision in precisions:
            made, problem = _made("gemm", size, MODE[precision], precision)
            first = first or made
            variants.append(ours(f"nbcnn {precision}", made))
            if peer:
                variants.append(_cublas(made, problem))
        assert first is not None
        m, k, n = size
        yield Case(f"{m}×{k}×{n}", 2 * m * k * n, step_bytes(first.step), 2 * m * k * n, "flop", tuple(_peers_behind(variants)))


def _cublas(made: Prepared, problem: opcases.Problem) -> Variant:
    import torch

    from nbcnn.lab.peers import fusion as fusion_peers

    precision = made.row.precision
    fusion_peers.prepare(precision)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    ins, _ = problem.operands()

    def run(a: Any, b: Any) -> Any:
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        return torch.matmul(a, b.T)

    def operands() -> list[Any]:
        return [torch.from_numpy(array).cuda().to(dtype) for array in ins]

    return fusion_peers.variant(f"cuBLAS {precision}", run, operands, len(made.bounds), made.device, precision, _want(made, problem))


def _peers_behind(variants: Sequence[Variant]) -> list[Variant]:
    """Ours first, then the peers, each in their order."""
    return sorted(variants, key=lambda variant: not variant.label.startswith("nbcnn"))


def activations(device: Any, names: Sequence[str], sides: Sequence[int], peer: bool) -> Iterator[Case]:
    """Elementwise activations of side×side numbers."""
    missing = () if not peer or has_triton() else (TRITON_MISSING,)
    for side in sides:
        for name in names:
            made, problem = _made(Op(name, "fprop"), (side, 1, 1, side))
            variants = [ours("nbcnn", made)]
            if peer:
                variants += _torch_forms(
                    made, problem, _activation(name), lambda ins: [ins[0].reshape(len(ins[0]), -1)], triton=_triton_activation(name)
                )
            yield Case(f"{name} {side}²", 0, 8 * side * side, side * side, "element", tuple(variants), missing)


def _activation(name: str) -> Callable[..., Any]:
    import torch

    return {"relu": torch.relu, "sigmoid": torch.sigmoid, "swish": torch.nn.functional.silu}[name]


def _triton_activation(name: str) -> dict[str, Callable[..., Any]]:
    if not has_triton():
        return {}
    from nbcnn.lab.peers import triton_kernels

    return {"triton": triton_kernels.activation(name)}


def _torch_forms(
    made: Prepared, problem: opcases.Problem, function: Callable[..., Any], arrays: Callable[[list[np.ndarray]], list[np.ndarray]], triton: Any = None
) -> list[Variant]:
    """PyTorch eager and compiled and Triton's forms of `function`, each verified against ours."""
    import torch

    from nbcnn.lab.peers import fusion as fusion_peers

    fusion_peers.prepare("fp32")
    ins, want = arrays(problem.operands()[0]), _want(made, problem)
    forms = {"torch eager": function, "torch.compile": fusion_peers.compiled(function), **(triton or {})}

    def operands() -> list[Any]:
        return [torch.from_numpy(np.ascontiguousarray(array)).cuda() for array in ins]

    return [
        fusion_peers.variant(label, form, operands, len(made.bounds), made.device, "fp32", (want[0].reshape(-1), want[1]))
        for label, form in forms.items()
    ]


def norms(
    device: Any,
    kinds: Sequence[str],
    paths: Sequence[str],
    forms: Sequence[str],
    batches: Sequence[int],
    peer: bool,
    precisions: Sequence[str] = ("fp32",),
    filters: int = IMAGE[0],
) -> Iterator[Case]:
    """EvoNorm alone or behind a 3×3 convolution from 64 channels to `filters`; `paths` "fwd", "bwd"; `forms` "alone", "conv".

    Precisions other than fp32 are those of the convolution's forward pass, and have no peers. The norm alone is of 64 channels.
    """
    narrow = "" if filters == IMAGE[0] else f" {IMAGE[0]}→{filters}"
    if "conv" in forms and "fwd" in paths:
        for precision in precisions:
            if precision != "fp32":
                yield from (_conv_forward(kind, batch, precision, filters, narrow) for kind in kinds for batch in batches)
    if "fp32" not in precisions:
        return
    missing = () if not peer or has_triton() else (TRITON_MISSING,)
    for form in forms:
        for kind in kinds:
            for path in paths:
                for batch in batches:
                    name = f"{kind.upper()} {'conv+' if form == 'conv' else ''}{path} {batch}{narrow}"
                    make = {"fwd": _forward, "bwd": _backward}[path]
                    variants, flops = make(kind, form, batch, peer, filters)
                    image, made = (4 * batch * channels * IMAGE[1] * IMAGE[2] for channels in (IMAGE[0], filters))
                    # Alone: x, y; dy, x, dx. With the convolution: its input and what it makes, y; dy, what it made, that one's gradient, x, dx.
                    moved = (2 if path == "fwd" else 3) * image if form == "alone" else image + 2 * made if path == "fwd" else 2 * image + 3 * made
                    yield Case(name, flops, moved, batch, "image", tuple(variants), missing, FEWEST_OF_CONV)


def _conv_forward(kind: str, batch: int, precision: str, filters: int, narrow: str) -> Case:
    """A convolution and its norm on tensor cores."""
    variants, flops, _ = _conv_norm_forms(kind, batch, precision, filters)
    moved = (2 if precision == "bf16" else 4) * batch * (IMAGE[0] + 2 * filters) * IMAGE[1] * IMAGE[2]
    return Case(f"{kind.upper()} conv+fwd {batch}{narrow} {precision}", flops, moved, batch, "image", tuple(variants))


def _conv_norm_forms(kind: str, batch: int, precision: str, filters: int) -> tuple[list[Variant], int, tuple[Prepared, opcases.Problem]]:
    """Fused in training and in inference, unfused, and its parts; flops; the fused op."""
    shape, norm_kind = (batch, *IMAGE, filters), f"evonorm_{kind}"

    def made(op: Op, of: Sequence[int]) -> tuple[Prepared, opcases.Problem]:
        return _made(op, of, MODE[precision], precision)

    fused = made(Op("conv", "fprop", after=(Norm(norm_kind),)), shape)
    conv, norm = made(Op("conv", "fprop"), shape)[0], made(Op(norm_kind, "fprop"), (batch, filters, *IMAGE[1:]))[0]
    variants = [
        ours("nbcnn fused", fused[0]),
        ours("nbcnn fused, inference", made(Op("conv", "infer", after=(Norm(norm_kind),)), shape)[0]),
        chained("nbcnn unfused", [(conv, {}), (norm, {0: 0})]),
        ours("nbcnn conv alone", conv),
        ours("nbcnn norm alone", norm),
    ]
    return variants, step_flops(conv.step), fused


def _forward(kind: str, form: str, batch: int, peer: bool, filters: int) -> tuple[list[Variant], int]:
    op = Op(f"evonorm_{kind}", "fprop")
    if form == "alone":
        made, problem = _made(op, (batch, *IMAGE), "naive")
        variants = [ours("nbcnn NCHW", made), ours("nbcnn NHWC", _made(op, (batch, *IMAGE))[0])]
        if peer:
            variants += _torch_forms(made, problem, _norm(kind), _norm_operands, _triton_norm(kind))
        return variants, 0
    variants, flops, fused = _conv_norm_forms(kind, batch, "fp32", filters)
    if peer:
        triton = {f"cuDNN, {label}": _behind_conv(norm) for label, norm in _triton_norm(kind, filters).items()}
        variants += _torch_forms(*fused, _behind_conv(_norm(kind, filters)), _conv_operands, triton)
    return variants, flops


def _backward(kind: str, form: str, batch: int, peer: bool, filters: int) -> tuple[list[Variant], int]:
    op = Op(f"evonorm_{kind}", "grads")
    if form == "alone":
        made, problem = _made(op, (batch, *IMAGE), "naive")
        variants = [ours("nbcnn NCHW", made), ours("nbcnn NHWC", _made(op, (batch, *IMAGE))[0])]
        return variants + (_differences(made, problem, _norm(kind), _grads_operands) if peer else []), 0
    shape, behind = (batch, *IMAGE, filters), (batch, filters, *IMAGE[1:])
    norm, wgrad, dgrad = (_made(name, s)[0] for name, s in ((op, behind), (Op("conv", "wgrad"), shape), (Op("conv", "dgrad"), shape)))
    problem = opcases.problem("conv_wgrad", ",".join(map(str, shape)))
    variants = [chained("nbcnn unfused", [(norm, {}), (wgrad, {1: 0}), (dgrad, {0: 0})])]
    if peer:
        variants += _differences(norm, problem, _behind_conv(_norm(kind, filters)), _conv_grads_operands, check=False)
    return variants, 2 * step_flops(wgrad.step)


def _differences(made: Prepared, problem: opcases.Problem, function: Any, arrays: Any, check: bool = True) -> list[Variant]:
    """PyTorch's backward, eager and compiled, as forward and backward less forward."""
    import torch

    from nbcnn.lab.peers import fusion as fusion_peers

    fusion_peers.prepare("fp32")
    ins = arrays(problem.operands()[0])
    variants = []
    for label, form in {"torch eager": function, "torch.compile": fusion_peers.compiled(function)}.items():

        def points() -> list[Any]:
            return [torch.from_numpy(np.ascontiguousarray(array)).cuda().requires_grad_() for array in ins[:-1]]

        def whole() -> list[Any]:
            return [*points(), torch.from_numpy(np.ascontiguousarray(ins[-1])).cuda()]

        want = _want(made, problem) if check else None
        both = fusion_peers.variant(label, fusion_peers.backward(form), whole, len(made.bounds), made.device, "fp32", want)
        forward = fusion_peers.variant(label, form, points, len(made.bounds), made.device, "fp32")
        variants.append(fusion_peers.difference(label, both, forward))
    return variants


def _norm(kind: str, channels: int = IMAGE[0]) -> Callable[..., Any]:
    from nbcnn.lab.peers import fusion as fusion_peers

    return fusion_peers.torch_norm(kind, EPS[kind], opcases.groups_of(channels))


def _triton_norm(kind: str, channels: int = IMAGE[0]) -> dict[str, Callable[..., Any]]:
    if not has_triton():
        return {}
    from nbcnn.lab.peers import triton_kernels

    return triton_kernels.norms(kind, EPS[kind], opcases.groups_of(channels))


def _behind_conv(norm: Callable[..., Any]) -> Callable[..., Any]:
    """A convolution by PyTorch, which is cuDNN's, and the norm behind it."""
    import torch

    def run(x: Any, w: Any, b: Any, v: Any, gamma: Any, beta: Any) -> Any:
        return norm(torch.nn.functional.conv2d(x, w, b, 1, 1), v, gamma, beta)

    return run


def _wide(channels: np.ndarray) -> np.ndarray:
    return channels.reshape(1, -1, 1, 1)


def _norm_operands(ins: list[np.ndarray]) -> list[np.ndarray]:
    x, gamma, beta, v, *_ = ins
    return [x, _wide(v), _wide(gamma), _wide(beta)]


def _conv_operands(ins: list[np.ndarray]) -> list[np.ndarray]:
    x, w, b, gamma, beta, v, *_ = ins
    return [x, w, b, _wide(v), _wide(gamma), _wide(beta)]


def _grads_operands(ins: list[np.ndarray]) -> list[np.ndarray]:
    dy, x, gamma, v, *_ = ins
    return [x, _wide(v), _wide(gamma), np.zeros_like(_wide(v)), dy]


def _conv_grads_operands(ins: list[np.ndarray]) -> list[np.ndarray]:
    x, dy, *_ = ins
    k, c = dy.shape[1], x.shape[1]
    rng = np.random.default_rng(0)
    w, one = rng.standard_normal((k, c, 3, 3)).astype(np.float32) / 24, np.ones((1, k, 1, 1), np.float32)
    return [x, w, np.zeros(k, np.float32), one, one, 0 * one, dy]
