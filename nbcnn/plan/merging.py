"""This module fuses a recorded list of steps: where one op of the row does what two or three steps do, it takes their place.

Layers record plain steps, and the rules look at steps alone, so they hold for lists and graphs, in training and in inference. A rule is taken where
the row has its op, and where the least estimated time of the steps that it makes is at most that of those that go (`Cost`):

    glu_fprop, last_fprop               last_fprop, glu_fprop of one hour, and so backward; likewise pwconv1d, a sum, and any map
    upsample_fprop, conv_fprop          upconv_fprop, _wgrad and _dgrad: the doubled image is never stored
    upconv_fprop, mse_fprop             upconv_mse_fprop, with the loss's gradient: the output is not stored either
    conv_, relu_, maxpool_fprop         conv_relu_pool_fprop; backward the ReLU's mask behind the pooling, then unpool, or conv_pool_wgrad
    conv_fprop, evonorm_s0_fprop        conv_evonorm_s0_fprop, or _infer where nothing reads the convolution's own results; evonorm_b0 likewise
    pwconv1d_fprop, glu_fprop, add      pwconv1d_glu_fprop, with or without the sum
    dwconv1d_wgrad, dwconv1d_dgrad      dwconv1d_bwd
    batchnorm_fprop, gelu_fprop         batchnorm_gelu_fprop, and batchnorm_gelu_grads for both gradients; so of every map that norms have
    batchnorm_fprop, add, relu_fprop    batchnorm_add_relu_fprop and _grads: the norm adds another value, too
    conv_fprop, batchnorm_fprop         conv_statistics_fprop, batchnorm_apply: the convolution's epilogue makes the statistics; with maps likewise
    conv_fprop, batchnorm_infer         batchnorm_fold, conv_fprop: in inference the norm is folded into filters and bias; with maps likewise
    conv_fprop, sigmoid_fprop           conv_sigmoid_fprop: a map of results is made by the convolution, or the sum, that makes them; any activation
    add, batchnorm_add_relu_grads       the op adds the two gradients of its output by itself
    maxpool_dgrad, add                  the pooling adds the other gradient of its input to what it gives that
    bias_fprop, concat_fprop            concat_bias_fprop: the copy of the last of two values adds the bias
    dropout_dgrad, relu_dgrad           relu_dgrad, dropout_dgrad, so that the convolution before them can mask; ksparse_dgrad is left out
    add, relu_dgrad                     add_relu_dgrad: the two gradients of a ReLU's output are added and masked in one pass
    conv_dgrad_relu, add, relu_dgrad    besides, a convolution does not mask what the pass behind it masks by the same values
    conv_dgrad, relu_dgrad              conv_dgrad_relu: the convolution's epilogue masks

Of several ways to fuse going back the one that saves most is taken: `nbcnn.plan.sums`.

A tensor between two fused steps is read by the second alone, so it vanishes. The second gradient of a value is what a graph's backward adds to the
first (`nbcnn.plan.graph.trace_nodes`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import replace

from nbcnn.plan.graph import Buf, Fusion, Step
from nbcnn.plan.op import MAPS, Add, Bias, Keep, Loss, Map, Mask, Moments, Norm, Op, Pool, Unpool, split_attrs, undone
from nbcnn.plan.rewriting import Cost, Steps, alike, free, like
from nbcnn.plan.shapes import numel

ADDS_GRADIENTS = {Op("batchnorm", "grads", before=(Mask("relu"), Keep())): 6}
"""Ops whose first operand is a gradient to which they can add a second, and their operands without it: it comes behind these."""
MAPPED = {Op("conv", "fprop"): 3, Op("upconv", "fprop"): 3, Op("add"): 2}
"""Ops that can apply a map to their results, and the operands that they must have for it: a convolution's epilogue has a bias."""
NORMS = tuple(Op("batchnorm", direction) for direction in ("fprop", "infer"))
"""Norms that can apply the map behind them."""
FEW_TAPS = 31
"""C·R·S up to which a pooled convolution's weight gradient reads the pooled gradient; beyond, unpooling it once serves both gradients."""
MOST_TAPS = 96
"""Taps up to which a depthwise convolution of series has one op for both gradients (`nbcnn.ops.series.dwconv1d.best_backward`)."""
HOURLY = (Op("add"), Op("glu", "fprop"), Op("pwconv1d", "fprop"))
"""Steps of series, besides maps, that make of each hour the same hour."""
MASK = Op("relu", "dgrad")
PRODUCTS = (Op("conv", "dgrad"), Op("upconv", "dgrad"))


