"""Tables of series for the documentation: depthwise convolution, the model of its bytes beside ncu's, and the training step of S4ConvD.

As in `readme_laboratory`, each is a whole paragraph, and empty as long as it was not measured.
"""

from __future__ import annotations

from pathlib import Path

from nbcnn.lab.report import sections
from nbcnn.lab.report.readme_laboratory import _PICTURES
from nbcnn.lab.report.sections import size_of
from nbcnn.lab.report.tables import GPU, folded, footer, joined, measured, named, section
from nbcnn.lab.studies.dwconv import TRIO

SECTION, CHART = "dwconv-causal", "dwconv.png"


def dwconv() -> str:
    """The first size in a table, the others folded below."""
    if not measured(GPU, SECTION):
        return ""
    sizes, environment = section(GPU, SECTION)
    first = sizes[0]
    intro = (
        f"**Depthwise convolution of series, without counters**: N {size_of(first)}, causal, fp32. Floors are compulsory bytes (every operand once)\n"
        f"at the bandwidth of a copy, {first['bandwidth'] / 1e12:.2f} TB/s; asked for: what the kernels' threads load and store.\n\n"
    )
    picture = f"![times of every path, and the roofline]({_PICTURES}/{CHART})\n\n"
    rest = [folded(f"N {size_of(size)}", sections.dwconv(size).markdown()) for size in sizes[1:]]
    note = f"A training step's paths ({', '.join(TRIO)}; in best both gradients are one kernel) one behind the other:\n\n"
    sequences = joined([sections.sequences(size).labelled("size", f"N {size_of(size)}") for size in sizes]).markdown()
    return intro + sections.dwconv(first).markdown() + "\n\n" + note + sequences + footer(environment) + "\n" + picture + "\n".join(rest)


def dwcounters() -> str:
    """The model's bytes beside DRAM's."""
    names = named("dwcounters")
    if not names:
        return ""
    (found, *_), environment = section(GPU, names[0])
    intro = f"**The same bytes, counted**: N {size_of(found)}; MB by the model and by `ncu` at DRAM, each kernel once.\n\n"
    return intro + sections.dwcounters(found).markdown() + footer(environment)


def s4convd() -> str:
    """The whole training step."""
    names = named("s4convd")
    if not names:
        return ""
    rows, environment = section(GPU, names[0])
    ours = rows[0]
    intro = (
        f"**The training step of S4ConvD** ({ours['mode']} {ours['precision']}, {ours['batch']:,} windows of 48 hours, 128 channels, 4 blocks), ms.\n"
        "Predicted: Amdahl's law from naive's step and the times of the convolutions alone."
    )
    apart = [row["curve_apart"] for row in rows if "curve_apart" in row]
    if apart:
        intro += f" Over 100 training steps no variant's loss is more than {max(apart):.1e} from that of {ours['variant']}."
    made = intro + "\n\n" + sections.s4convd(rows).markdown() + footer(environment)
    for name in names[1:]:
        rows, environment = section(GPU, name)
        made += "\n**The same, without PyTorch beside it:**\n\n" + sections.s4convd(rows).markdown() + footer(environment)
    return made


TABLES = {"dwconv": dwconv, "dwcounters": dwcounters, "s4convd": s4convd}


def charts(folder: Path) -> None:
    """The picture that the table shows, of what was measured."""
    from nbcnn.lab.studies import dwconv_report

    if measured(GPU, SECTION):
        size = section(GPU, SECTION)[0][0]
        dwconv_report.chart(size, folder / CHART, f"depthwise convolution, N {size_of(size)}, causal")
