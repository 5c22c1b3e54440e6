"""Networks of PyTorch for the tests, and how outputs are compared. Imported only where PyTorch is installed."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import nn

UNIT = 2.0**-24


class Block(nn.Module):
    """A basic block of ResNet, as torchvision writes it."""

    def __init__(self, channels, out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample = None
        if stride > 1 or channels != out:
            self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet18(nn.Module):
    """ResNet-18 with torchvision's names; `width` channels in the first stage, 64 in the original; `pooled` behind the first convolution."""

    def __init__(self, width=64, classes=10, stem=3, pooled=True):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, stem, 1 if stem == 3 else 2, stem // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1) if pooled else nn.Identity()
        sizes = [width, width, 2 * width, 4 * width, 8 * width]
        for at in range(1, 5):
            stride = 1 if at == 1 else 2
            blocks = [Block(sizes[at - 1], sizes[at], stride), Block(sizes[at], sizes[at], 1)]
            setattr(self, f"layer{at}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(8 * width, classes)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def settled(module, seed=0):
    """The module with running statistics and affine parameters that are not the ones and zeros of the beginning, for evaluation."""
    random = torch.Generator().manual_seed(seed)
    for each in module.modules():
        if isinstance(each, nn.BatchNorm2d):
            each.running_mean.copy_(0.2 * torch.randn(each.num_features, generator=random))
            each.running_var.copy_(0.5 + torch.rand(each.num_features, generator=random))
            if each.affine:
                each.weight.data.copy_(0.5 + torch.rand(each.num_features, generator=random))
                each.bias.data.copy_(0.2 * torch.randn(each.num_features, generator=random))
    return module.eval()


def relative(found, truth):
    """‖found − truth‖ / ‖truth‖ in float64."""
    truth = np.asarray(truth, np.float64)
    return float(np.linalg.norm(np.asarray(found, np.float64) - truth) / (np.linalg.norm(truth) or 1.0))


def assert_as_exact(found, module, x):
    """`found` is as near to the module's output in float64 as PyTorch's own float32 is: at most four times its error.

    Both are rounding errors of the same sums in different orders, so neither is larger by more than chance; where PyTorch's own is below one
    rounding, as of a maximum, that of one rounding is the yardstick.
    """
    with torch.no_grad():
        truth = copy.deepcopy(module).double()(*(each.double() for each in x)).numpy()
        own = relative(module(*x).numpy(), truth)
    assert found.shape == truth.shape
    assert relative(found, truth) <= 4 * max(own, UNIT), (relative(found, truth), own)
