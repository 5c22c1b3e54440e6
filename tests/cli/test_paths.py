"""Tests of paths on the command line: no output of any command may be an input, or a file of a run; every path is declared as what it is."""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path

import pytest
from command_lines import ALL, outputs, parser_of, spelt, words
from scripts import TINY, exits, message, train

from nbcnn.classify import processing
from nbcnn.cli import export, paths, predict, report
from nbcnn.cli.extract import main as extract
from nbcnn.cli.paths import CALLED, CLASSIFIER, FEATURES, IMAGES, KEPT, PIPELINE, RUN, PathArgument
from nbcnn.datasets import augment, image_files, own
from nbcnn.files import numerals
from nbcnn.files.errors import UsageError
from nbcnn.gpu import select
from nbcnn.lab.measure import op, opcases
from nbcnn.model import views
from nbcnn.nn import optim

NO_PATHS = {"address", "at", "command", "device", "freeze", "labels", "models", "networks", "only", "op", "parts", "rest", "shape", "a", "b", "what"}
"""Arguments of free text that are no paths."""


@pytest.mark.parametrize("command", ALL)
def test_every_argument_that_may_be_a_path_says_what_it_is_for(command):
    for action in parser_of(command)._actions:
        if action.nargs != 0 and action.type in (None, str, Path):
            assert action.dest in NO_PATHS, (
                f"{command}: {action.option_strings or action.dest} is a path without a PathArgument, or free text to list here"
            )


OUTPUTS = outputs()


def test_there_are_outputs_of_many_commands():
    found = {f"{command} {name}" for command, name, _ in OUTPUTS}
    assert {"train --out", "predict --csv", "predict --masks", "export FILE.onnx", "report --out", "classify --out", "study gemm --out"} <= found
    assert len(OUTPUTS) >= 20


def refused(command, given, capsys):
    """The sentence of a command line that is refused before anything is done."""
    made, line = words(command, given)
    with pytest.raises(SystemExit) as left:
        made.parse_args([str(word) for word in line])
    text = capsys.readouterr().err
    assert left.value.code == 2
    return text


