"""memtrain's command line: Hydra composes the config, a task runs it, the exit code says how it ended."""

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverrideParseException
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from memtrain import errors, sweep
from memtrain.config import folder_name
from memtrain.planner.child import PlannerProcess
from memtrain.run_folder import resumed_folder

ROOT = Path(__file__).resolve().parent
OUTPUTS = Path(os.environ.get("MEMTRAIN_OUTPUTS") or ROOT / "outputs").absolute()

OmegaConf.register_new_resolver("project_root", lambda: str(ROOT))
OmegaConf.register_new_resolver("outputs", lambda: str(OUTPUTS))
OmegaConf.register_new_resolver("process_id", os.getpid)
OmegaConf.register_new_resolver("folder_name", folder_name)  # checked before Hydra makes the folder
OmegaConf.register_new_resolver(
    "run_folder", lambda *parts: resumed_folder(OUTPUTS / "runs", *parts)
)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")  # type: ignore[untyped-decorator]
def job(config: DictConfig) -> float | None:
    """One run here, or one job of a sweep in a process of its own. Returns the number a sweeper minimises."""
    settings = HydraConfig.get()
    if settings.mode == RunMode.MULTIRUN:
        return sweep.run_job(Path(__file__).resolve(), settings)
    tree = plain_tree(config)
    plans = (tree.get("task"), tree.get("plan")) == ("train", "on")
    planner = PlannerProcess() if plans else None  # starts while torch is imported here
    from memtrain import tasks

    folder, base = Path(settings.runtime.output_dir), Path(settings.runtime.cwd)
    return tasks.run(tree, tasks.Place(folder, base, list(settings.overrides.task), planner))


def plain_tree(config: DictConfig) -> dict[str, Any]:
    """Without omegaconf from here on. Ends the process where a value is missing or cannot be resolved."""
    try:
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        sys.exit(refuse(error))


def refuse(error: Exception) -> int:
    print(f"error: {one_line(error)}", file=sys.stderr)
    return errors.EXIT_REFUSED


def one_line(error: Exception) -> str:
    """A composition error without the lines that only make sense to Hydra's developers."""
    text = str(error)
    if text.startswith("Config group override must be"):
        wrong = [word for word in sys.argv[1:] if re.fullmatch(r"\w+=(\d+|null)", word)]
        return f"{' or '.join(wrong)}: a group takes the name of a choice; `--help` lists them"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: cannot be read; quote the value, as in key='\"a=b\"'"
    if match := re.match(r"Could not override '([^']+)'", text):
        return f"{match[1]}: unknown key or choice; `python train.py --help` lists them"
    return " ".join(text.split("Config search path")[0].split())


def main() -> int:
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: word not in ("-m", "--multirun"))
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing its own report
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(errors.EXIT_TERMINATED))
    try:
        job()
    except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:
        return refuse(error)  # a task's own errors end in the task: these are Hydra's
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return errors.EXIT_INTERRUPTED
    return errors.EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
