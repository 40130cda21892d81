"""Before Hydra writes its first byte: whether this process is alone, and whose the folder is."""

import functools
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

from memtrain.errors import EXIT_FAILED, EXIT_REFUSED, Stopped, UserError, print_error
from memtrain.run_folder import RUN_FILES, SWEEP_FILES, goes_on_in, locked, owned

RANKS = (
    ("WORLD_SIZE", None),  # torchrun, accelerate, deepspeed
    ("OMPI_COMM_WORLD_SIZE", None),
    ("MV2_COMM_WORLD_SIZE", None),
    ("PMI_SIZE", "PMI_RANK"),  # MPICH, Intel MPI
    ("SLURM_NTASKS", "SLURM_PROCID"),  # without the second: the shell of an allocation
)
"""By which variable a launcher says how many processes it starts, and by which that this is one of them."""


def check_single_process(environment: Mapping[str, str], launcher: str | None) -> None:
    """Raises UserError where this is one of several processes that were started as ranks.

    `launcher` is the target of a sweep's: submitit's starts each job as a Slurm job of its own.
    """
    for count, rank in RANKS:
        by_slurm = count == "SLURM_NTASKS"
        if (rank and rank not in environment) or (by_slurm and "submitit" in (launcher or "")):
            continue
        size = environment.get(count, "1")
        if size.isdigit() and int(size) > 1:
            raise UserError(
                f"{count}={size}: several ranks are not supported yet: each would train by itself; "
                "start one process"
            )


def report_error(error: Exception) -> int:
    """In one line; the exit code comes back."""
    if not isinstance(error, UserError) and isinstance(error.__cause__, (UserError, OSError)):
        # Of a resolver.
        error = error.__cause__
    text, code = " ".join(str(error).split()), EXIT_REFUSED
    if isinstance(error, Stopped):
        code = error.code
    elif isinstance(error, OSError):
        text, code = f"{error.filename or 'a file'}: {error.strerror}", EXIT_FAILED
    elif not isinstance(error, (UserError, OmegaConfBaseException)):
        text, code = f"{type(error).__name__}: {text}", EXIT_FAILED
    print_error(text)
    return code


def ends_the_process(method: Callable[..., None]) -> Callable[..., None]:
    """Hydra goes on after what a callback raises; not after the end of the process."""

    @functools.wraps(method)
    def end(*args: Any, **kwargs: Any) -> None:
        try:
            method(*args, **kwargs)
        except Exception as error:
            sys.exit(report_error(error))

    return end


def hydra_files(config: Any) -> list[str]:
    """What Hydra itself writes in the folder of a run. Raises UserError where that would be another folder."""
    subfolder = config.hydra.output_subdir
    parts = Path(subfolder or "-").parts
    if not parts or ".." in parts or Path(*parts).is_absolute():
        raise UserError(f"hydra.output_subdir={subfolder}: name a folder inside the run's")
    return [f"{config.hydra.job.name}.log", *(parts[:1] if subfolder else [])]


def resolve_parts(config: Any) -> None:
    """So that an error names them and not the folder's key, which is made of them."""
    HydraConfig.instance().set_config(config)  # for ${hydra:...}; Hydra does so later
    for key in ("outputs", "name", "resume"):
        OmegaConf.select(config, key)


_asked = False


def check_asked(folder: Path) -> None:
    """Raises UserError for a run that Hydra started without asking `OwnFolder`, as --experimental-rerun does."""
    if not _asked:
        raise UserError(
            f"{folder}: Hydra skipped the check of this folder (--experimental-rerun, or other hydra.callbacks), "
            "so a run in it could be overwritten; type the run's overrides again"
        )


class OwnFolder(Callback):  # type: ignore[misc]
    """Hydra callback: a run's folder is its own, to the end of the process."""

    @ends_the_process
    def on_run_start(self, config: Any, **kwargs: Any) -> None:
        global _asked
        check_single_process(os.environ, None)
        resolve_parts(config)
        _asked = True
        folder = Path(str(config.hydra.run.dir)).absolute()
        resume = None if config.resume is None else str(config.resume)
        self._held = ExitStack()
        with read_write(config.hydra):
            config.hydra.run.dir = str(folder)  # whichever run is the latest by now
            if goes_on_in(folder, resume, Path.cwd()):
                self._held.enter_context(locked(folder))
                config.hydra.output_subdir = None  # says how the run began
                return
        names = [*RUN_FILES, *SWEEP_FILES, *hydra_files(config)]
        self._held.enter_context(owned(folder, names, "hydra.run.dir"))
