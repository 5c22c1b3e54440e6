"""What newcomers try in their first hour, and what they are told."""

from __future__ import annotations

import contextlib
import io
import json
import shutil

import numpy as np
import pytest
from PIL import Image
from scripts import exits, message, train

import nbcnn
from nbcnn import Linear
from nbcnn.cli import classify, describe, evaluate, extract, gradcheck, predict, recipes, report, simulate, train_flags
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
        ("--model resnet18 --batch 8", "lr 0.4 is for batches of 512, and with 8 training may diverge; in proportion it is --lr 0.0063"),
        ("--batch 8", "lr 0.1 is for batches of 64, and with 8 training may diverge; in proportion it is --lr 0.013"),
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


def own_files(folder):
    (folder / "net.py").write_text(
        "import nbcnn\n"
        "def graph():\n    x = nbcnn.Input((3, 32, 32))\n    return nbcnn.Graph.of(x, nbcnn.Linear(10)(nbcnn.Flatten()(x)), 'cross_entropy')\n"
        "def named():\n    return [nbcnn.Flatten(), nbcnn.Linear(10), 'cross_entropy']\n"
        "def bare():\n    return [nbcnn.Flatten(), nbcnn.Linear(10)]\n"
    )
    (folder / "rule.py").write_text("import nbcnn\nMine = 1\n_hidden = 2\n")
    (folder / "net.onnx").write_bytes(b"\x08\x0a")
    (folder / "net.pth").write_bytes(b"PK")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("--dataset net.py", 2, "names no function: a custom data set is FILE.py:FUNCTION, here net.py:graph, net.py:named, net.py:bare"),
        ("--dataset nothing.npz", 2, "there is no file 'nothing.npz'; arrays in a file are npz:PATH"),
        ("--optimizer rule.py", 2, "names no function: a custom optimizer is FILE.py:NAME, here rule.py:Mine"),
        ("--optimizer adan", 2, "is none of sgd, adam, adamw, FILE.py:NAME; did you mean adam?"),
        ("--model net.py", 2, "names no function: a custom network is FILE.py:FUNCTION, here net.py:graph"),
        ("--model net.py:named", 2, "a list with 'cross_entropy', which is no layer; a loss is a layer there, such as SoftmaxCrossEntropy()"),
        ("--model net.py:bare", 2, "must be a loss, and is Linear: return […, SoftmaxCrossEntropy()], of classes, or […, MSE()]"),
        ("--weights net.onnx", 3, "net.onnx is an ONNX file: python -m nbcnn import net.onnx net.safetensors makes a model of it"),
        ("--weights net.pth", 3, "a file of PyTorch, which is never unpickled here."),
    ],
)
def test_a_name_that_is_half_right_is_answered_with_the_line_to_write(words, code, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    own_files(tmp_path)
    data = [] if "--dataset" in words else ["--dataset", "digits", "--limit", "8", "--epochs", "1", "--mode", "cpu"]
    assert says in message(capsys, code, exits(train, [*words.split(), *data]))


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """A folder with two runs on eight digits, fewer than the default batch, of a graph whose loss is named."""
    folder = tmp_path_factory.mktemp("two")
    own_files(folder)
    said = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stderr(said):
        for seed, name in enumerate(("one", "two")):
            words = f"--model net.py:graph --dataset digits --limit 8 --epochs 1 --mode cpu --seed {seed} --out {name}"
            assert train(words.split()) == 0
    return folder, said.getvalue()


def test_fewer_images_than_the_default_batch_are_one_batch(two_runs, monkeypatch, capsys):
    folder, said = two_runs
    monkeypatch.chdir(folder)
    assert "NOTE: the training set has 8 images, so a batch has 8, with lr 0.0125; --batch and --lr set others." in said
    assert json.loads((folder / "one" / "config.json").read_text())["flags"]["batch"] == 8
    words = "--model net.py:graph --dataset digits --limit 8 --batch 16 --mode cpu --epochs 1 --out three"
    assert train(words.split()) == 0
    assert "NOTE: the training set has 8 images, so a batch has 8, not the 16 of --batch." in capsys.readouterr().err
    flags = json.loads((folder / "three" / "config.json").read_text())["flags"]
    assert (flags["batch"], flags["lr"]) == (8, 0.1), "the rate of a batch that was asked for stays"
    x, y = np.zeros((5, 3), np.uint8), np.arange(5) % 2
    with pytest.warns(UserWarning, match="batch_size 16 is more than the 5 examples: a training step takes all of them"):
        assert nbcnn.Model([Linear(2)], "cross_entropy", mode="cpu").fit(x, y, batch_size=16, verbose=0).rows[-1]["step"] == 1


def test_a_training_that_taught_nothing_is_warned_of(two_runs, monkeypatch, capsys):
    monkeypatch.chdir(two_runs[0])
    for number, (words, same) in enumerate(
        (
            ("--model net.py:graph --lr 1e9", ": try --optimizer adam or --lr 1e+08)"),
            ("--model small-autoencoder --lr 1e-9", "of giving all examples the same answer"),
            ("--model small-autoencoder --lr 1e-9 --normalise", "the learning rate is most often too small (adam, lr 1e-09: try --lr 0.001)"),
        )
    ):
        options = f"--dataset digits --limit 8 --epochs 2 --mode cpu --quiet --out nothing{number}"
        assert train([*words.split(), *options.split()]) == 0
        said = capsys.readouterr().err
        assert "nbcnn: warning: after 2 epochs the training loss is" in said
        assert same in said
    options = "--dataset digits --limit 64 --lr 0.01 --epochs 4 --mode cpu --quiet --out something"
    assert train(["--model", "net.py:graph", *options.split()]) == 0
    assert "warning" not in capsys.readouterr().err


def test_optimizers_have_the_names_of_the_flag_everywhere():
    x, y = np.arange(12, dtype=np.float32).reshape(6, 2) / 12, np.arange(6) % 2
    for name, made in (("sgd", nbcnn.SGD()), ("adam", nbcnn.Adam()), ("adamw", nbcnn.AdamW())):
        losses = [nbcnn.Model([Linear(2)], "cross_entropy", mode="cpu").fit(x, y, optimizer=each, verbose=0).rows for each in (name, made)]
        assert losses[0][-1]["loss"] == losses[1][-1]["loss"]
        assert ConvClassifier(mode="cpu", optimizer=name, epochs=1).fit(x, y).n_iter_ == 1
    with pytest.raises(UsageError, match=r"or a name \(sgd, adam, adamw\), got 'adan'; did you mean adam\?"):
        nbcnn.Model([Linear(2)], "cross_entropy", mode="cpu").fit(x, y, optimizer="adan", verbose=0)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"mode": "gpu"}, r"no mode 'gpu' \(there are auto, cpu, .*; auto takes the GPU where there is one"),
        ({"mode": "im2cool"}, "did you mean im2col"),
        ({"mode": "im2col", "precision": "bf16"}, "mode im2col has no precision 'bf16'; it has fp32"),
        ({"precision": "fp8"}, "mode auto has no precision 'fp8'; it has fp32, bf16, tf32, fp16"),
    ],
)
def test_a_mode_that_does_not_exist_is_refused_where_it_is_written(given, says):
    with pytest.raises(UsageError, match=says):
        nbcnn.Model([Linear(2)], "cross_entropy", **given)


