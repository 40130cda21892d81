"""What a user can have done wrong, and the exit code of each way to end. The README lists them."""

import sys

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_OUT_OF_MEMORY = 3
EXIT_NOT_FINITE = 4
EXIT_INTERRUPTED = 130


class UserError(ValueError):
    """Something the user chose or supplied cannot work: one line with what, where and the remedy."""


class NothingToDo(Exception):
    """The run that `resume` names has come to its end."""


class SaveError(RuntimeError):
    """A checkpoint could not be written; those before it are whole."""


class Stopped(RuntimeError):
    """A signal asked the run to end, and it has saved. `code` is the exit code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class NotFiniteError(RuntimeError):
    """Too many steps in a row, or the last ones, had a loss or gradient that is not finite; or a model's output is."""


def print_warning(text: str) -> None:
    """One line `warning: ...` on stderr."""
    print(f"warning: {' '.join(text.splitlines())}", file=sys.stderr, flush=True)


def print_error(text: str) -> None:
    """One line `error: ...` on stderr."""
    print(f"error: {' '.join(text.splitlines())}", file=sys.stderr, flush=True)
