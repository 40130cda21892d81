"""`memtrain ...` and `python -m memtrain ...`: train, plan, sweep."""

import sys

from memtrain import stop


def main() -> int:
    """The exit code; what was typed is in sys.argv."""
    stop.exit_on_signals()  # before the imports, which take a second
    from memtrain import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
