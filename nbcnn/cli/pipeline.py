"""nbcnn pipeline: train, extract and classify one after the other, in one folder."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from nbcnn.cli.errors import OK
from nbcnn.cli.flags import Parser, flag
from nbcnn.files.suggest import called

SUMMARY = "Train, extract the features, and classify them, each step in a subfolder of one folder."
EXAMPLES = (
    "pipeline --dataset digits --limit 512 --epochs 3     a few minutes on a CPU, no network",
    "pipeline --dataset cifar10 --mode tensorcore --out cifar",
    "pipeline --config run.toml --out mine",
)


def parser() -> Parser:
    """The parser of this command's own flags; all others are those of train."""
    made = Parser(called("pipeline"), SUMMARY, [called(*example.split(" ", 1)) for example in EXAMPLES], "[flags of train]")
    group = made.add_argument_group("output")
    flag(group, "--out", Path, "new folder, with run/, features/ and features/classify/ in it", "pipelines/<date-time>", metavar="DIR")
    return made


def main(argv: list[str] | None = None) -> int:
    """Run the three; ends with the exit code of the first that fails."""
    words = list(sys.argv[1:] if argv is None else argv)
    made = parser()
    own, rest = made.parse_known_args(words)
    from nbcnn.cli import classify, extract, train, train_flags

    given = train_flags.parse(rest)  # a mistake ends it here, in train's words
    if given.resume or given.explain:
        made.error("--resume and --explain are of train alone: give them to that")
    out = own.out or Path("pipelines") / time.strftime("%Y%m%d-%H%M%S")
    quiet = ["--quiet"] if given.quiet else []
    device = ["--device", given.device] if given.device else []
    mode = ["--mode", given.mode] if given.mode else []
    engine = ["--device", "cpu"] if "cpu" in (given.mode, given.device) else []
    steps = (
        (train.main, [*rest, "--out", str(out / "run")]),
        (extract.main, [str(out / "run"), "--out", str(out / "features"), *mode, *device, *quiet]),
        (classify.main, [str(out / "features"), *engine, *quiet]),
    )
    for command, flags in steps:
        if code := command(flags):
            return code
    return OK
