"""`memtrain ...` and `python -m memtrain ...`: train, plan, sweep."""

import sys
from pathlib import Path

from memtrain import stop


def main() -> int:
    """The exit code; what was typed is in sys.argv."""
    stop.exit_on_signals()  # before the imports, which take a second
    from memtrain import errors, words

    stop.outlive_readers()
    try:
        sys.argv[1:] = words.arrange(sys.argv[1:], Path.cwd())
    except errors.UserError as error:
        errors.print_error(str(error))
        return errors.EXIT_REFUSED
    if text := words.help_text(sys.argv[1:], Path.cwd()):
        print(text)
        return errors.EXIT_OK
    from memtrain import cli  # and Hydra with it

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
