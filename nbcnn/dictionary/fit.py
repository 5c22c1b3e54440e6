"""Fits the layers of a network to training images, in the order in which images pass them; see the package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np

from nbcnn.dictionary.kmeans import atoms_of, multiply
from nbcnn.dictionary.samples import HostSamples, Samples, drawn_on_gpu, in_parts
from nbcnn.dictionary.statistics import components, drawn_of_all, mirrored_mean, zca
from nbcnn.files.errors import UsageError
from nbcnn.gpu.arrays import DeviceArray
from nbcnn.nn.graphs import Graph
from nbcnn.nn.layers import Conv2d, Flatten, Linear, Residual
from nbcnn.nn.resampling import Upsample2d
from nbcnn.nn.whitening import Whiten, WhitenPatches
from nbcnn.ops.kernel.loops import ceil_div
from nbcnn.plan.graph import names
from nbcnn.run import inference
from nbcnn.run.net import Net
from nbcnn.run.rows import Choice

Say = Callable[[str], None]

WHITENED = 20_000
"""Images that `Whiten` is fitted to, at most."""
PATCHES = {"whiten": 300_000, "first": 400_000, "further": 150_000, "projected": 40_000, "start": 200_000, "wide": 60_000}
"""Patches that are drawn, at most: for `Whiten`; for the first dictionary, for further ones, and for a projection; for first weights, and for those
of more than `AXES` values."""
PER_IMAGE = 100
"""Patches of an image at most."""
AXES = 512
"""Principal axes of patches in which k-means looks for first weights."""
DEVIATIONS, ACTIVE = 0.25, 0.1
"""Products of the first dictionary pass above so many deviations; of later ones so large a part of each atom's."""
THRESHOLD = 10_000
"""Patches that thresholds are found by: the part of them that passes is within 0.3 % of all at one deviation."""
ROUNDS = 15
"""Iterations of k-means; twice as many where samples are few."""
BATCH = 256


def fit(net: Net, images: np.ndarray, seed: int = 0, say: Say = lambda text: None) -> bool:
    """Fit every `Whiten` of `net` that is not fitted yet to `images` (M, C, H, W), uint8 or float32; True if there was one.

    Its filters are the central rows of a ZCA of patches; `size`, `eps` and `contrast` are the layer's. Raises UsageError for one that is not
    the first layer, or in a graph of several inputs.
    """
    found = False
    for at, (name, layer) in enumerate(zip(names(net.layers), net.layers, strict=True)):
        if type(layer) is not Whiten or net.params.read(f"{name}.fitted")[0]:
            continue
        if at:
            raise UsageError(f"{name} is layer {at + 1}: Whiten is fitted to images, so it must be the first layer")
        if isinstance(net.layers, Graph) and len(net.layers.inputs) > 1:
            raise UsageError(f"{name} is fitted to the one input of a network, and this one has {len(net.layers.inputs)}")
        chosen = _chosen(images, WHITENED, seed)
        mean, filters = _whitening(layer, _seen(net, chosen), seed, net.device)
        _set(net, {f"{name}.mean": mean, f"{name}.filters": filters, f"{name}.fitted": np.array([len(chosen)])})
        say(f"{name}: fitted to {len(chosen):,} images")
        found = True
    return found


def is_fitted(net: Net) -> bool:
    """Whether no `Whiten` of `net` waits for images."""
    return all(net.params.read(f"{name}.fitted")[0] for name, layer in zip(names(net.layers), net.layers, strict=True) if type(layer) is Whiten)


