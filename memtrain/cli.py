"""The command line: Hydra composes the config, a task runs it, the exit code says how it ended."""

import argparse
import logging
import os
import re
import sys
import threading
import traceback
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverrideParseException
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from memtrain import errors, stop, sweep
from memtrain.config import folder_name, resolve_path, similar_keys
from memtrain.planner.child import PlannerProcess
from memtrain.run_folder import resumed_folder


def take_pinned_buffers_as_asked() -> None:
    """torch rounds them up to a power of two, so to up to twice as much; from 2.13 on it can be told not to."""
    torch_version = tuple(int(part) for part in re.findall(r"\d+", version("torch"))[:2])
    if torch_version >= (2, 13) and not os.environ.keys() & {
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
    }:
        os.environ["PYTORCH_ALLOC_CONF"] = "pinned_max_round_threshold_mb:0"


take_pinned_buffers_as_asked()  # before torch is imported, here and in the processes that this one starts
ROOT = Path(__file__).resolve().parent.parent
EXPECTED = (HydraException, OmegaConfBaseException, ValueError, OSError)
"""What composing raises for what is typed and written."""
TAKES_A_VALUE = (
    *("--cfg", "-c", "--package", "-p", "--config-dir", "-cd"),
    *("--config-name", "-cn", "--config-path", "-cp"),
)
"""Of Hydra's flags."""

OmegaConf.register_new_resolver("project_root", lambda: str(ROOT))
OmegaConf.register_new_resolver("absolute", lambda path: str(resolve_path(path, Path.cwd())))
OmegaConf.register_new_resolver("process_id", os.getpid)
OmegaConf.register_new_resolver("folder_name", folder_name)  # checked before Hydra makes the folder
OmegaConf.register_new_resolver(
    "run_folder", lambda runs, *parts: resumed_folder(Path(runs), *parts)
)


@hydra.main(version_base="1.3", config_path=str(ROOT / "conf"), config_name="config")  # type: ignore[untyped-decorator]
def job(config: DictConfig) -> float | None:
    """One run here, or one job of a sweep in a process of its own. Returns the number a sweeper minimises."""
    settings = HydraConfig.get()
    if settings.mode == RunMode.MULTIRUN:
        wanted = config.sweep
        return sweep.run_job(ROOT / "train.py", settings, wanted.resume, wanted.metric)
    tree = plain_tree(config)
    plans = (tree.get("task"), tree.get("plan")) == ("train", "on")
    planner = PlannerProcess() if plans else None  # starts while torch is imported here
    from memtrain import tasks

    stop.raise_on_signals()
    folder, base = Path(settings.runtime.output_dir), Path(settings.runtime.cwd)
    runs = resolve_path(tree["outputs"], base) / "runs" / folder_name(tree["name"])
    typed = list(settings.overrides.task)
    return tasks.run(tree, tasks.Place(folder, base, typed, planner, runs))


def plain_tree(config: DictConfig) -> dict[str, Any]:
    """Without omegaconf from here on. Ends the process where a value is missing or cannot be resolved."""
    try:
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        sys.exit(refuse(error))


def refuse(error: Exception) -> int:
    print(f"error: {' '.join(one_line(error).split())}", file=sys.stderr)
    return errors.EXIT_REFUSED


def refuse_flags(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """In the place of Hydra's whole usage."""
    sys.exit(refuse(ValueError(f"{message}; `python train.py --hydra-help` lists the flags")))


def one_line(error: Exception) -> str:
    """A composition error without the lines that only make sense to Hydra's developers."""
    text = str(error)
    if isinstance(error.__cause__, errors.UserError):  # of a resolver
        return str(error.__cause__)
    if isinstance(error.__cause__, OSError):  # such as a log in a folder that cannot be written
        return f"{error.__cause__.filename}: {error.__cause__.strerror}"
    if text.startswith("Config group override must be"):
        typed = [word for word in sys.argv[1:] if re.fullmatch(r"\w+=(\d+|null)", word)]
        wrong = [word for word in typed if (ROOT / "conf" / word.partition("=")[0]).is_dir()]
        return f"{' or '.join(wrong)}: a group takes the name of a choice; `--help` lists them"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: cannot be read; quote the value, as in key='\"a=b\"'"
    if match := re.match(r"Could not override '([^']+)'", text):
        meant = similar_keys(match[1])
        hint = f"did you mean {' or '.join(meant)}?" if meant else "conf/config.yaml has them all"
        return f"{match[1]}: unknown key or choice; {hint}"
    if not text or not isinstance(error, EXPECTED):
        return f"command line or config file cannot be composed: {text or type(error).__name__}"
    return text.split("Config search path")[0]


def flags_first(words: list[str]) -> list[str]:
    """Hydra reads overrides only where no flag comes between them."""
    flags: list[str] = []
    overrides: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--":
            continue
        (flags if word.startswith("-") else overrides).append(word)
        if word in TAKES_A_VALUE:
            flags += islice(rest, 1)
    return [*flags, "--", *overrides]


def is_of_composition(error: Exception) -> bool:
    """Whether it was raised by Hydra or below it: whatever it is, the words that were composed are wrong."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals["__name__"].split(".")[0] in ("hydra", "omegaconf", "yaml")


def leave_to_who_waits(thrown: threading.ExceptHookArgs) -> None:
    """TensorBoard's thread raises what a full disk raised again in the one that records."""
    if not issubclass(thrown.exc_type, OSError):
        threading.__excepthook__(thrown)


def main() -> int:
    sys.argv[1:] = flags_first(sys.argv[1:])
    argparse.ArgumentParser.error = refuse_flags  # type: ignore[method-assign, assignment]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing its own report
    stop.outlive_readers()
    logging.raiseExceptions = False  # a log that cannot be written is no reason to fill the screen
    threading.excepthook = leave_to_who_waits
    try:
        job()
    except Exception as error:  # a task's own errors end in the task
        if not isinstance(error, EXPECTED) and not is_of_composition(error):
            raise
        return refuse(error)
    return errors.EXIT_OK
