"""memtrain's command line: Hydra composes the config, a task runs it, the exit code says how it ended."""

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from memtrain import errors, sweep

OmegaConf.register_new_resolver("project_root", lambda: str(Path(__file__).resolve().parent))
OmegaConf.register_new_resolver("process_id", os.getpid)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")  # type: ignore[untyped-decorator]
def job(config: DictConfig) -> float | None:
    """One run here, or one job of a sweep in a process of its own. Returns the number a sweeper minimises."""
    settings = HydraConfig.get()
    if settings.mode == RunMode.MULTIRUN:
        return sweep.run_job(Path(__file__).resolve(), settings)
    from memtrain import tasks  # torch is imported only where something is computed

    tree: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    place = tasks.Place(Path(settings.runtime.output_dir), Path(settings.runtime.cwd))
    return tasks.run(tree, place, list(settings.overrides.task))


def one_line(error: Exception) -> str:
    """A composition error without the lines that only make sense to Hydra's developers."""
    text = str(error)
    if match := re.match(r"Could not override '([^']+)'", text):
        return f"{match[1]}: unknown key or choice; `python train.py --help` lists them"
    return " ".join(text.split("Config search path")[0].split())


def main() -> int:
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing its own report
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(errors.EXIT_TERMINATED))
    try:
        job()
    except (HydraException, OmegaConfBaseException, errors.UserError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return errors.EXIT_REFUSED
    except KeyboardInterrupt:
        return errors.EXIT_INTERRUPTED
    return errors.EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