Rule = Callable[[Steps, Step, Container[Op]], Sequence[Step]]
"""Rewrites the list around a step by ops of the row; gives the steps that it made."""


def merge(steps: Sequence[Step], ops: Container[Op] = (), cost: Cost = free, told: list[Fusion] | None = None) -> list[Step]:
    """The steps, fused. Rules apply where `ops` has their ops and the estimate does not grow. ADDS_GRADIENTS need no new op.

    `told` gets what was fused and what was not, for its cost.
    """
    made = Steps(steps, cost, told)
    for rule in RULES:
        waiting = deque(made)
        while waiting:
            step = waiting.popleft()
            if step in made.index:
                fused = rule(made, step, ops)
                if made.settle():
                    waiting.extendleft(reversed(fused))
    return list(made)


def _last_first(steps: Steps, step: Step, ops: Container[Op]) -> Sequence[Step]:
    """The last hour of what is made hour by hour, made of the last hour of what that reads; so are its gradients, which are zero at other hours.

    As far back as it goes, at once: a single step saves less than a launch more takes.
    """
    made, waiting = list[Step](), [step]
    while waiting:
        hours = _one_hour(steps, waiting.pop(), ops)
        made += hours
        waiting += hours
    return [each for each in made if each in steps.index]


def _one_hour(steps: Steps, step: Step, ops: Container[Op]) -> Sequence[Step]:
    """The steps that make the last hour of what one step before makes, in place of it and of `step`, which takes that hour; nothing for others."""
    back = Op("last", "dgrad")
    made = steps.maker(step.ins[0]) if step.op == Op("last", "fprop") and back in ops else None
    hourly = made is not None and (made.op in HOURLY or (made.op == Op(made.op.kind, "fprop") and made.op.kind in MAPS))
    if made is None or not hourly or made.outs[0].shape != step.ins[0].shape:
        return ()
    gradients = [each for each in steps if each.scope == made.scope and each.op in (Op(made.op.kind, "dgrad"), Op(made.op.kind, "wgrad"))]
    scattered = {scatter for each in gradients for scatter in [steps.maker(each.ins[each.op.direction == "wgrad"], back)]}
    if {*steps.reading(step.ins[0])} - {*gradients} != {step} or None in scattered or len(scattered) > 1:
        return ()
    # The two gradients of a sum are that of its result.
    series, z = made.ins if made.op.kind == "add" else made.ins[:1], step.outs[0]
    hours = [Step(step.op, (x,), (Buf(f"{step.scope}.{x.name}", x.shape[:2]),), step.attrs, step.scope) for x in dict.fromkeys(series)]
    one = {each.ins[0].root: each.outs[0].reshaped((*each.outs[0].shape, 1)) for each in hours}
    one |= {made.outs[0].root: z.reshaped((*z.shape, 1))}
    for scatter in scattered:
        assert scatter is not None
        one |= {scatter.outs[0].root: scatter.ins[0].reshaped((*z.shape, 1))}
        for each in gradients:
            dx, *rest = each.outs
            now = replace(each, ins=tuple(one.get(buf.root, buf) for buf in each.ins))
            if each.op.direction == "dgrad":
                hour = Buf(f"{dx.name}.hour", dx.shape[:2])
                now = replace(now, outs=(hour.reshaped((*hour.shape, 1)), *rest))
                steps.put(each, [now, replace(scatter, ins=(hour,), outs=(dx,))])
            else:
                steps.put(each, [now])
        first = min(steps.reading(scatter.outs[0]), key=lambda each: steps.index[each], default=None)
        if first is None:
            steps.put(scatter, [])
        else:  # The gradient of all hours is not held longer than it is needed.
            steps.put(first, [replace(scatter), replace(first)], scatter)
    ins = tuple(one.get(buf.root, buf) for buf in made.ins)
    return steps.put(step, [*hours, replace(made, ins=ins, outs=(one[made.outs[0].root],))], made)


