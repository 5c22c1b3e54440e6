"""Every ready network and every small module of `tests/pytorch/small.py` through both doors, from_module and from_onnx, and back.

    python -m tests.campaigns.doors                     all of them, with a table; needs PyTorch, onnx, onnxruntime and onnxscript
    python -m tests.campaigns.doors --only Conv2d       those whose name has this in it
    python -m tests.campaigns.doors --doors from_module --ways whole,frozen

A network comes out of a door right, refused or wrong. It is right if its prediction is the module's; if its trained numbers and their float64
gradients are; if two SGD steps change both alike, running statistics included; and if what `to_module` and `to_onnx` make of it, and what comes
back of that, is the same again. It is refused if an error says in words why. Everything else is wrong: another number, another trained parameter, an
error of another class.

A file of PyTorch records neither what training draws (dropouts, the slopes of RReLU) nor `detach`, nor what is trained: behind a file a module is
compared without that (`recorded`), only small modules whose weights are trained, and from_onnx is told which numbers and divisors are (`numbers`).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import itertools
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "pytorch")]  # what the tests share, as pytest has it

import numpy as np  # noqa: E402
import onnx  # noqa: E402
import torch  # noqa: E402
from doors import assert_the_same_gradients, gradients_here, gradients_there, matched  # noqa: E402
from networks import assert_as_exact  # noqa: E402
from onnxruntime import InferenceSession  # noqa: E402
from small import Weighted, small  # noqa: E402
from torch import nn  # noqa: E402

import nbcnn  # noqa: E402
import nbcnn.onnx  # noqa: E402
import nbcnn.torch  # noqa: E402
from nbcnn.datasets.arrays import Form  # noqa: E402
from nbcnn.nn import models  # noqa: E402
from nbcnn.onnx import OnnxError  # noqa: E402

REFUSALS = (nbcnn.UsageError, OnnxError)
"""What says in words why a network is not taken: nbcnn.torch.Unsupported is a UsageError."""
LR, DEEP_LR = 0.05, 1e-3
"""Of the steps of small modules and of the ready networks, which larger ones would let diverge in PyTorch, too."""


class Placed(nn.Module):
    """A small module behind a layer that trains, so that the gradient of its input counts, used as `way` says."""

    def __init__(self, part, shape, way, seed):
        super().__init__()
        features = shape[1]
        kinds = {2: nn.Linear, 3: nn.Conv1d, 4: nn.Conv2d}
        self.first = kinds[len(shape)](features, features, **({} if len(shape) == 2 else {"kernel_size": 1}))
        self.part, self.way = copy.deepcopy(part), way
        if way == "tied":
            self.other = copy.deepcopy(part)
            for name, each in self.part.named_parameters():
                home, _, last = name.rpartition(".")
                setattr(self.other.get_submodule(home), last, each)
                break
        random = torch.Generator().manual_seed(11 + seed)
        for each in self.parameters():
            # No two numbers alike, so that a parameter is known by them.
            each.data = each.data + 0.2 * torch.randn(each.shape, generator=random)
        for name, each in self.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                each.copy_(0.5 + torch.rand(each.shape, generator=random))
        if way == "frozen":
            for at, each in enumerate(list(self.parameters())[1:]):
                each.requires_grad_(bool(at % 2))

    def forward(self, x):
        if self.way == "reused":
            return self.part(self.first(x)) + torch.tanh(self.part(x))
        if self.way == "tied":
            return self.part(self.first(x)) + torch.tanh(self.other(x))
        if self.way == "detached":
            return self.part(self.first(x)) * torch.sigmoid(self.part(x)).detach()
        return self.part(self.first(x))


EXPORTERS = ("script", "export", "optimized")
"""PyTorch's: of TorchScript, and of torch.export, whose file is simplified or not."""
WAYS = ("whole", "frozen", "reused", "tied", "detached")


# -- what is held


def assert_gradients(model, module, x, more=False, training=True):
    """The model trains what the module trains, by the same float64 gradients, and nothing else; `more`: constants of a file, which it calls no more
    constant than weights, may be trained too. `training`: the module's norms take statistics of the batch."""
    # Statistics that stay, and constants, are float32 in a network: 2⁻²⁴ off, a few of them.
    assert_the_same_gradients(gradients_here(model, x), gradients_there(module, x, training), 2**-20, more)


