"""The small modules of the tests of both doors: each class of `torch.nn` and each function that nbcnn reads, with its options."""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from torch import nn

IMAGE, VECTOR, SERIES = (3, 4, 12, 8), (3, 10), (3, 4, 9)

MODULES = [
    (nn.Conv2d(4, 6, 3, padding=1), IMAGE),
    (nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 0), bias=False), IMAGE),
    (nn.Conv2d(4, 8, 3, padding=2, dilation=2, groups=4), IMAGE),
    (nn.Conv2d(4, 6, (4, 3), padding="same"), IMAGE),
    (nn.Conv2d(4, 6, 3, padding="valid"), IMAGE),
    (nn.Conv2d(4, 6, 3, padding=(1, 2), padding_mode="reflect"), IMAGE),
    (nn.Conv2d(4, 6, 3, padding=1, padding_mode="replicate", bias=False), IMAGE),
    (nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), IMAGE),
    (nn.ConvTranspose2d(4, 5, 3, 2, 1, 1), IMAGE),
    (nn.ConvTranspose2d(4, 6, (3, 2), (2, 3), (1, 0), (1, 2), groups=2, dilation=(2, 1)), IMAGE),
    (nn.Conv1d(4, 6, 3, padding=1, stride=2), SERIES),
    (nn.Conv1d(4, 8, 3, groups=2, padding="same", padding_mode="reflect"), SERIES),
    (nn.ConvTranspose1d(4, 6, 3, 2, 1), SERIES),
    (nn.Linear(10, 7), VECTOR),
    (nn.Linear(10, 7, bias=False), VECTOR),
    (nn.Linear(9, 5), SERIES),
    (nn.Linear(8, 5, bias=False), IMAGE),
    (nn.BatchNorm2d(4), IMAGE),
    (nn.BatchNorm2d(4, affine=False), IMAGE),
    (nn.BatchNorm2d(4, eps=1e-3, momentum=0.4), IMAGE),
    (nn.BatchNorm1d(10), VECTOR),
    (nn.BatchNorm1d(4), SERIES),
    (nn.GroupNorm(2, 4), IMAGE),
    (nn.GroupNorm(2, 4, affine=False), IMAGE),
    (nn.GroupNorm(2, 4), SERIES),
    (nn.InstanceNorm2d(4), IMAGE),
    (nn.InstanceNorm2d(4, affine=True), IMAGE),
    (nn.InstanceNorm1d(4, affine=True), SERIES),
    (nn.LayerNorm((4, 12, 8)), IMAGE),
    (nn.LayerNorm(10), VECTOR),
    (nn.LayerNorm(8), IMAGE),
    (nn.LayerNorm((12, 8), elementwise_affine=False), IMAGE),
    (nn.LayerNorm(10, bias=False), VECTOR),
    (nn.RMSNorm(8), IMAGE),
    (nn.RMSNorm(10, elementwise_affine=False, eps=1e-3), VECTOR),
    (nn.LocalResponseNorm(3, 0.1), IMAGE),
    (nn.PReLU(), SERIES),
    (nn.PReLU(4), IMAGE),
    (nn.ReLU(), IMAGE),
    (nn.ReLU(inplace=True), VECTOR),
    (nn.ReLU6(), IMAGE),
    (nn.LeakyReLU(0.2), IMAGE),
    (nn.ELU(0.7), IMAGE),
    (nn.SELU(), IMAGE),
    (nn.CELU(0.7), IMAGE),
    (nn.GELU(), IMAGE),
    (nn.GELU("tanh"), VECTOR),
    (nn.SiLU(), IMAGE),
    (nn.Mish(), IMAGE),
    (nn.Hardswish(), IMAGE),
    (nn.Hardsigmoid(), IMAGE),
    (nn.Hardtanh(0, 6), IMAGE),
    (nn.Hardtanh(-0.5, 0.8), IMAGE),
    (nn.Sigmoid(), VECTOR),
    (nn.Tanh(), IMAGE),
    (nn.Softplus(), IMAGE),
    (nn.Softplus(2.0), VECTOR),
    (nn.LogSigmoid(), IMAGE),
    (nn.Softsign(), IMAGE),
    (nn.Tanhshrink(), IMAGE),
    (nn.Softshrink(0.2), IMAGE),
    (nn.Hardshrink(0.2), IMAGE),
    (nn.Threshold(0.1, -0.2), IMAGE),
    (nn.GLU(1), IMAGE),
    (nn.GLU(-1), VECTOR),
    (nn.Softmax(-1), VECTOR),
    (nn.Softmax(-1), IMAGE),
    (nn.Softmax2d(), IMAGE),
    (nn.LogSoftmax(1), IMAGE),
    (nn.LogSoftmax(-1), VECTOR),
    (nn.MaxPool1d(3, 2, 1), SERIES),
    (nn.MaxPool2d(3, 2, 1), IMAGE),
    (nn.MaxPool2d((2, 3), ceil_mode=True), IMAGE),
    (nn.MaxPool2d(2, 1, dilation=2), IMAGE),
    (nn.AvgPool1d(2), SERIES),
    (nn.AvgPool2d(3, 2, 1, count_include_pad=False), IMAGE),
    (nn.AvgPool2d(3, 2, 1, ceil_mode=True), IMAGE),
    (nn.AvgPool2d((2, 3), ceil_mode=True, count_include_pad=False), IMAGE),
    (nn.AdaptiveAvgPool1d(4), SERIES),
    (nn.AdaptiveAvgPool2d(1), IMAGE),
    (nn.AdaptiveAvgPool2d((6, 2)), IMAGE),
    (nn.AdaptiveAvgPool2d((5, 3)), IMAGE),
    (nn.AdaptiveMaxPool2d(4), IMAGE),
    (nn.AdaptiveMaxPool2d(1), IMAGE),
    (nn.AdaptiveMaxPool1d(3), SERIES),
    (nn.Flatten(), IMAGE),
    (nn.Flatten(2), IMAGE),
    (nn.Unflatten(1, (2, 5, 1)), VECTOR),
    (nn.Identity(), IMAGE),
    (nn.ZeroPad2d((1, 2, 0, 3)), IMAGE),
    (nn.ConstantPad2d(1, 0.5), IMAGE),
    (nn.ReflectionPad2d((1, 2, 0, 3)), IMAGE),
    (nn.ReplicationPad2d(1), IMAGE),
    (nn.CircularPad2d((1, 0, 0, 2)), IMAGE),
    (nn.ZeroPad1d(2), SERIES),
    (nn.ConstantPad1d((1, 0), -1.5), SERIES),
    (nn.ReflectionPad1d(2), SERIES),
    (nn.ReplicationPad1d((0, 3)), SERIES),
    (nn.CircularPad1d(2), SERIES),
    (nn.Upsample(scale_factor=3), IMAGE),
    (nn.Upsample(scale_factor=(2, 1)), IMAGE),
    (nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False), IMAGE),
    (nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), IMAGE),
    (nn.Upsample(size=(17, 5), mode="bilinear", align_corners=False), IMAGE),
    (nn.Upsample(size=(17, 5)), IMAGE),
    (nn.Upsample(scale_factor=1.7, mode="nearest-exact"), IMAGE),
    (nn.Upsample(scale_factor=(1.5, 2), mode="bicubic"), IMAGE),
    (nn.Upsample(scale_factor=3, mode="linear"), SERIES),
    (nn.PixelShuffle(2), IMAGE),
    (nn.PixelUnshuffle(2), IMAGE),
    (nn.ChannelShuffle(2), IMAGE),
    (nn.Dropout(0.0), IMAGE),
]
"""Modules, each with the shape of a batch that it takes."""

