"""Run campaigns for a number of minutes and print what was tried, survived and lost; exit 1 if anything was lost."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from . import CAMPAIGNS
from .runner import run, table


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parents[1]))  # what the tests share, as pytest has it
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="for all campaigns together (default 1)")
    parser.add_argument("--only", default=",".join(CAMPAIGNS), help=f"campaigns, of {', '.join(CAMPAIGNS)} (default all)")
    parser.add_argument("--attempts", type=int, help="at most so many of each campaign")
    parser.add_argument("--first", type=int, default=0, help="the first attempt's seed (default 0)")
    parser.add_argument("--mode", default="cpu", help="where `kills` and `signals` train (default cpu)")
    given = parser.parse_args()
    os.environ["NBCNN_CAMPAIGN_MODE"] = given.mode
    names = given.only.split(",")
    if unknown := set(names) - set(CAMPAIGNS):
        parser.error(f"no campaign {', '.join(sorted(unknown))}; there are {', '.join(CAMPAIGNS)}")
    results = [run(name, given.minutes * 60 / len(names), given.attempts, given.first) for name in names]
    print(table(results))
    return any(result.lost for result in results)


if __name__ == "__main__":
    sys.exit(main())
