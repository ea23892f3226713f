"""`python -m draftsmith.train RECIPE [KEY=VALUE ...]`, also under `accelerate launch -m`."""

import sys

from draftsmith.train.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
