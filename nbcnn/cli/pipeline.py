"""nbcnn pipeline: train, extract and classify one after the other, in one folder."""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from nbcnn.cli.classify import steps
from nbcnn.cli.errors import OK
from nbcnn.cli.flags import Parser, flag
from nbcnn.cli.together import together
from nbcnn.files.suggest import called

if TYPE_CHECKING:
    from nbcnn.ranks.team import Team

SUMMARY = "Train, extract the features, and classify them, each step in a subfolder of one folder."
EXAMPLES = (
    "pipeline --dataset digits --limit 512 --epochs 3     a few minutes on a CPU, no network",
    "pipeline --dataset cifar10 --mode tensorcore --out cifar",
    "pipeline --config run.toml --out mine",
    "launch --nproc 4 pipeline --dataset cifar10         four GPUs train and extract, the first one classifies",
)
SHARED_WORK = (
    "pipeline: all ranks train and extract together; rank 0 alone writes the files and, where there is a GPU, trains the classifier "
    "(without one all ranks solve its pairs of classes)"
)


def parser() -> Parser:
    """The parser of this command's own flags; all others are those of train."""
    made = Parser(called("pipeline"), SUMMARY, [called(*example.split(" ", 1)) for example in EXAMPLES], "[flags of train]")
    group = made.add_argument_group("output")
    flag(group, "--out", Path, "new folder, with run/, features/ and features/classify/ in it", "pipelines/<date-time>", metavar="DIR")
    group = made.add_argument_group("classifier")
    flag(group, "--process", steps, "steps before the kernel, as of nbcnn classify: blur+sqrt+cw1+l2", "none")
    return made


def main(argv: list[str] | None = None) -> int:
    """Run the three; ends with the exit code of the first that fails. Several ranks (`nbcnn launch`) run each of them together."""
    words = list(sys.argv[1:] if argv is None else argv)
    made = parser()
    own, rest = made.parse_known_args(words)
    from nbcnn.cli import train_flags

    given = train_flags.parse(rest)  # a mistake ends it here, in train's words
    if given.resume or given.explain:
        made.error("--resume and --explain are of train alone: give them to that")
    out = own.out or Path("pipelines") / time.strftime("%Y%m%d-%H%M%S")
    quiet = ["--quiet"] if given.quiet else []
    device = ["--device", given.device] if given.device else []
    mode = ["--mode", given.mode] if given.mode else []
    engine = ["--device", "cpu"] if "cpu" in (given.mode, given.device) else []
    process = ["--process", own.process] if own.process else []
    return together(lambda team: _steps(team, rest, out, mode, device, [*engine, *process], quiet))


def _steps(team: Team, rest: list[str], out: Path, mode: list[str], device: list[str], engine: list[str], quiet: list[str]) -> int:
    """The three commands as the same team of ranks; the exit code of the first that fails."""
    from nbcnn.cli import classify, extract, train, train_flags
    from nbcnn.ranks.team import LONG

    # Each rank has its own clock: rank 0's names the folder.
    out = Path(team.broadcast(os.fsencode(out)).decode(errors="surrogateescape"))
    if team.size > 1 and team.leads and not quiet:
        print(SHARED_WORK, file=sys.stderr, flush=True)

    def trained() -> int:
        with ExitStack() as held:
            return train.train(train_flags.parse([*rest, "--out", str(out / "run")]), team, held)

    def extracted() -> int:
        flags = [str(out / "run"), "--out", str(out / "features"), *mode, *device, *quiet]
        return extract.extract(extract.parser().parse_args(flags), team)

    def classified() -> int:
        return classify.run(classify.add_parser().parse_args([str(out / "features"), *engine, *quiet]), team)

    for step in (trained, extracted, classified):
        if code := step():
            return code
        # What the next step reads is there when rank 0 comes here.
        team.barrier(LONG)
    return OK
