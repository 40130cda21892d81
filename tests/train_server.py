"""`python train.py` many times in seconds: torch and Hydra are imported once, every command runs in a forked child.

Reads lines of JSON {"argv", "cwd", "limit_s"} and answers each with {"code", "stdout", "stderr"}; a command that the
limit ended has code -14 (SIGALRM).
"""

import json
import os
import runpy
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import antlr4  # noqa: F401
import hydra._internal.hydra
import hydra.core.override_parser.overrides_parser
import hydra.core.plugins
import torch._dynamo  # noqa: F401

import memtrain.tasks  # noqa: F401

hydra.core.plugins.Plugins.instance()  # looks for all there are

SCRIPT = Path(__file__).resolve().parents[1] / "train.py"


def run_here(argv: list[str], cwd: str, limit_s: int) -> None:
    """What the interpreter does with a script; does not return."""
    code = 1
    try:
        signal.alarm(limit_s)
        os.chdir(cwd)
        sys.argv = [str(SCRIPT), *argv]
        runpy.run_path(str(SCRIPT), run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def answer(command: dict[str, Any], output: int, errors: int) -> dict[str, Any]:
    for file in (output, errors):
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)
    child = os.fork()
    if child == 0:
        os.dup2(output, 1)
        os.dup2(errors, 2)
        run_here(command["argv"], command["cwd"], command["limit_s"])
    _, status = os.waitpid(child, 0)
    return {
        "code": os.waitstatus_to_exitcode(status),
        "stdout": read(output),
        "stderr": read(errors),
    }


def read(file: int) -> str:
    os.lseek(file, 0, os.SEEK_SET)
    with os.fdopen(os.dup(file), "rb") as whole:
        return whole.read().decode("utf-8", "replace")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        for line in sys.stdin:
            found = answer(json.loads(line), output.fileno(), errors.fileno())
            print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
