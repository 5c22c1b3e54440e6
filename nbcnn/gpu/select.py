"""Which device this process uses: a GPU by its number, or none. Chosen before the first use, because the CUDA driver looks once."""

from __future__ import annotations

import os
import re
import sys

from nbcnn.files.errors import UsageError
from nbcnn.files.quote import quoted

VISIBLE = "CUDA_VISIBLE_DEVICES"
_chosen: list[str] = []
"""The devices that were chosen, the last one last; and before the first, what was visible then is in `_visible`."""
_visible: list[str | None] = []


def use_device(name: str) -> None:
    """Have this process use one device: "cuda" or "cuda:0" the first GPU that is visible to it, "cuda:1" the second, …, "cpu" none.

    "cpu" is what mode "auto" then takes; an explicit GPU mode is refused. Of a GPU that is not there the first network says so: mode "auto" raises
    GpuUnavailable then, and takes no CPU. Raises UsageError for another name, for a GPU that CUDA_VISIBLE_DEVICES does not show, and for another
    device once the CUDA driver has looked for its devices, which it does only once.

    name  "cpu", "cuda" or "cuda:N". `nbcnn --device` is the same.

    Example, before anything else (`nbcnn.use_device("cuda:1")` is the second GPU):
        >>> import nbcnn
        >>> nbcnn.use_device("gpu")
        Traceback (most recent call last):
        nbcnn.files.errors.UsageError: no device 'gpu': cpu, cuda, or cuda:N with the number of a GPU
    """
    found = re.fullmatch(r"cpu|cuda(?::([0-9]{1,9}))?", name)
    if not found:
        raise UsageError(f"no device {quoted(name)}: cpu, cuda, or cuda:N with the number of a GPU")
    if not _visible:
        _visible.append(os.environ.get(VISIBLE))
    if name == "cpu":
        _chosen.append(name)
        return
    shown, number = [part.strip() for part in (_visible[0] or "").split(",") if part.strip()], int(found[1] or 0)
    if shown and number >= len(shown):
        raise UsageError(f"there is no cuda:{number}: {VISIBLE}={_visible[0]} shows {len(shown)}")
    wanted = shown[number] if shown else str(number)
    if os.environ.get(VISIBLE) != wanted:
        if _in_use():
            raise UsageError(f"the CUDA driver has looked for its devices already, so {name} comes too late: call use_device before anything else")
        os.environ[VISIBLE] = wanted
    _chosen.append(name)


def refused() -> str | None:
    """Why no GPU may be used, in words; None if one may."""
    return "use_device('cpu') was called" if _chosen and _chosen[-1] == "cpu" else None


def demanded() -> str | None:
    """The name of the GPU that was chosen, None if none was."""
    return _chosen[-1] if _chosen and _chosen[-1] != "cpu" else None


def _in_use() -> bool:
    """The CUDA driver has been asked for its devices."""
    driver = sys.modules.get("nbcnn.gpu.driver")
    return driver is not None and driver.in_use()
