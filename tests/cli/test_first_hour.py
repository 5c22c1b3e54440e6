"""What newcomers try in their first hour, and what they are told."""

from __future__ import annotations

import numpy as np
import pytest
from scripts import exits, message, train

import nbcnn
from nbcnn import Linear
from nbcnn.cli import describe, gradcheck, recipes, simulate, train_flags
from nbcnn.files.errors import UsageError
from nbcnn.sklearn import ConvAutoencoder, ConvClassifier


@pytest.mark.parametrize(("name", "kind"), [("./photos", "folder"), ("photoz", "folder"), ("set.npz", "npz")])
def test_a_folder_that_is_there_is_named_as_data_sets_in_folders_are(name, kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if kind == "folder":
        (tmp_path / name).mkdir()
    else:
        np.savez(tmp_path / name, train_images=np.zeros((1, 1, 2, 2), np.uint8))
    text = message(capsys, 2, exits(train, ["--dataset", name]))
    assert f"that data set is {kind}:{name}" in text
    assert "did you mean" not in text
    assert train_flags.dataset("photos") == "photos", "a name that is known stays one beside a folder of that name"


def test_what_is_downloaded_and_what_is_not(tmp_path, capsys):
    words = ["--model", "mnist-cnn", "--dataset", "photos", "--limit", "4", "--mode", "cpu", "--out", tmp_path / "run"]
    assert "the files of mnist and fashion-mnist are put into --data-dir by hand" in message(capsys, 2, exits(train, words))


@pytest.mark.parametrize("kind", [ConvClassifier, ConvAutoencoder])
def test_images_without_an_image_shape_are_told_of_it(kind):
    x = np.zeros((6, 3, 8, 8), np.uint8)
    with pytest.raises(ValueError, match=rf"of images X\(6, 3, 8, 8\) say {kind.__name__}\(image_shape=\(C, H, W\)\)"):
        kind(mode="cpu").fit(x, np.arange(6) % 2)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--model resnet18 --batch 8", "lr 0.4 is for batches of 512, and with 8 the loss may grow without end; in proportion it is --lr 0.0063"),
        ("--batch 8", "lr 0.1 is for batches of 64, and with 8 the loss may grow without end; in proportion it is --lr 0.013"),
        ("--batch 32", ""),
        ("--model resnet18 --batch 8 --lr 0.01", ""),
        ("--model mnist-cnn --batch 8", ""),
        ("--model resnet18 --batch 512", ""),
    ],
)
def test_a_small_batch_at_the_rate_of_a_large_one_is_warned_of(words, says):
    said = recipes.of_batch(recipes.fill(train_flags.parse(words.split())))
    assert says in said
    assert bool(said) is bool(says)


def test_the_rate_that_a_cpu_sets_is_for_its_own_batch():
    flags = recipes.fill(train_flags.parse(["--model", "resnet18", "--batch", "8"]))
    recipes.on_cpu(flags)
    assert "lr 0.05 is for batches of 32" in recipes.of_batch(flags)


class DataLoader:
    """As PyTorch's: it has a length, and yields lists of x and y."""

    def __len__(self):
        return 3

    def __iter__(self):
        return iter([[np.full((4, 2), number, np.uint8), np.arange(4) % 2] for number in range(3)])


def test_a_data_loader_is_shown_the_way_and_the_way_works():
    loader = DataLoader()
    model = nbcnn.Model([Linear(2)], "cross_entropy", mode="cpu")
    with pytest.raises(UsageError, match=r"not DataLoader\. .* fit\(lambda epoch: loader\)"):
        model.fit(loader, verbose=0)
    assert model.fit(lambda epoch: loader, epochs=2, verbose=0).rows[-1]["step"] == 6


def test_an_elementwise_op_is_simulated_at_a_count(monkeypatch, capsys):
    from nbcnn.lab.measure.opcases import problem

    assert problem("relu_fprop", "1000").small.ins[0].shape == (1, 1, 1, 1000)
    assert "COUNT" in next(action.help for action in simulate.parser()._actions if action.dest == "shape")
    with pytest.raises(UsageError, match="is N,C,H,W or COUNT"):
        problem("relu_fprop", "10,10")


def test_the_simulator_says_that_it_is_one(monkeypatch):
    class Net:
        mode = "im2col"

    assert "compiling them at the first start" in describe.compiling(Net)
    monkeypatch.setattr(describe, "SIMULATOR", True)
    assert describe.compiling(Net) == "the im2col kernels run in the simulator, thread by thread: a millionth of a GPU's speed"


def test_gradcheck_of_some_ops(capsys):
    assert exits(gradcheck.main, ["--mode", "cpu", "--op", "relu_*,maxpool_dgrad"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert {line.split()[2] for line in lines[:-1]} == {"relu_fprop", "relu_dgrad", "maxpool_dgrad"}
    assert lines[-1].endswith("0 failed")
    assert "no op 'conv_fprob' to check; did you mean conv_fprop?" in message(
        capsys, 2, exits(gradcheck.main, ["--mode", "cpu", "--op", "conv_fprob"])
    )