def stepped(module, x, target, dtype, lr):
    """The parameters and running statistics of a module by name, before and after two steps of SGD in `dtype`."""
    module = copy.deepcopy(module).to(dtype).train()
    before = {name: each.detach().clone() for name, each in module.state_dict().items() if each.is_floating_point()}
    given = [each for each in module.parameters() if each.requires_grad]
    for _ in range(2):
        loss = nn.functional.mse_loss(module(x.to(dtype)), target.to(dtype))
        if loss.requires_grad:
            for each in given:
                each.grad = None
            loss.backward()
            with torch.no_grad():
                for each in given:
                    if each.grad is not None:
                        each -= lr * each.grad
    return [(before[name].double().numpy(), each.detach().double().numpy()) for name, each in module.state_dict().items() if name in before]


def assert_two_steps(model, module, x, lr=LR):
    """Every number that two steps change in the module they change alike in the model, and no other."""
    with torch.no_grad():
        shape = module(x).shape
    target = torch.rand(shape, generator=torch.Generator().manual_seed(7))
    exact, own = (stepped(module, x, target, dtype, lr) for dtype in (torch.float64, torch.float32))
    off = [np.abs(a - b).max(initial=0) / (np.abs(a).max(initial=0) or 1) for (_, a), (_, b) in zip(exact, own, strict=True)]
    allowed = 16 * max([2**-22, *off])  # an order of sums of its own, which float32 feels as PyTorch's own order does
    before = model.weights()
    arrays = x.numpy().reshape(len(x), *model.net.input_shape)
    wanted = target.numpy().reshape(len(x), *model.net.output_shape)
    model.fit(arrays, wanted, epochs=2, batch_size=len(x), shuffle=False, channels_last=False, optimizer=nbcnn.SGD(lr=lr, momentum=0.0), verbose=0)
    after = model.weights()
    left = {name for name in after if (after[name] != before[name]).any()}
    for first, last in exact:
        if (first == last).all():
            continue
        known = {name: found for name in before if (found := matched(before[name], first.astype(np.float32))) is not None}
        assert known, f"no parameter of the model is the module's of {first.shape}"
        scale = np.abs(last).max()
        apart = min(np.abs(sign * after[name].reshape(-1)[mine] - last.reshape(-1)[theirs]).max() for name, (sign, mine, theirs) in known.items())
        assert apart <= allowed * scale, f"two steps: {known} of {first.shape} is {apart:.1e} off, and {allowed * scale:.1e} is rounding"
        left -= set(known)
    moved = max([np.abs(last - first).max() for first, last in exact], default=0.0)
    for name in left:
        # A bias before a norm has the gradient 0, and rounding of it here.
        apart = np.abs(after[name] - before[name]).max()
        assert apart <= allowed * max(moved, 1.0), f"two steps change {name} by {apart:.1e}, and the module has no such trained number"


def assert_back(model, module, x):
    """What the model becomes elsewhere, and what comes back of it, computes and trains the same."""
    arrays = x.numpy().reshape(len(x), *model.net.input_shape)
    there = nbcnn.torch.to_module(model)
    seen = torch.from_numpy(arrays)
    near(model.predict(arrays), there, seen)
    assert_the_same_gradients(gradients_there(there, seen), gradients_there(module, x), 2**-20)
    again = nbcnn.torch.from_module(there, seen, loss="mse", mode="cpu")
    near(again.predict(arrays).reshape(len(x), *model.net.output_shape), there, seen)
    assert_gradients(again, module, x)
    file = nbcnn.onnx.to_onnx(model)
    restored = nbcnn.onnx.from_onnx(file.SerializeToString(), loss="mse", mode="cpu")
    assert restored.net.params.names == model.net.params.names
    assert restored.frozen() == model.frozen()
    assert np.array_equal(restored.predict(arrays), model.predict(arrays))
    assert_gradients(restored, module, x)


def near(found, module, x):
    assert_as_exact(found, module, (x,))


# -- the doors


def files(module, x, exporters) -> Iterator[tuple[str, bytes]]:
    """The module as PyTorch's exporters write it: (exporter, file)."""
    plain = {"training": torch.onnx.TrainingMode.PRESERVE, "do_constant_folding": False}
    for name, how in {"script": {"dynamo": False, **plain}, "export": {"dynamo": True, "optimize": False}, "optimized": {"dynamo": True}}.items():
        if name not in exporters:
            continue
        made = io.BytesIO()
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            try:
                torch.onnx.export(module.eval(), (x,), made, **how, **({"verbose": False} if how["dynamo"] else {}))
            except Exception as error:  # PyTorch has no file of it
                yield name, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}".encode()
                continue
        yield name, made.getvalue()


