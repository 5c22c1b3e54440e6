"""This module has the command lines of every command: their parsers, the paths that they write, and lines with given paths."""

from __future__ import annotations

import importlib
from pathlib import Path
from unittest import mock

from nbcnn.__main__ import COMMANDS
from nbcnn.cli import flags, paths, study
from nbcnn.cli.paths import PathArgument

FIRST = {"cache": ["list"], "bench": ["ops"], "study": ["gemm"], "compare": ["naive", "tiled"], "simulate": ["relu"]}
"""Words that a command needs before its flags, and that are no paths."""
ALL = [*COMMANDS, *(f"study {name}" for name in study.STUDIES)]
"""All commands, "study" also with each of its studies."""


class Found(Exception):
    """Carries a parser out of its command."""


def main_of(command):
    """The function that runs "train", "study gemm", … with the words behind it."""
    name, *rest = command.split()
    main = importlib.import_module(f"nbcnn.cli.{name}").main
    return lambda line: main([*rest, *line])


def parser_of(command):
    """The parser of a command, which has not parsed anything."""

    def found(self, *_, **__):
        raise Found(self)

    with mock.patch.object(flags.Parser, "parse_args", found), mock.patch.object(flags.Parser, "parse_known_args", found):
        try:
            main_of(command)(["--json"])
        except Found as raised:
            return raised.args[0]
    raise AssertionError(f"{command} parses nothing")


def outputs():
    """(command, argument as it is called, its PathArgument) of every path that a command writes."""
    return [
        (command, name, argument)
        for command in ALL
        for name, argument in paths.declared(parser_of(command)).items()
        if isinstance(argument, PathArgument) and argument.use in ("file", "folder")
    ]


def words(command, given):
    """A parser, and a command line with the paths `given` by argument; every other path that the command cannot do without is a file of its own."""
    made = parser_of(command)
    line = list(FIRST.get(command.split()[0], [])) if " " not in command else []
    for action in made._actions:
        argument = getattr(action.type, "path", action.type)
        name = action.option_strings[0] if action.option_strings else str(action.metavar or action.dest)
        if not isinstance(argument, PathArgument):
            continue
        if action.option_strings:
            line += [name, given[name]] if name in given else []
        else:
            line.append(given.get(name, spelt(argument, Path(f"nowhere/{action.dest}"))))
    return made, line


def spelt(argument, path):
    """`path` as the argument takes it; empty if it takes no such path."""
    texts = (f"folder:{path}", f"{path}:network", str(path))
    return next((text for text in texts if path in map(Path, argument.parts(text))), "")