@pytest.mark.parametrize("word", ["rule.py", "rule.py:", "rule.py:2"])
def test_every_flag_reads_a_file_without_a_name_by_one_rule(word, two_runs, monkeypatch, capsys):
    monkeypatch.chdir(two_runs[0])
    for flag in ("--augment", "--optimizer", "--callback", "--model", "--dataset"):
        text = message(capsys, 2, exits(train, [flag, word]))
        assert f"{word!r} names no function: a custom " in text
    assert "'alternate', got 'alternat'" in message(capsys, 2, exits(train, ["--augment", "flip:alternat"]))


def test_lines_to_type_next_are_quoted_for_a_shell(two_runs, monkeypatch, capsys):
    monkeypatch.chdir(two_runs[0])
    new = ["--model", "small-autoencoder", "--dataset", "digits", "--limit", "8", "--epochs", "1", "--mode", "cpu", "--out"]
    assert train([*new, "my run"]) == 0
    said = [capsys.readouterr().out]
    for command, *words in (
        (train, "--resume", "my run"),
        (train, "--resume", "my run", "--lr", "0.5"),
        (train, *new, "my run"),
        (extract.main, "my run", "--out", "my features"),
        (report.main, "my features"),
    ):
        exits(command, words)
        said.append("".join(capsys.readouterr()))
    for text, line in zip(
        said,
        (
            "next: python extract_features.py 'my run'",
            "More: python train.py --resume 'my run' --epochs 2",
            "python train.py --weights 'my run' --lr 0.5 …",
            "continue that run with --resume 'my run'",
            "next: python -m nbcnn classify 'my features'",
            "python -m nbcnn classify 'my features' reads",
        ),
        strict=True,
    ):
        assert line in text


