"""Random networks of all layers that have a form elsewhere, for the tests of ONNX and PyTorch: a seed says which."""

from __future__ import annotations

import numpy as np

import nbcnn
from nbcnn.datasets.arrays import Form

PLAIN = [
    nbcnn.ReLU(),
    nbcnn.LeakyReLU(0.2),
    nbcnn.Sigmoid(),
    nbcnn.Tanh(),
    nbcnn.ELU(0.7),
    nbcnn.ReLU6(),
    nbcnn.HardSwish(),
    nbcnn.Swish(),
    nbcnn.GELU(),
    nbcnn.GELU(approximate="tanh"),
    nbcnn.Softplus(),
    nbcnn.Abs(),
    nbcnn.Clip(-0.4, 0.6),
    nbcnn.Clip(None, 0.5),
    nbcnn.Scale(-1.5, 0.25),
    nbcnn.Scale(1.0, 0.5),
    nbcnn.Threshold(0.1, -0.3),
    nbcnn.Threshold(0.1),
    nbcnn.Power(2.0),
    nbcnn.Softmax(),
    nbcnn.LogSoftmax(),
    nbcnn.Root(),
    nbcnn.Detach(),
]


class Maker:
    """One network that is being made."""

    def __init__(self, seed):
        self.random = np.random.default_rng([seed, 54])
        self.used = []

    def pick(self, *given):
        return given[int(self.random.integers(len(given)))]

    def below(self, n):
        return int(self.random.integers(n))

    def step(self, x):
        """A value made of the image `x` by one layer or a few."""
        c, h, w = x.shape
        small = min(h, w) < 4 or c * h * w > 4000
        kinds = [self.plain, self.plain, self.norm, self.join, self.map, self.training_only, self.again]
        kinds += [self.conv1] if small else [self.conv, self.conv, self.transposed, self.pool, self.pool, self.sizes, self.gate]
        return self.pick(*kinds)(x)

    def call(self, layer, x):
        self.used.append((layer, x.shape))
        return layer(x)

    def plain(self, x):
        layer = self.pick(*PLAIN)
        return nbcnn.PReLU(num_parameters=self.pick(1, x.shape[0]))(x) if self.below(8) == 0 else self.call(layer, x)

    def conv1(self, x):
        return self.call(nbcnn.Conv2d(1 + self.below(6), 1), x)

    def conv(self, x):
        c, groups = x.shape[0], self.pick(1, 1, x.shape[0])
        window, dilation = self.pick(1, 2, 3, (3, 2)), self.pick(1, 1, 2) if min(x.shape[1:]) > 5 else 1
        padding = self.pick(0, 1, (1, 0), (0, 1, 1, 0))
        filters = groups * (1 + self.below(3)) if groups > 1 else 1 + self.below(6)
        how = {"stride": self.pick(1, 1, 2, (2, 1)), "padding": padding, "bias": self.pick(True, False), "dilation": dilation, "groups": groups}
        return self.call(nbcnn.Conv2d(filters, window, **how), x) if c else x

    def transposed(self, x):
        stride = self.pick(1, 2)
        how = {"stride": stride, "padding": self.pick(0, 1), "output_padding": self.below(stride), "bias": self.pick(True, False)}
        return nbcnn.ConvTranspose2d(1 + self.below(4), self.pick(3, (3, 4)), **how)(x)

    def pool(self, x):
        size = self.pick(2, 3, (2, 3), (3, 1))
        padding = self.pick(0, 0, 1) if size in (2, 3, (2, 3)) else 0
        how = {"stride": self.pick(1, 2, 3, (2, 1)), "padding": padding, "ceil_mode": self.pick(True, False)}
        if self.below(2):
            return nbcnn.MaxPool2d(size, **how)(x)
        return nbcnn.AvgPool2d(size, **how, count_include_pad=self.pick(True, False))(x)

    def norm(self, x):
        groups = self.pick(*[n for n in range(1, x.shape[0] + 1) if x.shape[0] % n == 0])
        return self.pick(
            nbcnn.BatchNorm2d(),
            nbcnn.BatchNorm2d(eps=1e-3, momentum=0.25),
            nbcnn.GroupNorm(groups),
            nbcnn.InstanceNorm2d(affine=self.pick(True, False)),
            nbcnn.LayerNorm(),
            nbcnn.EvoNormS0(groups=groups),
            nbcnn.EvoNormB0(),
        )(x)

    def join(self, x):
        other = self.pick(self.plain, self.norm)(x)
        layer = self.pick(nbcnn.Add(), nbcnn.Mul(), nbcnn.Concat())
        return layer([x, other] if self.below(2) else [other, x])

    def gate(self, x):
        """Squeeze and excitation, of a factor (N, C) or (N, C, 1, 1)."""
        factor = nbcnn.Sigmoid()(nbcnn.Linear(x.shape[0])(nbcnn.GlobalAvgPool2d()(x)))
        factor = nbcnn.Reshape((x.shape[0], 1, 1))(factor) if self.below(2) else factor
        return nbcnn.Mul()([x, factor] if self.below(2) else [factor, x])

    def map(self, x):
        axis = 1 + self.below(3)
        extent = x.shape[axis - 1]
        kind = self.below(4)
        if kind == 0:
            order = self.pick((1, 0, 2), (2, 0, 1), (0, 2, 1))
            return nbcnn.Permute(order)(x)
        if kind == 1:
            return nbcnn.Reshape(x.shape)(nbcnn.Permute((1, 0), (x.shape[0], x.shape[1] * x.shape[2]))(x))
        rows = tuple(tuple(int(n) for n in self.random.integers(0, extent, self.below(4))) for _ in range(1 + self.below(extent + 2)))
        weights = None if kind == 2 else tuple(tuple(float(n) for n in self.random.uniform(-1, 1, len(row)).round(3)) for row in rows)
        return nbcnn.LinearMap(axis, extent, indices=rows, weights=weights)(x)

    def sizes(self, x):
        return self.pick(
            nbcnn.Upsample2d(2),
            nbcnn.Resize((1, 2)),
            nbcnn.Resize(2, mode="bilinear"),
            nbcnn.Pad((1, 0, 2, 1), 0.5),
            nbcnn.Pad((-1, 0, 0, -1)),
            nbcnn.Residual(nbcnn.Conv2d(x.shape[0], 3, padding=1), nbcnn.BatchNorm2d(), nbcnn.ReLU()),
        )(x)

    def training_only(self, x):
        return self.pick(nbcnn.Dropout(0.3), nbcnn.Noise(0.1), nbcnn.MaskSquares(0.3, 2))(x)

    def again(self, x):
        """A layer that was called before, so that its weights are those of two calls."""
        known = [layer for layer, shape in self.used if shape == x.shape]
        return self.pick(*known)(x) if known else self.plain(x)


