"""`python train.py ...` from any folder: what `memtrain ...` does, out of this checkout. See memtrain/cli.py."""

import sys

from memtrain.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