@pytest.mark.parametrize(("command", "name", "argument"), OUTPUTS, ids=lambda value: value if isinstance(value, str) else value.use)
def test_no_output_is_an_input_or_a_file_that_was_kept(command, name, argument, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos" / "below").mkdir(parents=True)
    (tmp_path / "net.py").write_text("x")
    for place in ("a.png", "photos/b.png", "photos/below/c.JPG"):
        (tmp_path / place).write_text("x")
    (tmp_path / "link.png").symlink_to("a.png")
    os.link(tmp_path / "a.png", tmp_path / "hard.png")
    for other, source in paths.declared(parser_of(command)).items():
        if source.use not in ("reads", "images", "data"):
            continue
        own = next(path for path in (Path("a.png"), Path("net.py")) if spelt(source, path))
        if argument.use == "file":
            same = [own, own.absolute()] + ([Path("link.png"), Path("hard.png")] if own.suffix == ".png" else [])
            for path in same:
                assert f"{name} {path} is what {other} reads" in refused(command, {other: spelt(source, own), name: path}, capsys)
            if source.use in ("images", "data"):
                inside = {other: spelt(source, Path("photos")), name: "photos/below/../b.png"}
                assert f"{name} photos/below/../b.png is a file in photos, which {other} reads" in refused(command, inside, capsys)
        elif own.suffix == ".png":
            for path in ("photos", "photos/below/.."):
                assert f"{name} {path} is what {other} reads" in refused(command, {other: spelt(source, Path("photos")), name: path}, capsys)
            if source.use == "images":
                for read, path, said in (("photos/b.png", "photos", "holds photos/b.png"), ("photos", "photos/below", "holds images in photos")):
                    assert f"{name} {path} {said}" in refused(command, {other: spelt(source, Path(read)), name: path}, capsys)
    for mark, patterns in KEPT.items():
        folder = tmp_path / mark.split(".")[0]
        folder.mkdir()
        for file in (mark, *(pattern.replace("*", "x") for pattern in patterns)):
            (folder / file).write_text("x")
            if argument.use == "file":
                assert f"is a file of the {CALLED[mark]} in {folder}" in refused(command, {name: folder / file}, capsys)
        if argument.use == "folder" and argument.own != mark:
            assert f"holds the {CALLED[mark]} that {folder / mark} describes" in refused(command, {name: folder}, capsys)
    if argument.use == "file":
        assert "is no regular file" in refused(command, {name: "/dev/null"}, capsys)
    made, line = words(command, {name: tmp_path / "new"})
    assert made.parse_args([str(word) for word in line]), "a new path is taken"


def test_two_outputs_are_two_files(capsys):
    line = {"--csv": "found", "--picture": "./found"}
    assert "--picture found is what --csv writes; choose another file" in refused("predict", line, capsys)


@pytest.mark.parametrize("command", ALL)
def test_no_path_is_empty_or_has_a_zero_byte(command, capsys):
    for name, argument in paths.declared(parser_of(command)).items():
        for text in ("", "a\0b"):
            with pytest.raises(argparse.ArgumentTypeError):
                argument(text)
        if name.startswith("--") and {Path("x")} == {*argument.paths("x")}:
            assert "it is empty" in refused(command, {name: ""}, capsys)


def test_what_the_files_of_nbcnn_are_called_is_known(finished):
    """A new file of a run must be protected, too."""
    import fnmatch

    for file in finished.iterdir():
        assert any(fnmatch.fnmatch(file.name, pattern) for pattern in (RUN, *KEPT[RUN])), f"{file.name} is in no pattern of {RUN}"
    assert image_files.SUFFIXES == IMAGES
    assert {RUN, FEATURES, CLASSIFIER, PIPELINE} == KEPT.keys() == CALLED.keys()


def contents(folder):
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_commands_refuse_before_anything_is_read_or_written(copied, tmp_path, capsys):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(b"a photograph")
    before, photos, last = contents(tmp_path), tmp_path / "photos", copied / "checkpoint-last.safetensors"
    for main, line in (
        (predict.main, [copied, photos, "--masks", photos]),
        (predict.main, [copied, photos, "--picture", photos / "a.png"]),
        (predict.main, [copied, photos, "--csv", copied / "config.json"]),
        (export.main, [copied, last]),
        (report.main, [copied, "--out", copied / "config.json"]),
        (extract, [copied, "--out", copied]),
        (train, ["--resume", ""]),
    ):
        assert "choose another" in (text := message(capsys, 2, exits(main, line))) or "is empty" in text
    (tmp_path / "run.toml").write_text(f'dataset = "folder:{photos}"\nout = "{photos}"\n')
    assert "--out" in message(capsys, 2, exits(train, ["--config", tmp_path / "run.toml"]))
    (tmp_path / "run.toml").unlink()
    assert contents(tmp_path) == before


def test_a_name_with_a_line_break_stays_in_its_line(copied, tmp_path, capsys):
    """A file from an archive could say what nbcnn does not; the names of folders above it and of outputs are their users' own."""
    photos = tmp_path / "two\nlines"
    (photos / "class\nb").mkdir(parents=True)
    for name in ("x\nnbcnn: error: a lie.png", "y.png"):
        (photos / "class\nb" / name).write_bytes(b"none")
    (photos / "\n").mkdir()
    run = tmp_path / "run\n1"
    copied.rename(run)
    escaped = r"two\nlines/class\nb/x\nnbcnn: error: a lie.png"
    for main, line, code, said in (
        (predict.main, [run, photos, "--mode", "cpu"], 3, f"{escaped}: it is no image"),
        (train, [*TINY, "--dataset", f"folder:{photos}?size=8"], 3, f"{escaped}: it is no image"),
        (train, [*TINY, "--out", run], 2, r"run\n1 is there already; choose a new folder"),
        (report.main, [run / "none"], 3, r"run\n1/none is neither a run folder"),
    ):
        text = message(capsys, code, exits(main, line))
        assert said in text
        assert not any(each.startswith("nbcnn: error: a lie") for each in text.splitlines())


NUMBERS = ("2", "2,2", "2,2,2", "2x2", "2x2x2", "2x2x2x2", "0:2,3:2", "x=2,2,2", "shift:2", "crop:2", "cw2", "relu@2")
"""Texts with numbers, of which every flag that has a number takes one."""


@pytest.mark.parametrize("command", ALL)
@pytest.mark.parametrize("digit", "٢२２²", ids=["Arabic", "Devanagari", "fullwidth", "superscript"])
def test_numbers_of_flags_are_in_ascii_digits(command, digit):
    """`int` and `float` of Python take the digits of every script, and `isdigit` is true of a superscript."""
    for action in parser_of(command)._actions:
        if action.type in (None, str) or isinstance(getattr(action.type, "path", action.type), PathArgument):
            continue
        for text in NUMBERS:
            with contextlib.suppress(ValueError, argparse.ArgumentTypeError):
                if action.type(text) != text:
                    with pytest.raises((ValueError, argparse.ArgumentTypeError)):
                        action.type(text.replace("2", digit))


@pytest.mark.parametrize(
    "parse",
    [
        lambda digit: own.size_of(f"{digit}x4"),
        lambda digit: own.share_of(f"0.{digit}"),
        lambda digit: augment.Augment.parse(f"crop:{digit}"),
        lambda digit: views.Views.parse(f"shift:{digit}"),
        lambda digit: optim.points_of(f"0:{digit},3:0"),
        lambda digit: processing.names_of(f"cw{digit}"),
        lambda digit: select.use_device(f"cuda:{digit}"),
        lambda digit: opcases.problem("conv_fprop", f"1,8,8,8,{digit}"),
        lambda digit: opcases.problem("conv_fprop", f"conv4@{digit}"),
        lambda digit: op.Choice.parse(f"tiled@{digit}"),
        lambda digit: numerals.whole_in({"RANK": digit}, "RANK", 0, 9),
        lambda digit: numerals.real_in({"NBCNN_TIMEOUT": digit}, "NBCNN_TIMEOUT", 0, 9),
    ],
)
def test_numbers_in_the_words_of_options_are_in_ascii_digits(parse):
    for digit in "٢２²":
        with pytest.raises((UsageError, ValueError)) as refused:
            parse(digit)
        assert "invalid literal" not in str(refused.value)
        assert "could not convert" not in str(refused.value)
