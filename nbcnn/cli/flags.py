"""This module is the command-line parser of every command: groups, defaults and units in the help, examples, the nearest right name.

Only the standard library is imported, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from nbcnn import __version__
from nbcnn.cli import errors, paths
from nbcnn.cli.saying import to_stderr
from nbcnn.files import numerals
from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted
from nbcnn.files.suggest import nearest
from nbcnn.plan import names

MODES = tuple(names.MODES)
GPU_MODES = MODES[1:]
ENGINES = ("auto", *names.ENGINES)
OWN_PRECISION = ", ".join(f"{first} for {mode}" for mode, (first, *_) in names.MODES.items() if first != "fp32") + ", else fp32"
"""The precision of a mode where no flag says another, for the help."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose help ends with `examples` and the exit codes, and whose errors suggest what was meant.

    `arguments` are what stands before the flags. A flag that is not given is None: defaults are filled in later, when it
    is known which were given.
    """

    def __init__(self, prog: str, description: str, examples: Sequence[str], arguments: str = "") -> None:
        ends = ["examples:", *(f"  {example}" for example in examples), ""]
        ends += ["exit codes:", *(f"  {code:<3} {meaning}" for code, meaning in errors.MEANINGS.items())]
        super().__init__(
            prog,
            usage=" ".join(filter(None, (prog, arguments, "[flags]"))),
            description=description,
            epilog="\n".join(ends),
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=28, width=110),
            allow_abbrev=False,
        )
        self.add_argument("--version", action="version", version=__version__, help="print the version and stop")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse like argparse, but an unknown flag is answered with the nearest known one."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].split("=")[0]
            known = [option for action in self._actions for option in action.option_strings]
            self.error(f"no flag or argument {quoted(unknown[0])}{nearest(name, known) if name.startswith('-') else ''}")
        self.check_paths((self, parsed))
        return parsed

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # An empty variable of a shell script: --resume "$RUN" must not begin a new run, nor --at "" take the default.
        if "" in arg_strings:
            raise argparse.ArgumentError(action, "it is empty")
        return super()._get_values(action, arg_strings)

    def check_paths(self, *parsed: tuple[argparse.ArgumentParser, Any]) -> None:
        """Exit 2 if one of the paths that were given would replace another, or a file of a run (`paths.complaint`)."""
        if found := paths.complaint(*parsed):
            self.error(found)

    def error(self, message: str) -> NoReturn:
        to_stderr(f"nbcnn: error: {message}\n  {self.prog} --help lists every flag")
        raise SystemExit(errors.USAGE)


def flag(group: Any, name: str, kind: Any, text: str, default: Any, unit: str = "", metavar: str | None = None) -> None:
    """Add the flag `name` to `group`. `kind` is a converter (see below) or bool; `default` and `unit` are only shown."""
    shown = ", ".join(part for part in (unit, "" if default is None else f"default {default}") if part)
    text = f"{text} ({shown})".replace("%", "%%") if shown else text.replace("%", "%%")
    if kind is bool:
        group.add_argument(name, action="store_const", const=True, default=None, help=text)
    else:
        group.add_argument(name, type=kind, default=None, help=text, metavar=metavar or getattr(kind, "metavar", name[2:].upper().replace("-", "_")))


def device(group: Any) -> None:
    """Add --device, which GPU of several this process uses (`nbcnn.gpu.select.use_device`)."""
    flag(group, "--device", str, "cpu, or a GPU that must be there: cuda:0, cuda:1, …", "the first GPU that is visible, else the CPU", metavar="NAME")


def check_device(name: str | None, mode: str | None) -> None:
    """Raise UsageError for a GPU as --device in mode cpu, which uses none: a GPU that is asked for by its name must be there."""
    if mode == "cpu" and name not in (None, "cpu"):
        raise UsageError(f"--device {name} asks for a GPU, and --mode cpu uses none: leave out one of the two")


def take_device(name: str | None, mode: str | None) -> None:
    """Have this process use the device of --device, if there is one (`nbcnn.gpu.select.use_device`). Raises UsageError as that and `check_device`."""
    from nbcnn.gpu.select import use_device

    if name:
        use_device(name)
    check_device(name, mode)


OWN_CHECKPOINT = "last; best of a run with --patience"
"""Whose weights a command takes of a run folder, for the help (`nbcnn.train.runlog.RunFolder.checkpoint`)."""


def inference_flags(made: Any, precision: str) -> None:
    """Add the group of flags that say how a trained network is computed; `precision` says in words which one is the default."""
    group = made.add_argument_group("kernels")
    flag(group, "--mode", one_of("auto", *MODES), "how layers are computed; auto: the fastest here that has the precision", "auto")
    flag(group, "--precision", one_of(*names.PRECISIONS), "what multiplications round to", precision)
    flag(group, "--batch", count(1), "images at a time", 256, "images")
    device(group)


def results_flags(group: Any) -> None:
    """Add the flags of commands that measure: --save, --results, --json."""
    flag(group, "--save", bool, "save the rows in the device's results file (nbcnn/lab/results)", "off")
    flag(group, "--results", paths.KEEPS_TEXT, "another folder for results files", "nbcnn/lab/results", metavar="DIR")
    flag(group, "--json", bool, "print one line of JSON instead of the table", "off")


def compare_flag(group: Any) -> None:
    """Add --compare, for commands whose rows can be held against an older results file (`nbcnn.lab.measure.regressions`)."""
    flag(
        group,
        "--compare",
        paths.READS_TEXT,
        "flag what is slower than in this results file by more than the spread; exit 1 then",
        "none",
        metavar="OLD.json",
    )


def one_of(*names: str) -> Callable[[str], str]:
    """A converter that takes only `names` and answers another word with the nearest of them."""

    def convert(text: str) -> str:
        if text in names:
            return text
        raise argparse.ArgumentTypeError(f"{quoted(text)} is none of {', '.join(names)}{nearest(text, names)}")

    convert.metavar = "{" + ",".join(names) + "}"  # type: ignore[attr-defined]
    return convert


def some_of(*names: str) -> Callable[[str], tuple[str, ...]]:
    """A converter to a tuple that takes only `names`, with commas between them."""
    each = one_of(*names)

    def convert(text: str) -> tuple[str, ...]:
        return tuple(each(part.strip()) for part in text.split(","))

    convert.metavar = "NAME,…"  # type: ignore[attr-defined]
    return convert


def count(least: int, below: int = 1 << 31) -> Callable[[str], int]:
    """A converter to an int of at least `least`, and less than `below`; 1,024 and 1_024 are fine."""

    def convert(text: str) -> int:
        try:
            value = numerals.whole(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{quoted(text)} is no whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{quoted(value)} is below {least}")
        if value >= below:
            raise argparse.ArgumentTypeError(f"{quoted(text)} is not below {below:,}")
        return value

    convert.metavar = "N"  # type: ignore[attr-defined]
    return convert


def real(least: float, below: float = math.inf, exclusive: bool = False) -> Callable[[str], float]:
    """A converter to a finite float of at least `least` (more than it, if `exclusive`) and less than `below`."""

    def convert(text: str) -> float:
        try:
            value = numerals.real(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{quoted(text)} is no number") from None
        if math.isinf(value):
            raise argparse.ArgumentTypeError(f"{quoted(text)} is not finite")
        if math.isnan(value) or value < least or value >= below or (exclusive and value == least):
            bounds = f"{'more than' if exclusive else 'at least'} {least:g}" + (f" and less than {below:g}" if below < math.inf else "")
            raise argparse.ArgumentTypeError(f"{quoted(text)} is not {bounds}")
        return value

    convert.metavar = "X"  # type: ignore[attr-defined]
    return convert