def _doubled(steps: Steps, step: Step, ops: Container[Op]) -> Sequence[Step]:
    """A 3×3 convolution that keeps the size of a doubled image, made of the image itself, forward and backward: the doubled one is never stored."""
    folds = step.op == Op("conv", "fprop") and len(step.ins) == 3 and step.ins[1].shape[2:] == (3, 3) and step.attrs == {"stride": 1, "pad": 1}
    up = steps.maker(step.ins[0], Op("upsample", "fprop")) if folds else None
    forward, inner, outer = (Op("upconv", direction) for direction in ("fprop", "wgrad", "dgrad"))
    if up is None or up.attrs["factor"] != 2 or not all(op in ops for op in (forward, inner, outer)):
        return ()
    others = [each for each in steps.reading(step.ins[0]) if each is not step]
    if any(each.op != Op("conv", "wgrad") or each.scope != step.scope for each in others):
        return ()
    back = [(each, steps.reading(each.outs[0])) for wgrad in others for each in steps.reading(wgrad.ins[1]) if _is(each, "conv", "dgrad", step.scope)]
    if any([each.op for each in readers] != [Op("upsample", "dgrad")] for _, readers in back):
        return ()
    for wgrad in others:
        steps.put(wgrad, [replace(wgrad, op=inner, ins=(up.ins[0], wgrad.ins[1]), attrs={})])
    for dgrad, (halved,) in back:
        steps.put(dgrad, [replace(dgrad, op=outer, outs=halved.outs, attrs={})], halved)
    return steps.put(step, [replace(step, op=forward, ins=(up.ins[0], *step.ins[1:]), attrs={})], up)


def _measured(steps: Steps, step: Step, ops: Container[Op]) -> Sequence[Step]:
    """A loss and its gradient made where the network's output would have been, which is not stored."""
    conv = steps.maker(step.ins[0], Op("upconv", "fprop")) if step.op.direction == "fprop" and len(step.ins) == 2 else None
    op, gradient = Op("upconv", "fprop", after=(Loss(step.op.kind),)), Op(step.op.kind, "dgrad")
    if conv is None or op not in ops:
        return ()
    back = [each for each in steps.reading(step.ins[0]) if each is not step]
    if len(back) > 1 or any(each.op != gradient or each.ins != step.ins for each in back):
        return ()
    outs = back[0].outs if back else (Buf(f"{step.scope}.dy", step.ins[0].shape),)
    return steps.put(step, [replace(conv, op=op, ins=(*conv.ins, step.ins[1]), outs=(*step.outs, *outs))], conv, *back)


