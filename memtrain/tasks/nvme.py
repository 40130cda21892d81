"""The folder that a run has to itself for the _nvme modes of offload."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from memtrain.config import Config
from memtrain.config.derived import optimizer_home, resolve_path
from memtrain.memory import file_store
from memtrain.report import console
from memtrain.tasks.run import Place
from memtrain.units import format_bytes


@contextmanager
def own_nvme_folder(config: Config, place: Place) -> Iterator[Config]:
    """For the _nvme modes: `offload.nvme_dir` becomes a folder of this run's own, which is gone afterwards."""
    if optimizer_home(config) != "nvme":
        yield config
        return
    assert config.offload.nvme_dir
    nvme_dir = resolve_path(config.offload.nvme_dir, place.base)
    file_store.check_folder(nvme_dir, 0)
    for folder, size_bytes in file_store.leftovers(nvme_dir):
        console.print_warning(
            f"{folder}: {format_bytes(size_bytes)} left behind by a run that ended before it could remove them; "
            "delete it"
        )
    folder = file_store.claim_folder(nvme_dir, config.name)
    try:
        yield replace(config, offload=replace(config.offload, nvme_dir=str(folder)))
    finally:
        file_store.release_folder(folder)


def check_room_for_files(config: Config) -> None:
    """Some are written, others are still to grow. Raises UserError if there is no room for that."""
    assert config.offload.nvme_dir
    folder = Path(config.offload.nvme_dir)
    still_bytes = file_store.files_bytes(folder) - file_store.taken_bytes(folder)
    file_store.check_folder(folder, max(0, still_bytes))