def through_module(module, x, lr=LR):
    module = module.eval()
    model = nbcnn.torch.from_module(module, x, loss="mse", mode="cpu")
    arrays = x.numpy().reshape(len(x), *model.net.input_shape)
    with torch.no_grad():
        wanted = module(x)
    near(model.predict(arrays).reshape(wanted.shape), module, x)
    assert_gradients(model, module, x)
    assert_back(model, module, x)
    assert_two_steps(model, module, x, lr)


def recorded(module):
    """A module as a file of it has it: nothing is drawn."""
    module = copy.deepcopy(module)
    for each in module.modules():
        if isinstance(each, nn.modules.dropout._DropoutNd):
            each.p = 0.0
        elif isinstance(each, nn.RReLU):
            each.lower = each.upper = (each.lower + each.upper) / 2
    return module


def numbers(content, module):
    """The initialisers that are the trained numbers and divisors of a module, by what the module calls them."""
    parts = [(home, part) for home, part in module.named_modules() if isinstance(part, Weighted) and part.name in CONSTANTS]
    held = {f"{home}.{name}" for home, part in parts for name, _ in part.named_parameters()}
    return [each.name for each in onnx.load_from_string(content).graph.initializer if each.name in held]


CONSTANTS = ("one factor", "divisor")
"""The small modules whose only tensor is a constant to from_onnx unless it is told."""


def through_file(content, module, x, folded=False, training=True):
    module = recorded(module)
    model = nbcnn.onnx.from_onnx(content, numbers=numbers(content, module), loss="mse", mode="cpu")
    arrays = x.numpy().reshape(len(x), *model.net.input_shape)
    with torch.no_grad():
        wanted = module(x)
    near(model.predict(arrays).reshape(wanted.shape), module, x)
    if not folded:
        assert_gradients(model, module, x, more=True, training=training)


@dataclass
class Case:
    """One network in one door: its name, and what raises AssertionError where it is wrong."""

    name: str
    door: str
    way: str
    run: Callable[[], None]


