"""Every path that a command writes, named like what the command reads or what nbcnn has kept, under strange names.

A seed takes one output of one command, one of the paths that the command reads, and one way to name the same file or folder twice: links, ".." and
"//", absolute paths, names with spaces, quotes, new lines and bytes that are no UTF-8. The command is run: it must end with exit code 2 and a
sentence that can be printed, and no byte of what was there may change. The same line with another output must not be refused.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
from pathlib import Path
from random import Random
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import command_lines
from scripts import exits

from nbcnn.cli import paths

from .files import TooLong, bounded

STRANGE = (
    *(
        "a",
        "two words",
        "quote'\"",
        "-o",
        "--out",
        "new\nline",
        "tab\t",
        "\x1b[31mred",
        "é",
        "e\u0301",
        "文",
        "a&b;c",
        "$HOME",
        "%s{}",
        "*",
        "~",
        "a=b",
    ),
    *(os.fsdecode(b"caf\xe9"), "x" * 200, ".hidden", "con", "a.", " ", "\u202egnp", "#1", "a\\b", "١"),
)
READ = ("reads", "images", "data")


def attack(seed: int, folder: Path) -> None:
    pick = Random(seed)
    made = table()
    command, name, argument = made[seed % len(made)]
    here = os.getcwd()
    os.chdir(folder)
    try:
        one(pick, command, name, argument)
    finally:
        os.chdir(here)


@functools.cache
def table() -> list[tuple[str, str, Any]]:
    """Every output of every command."""
    return command_lines.outputs()


def one(pick: Random, command: str, name: str, argument: Any) -> None:
    sources = {other: source for other, source in paths.declared(command_lines.parser_of(command)).items() if source.use in READ}
    marks = [mark for mark in paths.KEPT if argument.use == "file" or mark != argument.own]
    other = pick.choice([*sources, *marks])
    called = pick.choice([each for each in STRANGE if other not in sources or "," not in each])
    if other in sources:
        given, output = same_as_input(pick, sources[other], other, called, argument.use)
    else:
        given, output = {}, kept(pick, other, called, argument.use)
    before = contents()
    text, code = said(command, given | {name: output})
    where = f"{command} {name} {output!r} for {given or other!r}"
    assert code == 2, f"{where}: exit code {code}: {text[-300:]}"
    assert text.startswith("nbcnn: error: "), f"{where}: {text[:300]!r}"
    assert "Traceback" not in text, f"{where}: {text[:300]!r}"
    assert all(each.isprintable() or each in "\n\t" for each in text), f"{where}: it prints {text[:300]!r}"
    assert contents() == before, f"{where}: files have changed"
    free(command, given | {name: f"{'q' * pick.randint(1, 9)}.new"}, where)


def same_as_input(pick: Random, source: Any, other: str, called: str, use: str) -> tuple[dict[str, str], str]:
    """A file or folder as the input `other`, and another path of it, as the output."""
    place = Path(called) if pick.random() < 0.5 else Path("below") / called
    # What a folder reads ends in a suffix of images, a function's file in .py.
    suffix = next(each for each in (".png", ".py") if command_lines.spelt(source, Path(f"a{each}")))
    if use == "folder":
        if suffix == ".py":  # a file, which is no folder to write to, whatever reads it
            read = place.with_name(f"{called}.py")
            read.parent.mkdir(exist_ok=True)
            read.write_text("x")
            return {other: plain(source, read)}, another(pick, read)
        place.mkdir(parents=True)
        (place / "a.png").write_text("a photograph")
        return {other: plain(source, place)}, another(pick, place)
    if source.use != "reads" and suffix == ".png" and pick.random() < 0.5:  # a file within the folder that is read
        place.mkdir(parents=True)
        (place / "b.png").write_text("a photograph")
        return {other: plain(source, place)}, another(pick, place / "b.png", links=False)
    read = place.with_name(f"{called}{suffix}")
    read.parent.mkdir(exist_ok=True)
    read.write_text("a photograph")
    return {other: plain(source, read)}, another(pick, read)


def plain(source: Any, path: Path) -> str:
    """The input as a word of the command line, which no dash begins."""
    text = command_lines.spelt(source, path)
    return f"./{text}" if text.startswith("-") else text


def another(pick: Random, path: Path, links: bool = True) -> str:
    """Another path of what is at `path`; without `links`, one in the same folder: a link elsewhere is itself replaced, and what it shows stays."""
    folder, name = path.parent, path.name
    up = f"{folder}/../{folder.name}/{name}" if folder.name else f"../{Path.cwd().name}/{path}"
    text = pick.choice([str(path), up, f"{folder}//./{name}", str(path.absolute()), f"above/{name}", *(["link", "hard"] if links else [])])
    Path("above").symlink_to(folder.absolute(), target_is_directory=True)
    Path("link").symlink_to(path.absolute())
    if path.is_file():
        os.link(path, "hard")
    elif text == "hard":
        text = "link"
    return f"./{text}" if text.startswith("-") else text


def kept(pick: Random, mark: str, called: str, use: str) -> str:
    """A file of a run, of features, …, or their folder, as the output."""
    folder = Path(called)
    folder.mkdir()
    names = [mark, *(pattern.replace("*", "x") for pattern in paths.KEPT[mark])]
    for each in names:
        (folder / each).write_text("kept")
    return another(pick, folder) if use == "folder" else another(pick, folder / pick.choice(names), links=False)


def said(command: str, given: dict[str, str]) -> tuple[str, Any]:
    """What a command writes to stderr with these paths, and its exit code."""
    _, line = command_lines.words(command, given)
    errors = io.StringIO()
    with bounded(), contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = exits(command_lines.main_of(command), line)
        except TooLong:
            raise AssertionError(f"{command} is not refused with {given}, and runs") from None
    return errors.getvalue(), code


def free(command: str, given: dict[str, str], where: str) -> None:
    """A new path as the output is taken by the parser, unless the input's name is refused in words."""
    made, line = command_lines.words(command, given)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            made.parse_args([str(word) for word in line])
    except SystemExit:
        text = errors.getvalue()
        assert "is no UTF-8" in text, f"{where}: with another output it is refused, too: {text[:300]}"


def contents() -> dict[str, bytes]:
    """Every file below this folder, as bytes."""
    return {str(file): file.read_bytes() for file in sorted(Path().rglob("*")) if file.is_file()}