def test_a_table_that_is_written_is_not_printed_too_if_it_is_to_be_quiet(two_runs, monkeypatch, capsys):
    monkeypatch.chdir(two_runs[0])
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save("black.png")
    written = "--csv found.csv"
    for words, printed in (("--quiet", True), (written, True), (f"{written} --quiet", False), (f"{written} --quiet --json", True)):
        assert predict.main(["one", "black.png", *words.split()]) == 0
        assert bool(capsys.readouterr().out) is printed, words
    assert (two_runs[0] / "found.csv").read_text().startswith("image,class_1,")


def test_a_run_that_is_complete_says_so_and_how_to_go_on(two_runs, monkeypatch, capsys):
    monkeypatch.chdir(two_runs[0])
    assert train(["--resume", "two"]) == 0
    assert "two is complete: its 1 epoch is trained. More: python train.py --resume two --epochs 2" in capsys.readouterr().err
    assert train(["--resume", "two", "--epochs", "2"]) == 0
    assert "is complete" not in capsys.readouterr().err


def test_features_of_another_run_are_kept_and_a_folder_of_features_is_no_run(two_runs, monkeypatch, capsys):
    monkeypatch.chdir(two_runs[0])
    for run, place in (("one", "features/digits"), ("two", "features/digits-two"), ("one", "features/digits")):
        assert extract.main([run, "--at", "flatten1", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["features"] == place
    (two_runs[0] / "other").mkdir()
    shutil.copytree(two_runs[0] / "one", two_runs[0] / "other" / "two")
    assert "hold the features of other runs: --out DIR" in message(capsys, 2, exits(extract.main, ["other/two", "--at", "flatten1"]))
    says = "is no run folder: it holds features, which python -m nbcnn classify features/digits reads"
    for command, *words in ((report.main,), (extract.main,), (predict.main, "one.png"), (evaluate.main, "digits")):
        (two_runs[0] / "one.png").write_bytes(b"")
        assert says in message(capsys, 3, exits(command, ["features/digits", *words]))
    assert says in message(capsys, 3, exits(train, ["--weights", "features/digits", "--dataset", "digits", "--mode", "cpu"]))


def test_features_of_other_images_are_kept(two_runs, monkeypatch, capsys):
    monkeypatch.chdir(two_runs[0])
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save("grey.png")
    words = ["one", "--at", "flatten1", "--images", "grey.png"]
    assert extract.main(words) == 0
    assert "features/images holds the features of other images: --out features/images replaces them" in message(capsys, 2, exits(extract.main, words))
    assert extract.main([*words, "--out", "features/images"]) == 0


def test_a_classifier_whose_features_are_gone_is_told_the_command(two_runs, monkeypatch, capsys):
    monkeypatch.chdir(two_runs[0])
    for run in ("one", "two"):
        assert extract.main([run, "--at", "linear1", "--out", "mine"]) == 0
        assert run == "two" or classify.main(["mine", "--quiet"]) == 0
    Image.new("L", (8, 8), 9).save("grey.png")
    words = ["one", "grey.png", "--classifier", "mine/classify/classifier.safetensors"]
    said = message(capsys, 3, exits(predict.main, words))
    assert "classify the features again (python -m nbcnn classify FEATURES), with --portable if the file is to work without them" in said
