"""Settings of a command from a TOML file (`--config`): its flags by their names, where the command line does not say otherwise."""

from __future__ import annotations

import argparse
from typing import Any

from nbcnn.files import regular
from nbcnn.files.quote import brief, quoted
from nbcnn.files.suggest import nearest

LARGEST = 1 << 20
"""Bytes of a file of settings at most."""
MOST_DOTS = 5_000
"""Dots in a line at most, which may be those of the weights of as many classes."""
_DEEPEST = 8
"""Tables within tables at most; one level suffices for a file in parts."""


def merge(parser: argparse.ArgumentParser, given: Any, path: str) -> None:
    """Fill what is None in `given` from the file `path`; ends as a mistake on the command line does, naming file and setting.

    A setting is a flag without its dashes (batch = 64, weight-decay = 1e-4, quiet = true); tables group them and have no meaning.
    """
    import tomllib  # with datetime and a dozen patterns to compile, and few runs have a file of settings

    try:
        content = regular.read(path, LARGEST)
        # What a key of n parts takes grows with n²: 20,000 parts took 1.5 GB. No key goes beyond its line.
        if sum(line.count(b".") ** 2 for line in content.split(b"\n")) > MOST_DOTS**2:
            parser.error(f"--config {path} has more dots in a line than settings have (at most {MOST_DOTS:,})")
        held = tomllib.loads(content.decode())
    except OSError as error:
        parser.error(f"--config {path} cannot be read: {error.strerror}")
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, UnicodeDecodeError and ints of thousands of digits are ValueErrors
        parser.error(f"--config {path} is no TOML: {brief(error)}")
    actions = {action.dest: action for action in parser._actions if action.option_strings and action.dest not in ("help", "version", "config")}
    for name, value in _flat(parser, held, path):
        dest = name.replace("-", "_")
        action = actions.get(dest)
        if action is None:
            parser.error(f"--config {path}: no setting {quoted(name)}{nearest(name, [key.replace('_', '-') for key in actions])}")
        if getattr(given, dest) is None:
            setattr(given, dest, _converted(parser, action, name, value, path))


def _flat(parser: argparse.ArgumentParser, held: dict[str, Any], path: str, above: int = 0) -> list[tuple[str, Any]]:
    """The settings of a table and of those within it."""
    if above == _DEEPEST:
        parser.error(f"--config {path} has tables more than {_DEEPEST} deep")
    made: list[tuple[str, Any]] = []
    for name, value in held.items():
        made += _flat(parser, value, path, above + 1) if isinstance(value, dict) else [(name, value)]
    return list(dict(made).items())


def _converted(parser: argparse.ArgumentParser, action: argparse.Action, name: str, value: Any, path: str) -> Any:
    if not callable(action.type):  # a flag without a value
        if not isinstance(value, bool):
            parser.error(f"--config {path}: {name} is true or false, not {quoted(value)}")
        return True if value else None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        parser.error(f"--config {path}: {name} is one value, not {quoted(value)}")
    if value == "":
        parser.error(f"--config {path}: {name} is empty")
    try:
        return action.type(str(value))
    except (argparse.ArgumentTypeError, ValueError) as error:
        parser.error(f"--config {path}: {name}: {brief(error)}")
