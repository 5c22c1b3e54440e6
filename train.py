"""Train a network: `python train.py --help` lists the flags. It is `nbcnn train` (nbcnn/cli/train.py) under its older name."""

from __future__ import annotations

if __name__ == "__main__":
    from nbcnn.cli import process

    process.begin()  # first: from here on a signal or a closed output ends nothing without a word

import sys

from nbcnn.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
