"""The command line: Hydra composes the config, a task runs it, the exit code says how it ended."""

import argparse
import gc
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverrideParseException
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from memtrain import errors, owner, stop, sweep, words
from memtrain.cards import CHECKOUT, CONF_DIR, PROGRAM
from memtrain.config import parse
from memtrain.config.derived import resolve_path
from memtrain.config.read import groups
from memtrain.config.rules import folder_name
from memtrain.errors import UserError
from memtrain.planner.child import PlannerProcess
from memtrain.run_folder import resumed_folder
from memtrain.tasks.run import Place, run_task

EXPECTED = (HydraException, OmegaConfBaseException, ValueError, OSError)
"""What composing raises for what is typed and written."""
SCRIPT = "import sys; del sys.path[0]; from memtrain.__main__ import main; sys.exit(main())"
COMMAND = [sys.executable, *([str(CHECKOUT / "train.py")] if CHECKOUT else ["-c", SCRIPT])]
"""Starts a job of a sweep. Not by `-m`, which imports from the folder where it was typed first."""

RESOLVERS: dict[str, Callable[..., Any]] = {
    "project_root": lambda: str(CHECKOUT or Path.cwd()),
    "absolute": lambda path: str(resolve_path(path, Path.cwd())),
    "process_id": os.getpid,
    "unless": lambda given, value: value if given is None else None,
    "folder_name": folder_name,  # checked before Hydra makes the folder
    "run_folder": lambda runs, *parts: resumed_folder(Path(runs), *parts),
}
for name, resolver in RESOLVERS.items():
    OmegaConf.register_new_resolver(name, resolver)


class OwnChoices(SearchPathPlugin):  # type: ignore[misc]
    """`conf/` in the folder where the command was typed adds choices to the groups; ours stay what they are."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        own = Path.cwd() / "conf"
        if own.is_dir() and not own.samefile(CONF_DIR):
            search_path.append("own", f"file://{own}")


Plugins.instance().register(OwnChoices)


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")  # type: ignore[untyped-decorator]
def job(config: DictConfig) -> float | None:
    """One run here, or one job of a sweep in a process of its own. Returns the number a sweeper minimises."""
    settings = HydraConfig.get()
    if settings.mode == RunMode.MULTIRUN:
        wanted, wrong = config.sweep, what_is_wrong(config)
        return sweep.run_job(COMMAND, settings, wanted.resume, wanted.metric, wrong)
    folder, base = Path(settings.runtime.output_dir), Path(settings.runtime.cwd)
    owner.check_asked(folder)
    tree = plain_tree(config)
    runs = resolve_path(tree["outputs"], base) / "runs" / folder_name(tree["name"])
    place = Place(folder, base, sweep.typed(settings.overrides.task), None, runs)
    try:
        parse(tree)
    except UserError:
        return run_task(tree, place, {})  # which says so, and needs no torch for that
    plans = (tree["task"], tree["plan"]) == ("train", "on")
    planner = PlannerProcess() if plans else None  # starts while torch is imported here
    with no_collections():
        from memtrain.tasks.registry import TASKS
    stop.raise_on_signals()
    return run_task(tree, replace(place, planner=planner), TASKS)


def what_is_wrong(config: DictConfig) -> str | None:
    """In one line."""
    try:
        parse(OmegaConf.to_container(config, resolve=True, throw_on_missing=True))  # type: ignore[arg-type]
    except UserError as error:
        return str(error)
    except OmegaConfBaseException as error:
        return one_line(error)
    return None


@contextmanager
def no_collections() -> Iterator[None]:
    """What is imported stays: looking it through for garbage takes a fifth of the time, then and ever after."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


def plain_tree(config: DictConfig) -> dict[str, Any]:
    """Without omegaconf from here on. Ends the process where a value is missing or cannot be resolved."""
    try:
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        sys.exit(refuse(error))


def refuse(error: Exception) -> int:
    errors.print_error(" ".join(one_line(error).split()))
    return errors.EXIT_REFUSED


def refuse_flags(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """In the place of Hydra's whole usage."""
    sys.exit(refuse(ValueError(f"{message}; `{PROGRAM} --hydra-help` lists the flags")))


def one_line(error: Exception) -> str:
    """A composition error without the lines that only make sense to Hydra's developers."""
    text = str(error)
    if isinstance(error.__cause__, errors.UserError):  # of a resolver
        return str(error.__cause__)
    if isinstance(error.__cause__, OSError):  # such as a log in a folder that cannot be written
        return f"{error.__cause__.filename}: {error.__cause__.strerror}"
    if text.startswith("Config group override must be"):
        typed = [word for word in sys.argv[1:] if re.fullmatch(r"\w+=(\d+|null)", word)]
        wrong = [word for word in typed if word.partition("=")[0] in groups()]
        return f"{' or '.join(wrong)}: a group takes the name of a choice; `--help` lists them"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: cannot be read; quote the value, as in key='\"a=b\"'"
    if match := re.match(r"Could not override '([^']+)'", text):
        return f"{match[1]}: {words.unknown(match[1])}"
    if not text or not isinstance(error, EXPECTED):
        return f"command line or config file cannot be composed: {text or type(error).__name__}"
    return text.split("Config search path")[0]


def is_of_composition(error: Exception) -> bool:
    """Whether it was raised by Hydra or below it: whatever it is, the words that were composed are wrong."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals["__name__"].split(".")[0] in ("hydra", "omegaconf", "yaml")


def leave_to_who_waits(thrown: threading.ExceptHookArgs) -> None:
    """TensorBoard's thread raises what a full disk raised again in the one that records."""
    if not issubclass(thrown.exc_type, OSError):
        threading.__excepthook__(thrown)


def main() -> int:
    argparse.ArgumentParser.error = refuse_flags  # type: ignore[method-assign, assignment]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing its own report
    logging.raiseExceptions = False  # a log that cannot be written is no reason to fill the screen
    logging.lastResort = None  # nor one that is not wanted
    threading.excepthook = leave_to_who_waits
    try:
        job()
    except Exception as error:  # a task's own errors end in the task
        sweep.end_if_stopped()
        if not isinstance(error, EXPECTED) and not is_of_composition(error):
            raise
        return refuse(error)
    return errors.EXIT_OK
