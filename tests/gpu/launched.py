"""This program makes launched.json anew, after a kernel was added, moved or renamed: `python -m tests.gpu.launched` (a minute or two of a core).

It runs the parts of test_simulator.py as pytest does, and writes down, by part, every kernel that the part launches, with the loops of it that go
round more than once and the tests that have both answers in a launch that is checked for races; each stands with the first part that has it.
"never" has what no part reaches. Look at the difference before you commit it: what is lost needs a case. A kernel that was in the list may not have
more lines under "never" than before: then nothing is written, and the exit code is 1.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # what the tests share, as pytest has it

from gpu.test_simulator import JSON, LAUNCHED, OURS, PARTS, marks_of, on_the_page, passes, short
from launches import LAUNCHES, grown, never_reached, read

Found = dict[str, dict[str, list[str]]]


def by_part(noted: dict[str, dict]) -> Found:
    """launched.json of what each part has noted: {part: {kernel: what it reaches and no part before}}, and what none reaches."""
    seen: dict[str, set[str]] = {}
    found: Found = {}
    for part, kernels in noted.items():
        found[part] = {}
        for kernel, about in kernels.items():
            new = set(about["reached"]) - seen.get(kernel, set())
            if new or kernel not in seen:
                found[part][kernel] = sorted(new)
            seen.setdefault(kernel, set()).update(new)
    return found | {"never": never_reached(found)}


def main() -> None:
    noted: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        for part, files in PARTS.items():
            path = Path(folder) / part
            passes(files, OURS, marks_of(part, "not full"), {LAUNCHES: str(path)})
            kernels = on_the_page()  # not those that tests declare
            noted[part] = {kernel: about for kernel, about in read(path).items() if short(kernel) in kernels}
    made = by_part(noted)
    if more := grown(LAUNCHED, made):
        sys.exit("no case reaches any more, or reaches yet; give them one:\n" + "\n".join(f"{kernel}: {'; '.join(more[kernel])}" for kernel in more))
    JSON.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
