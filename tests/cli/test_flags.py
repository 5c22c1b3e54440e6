"""Tests of the defaults of train.py: recipes, what overrides them, and the small run of a machine without a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from nbcnn import modes
from nbcnn.cli import flags as flags_of_all
from nbcnn.cli import recipes, train_flags, train_run
from nbcnn.files.errors import UsageError
from nbcnn.nn import models
from nbcnn.nn.layers import Conv2d, Flatten, Linear, parameters
from nbcnn.nn.norms import EvoNormB0
from nbcnn.nn.series_layers import DepthwiseConv1d, StateSpaceConv1d
from nbcnn.ops.update.rule import effective_gradient
from nbcnn.plan import names
from nbcnn.plan.bounds import STORE


def test_every_flag_of_train_shows_its_default():
    for action in train_flags.parser()._actions:
        if action.dest not in ("help", "version", "resume"):
            assert "default" in action.help, action.option_strings


def flags(*argv):
    return recipes.fill(train_flags.parse(argv))


def test_the_default_recipe():
    chosen = flags()
    assert (chosen.optimizer, chosen.lr, chosen.momentum, chosen.batch, chosen.epochs) == ("sgd", 0.1, 0.9, 64, 15)
    assert (chosen.schedule, chosen.init, chosen.clip_value, chosen.limit) == ("cosine", "torch", 0.0, None)


def test_the_per_image_recipe_and_a_flag_that_overrides_it():
    chosen = flags("--recipe", "per-image", "--epochs", "2")
    assert (chosen.optimizer, chosen.lr, chosen.momentum, chosen.batch, chosen.epochs) == ("sgd", 0.001, 0.0, 1, 2)
    assert (chosen.schedule, chosen.init, chosen.clip_value) == ("constant", "he", 5.0)


def test_adam_has_a_learning_rate_of_its_own():
    assert flags("--optimizer", "adam").lr == 0.001
    assert flags("--optimizer", "adam", "--lr", "0.01").lr == 0.01


def test_help_gives_the_order_of_clipping_that_training_has():
    help_of = {action.dest: action.help for action in train_flags.parser()._actions}
    assert "before --clip-value" in help_of["clip_norm"]
    assert "after --clip-norm" in help_of["clip_value"]
    # By norm first (3, 4) becomes (0.6, 0.8), cut to 0.7; by value first it would become (0.7, 0.7), too short to be scaled.
    gradient = np.array([3, 4], np.float32)
    clipped = effective_gradient(gradient, gradient, np.float64(5), clip_norm=1, clip_value=0.7)
    np.testing.assert_allclose(clipped, [0.6, 0.7], rtol=1e-6)


def test_help_names_what_weight_decay_counts():
    help_of = {action.dest: action.help for action in train_flags.parser()._actions}
    assert "weights and biases, not on norms, skips and state spaces" in help_of["weight_decay"]
    layers = [
        Conv2d(2, in_channels=1),
        EvoNormB0(channels=2),
        Flatten(),
        Linear(3, in_features=8),
        DepthwiseConv1d(3, skip=True, channels=2),
        StateSpaceConv1d(3, channels=2),
    ]
    decays = {name: param.decay for name, param in parameters(layers).items()}
    wanted = {"conv1.weight", "conv1.bias", "linear1.weight", "linear1.bias", "dwconv1.weight"}
    assert {name for name, decay in decays.items() if decay} == wanted


SMALL_ON_CPU = {"model": "small-autoencoder", "recipe": "small", "optimizer": "adam", "lr": 0.003, "batch": 16, "epochs": 10, "limit": 1024}


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("", {}),
        ("--batch 8", {"batch": 8}),
        ("--epochs 2", {"epochs": 2}),
        ("--limit 99", {"limit": 99}),
        ("--limit all", {"limit": None}),
        ("--epochs 10 --limit 1024", {}),
        ("--lr 0.05", {"lr": 0.05}),
        ("--optimizer adamw", {"optimizer": "adamw", "weight_decay": 0.01}),
        ("--optimizer sgd", {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9}),
        ("--weights run", {"weights": "run"}),
        ("--seed 3", {"seed": 3}),
    ],
)
def test_a_flag_changes_what_it_names_in_the_small_run_of_a_cpu(words, changed):
    chosen = flags(*words.split())
    notice = recipes.on_cpu(chosen)
    wanted = SMALL_ON_CPU | changed
    assert {name: value for name, value in vars(chosen).items() if name in wanted} == wanted
    named = flags("--model", "small-autoencoder", *words.split())
    recipes.on_cpu(named)
    assert vars(chosen) | {"given": 0} == vars(named) | {"given": 0}, "the small network has the same recipe by name"
    train_flags.check({name: value for name, value in vars(chosen).items() if name != "given"})
    amount = f"up to {wanted['limit']:,}" if wanted["limit"] else "all"
    assert f"small-autoencoder, {wanted['epochs']} epochs of {amount} images" in notice


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--model autoencoder", {"epochs": 3, "limit": 1024}),
        ("--recipe default", {"epochs": 3, "limit": 1024}),
        ("--model autoencoder --epochs 2", {"limit": 1024}),
        ("--model resnet18 --limit 64", {"epochs": 3, "batch": 32, "lr": 0.05}),
        ("--model resnet18 --epochs 1 --limit all", {"batch": 32, "lr": 0.05}),
        ("--model s4convd --epochs 1", {"limit": 65536, "batch": 128, "width": 32, "blocks": 2, "lr": 0.012}),
        ("--model patches", {"limit": 1024}),
        ("--model patches --limit all", {}),
    ],
)
def test_who_names_the_network_keeps_it_and_its_recipe_on_a_cpu(words, wanted):
    chosen, before = flags(*words.split()), vars(flags(*words.split()))
    notice = recipes.on_cpu(chosen)
    assert bool(notice) == bool(wanted.keys() & {"epochs", "limit"})
    assert vars(chosen) == before | wanted


def test_an_optimizer_of_another_kind_than_the_recipes_has_its_own_rate_and_momentum():
    chosen = flags("--model", "mnist-cnn", "--optimizer", "sgd")
    assert (chosen.lr, chosen.momentum) == (0.1, 0.9)
    chosen = flags("--model", "resnet18", "--optimizer", "adam")
    assert (chosen.lr, chosen.momentum) == (0.001, 0.0)
    chosen = flags("--model", "mnist-cnn", "--optimizer", "sgd", "--lr", "0.5", "--momentum", "0")
    assert (chosen.lr, chosen.momentum) == (0.5, 0.0)


def test_another_model_on_a_cpu_keeps_its_recipe():
    chosen = flags("--model", "mnist-cnn")
    recipes.on_cpu(chosen)
    assert (chosen.model, chosen.recipe, chosen.batch, chosen.epochs, chosen.limit) == ("mnist-cnn", "classifier", 128, 3, 1024)


def test_a_resumed_run_keeps_its_tiles_where_everything_is_as_it_was():
    notes = {"mode": "naive", "precision": "fp32", "device": "a GPU", "tiles": '{"one": {"BM": 64}}'}
    start = train_run.Start(SimpleNamespace(), notes=notes)
    assert start.tiles("naive", "fp32", "a GPU") == {"one": {"BM": 64}}
    for other in (("tiled", "fp32", "a GPU"), ("naive", "bf16", "a GPU"), ("naive", "fp32", "another GPU")):
        assert start.tiles(*other) == {}
    assert train_run.Start(SimpleNamespace()).tiles("naive", "fp32", "a GPU") == {}


def saved_flags(*argv):
    """The flags of a run as its config.json has them."""
    return {name: value for name, value in vars(flags(*argv)).items() if name != "given"}


def test_a_resumed_run_keeps_its_mode_and_everything_that_changes_its_bits():
    saved = saved_flags("--precision", "bf16", "--engine", "mma")
    resolved = {"mode": "tensorcore", "precision": "bf16", "dataset": "cifar10"}

    def resumed(*argv):
        return train_flags.from_run(train_flags.parse(argv), saved, Path("run"), resolved)

    kept = resumed("--mode", "tensorcore", "--dataset", "auto", "--epochs", "20", "--data-dir", "elsewhere")
    assert (kept.mode, kept.precision, kept.engine, kept.dataset) == ("tensorcore", "bf16", "mma", "cifar10")
    assert (kept.epochs, kept.data_dir) == (20, "elsewhere")
    for words in (["--mode", "cpu"], ["--precision", "tf32"], ["--no-fuse"], ["--tune"], ["--seed", "1"], ["--weights", "other"]):
        with pytest.raises(UsageError, match=rf"{words[0]}.* cannot change in a resumed run[^$]*python train.py --weights run {words[0]}"):
            resumed(*words)


def test_flags_of_a_damaged_config_are_noticed():
    train_flags.check(saved_flags())
    train_flags.check(saved_flags("--model", "s4convd", "--width", "8"))
    train_flags.check(saved_flags("--weights", "run", "--limit", "5"))
    for name, value in {
        "lr": "fast",
        "lr ": None,
        "batch": 0,
        "epochs": 1.5,
        "seed": True,
        "flip": 1,
        "mode": "gpu",
        "limit": [4],
        "data_dir": 3,
    }.items():
        with pytest.raises(ValueError, match=repr(name.strip())):
            train_flags.check(saved_flags() | {name.strip(): value})


def test_the_names_that_flags_offer_are_those_of_what_they_name():
    assert set(names.PRECISIONS) == set(STORE) == {precision for _, precision in modes.MODES}
    assert tuple(modes.DWCONV) == names.DWCONV
    assert set(names.MODELS) == {*models.MODELS, "s4convd"}
    assert set(names.ENGINES) <= {part for _, row in modes.MODES.items() for part in row.own}
    assert flags_of_all.OWN_PRECISION == "bf16 for tensorcore, else fp32"


@pytest.mark.parametrize(
    ("words", "model"), [([], "small-autoencoder"), (["--epochs", "2"], "small-autoencoder"), (["--model", "autoencoder"], "autoencoder")]
)
def test_digits_that_stand_in_for_cifar_10_get_the_small_network(words, model):
    """On a GPU, too: the features of the large one are worth less there than those of a random encoder."""
    flags = recipes.fill(train_flags.parse(words))
    flags.resume = None
    note = recipes.on_digits(flags)
    assert (flags.model, bool(note)) == (model, model == "small-autoencoder")
    if note:
        assert (flags.recipe, flags.epochs, flags.optimizer) == ("small", 2 if words else 10, "adam")
        assert "digits stand in for CIFAR-10" in note