REFUSED = [
    (nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), (3, 4, 8)),
    (nn.RReLU(), IMAGE),
    (nn.AvgPool2d(2, divisor_override=3), IMAGE),
    (nn.BatchNorm2d(4, track_running_stats=False), IMAGE),
    (nn.BatchNorm2d(4, momentum=None), IMAGE),
    (nn.InstanceNorm2d(4, track_running_stats=True), IMAGE),
    (nn.Softmin(1), IMAGE),
    (nn.LPPool2d(2, 2), IMAGE),
    (nn.FractionalMaxPool2d(2, output_ratio=0.5), IMAGE),
    (nn.AdaptiveMaxPool2d((5, 3)), IMAGE),
    (nn.LocalResponseNorm(2), IMAGE),
    (nn.Softplus(1.0, 2.0), IMAGE),
    (nn.Dropout2d(0.3), IMAGE),
    (nn.Dropout1d(0.3), SERIES),
    (nn.AlphaDropout(0.3), IMAGE),
    (nn.FeatureAlphaDropout(0.3), IMAGE),
    (nn.Fold((3, 3), 1), SERIES),
    (nn.Unfold(2), IMAGE),
]
"""Modules of which some are refused, in words, and none may be taken for something else."""

C, H, W = IMAGE[1:]
FUNCTIONS = {
    "numbers": lambda x: (x * 0.5 + 1 - x / 4) * (2 - x) - (-x),
    "add alpha": lambda x: torch.add(x, x.tanh(), alpha=0.3) - torch.sub(x, 1.5, alpha=2),
    "rsub": lambda x: torch.rsub(x, 2) + torch.rsub(x, x.tanh(), alpha=0.5),
    "multiply": lambda x: torch.multiply(x, x.sigmoid()) + torch.negative(x) + torch.positive(x),
    "divisions": lambda x: torch.div(1, x.abs() + 1) + torch.true_divide(x, x.square() + 2) + torch.divide(x, 3),
    "in place": lambda x: x.mul(2).add_(1).clamp_(max=0.7),
    "clamps": lambda x: x.clamp(-0.3, 0.4) + x.clamp(min=0.1) + torch.clamp_max(x, 0.2) + torch.clamp_min(x, -0.1) + x.clip(-1, 1),
    "powers": lambda x: (x.abs() + 0.1) ** 0.5 + x.square() + (x * x + 1).rsqrt() + torch.reciprocal(x.abs() + 1) + x.pow(3),
    "roots": lambda x: torch.sqrt(x.abs() + 0.2) + torch.pow(x.abs() + 1, -1.5),
    "exp": lambda x: torch.exp(-x.square()),
    "absolute": lambda x: torch.absolute(x) + x.abs(),
    "axes": lambda x: x.mean((2, 3))[:, :, None, None] * x + x.mean(1, keepdim=True) - x.sum(-1, keepdim=True) * x.mean(-1)[..., None],
    "spread": lambda x: x.std(1, keepdim=True) + x.var((2, 3), unbiased=False, keepdim=True) + F.normalize(x, dim=1) + x.norm(dim=1, keepdim=True),
    "norm of one": lambda x: x.norm(p=1, dim=2, keepdim=True) + F.normalize(x, p=1.0, dim=3),
    "extremes": lambda x: x.amax((2, 3), keepdim=True) * torch.maximum(x, -x) - torch.minimum(x, x.roll(1, 2)) + x.amin(1, keepdim=True),
    "parts": lambda x: torch.cat([x[:, 1:3], x.flip(1)[:, ::2], *x.chunk(2, 1), x.split([1, 3], 1)[0], torch.stack(x.unbind(1), 1)], 1),
    "concat": lambda x: torch.concat([x, torch.concatenate([x.tanh(), x], 2)], 2),
    "orders": lambda x: x.permute(0, 2, 3, 1).transpose(1, 3).movedim(-1, 1).swapaxes(2, 3).contiguous(),
    "moved": lambda x: torch.moveaxis(x, (1, 2), (3, 1)).swapdims(1, 2),
    "copies": lambda x: x[:, :, :1].expand(-1, -1, H, -1) + x.repeat(1, 1, 1, 2)[..., :W] + x[:, :, :6].repeat_interleave(2, 2),
    "tiles": lambda x: torch.tile(x, (1, 2, 1, 1)) + x[:, :1].expand_as(x).repeat(1, 2, 1, 1),
    "rolled": lambda x: x.roll((1, -2), (2, 3)) + x[:, 0:1] * x.narrow(1, 2, 1) + x.select(1, 3).unsqueeze(1) + x[:, -1:],
    "shapes": lambda x: x.flatten(2).unflatten(2, (H, W)).view(x.size(0), 2, 2, -1).squeeze(-1).reshape(x.shape[0], -1),
    "shapes of others": lambda x: x.flatten(1).view_as(x) + x.flatten(2).reshape_as(x),
    "masked": lambda x: torch.where(torch.arange(W) > 3, x, 2 * x) + torch.where(torch.ones(H, 1, dtype=torch.bool).tril(), 0.5, x),
    "detached": lambda x: x * x.detach() + x.tanh().detach(),
    "same": lambda x: x.clone().float().to(torch.float32).contiguous(),
    "relu": lambda x: F.relu(x) + F.relu6(x) + torch.relu(x - 0.2),
    "leaky": lambda x: F.leaky_relu(x, 0.3) + F.leaky_relu(x, negative_slope=0.05),
    "exponentials": lambda x: F.elu(x, 0.4) + F.selu(x) + F.celu(x, 0.6),
    "gates": lambda x: F.gelu(x) + F.gelu(x, approximate="tanh") + F.silu(x) + F.mish(x) + F.hardswish(x) + F.hardsigmoid(x),
    "curves": lambda x: torch.sigmoid(x) + torch.tanh(x) + F.softplus(x, beta=2) + F.logsigmoid(x) + F.softsign(x) + F.tanhshrink(x),
    "thresholds": lambda x: F.hardtanh(x, -0.3, 0.7) + F.softshrink(x, 0.1) + F.hardshrink(x, 0.3) + F.threshold(x, 0.2, -1.0),
    "glu": lambda x: F.glu(x, 1) + F.glu(x, dim=1),
    "softmax": lambda x: F.softmax(x, 1) + x.softmax(-1) + F.log_softmax(x, dim=2) + torch.log_softmax(x, 1),
    "max pools": lambda x: F.max_pool2d(x, 2, 1) + F.max_pool2d(x, (2, 2), 1, ceil_mode=True),
    "mean pools": lambda x: F.avg_pool2d(x, 3, 2, 1) + F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "adaptive pools": lambda x: F.adaptive_avg_pool2d(x, (5, 3)) * F.adaptive_avg_pool2d(x, 1) + F.adaptive_max_pool2d(x, (1, 1)),
    "paddings": lambda x: F.pad(x, (1, 2, 0, 1)) + F.pad(x, (2, 1, 1, 0), value=0.5) + F.pad(x, (1, 2, 0, 1), mode="reflect"),
    "paddings of edges": lambda x: F.pad(x, (1, 0, 2, 1), mode="replicate") + F.pad(x, (1, 0, 2, 1), mode="circular"),
    "padded channels": lambda x: F.pad(x, (0, 0, 0, 0, 1, 2)),
    "cropped": lambda x: F.pad(x, (-1, -1, 0, -2)),
    "interpolations": lambda x: F.interpolate(x, scale_factor=2) + F.interpolate(x, (2 * H, 2 * W), mode="bilinear"),
    "interpolations down": lambda x: F.interpolate(x, (5, 3), mode="bicubic") + F.interpolate(x, (5, 3), mode="area") + F.interpolate(x, (5, 3)),
    "recomputed": lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear", recompute_scale_factor=True),
    "shuffles": lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2) + F.channel_shuffle(x, 2),
    "norms": lambda x: F.layer_norm(x, (W,)) + F.group_norm(x, 2) + F.instance_norm(x) + F.rms_norm(x, (H, W)),
    "responses": lambda x: F.local_response_norm(x, 3, 0.1, 0.6, 2.0),
    "softmin": lambda x: F.softmin(x, 1),
    "argmax": lambda x: x.argmax(1).float(),
    "cumsum": lambda x: x.cumsum(2),
    "sorted": lambda x: x.sort(1)[0],
    "log": lambda x: torch.log(x.abs() + 1),
    "sin": lambda x: torch.sin(x),
    "floor": lambda x: x + torch.floor(x),
    "einsum": lambda x: torch.einsum("nchw,nkhw->nck", x, x),
    "over examples": lambda x: x - x.mean(0, keepdim=True),
}
"""Functions, methods and operators on images."""