def _whitening(layer: Whiten, x: np.ndarray, seed: int, device: Any) -> tuple[np.ndarray, np.ndarray]:
    """The mean image (C, H, W) and the filters of `layer` for what it sees of the images, float32 (M, C, H, W)."""
    channels, size = x.shape[1], layer.size
    flat = x.reshape(len(x), -1)
    flat = flat - flat.mean(1, keepdims=True)
    flat /= np.sqrt((flat * flat).mean(1, keepdims=True) + layer.contrast)
    mean = flat.mean(0, dtype=np.float64).astype(np.float32)
    flat -= mean
    random, count = np.random.default_rng([seed, 0]), min(PATCHES["whiten"], PER_IMAGE * len(x))
    patches = drawn_of_all([flat.reshape(x.shape)], len(x), (size, size), count, random)
    patches -= patches.mean(0)
    # The rows of the central pixel, one for each channel.
    rows = zca(mirrored_mean(HostSamples(patches).covariance(), channels, size), layer.eps)[size * size // 2 :: size * size]
    deviation = float((patches @ rows.T.astype(np.float32)).std())
    return mean.reshape(x.shape[1:]), (rows / (deviation or 1.0)).reshape(channels, channels, size, size)


def start(net: Net, images: np.ndarray, seed: int = 0, say: Say = lambda text: None) -> list[str]:
    """Give the convolutions of an encoder first weights by k-means of whitened patches, layer by layer; returns their names.

    Every `Conv2d` before the first `Upsample2d`, `Flatten`, `Linear`, `Residual` or loss: its filters are atoms of the patches of its input, with the
    whitening folded in, scaled so that products have deviation 1; its biases let half of the products of every filter pass a ReLU. A `Whiten` must be
    fitted before (`fit`). One with groups or dilation keeps the weights it has. Raises UsageError if there is no such convolution, or for a graph.
    """
    if isinstance(net.layers, Graph):
        raise UsageError("--init kmeans goes from layer to layer of a list; a graph trains from --init torch or he")
    ends = (Upsample2d, Flatten, Linear, Residual)
    stop = next((at for at, layer in enumerate(net.layers) if isinstance(layer, ends) or hasattr(layer, "needs_labels")), len(net.layers))
    made: list[str] = []
    for at, (name, layer) in enumerate(zip(names(net.layers), net.layers[:stop], strict=False)):
        if type(layer) is not Conv2d or layer.general:
            continue
        shape = layer.params()["weight"].shape
        wide = int(np.prod(shape[1:])) > AXES
        rate, eps = 0.5, 0.05 if made else 0.01
        p = _patches(net, at, images, (shape[2], shape[3]), PATCHES["wide" if wide else "start"], seed)
        mean = p.mean(0)
        p -= mean
        axes = components(HostSamples(p).covariance(), AXES, eps).astype(np.float32)
        atoms = atoms_of(multiply(p, np.ascontiguousarray(axes.T), net.device), shape[0], ROUNDS * (2 if wide else 1), seed, net.device)
        filters = atoms @ axes.T
        products = multiply(p, filters, net.device)
        deviation = np.maximum(products.std(0), 1e-12)
        filters /= deviation[:, None]
        bias = -np.quantile(products[:50_000] / deviation, 1 - rate, axis=0) - filters @ mean
        _set(net, {f"{name}.weight": filters.reshape(shape)} | ({f"{name}.bias": bias} if layer.bias else {}))
        say(f"{name}: {shape[0]} atoms of {len(p):,} patches of {p.shape[1]:,} values")
        made.append(name)
    if not made:
        raise UsageError("--init kmeans is for networks that begin with convolutions; this one has none before its first other layer")
    return made


def fit_encoder(net: Net, images: np.ndarray, seed: int = 0, say: Say = lambda text: None) -> None:
    """Fit an encoder that is nothing but dictionaries (`nbcnn.patches`, `nbcnn.patches2`) to `images` (M, C, H, W), uint8 or float32.

    `WhitenPatches` gets the ZCA of its input's patches, the `Conv2d` behind it atoms by k-means, with a threshold as bias; a `Conv2d` elsewhere the
    first principal components of its input. Raises UsageError for a convolution of more than one pixel.

    >>> net = Net([WhitenPatches(2), Conv2d(3, 1)], (1, 4, 4), mode="cpu")
    >>> fit_encoder(net, np.random.default_rng(0).integers(0, 256, (20, 1, 4, 4), dtype=np.uint8))
    >>> np.linalg.norm(net.params.read("conv1.weight").reshape(3, 4), axis=1).round(5)
    array([1., 1., 1.], dtype=float32)
    """
    codes, dictionaries = None, 0
    for at, (name, layer) in enumerate(zip(names(net.layers), net.layers, strict=True)):
        if type(layer) is WhitenPatches:
            count = PATCHES["further" if dictionaries else "first"]
            codes = _patch_whitening(net, name, layer, _samples(net, at, images, (layer.size, layer.size), count, seed))
            say(f"{name}: whitening of {codes.count:,} patches of {codes.width:,} values")
        elif type(layer) is Conv2d:
            if layer.params()["weight"].shape[2:] != (1, 1) or layer.general:
                raise UsageError(f"{name} is no 1×1 convolution: in a dictionary WhitenPatches takes the patches")
            if codes is None:
                _projection(net, name, layer, _samples(net, at, images, (1, 1), PATCHES["projected"], seed))
                say(f"{name}: {layer.out_channels} principal components")
            else:
                atoms = atoms_of(codes, layer.out_channels, ROUNDS, seed + dictionaries, net.device)
                products = codes.products(atoms, THRESHOLD)
                least = _passed_by(products, ACTIVE) if dictionaries else np.full(len(atoms), DEVIATIONS * products.std())
                _set(net, {f"{name}.weight": atoms[:, :, None, None], f"{name}.bias": -least})
                say(f"{name}: {len(atoms):,} atoms of {codes.count:,} patches")
                codes, dictionaries = None, dictionaries + 1


def _passed_by(products: np.ndarray, part: float) -> np.ndarray:
    """For every row of products the threshold that such a part of it passes."""
    place = int((1 - part) * (products.shape[1] - 1))
    # Not by np.quantile, which holds Python's lock most of the time.
    return np.concatenate(in_parts(lambda at: np.partition(products[at], place, axis=1)[:, place], len(products), 64))


def _patch_whitening(net: Net, name: str, layer: WhitenPatches, p: Samples) -> Samples:
    """Set the values of `layer` from patches p, which are changed; returns what it makes of them."""
    p.normalise_contrast(layer.norm)
    mean = p.centre()
    whitening = zca(p.covariance(), layer.eps)
    # Rows that sum to zero take out the mean of a patch, which the layer does not.
    rows = (whitening - whitening.mean(1, keepdims=True)).astype(np.float32)
    weight = layer.params()["weight"].shape
    _set(net, {f"{name}.weight": rows.reshape(weight), f"{name}.bias": whitening @ mean})
    return p.mapped(whitening.astype(np.float32))


def _projection(net: Net, name: str, layer: Conv2d, p: Samples) -> None:
    """Set `layer` to the first principal components of p, which is changed."""
    mean = p.centre()
    axes = components(p.covariance(), layer.out_channels, 0.05).T
    _set(net, {f"{name}.weight": axes[:, :, None, None], f"{name}.bias": -axes @ mean})


def _patches(net: Net, at: int, images: np.ndarray, window: tuple[int, int], count: int, seed: int) -> np.ndarray:
    """Patches of the input of layer `at` of `net`, drawn at random, float32 (n, C·R·S): at most `count` and PER_IMAGE per image."""
    chosen, count, random = _drawing(at, images, count, seed)
    return drawn_of_all(_inputs(net, at, chosen), len(chosen), window, count, random)


def _samples(net: Net, at: int, images: np.ndarray, window: tuple[int, int], count: int, seed: int) -> Samples:
    """The same patches where the net's device computes: those of a GPU's net are never on the host."""
    if net.device.name != "gpu":
        return HostSamples(_patches(net, at, images, window, count, seed))
    chosen, count, random = _drawing(at, images, count, seed)
    chosen = chosen if chosen.dtype == np.uint8 else chosen.astype(np.float32, copy=False)
    scale: Sequence[Any] = (0.0, 1.0)  # behind the first layer values are taken as they are
    if at == 0 and net.normalisation:
        scale = tuple(net.normalisation.attributes(chosen.dtype.name).values())
    elif at == 0 and chosen.dtype == np.uint8:
        scale = (0.0, 1 / 255)
    return drawn_on_gpu(net.device, _inputs_on_gpu(net, at, chosen), len(chosen), window, count, random, scale)


def _drawing(at: int, images: np.ndarray, count: int, seed: int) -> tuple[np.ndarray, int, np.random.Generator]:
    """The images that patches of the input of layer `at` are drawn from, how many patches, and by what."""
    # A few patches of many images tell more than many of few; images behind the first layers cost time, and a last batch of another size 0.1 s more.
    chosen = _chosen(images, WHITENED if at == 0 else min(WHITENED, BATCH * ceil_div(max(2_000, count // 20), BATCH)), seed)
    return chosen, min(count, PER_IMAGE * len(chosen)), np.random.default_rng([seed, at + 1])


def _inputs(net: Net, at: int, images: np.ndarray) -> Iterator[np.ndarray]:
    """What layer `at` of `net` gets of `images`, block by block."""
    if at == 0:
        for first in range(0, len(images), 4 * BATCH):
            yield _seen(net, images[first : first + 4 * BATCH])
        return
    with closing(_front(net, at)) as front:
        yield from front.predict_batches(images, min(BATCH, len(images)))


def _inputs_on_gpu(net: Net, at: int, images: np.ndarray) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """The same blocks in the memory of the GPU, with their shapes; of the first layer the images as they are."""
    device, step = net.device, BATCH if at else 4 * BATCH
    with ExitStack() as held:
        front = held.enter_context(closing(_front(net, at))) if at else None
        for first in range(0, len(images), step):
            part = images[first : first + step]
            there = device.empty(part.size, part.dtype.name)
            device.upload(there, part)
            if front is None:
                yield there, part.shape
            else:
                made = inference.on_gpu(front, DeviceArray(there, part.shape, None, device.stream), min(BATCH, len(images)))
                yield made.flat, made.shape


def _front(net: Net, at: int) -> Net:
    """The layers of `net` before layer `at`, with its weights."""
    choice = Choice(net.row, net.why)
    front = Net(net.layers[:at], net.input_shape, choice=choice, device=net.device, normalisation=net.normalisation, fusing=net.fusing)
    weights = net.params.as_dict()
    front.params.load_dict({name: weights[name] for name in front.params.names})
    return front


def _chosen(images: np.ndarray, count: int, seed: int) -> np.ndarray:
    """At most `count` of the images, drawn at random, in their order."""
    if len(images) <= count:
        return images
    return np.ascontiguousarray(images[np.sort(np.random.default_rng([seed, len(images)]).permutation(len(images))[:count])])


def _seen(net: Net, images: np.ndarray) -> np.ndarray:
    """What the first layer of `net` sees of the images, float32."""
    if net.normalisation:
        return np.asarray(net.normalisation.done(images), np.float32)
    return images.astype(np.float32) * np.float32(1 / 255 if images.dtype == np.uint8 else 1)


def _set(net: Net, values: dict[str, np.ndarray]) -> None:
    """Replace these parameters and states of `net`."""
    net.params.load_dict(net.params.as_dict() | {name: np.ascontiguousarray(value, np.float32) for name, value in values.items()})
