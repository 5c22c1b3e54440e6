"""Write the features of a run's images: `python extract_features.py RUN`. It is `nbcnn extract` (nbcnn/cli/extract.py) under its older name."""

from __future__ import annotations

if __name__ == "__main__":
    from nbcnn.cli import process

    process.begin()  # first: from here on a signal or a closed output ends nothing without a word

import sys

from nbcnn.cli.extract import main

if __name__ == "__main__":
    sys.exit(main())