class Named(nn.Module):
    """A function as a module."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        return FUNCTIONS[self.name](x)

    def extra_repr(self):
        return self.name


class Weighted(nn.Module):
    """A function of values and of tensors that the module holds; `tensors` are their shapes."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        shapes, _ = WEIGHTED[name]
        for at, shape in enumerate(shapes):
            self.register_parameter(f"p{at}", nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(at))))

    def forward(self, x):
        return WEIGHTED[self.name][1](x, *self.parameters())

    def extra_repr(self):
        return self.name


WEIGHTED = {
    "conv2d": ([(6, 4, 3, 3), (6,)], lambda x, w, b: F.conv2d(x, w, b, padding=1)),
    "conv2d in groups": ([(8, 1, 3, 2)], lambda x, w: torch.conv2d(x, w, stride=(2, 1), groups=4)),
    "conv_transpose2d": ([(4, 5, 3, 3), (5,)], lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, output_padding=1)),
    "conv1d": ([(6, 4, 3), (6,)], lambda x, w, b: F.conv1d(x.flatten(2), w, b, dilation=2)),
    "conv_transpose1d": ([(4, 3, 2)], lambda x, w: F.conv_transpose1d(x.flatten(2), w, stride=2)),
    "linear": ([(5, 8), (5,)], lambda x, w, b: F.linear(x, w, b)),
    "linear of vectors": ([(5, 4), (5,)], lambda x, w, b: F.linear(x.mean((2, 3)), w, b)),
    "matmul": ([(8, 5)], lambda x, w: x @ w),
    "matmul from the left": ([(5, 12)], lambda x, w: torch.matmul(w, x)),
    "mm": ([(4, 6)], lambda x, w: torch.mm(x.mean((2, 3)), w)),
    "group_norm": ([(4,), (4,)], lambda x, w, b: F.group_norm(x, 2, w, b)),
    "layer_norm": ([(8,), (8,)], lambda x, w, b: F.layer_norm(x, (8,), w, b)),
    "rms_norm": ([(12, 8)], lambda x, w: F.rms_norm(x, (12, 8), w)),
    "instance_norm": ([(4,), (4,)], lambda x, w, b: F.instance_norm(x, weight=w, bias=b)),
    "prelu": ([(4,)], lambda x, w: F.prelu(x, w)),
    "scale and shift": ([(4, 1, 1), (1, 4, 1, 1)], lambda x, w, b: x * w + b),
    "shift less": ([(8,)], lambda x, b: x - b),
    "layer scale of rows": ([(4,)], lambda x, w: x.permute(0, 2, 3, 1) * w),
    "positions": ([(1, 4, 12, 8)], lambda x, p: x + p),
    "one factor": ([(1,)], lambda x, w: x * w),
    "divisor": ([(4, 1, 1)], lambda x, w: x / w),
    "used twice": ([(4, 4, 1, 1)], lambda x, w: F.conv2d(F.conv2d(x, w).tanh(), w)),
    "used in two ways": ([(4, 4, 1, 1)], lambda x, w: F.conv2d(x, w) + F.conv_transpose2d(x, w)),
    "scaled weight": ([(6, 4, 1, 1)], lambda x, w: F.conv2d(x, 2 * w)),
    "concatenated": ([(3, 2, 12, 8)], lambda x, p: torch.cat([x, p], 1)),
}
"""By name the shapes of the tensors and the function of them."""


def name_of(module):
    return re.sub(r"\W+", " ", str(module)).strip()


def small():
    """Every small module, (name, module, shape of a batch)."""
    made = [(name_of(module), module, shape) for module, shape in MODULES + REFUSED]
    made += [(f"function {name}", Named(name), IMAGE) for name in FUNCTIONS]
    return made + [(f"weights of {name}", Weighted(name), IMAGE) for name in WEIGHTED]