def _with_maxima(steps: Steps, step: Step, ops: Container[Op]) -> Sequence[Step]:
    """The maxima of 2×2 results of a convolution and its ReLU made by the convolution, with two bits each that say where they were."""
    pools = step.op == Op("maxpool", "fprop") and step.attrs == {"size": 2, "stride": 2} and not any(n % 2 for n in step.ins[0].shape[2:])
    relu = steps.maker(step.ins[0], Op("relu", "fprop")) if pools else None
    conv = steps.between(relu.ins[0], Op("conv", "fprop")) if relu else None
    forward, wgrad = Op("conv", "fprop", after=(Map("relu"), Pool())), Op("conv", "wgrad", before=(Unpool(),))
    if relu is None or conv is None or len(conv.ins) != 3 or not all(op in ops for op in (forward, wgrad, Op("unpool"))):
        return ()
    y, masks, back = step.outs[0], [each for each in steps.reading(step.ins[0]) if each is not step], steps.reading(step.outs[1])
    found = [each.op for each in (*back, *masks)]
    if found not in ([], [Op("maxpool", "dgrad"), MASK]) or any(steps.between(each.ins[0]) not in back for each in masks):
        return ()
    n, k, p, q = y.shape
    index = Buf(f"{conv.scope}.index", (n, -(-k // 4), p, q), "uint8")
    for unpool, mask in zip(back, masks, strict=True):
        dp, dz = Buf(f"{conv.scope}.dp", y.shape), mask.outs[0]
        made = [Step(MASK, (unpool.ins[0], y), (dp,), {}, conv.scope), Step(Op("unpool"), (dp, index), (dz,), {}, conv.scope)]
        steps.put(unpool, made, mask)
        few = [each for each in steps.reading(dz) if _is(each, "conv", "wgrad", conv.scope) and numel(conv.ins[1].shape[1:]) <= FEW_TAPS]
        for each in few:
            steps.put(each, [replace(each, op=wgrad, ins=(each.ins[0], dp, index))])
        if not steps.reading(dz):
            steps.put(made[1], [])
    return steps.put(conv, [replace(conv, op=forward, outs=(y, index))], relu, step)


def _with_evonorm(steps: Steps, step: Step, ops: Container[Op]) -> Sequence[Step]:
    """An EvoNorm made by the convolution before it, whose own results are stored only where something reads them: the norm's gradient."""
    norms = step.op.kind in ("evonorm_s0", "evonorm_b0") and step.op.direction in ("fprop", "infer")
    conv = steps.maker(step.ins[0], Op("conv", "fprop")) if norms else None
    if conv is None or len(conv.ins) != 3 or not steps.first(step):
        return ()
    kept = len(steps.reading(step.ins[0])) > 1 or any(buf.home != "arena" or steps.reading(buf) for buf in step.outs[1:])
    op = Op("conv", "fprop" if kept else "infer", after=(Norm(step.op.kind),))
    if op not in ops or (kept and step.op.direction == "infer"):
        return ()
    outs = (step.outs[0], *conv.outs, *step.outs[1:]) if kept else step.outs[:1]
    made = replace(conv, op=op, ins=(*conv.ins, *step.ins[1:]), outs=outs, attrs={**conv.attrs, **step.attrs})
    return steps.put(step, [made], conv)


def _gated(steps: Steps, step: Step, ops: Container[Op]) -> Sequence[Step]:
    """A GLU made by the pointwise convolution of series before it, and the sum with another value behind it. It loads four hours at a time."""
    conv = steps.maker(step.ins[0], Op("pwconv1d", "fprop")) if step.op == Op("glu", "fprop") else None
    op = Op("pwconv1d", "fprop", after=(Map("glu"),))
    if conv is None or op not in ops or len(conv.ins) != 3 or step.ins[0].shape[-1] % 4 or not steps.first(step):
        return ()
    kept = conv.outs if len(steps.reading(step.ins[0])) > 1 else ()
    made = replace(conv, op=op, outs=(*step.outs, *kept))
    total = next((each for each in steps.reading(step.outs[0]) if each.op == Op("add") and steps.between(step.outs[0]) is step), None)
    if total is None:
        return steps.put(step, [made], conv)
    (other,) = (buf for buf in total.ins if buf.root is not step.outs[0].root)
    return steps.put(total, [replace(made, ins=(*conv.ins, other), outs=(*total.outs, *kept))], conv, step)


def _together(steps: Steps, step: Step, ops: Container[Op]) -> Sequence[Step]:
    """Both gradients of a depthwise convolution of series made from one load of its input and dy."""
    op = Op("dwconv1d", "bwd")
    if step.op != Op("dwconv1d", "wgrad") or op not in ops or step.outs[0].shape[-1] > MOST_TAPS:
        return ()
    x, dy = step.ins
    dgrad = next((each for each in steps.reading(dy) if _is(each, "dwconv1d", "dgrad", step.scope)), None)
    return steps.put(step, [replace(step, op=op, ins=(dy, x, *dgrad.ins[1:]), outs=(*dgrad.outs, *step.outs))], dgrad) if dgrad else ()


def _normed(steps: Steps, step: Step, ops: Container[Op]) -> Sequence[Step]:
    """A map behind a norm, or behind the sum of a norm and another value, made by the norm; and so is its gradient, by the norm's.

    The norm's gradient makes the map's input once more, so no other step may read that; behind a sum it reads the map's output, and writes the
    gradient of the other value, too.
    """
    if step.op != Op(step.op.kind, "fprop") or not len(step.ins) == len(step.outs) == 1:
        return ()
    (y,), (z,) = step.ins, step.outs
    back = Op(step.op.kind, "dgrad")
    masks = {each for buf in (y, z) for each in steps.reading(buf) if each.op == back and len(each.ins) == 2 and each.ins[1].root in (y.root, z.root)}
    total = steps.maker(y, Op("add"))
    norms = [steps.between(buf, *NORMS) for buf in total.ins] if total else [steps.maker(y, *NORMS)]
    if len(masks) > 1 or {*steps.reading(y)} - masks != {step}:
        return ()
    for norm in sorted((each for each in norms if each), key=lambda each: steps.index[each]):
        after = (*((Add(),) if total else ()), Map(step.op.kind))
        op, gradient = replace(norm.op, after=after), Op("batchnorm", "grads", before=undone(after))
        if op not in ops or norm.attrs.keys() & step.attrs.keys():
            continue
        for mask in masks:
            dy = mask.outs[0]
            own = [each for each in steps.reading(dy) if each.op == gradient.plain and _roots(each.ins[1:3]) == _roots(norm.ins[:2])]
            if gradient not in ops or not own or (not total and steps.reading(dy) != own):
                return ()
            (grads, *_), (_, x, weight, bias, mean, rstd) = own, own[0].ins
            if total:
                made = replace(grads, op=gradient, ins=(mask.ins[0], x, z, weight, mean, rstd), outs=(grads.outs[0], dy, *grads.outs[1:]))
                steps.put(mask, [made], grads)
            else:
                steps.put(grads, [replace(grads, op=gradient, ins=(mask.ins[0], x, weight, bias, mean, rstd), attrs=mask.attrs)], mask)
        others = [buf for buf in total.ins if buf.root is not norm.outs[0].root] if total else []
        made = replace(norm, op=op, ins=(*norm.ins, *others), outs=(z, *norm.outs[1:]), attrs={**norm.attrs, **step.attrs})
        return steps.put(step, [made], norm, total) if total else steps.put(norm, [made], step)
    return ()


def _with_moments(steps: Steps, step: Step, ops: Container[Op]) -> Sequence[Step]:
    """The statistics of a batch made by the convolution whose results they are of; the norm is one pass behind it."""
    conv = steps.maker(step.ins[0], Op("conv", "fprop")) if step.op.plain == Op("batchnorm", "fprop") else None
    op, apply = Op("conv", "fprop", after=(Moments(),)), replace(step.op, direction="apply")
    # The convolution comes to where the norm is, so that a layer that is called twice moves its running statistics in the order of the calls.
    if conv is None or op not in ops or apply not in ops or not steps.first(step):
        return ()
    (y, *kept), (statistics, parameters) = step.outs, split_attrs(step.attrs)
    first = replace(conv, op=op, ins=(*conv.ins, *step.ins[3:5]), outs=(*conv.outs, *kept), attrs={**conv.attrs, **statistics})
    return steps.put(step, [first, Step(apply, (*step.ins[:3], *kept[:2], *step.ins[5:]), (y,), parameters, step.scope)], conv)


def _folded(steps: Steps, step: Step, ops: Container[Op]) -> Sequence[Step]:
    """A norm of inference, with the map behind it, folded into the filters and the bias of the convolution before it. Behind a sum a pass is left
    anyway.
    """
    inference = step.op.plain == Op("batchnorm", "infer") and not step.op.has(Add)
    conv = steps.between(step.ins[0], Op("conv", "fprop")) if inference else None
    op, fold = Op("conv", "fprop", after=step.op.after), Op("batchnorm", "fold")
    statistics, parameters = split_attrs(step.attrs)
    if conv is None or op not in ops or fold not in ops or conv.attrs.keys() & parameters.keys():
        return ()
    x, weight, *bias = conv.ins
    # One axis, so that no row of the op table rounds the filters before they are packed.
    filters, shift = Buf(f"{conv.scope}.folded", (numel(weight.shape),)), Buf(f"{conv.scope}.shift", (weight.shape[0],))
    folding = Step(fold, (weight.reshaped(filters.shape), *bias, *step.ins[1:]), (filters, shift), statistics, step.scope)
    made = replace(conv, op=op, ins=(x, filters.reshaped(weight.shape), shift), outs=step.outs, attrs={**conv.attrs, **parameters})
    return steps.put(conv, [folding, made], step)


def _mapped(steps: Steps, step: Step, ops: Container[Op]) -> Sequence[Step]:
    """A map made by the step whose results it is of. The row knows which ops are maps."""
    if step.op != Op(step.op.kind, "fprop") or not len(step.ins) == len(step.outs) == 1:
        return ()
    before = steps.between(step.ins[0], *MAPPED)
    if before is None or len(before.ins) != MAPPED[before.op] or not alike(step.ins[0], step.outs[0]):
        return ()
    op = replace(before.op, after=(Map(step.op.kind),))
    if op not in ops or before.attrs.keys() & step.attrs.keys():
        return ()
    made = replace(before, op=op, outs=(like(step.outs[0], before.outs[0]),), attrs={**before.attrs, **step.attrs})
    return steps.put(before, [made], step)


def _second(steps: Steps, step: Step, ops: Container[Op]) -> Sequence[Step]:
    """The sum of two gradients that one step alone reads and can add by itself: what a value that is read twice has."""
    total = steps.between(step.ins[0], Op("add")) if ADDS_GRADIENTS.get(step.op) == len(step.ins) else None
    return steps.put(step, [replace(step, ins=(total.ins[0], *step.ins[1:], total.ins[1]))], total) if total else ()


def _pooled(steps: Steps, step: Step, ops: Container[Op]) -> Sequence[Step]:
    """The sum of two gradients of which max pooling makes one made by it."""
    for at, gradient in enumerate(step.ins if step.op == Op("add") and Op("maxpool", "dgrad") in ops else ()):
        pooled = steps.between(gradient, Op("maxpool", "dgrad"))
        if pooled is not None and len(pooled.ins) == 2 and step.outs[0].shape == gradient.shape:
            return steps.put(step, [replace(pooled, ins=(*pooled.ins, step.ins[1 - at]), outs=step.outs)], pooled)
    return ()


def _biased(steps: Steps, step: Step, ops: Container[Op]) -> Sequence[Step]:
    """A bias added where the sum is only copied behind another value's channels."""
    op = Op("concat", "fprop", before=(Bias(),))
    biased = steps.between(step.ins[1], Op("bias", "fprop")) if step.op == op.plain and len(step.ins) == 2 and op in ops else None
    return steps.put(step, [replace(step, op=op, ins=(step.ins[0], *biased.ins))], biased) if biased else ()


def _passed(steps: Steps, step: Step, ops: Container[Op]) -> Sequence[Step]:
    """A mask behind the gradient of a dropout or of a k-sparse code: what is 0 before them is 0 behind them, so the mask can be made first."""
    back = steps.between(step.ins[0], Op("dropout", "dgrad"), Op("ksparse", "dgrad")) if step.op == MASK else None
    if back is None or not steps.between(back.ins[0], *PRODUCTS):
        return ()
    dy, y, forward = back.ins[0], step.ins[1], replace(back.op, direction="fprop")
    sparse = next((each.outs[0] for each in steps if each.op == forward and each.ins[0].root is y.root and each.attrs == back.attrs), None)
    if sparse is None:
        return ()
    if back.op.kind == "ksparse":
        return steps.put(step, [replace(step, ins=(dy, sparse))], back)
    masked = Buf(f"{step.scope}.dz", dy.shape)
    return steps.put(step, [replace(step, ins=(dy, sparse), outs=(masked,)), replace(back, ins=(masked, *back.ins[1:]), outs=step.outs)], back)


def _masked(steps: Steps, step: Step, ops: Container[Op]) -> Sequence[Step]:
    """A mask made by the sum or the convolution whose results it is of. Strided convolutions are left to `with_sums`."""
    before = steps.between(step.ins[0], Op("add"), *PRODUCTS) if step.op == MASK else None
    if before is None or before.attrs.get("stride", 1) != 1:
        return ()
    made = with_mask(before, step)
    if made.op not in ops:
        return ()
    if before.op != Op("add"):
        return steps.put(before, [made], step)
    steps.put(step, [replace(made, scope=step.scope)], before)
    for gradient in before.ins:
        maker = steps.between(gradient, Op("conv", "dgrad", after=(Mask("relu"),)))
        if maker is not None and maker.ins[2].root is step.ins[1].root:
            steps.put(maker, [replace(maker, op=maker.op.plain, ins=maker.ins[:2])])
    return ()


def with_mask(before: Step, mask: Step) -> Step:
    """A step with the mask behind it."""
    y, out = like(mask.ins[1], before.outs[0]), like(mask.outs[0], before.outs[0])
    return replace(before, op=replace(before.op, after=(Mask("relu"),)), ins=(*before.ins, y), outs=(out,))


def _is(step: Step, kind: str, direction: str, scope: str) -> bool:
    """Whether a step is that pass of a layer's op."""
    return step.op == Op(kind, direction) and step.scope == scope


def _roots(bufs: Sequence[Buf]) -> list[Buf]:
    return [buf.root for buf in bufs]


RULES: tuple[Rule, ...] = (
    *(_last_first, _doubled, _measured, _with_maxima, _with_evonorm, _gated, _together),
    *(_normed, _with_moments, _folded),
    *(_mapped, _second, _pooled, _biased, _passed, _masked),
)
"""The rules of `merge` in their order."""