def model_of(seed, random_layers=True):
    """The built model of a seed, with weights and statistics that are not those of the beginning, and some parameters frozen. `random_layers`: layers
    that draw random numbers in training are among them."""
    make = Maker(seed)
    if not random_layers:
        make.training_only = make.plain
    shape = (1 + make.below(5), 5 + make.below(6), 5 + make.below(6))
    start = value = nbcnn.Input(shape)
    for _ in range(3 + make.below(7)):
        value = make.step(value)
    if value is start:
        value = nbcnn.ReLU()(value)
    if make.below(2) or len(set(value.shape)) == 1:
        # An image of as many channels as rows and columns could be meant either way round as a target.
        value = nbcnn.Linear(3)(nbcnn.Flatten()(value))
        value = nbcnn.Softmax()(value) if make.below(3) == 0 else value
    model = nbcnn.Model(nbcnn.Graph.of(start, value), "mse", mode="cpu", seed=seed)
    model.learn(Form(shape, scale=(0.0, 1.0)))
    values = model.net.params.as_dict()
    moved = {name: each + make.random.uniform(0.05, 0.3, each.shape).astype(np.float32) for name, each in values.items()}
    model.net.params.load_dict(moved)
    names = model.net.params.layout.names
    for name in names:
        if make.below(5) == 0:
            model.freeze(name)
    return model


def images_of(model, count=3):
    """Float images for a model."""
    return np.random.default_rng(8).uniform(-1, 1, (count, *model.net.input_shape)).astype(np.float32)
