"""This module writes a report: all sections in their order, and last what was not measured."""

from __future__ import annotations

from collections.abc import Callable

from nbcnn import __version__
from nbcnn.files.document import DocumentError
from nbcnn.files.quote import quoted
from nbcnn.lab.report import bench, learning, page, story, studies
from nbcnn.lab.report.source import Missing, Source

SECTIONS: tuple[tuple[str, str, str, Callable[[Source], story.Parts]], ...] = (
    ("headline", "Summary", "", story.headline),
    ("environment", "Machine and versions", "what a reader needs to repeat it", story.environment),
    ("command", "Commands", "exactly as they were given", story.command),
    ("curves", "Loss by epoch", "training and test", story.curves),
    ("results", "On test data", "what the network makes of it", story.results),
    ("ladder", "The ladder of modes", "what each mode gains over the one before", bench.ladder),
    ("roofline", "Roofline", "what limits each step of the plan", bench.roofline),
    ("time", "Where the time goes", "by kernel or by pass", bench.time),
    ("memory", "Memory", "planned and used", story.memory),
    ("confusion", "Confusion matrix", "of a support vector machine on the features", story.confusion),
    ("learned", "What the encoder learned", "its features, beside controls", learning.learned),
    ("benchmarks", "Beside PyTorch and cuDNN", "training steps, epochs, single convolutions", bench.peers),
    ("networks", "Networks", "training steps of several networks", studies.networks),
    ("series", "Series", "depthwise convolutions and S4ConvD", studies.series),
    ("fusion", "Fused kernels and small networks", "beside PyTorch and Triton", studies.fusion),
    ("scaling", "Several GPUs", "how a training scales", studies.scaling),
)
"""In the order of the page: id, title, what the contents say about it, and the function that makes it."""
OF_THE_DEVICE = frozenset(("ladder", "roofline", "benchmarks", "networks", "series", "fusion", "scaling"))
"""Sections of what was measured with the autoencoder and beside peers, which a run of another network does not show."""
MISSING = ("missing", "What was not measured", "with the commands that measure it")


def report(source: Source) -> tuple[str, list[Missing]]:
    """The HTML file of `source`, and what it could not show: the same list as in its last section.

    The page opens with the summary and the contents. A section of which nothing was measured is left out, but for that list.
    Raises DocumentError for values that cannot be shown.
    """
    shown, missing = [], []
    for name, title, about, section in SECTIONS:
        if name in OF_THE_DEVICE and not source.measured:
            continue
        try:
            parts = list(section(source))
        except (ArithmeticError, ValueError, TypeError, LookupError, AttributeError) as error:
            # Everything on the page is from files. The forms on opening name what is wrong; what they let through is found out here.
            why = f"({type(error).__name__}: {error}); NBCNN_DEBUG=1 shows where"
            raise DocumentError(f"{_files(source)}: the section {quoted(title)} cannot be made of what is there {why}") from error
        missing += [part for part in parts if isinstance(part, Missing)]
        content = "\n".join(part for part in parts if isinstance(part, str))
        if content:
            shown.append((name, title, about, content))
    rows = "".join(f"<li>{_item(each)}</li>" for each in missing)
    shown.append((*MISSING, f"<ul>{rows}</ul>" if missing else page.paragraph("Nothing: every section has its figures.")))
    return page.page(*_titles(source), shown, _origin(source)), missing


def _item(missing: Missing) -> str:
    """What, why, and the command."""
    why = f" ({missing.why})" if missing.why else ""
    return page.escape(f"{missing.what}{why}") + (f": <code>{page.escape(missing.command)}</code>" if missing.command else "")


def _titles(source: Source) -> tuple[str, str]:
    """The title, and the line under it."""
    if source.run:
        config = source.config
        below = f"{config['data']['name']}, {config['mode']} {config['precision']}, {config['device']}"
        return f"Training run {source.run.path.resolve().name}", below
    return f"Measurements on {source.device.split(' (')[0]}", "Every table names its date, revision and command."


def _origin(source: Source) -> str:
    return f"Written by nbcnn {__version__} from {_files(source)}. This file needs nothing else: no internet, no scripts."


def _files(source: Source) -> str:
    return " and ".join(path.resolve().name for path in (source.run.path if source.run else None, source.file) if path)
