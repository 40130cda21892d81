"""`python train.py` many times in seconds: torch and Hydra are imported once, every command runs in a forked child.

Reads lines of JSON {"argv", "cwd", "limit_s"} and answers each with {"code", "stdout", "stderr"}; a command
that the limit ended has code -14 (SIGALRM). The child ends as an interpreter does that ran the script.
"""

import gc
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


def run_here(command: dict[str, Any]) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.alarm(command["limit_s"])
    os.chdir(command["cwd"])
    sys.argv = [str(SCRIPT), *command["argv"]]
    runpy.run_path(str(SCRIPT), run_name="__main__")


def wait(child: int, output: int, errors: int) -> dict[str, Any]:
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return {"code": code, "stdout": read(output), "stderr": read(errors)}


def read(file: int) -> str:
    os.lseek(file, 0, os.SEEK_SET)
    with os.fdopen(os.dup(file), "rb") as whole:
        return whole.read().decode("utf-8", "replace")


def main() -> None:
    gc.freeze()  # what is imported is not to be looked through in every child
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        for line in sys.stdin:
            for file in (output, errors):
                os.ftruncate(file.fileno(), 0)
                os.lseek(file.fileno(), 0, os.SEEK_SET)
            child = os.fork()
            if child == 0:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(output.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                run_here(json.loads(line))
                return
            found = wait(child, output.fileno(), errors.fileno())
            print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