def outcome(case: Case) -> tuple[str, str]:
    """right, refused or wrong, and why."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case.run()
    except REFUSALS as error:
        return "refused", str(error)
    except NotExported as error:
        return "no file", str(error)
    except Exception as error:
        return "wrong", f"{type(error).__name__}: {error}"
    return "right", ""


class NotExported(Exception):
    """PyTorch makes no file of the module."""


def small_cases(doors=("from_module", *EXPORTERS), ways=WAYS, only="", seed=0) -> Iterator[Case]:
    """The small modules, each way in each door."""
    for name, part, shape in small():
        if only not in name:
            continue
        for way in ways:
            if way == "tied" and not list(part.parameters()):
                continue
            if way in ("reused", "detached") and getattr(part, "inplace", False):
                continue  # PyTorch itself has no gradient of a value that was written over
            x = torch.randn(shape, generator=torch.Generator().manual_seed(1 + seed))
            if "from_module" in doors:
                yield Case(name, "from_module", way, lambda part=part, shape=shape, way=way, x=x: through_module(Placed(part, shape, way, seed), x))
            if way in ("frozen", "detached") or name == "function detached":
                continue  # no file says so
            exporters = [each for each in doors if each != "from_module"]
            if not exporters:
                continue
            module = Placed(part, shape, way, seed).eval()
            for exporter, content in files_of(module, x, exporters):
                yield Case(name, exporter, way, partial(through_exported, content, module, x, exporter))


def through_exported(content, module, x, exporter, training=True):
    """A file of PyTorch's exporter, which onnxruntime takes for the module, too."""
    if content[:1] != b"\x08":
        raise NotExported(content.decode(errors="replace"))
    try:
        runtime = InferenceSession(content, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no class in common
        raise NotExported(f"onnxruntime does not take the file: {error}") from None
    (found,), wanted = runtime.run(None, {runtime.get_inputs()[0].name: x.numpy()}), module(x).detach().numpy()
    if np.abs(found - wanted).max() > 1e-3 * max(1.0, np.abs(wanted).max()):
        raise NotExported("the file computes something else in onnxruntime, too")
    through_file(content, module, x, exporter == "optimized", training)


def files_of(module, x, exporters):
    try:
        module(x)
    except Exception:
        return
    yield from files(module, x, exporters)


SIZES = {"autoencoder": (3, 16, 16), "small-autoencoder": (3, 16, 16), "mnist-cnn": (1, 28, 28), "mnist-cnn-b0": (1, 28, 28)}
SMALLER = {
    "autoencoder": lambda: models.autoencoder(3, wide=16, code=8),
    "resnet18": lambda: models.resnet18(3, 32, 32, filters=4),
    "mobilenet": lambda: models.mobilenet(3, 32, 32, multiplier=0.25),
    "unet": lambda: models.unet(3, 16, 16, filters=4, depth=2),
    "unet of pixels' classes": lambda: models.unet(3, 16, 16, classes=3, filters=4, depth=2),
}
"""Small forms of the networks that have a size."""


def ready(name, seed=0):
    """A ready network, built, with weights and statistics that are not those of the beginning."""
    shape = SIZES.get(name, (3, 16, 16) if "unet" in name else (3, 32, 32))
    layers = SMALLER[name]() if name in SMALLER else models.MODELS[name](*shape)
    has_loss = hasattr(list(layers)[-1], "needs_labels")
    model = nbcnn.Model(layers, None if has_loss else "mse", mode="cpu", input_shape=shape, seed=3)
    model.learn(Form(shape, scale=(0.0, 1.0)))
    random = np.random.default_rng(5 + seed)
    values = model.net.params.as_dict()
    model.net.params.load_dict({key: (each + random.uniform(0.02, 0.1, each.shape)).astype(np.float32) for key, each in values.items()})
    names = model.net.params.layout.names
    for frozen in names[1::5]:
        model.freeze(frozen)
    return model


def through_ready(name, door, seed=0):
    model = ready(name, seed)
    x = torch.rand(2, *model.net.input_shape, generator=torch.Generator().manual_seed(2 + seed))
    module = nbcnn.torch.to_module(model)
    near(model.predict(x.numpy()), module, x)
    assert_gradients(model, module, x)
    if door == "from_module":
        through_module(module, x, DEEP_LR)
        return
    # Nodes of an EvoNormB0 compute with its running variance, in training, too.
    training = not any(isinstance(each, nbcnn.EvoNormB0) for each in model.layers)
    if door in EXPORTERS:
        for each in module.parameters():
            each.requires_grad_(True)
        ((_, content),) = files_of(module.eval(), x, [door])
        through_exported(content, module, x, door, training)
        return
    file = nbcnn.onnx.to_onnx(model)
    if door == "by its notes":
        again = nbcnn.onnx.from_onnx(file.SerializeToString(), loss="mse", mode="cpu")
        assert again.frozen() == model.frozen()
        assert np.array_equal(again.predict(x.numpy()), model.predict(x.numpy()))
        assert_gradients(again, module, x)
        assert_two_steps(again, module, x, DEEP_LR)
        return
    del file.metadata_props[:]
    for each in module.parameters():
        each.requires_grad_(True)
    through_file(file.SerializeToString(), module, x, training=training)


def ready_cases(doors=("from_module", *EXPORTERS), only="", seed=0) -> Iterator[Case]:
    """The ready networks in each door."""
    for name in dict.fromkeys([*models.MODELS, *SMALLER]):
        for door in (*doors, "by its notes", "by its nodes"):
            if only in f"network {name}":
                yield Case(f"network {name}", door, "whole", partial(through_ready, name, door, seed))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns.doors", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="networks whose name has this in it")
    parser.add_argument("--doors", default=",".join(("from_module", *EXPORTERS)))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--seed", type=int, default=0, help="of weights and inputs")
    parser.add_argument("--refused", action="store_true", help="say why each that is refused is")
    given = parser.parse_args()
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    started, tried = time.perf_counter(), set[str]()
    doors, ways = given.doors.split(","), given.ways.split(",")
    for case in itertools.chain(ready_cases(doors, given.only, given.seed), small_cases(doors, ways, given.only, given.seed)):
        what, why = outcome(case)
        counts[case.door][what] += 1
        tried.add(case.name)
        if what == "wrong" or (what == "refused" and given.refused):
            print(f"{what}: {case.door}, {case.way}: {case.name}: {why[:600]}", flush=True)
    print(f"{len(tried)} networks in {time.perf_counter() - started:.0f} s\n")
    print("| door | right | refused | wrong | no file |\n| --- | ---: | ---: | ---: | ---: |")
    for door, found in counts.items():
        print(f"| {door} | " + " | ".join(str(found[what]) for what in ("right", "refused", "wrong", "no file")) + " |")
    return any(found["wrong"] for found in counts.values())


if __name__ == "__main__":
    sys.exit(main())
