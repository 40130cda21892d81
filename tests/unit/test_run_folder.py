"""Which checkpoints of a run are whole, while another process writes them."""

import json
import shutil
import threading
from pathlib import Path

from memtrain.run_folder import FILES, META, complete, damaged, newest, step_name


def make_checkpoint(run: Path, step: int, **changes: object) -> Path:
    """Written under another name and renamed, as a run does it."""
    folder = run / "checkpoints/.new"
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_text("1234")
    meta = {"step": step, "val_loss": None, "sizes_bytes": dict.fromkeys(FILES, 4), **changes}
    (folder / META).write_text(json.dumps(meta))
    return folder.rename(run / "checkpoints" / step_name(step))


def test_the_newest_is_found_while_a_run_replaces_it(tmp_path: Path) -> None:
    """A name that is listed may be gone before it is looked at: the next one is there by then."""
    make_checkpoint(tmp_path, 0)
    ended = threading.Event()

    def replace() -> None:
        for step in range(1, 300):
            made = make_checkpoint(tmp_path, step)
            old = made.with_name(step_name(step - 1)).rename(made.with_name(".old"))
            shutil.rmtree(old)
        ended.set()

    writer = threading.Thread(target=replace)
    writer.start()
    looked = 0
    while not ended.is_set():
        assert newest(tmp_path) is not None
        looked += 1
    writer.join()
    assert looked > 10


def test_a_description_without_its_parts_is_none(tmp_path: Path) -> None:
    whole, wrong = make_checkpoint(tmp_path, 1), make_checkpoint(tmp_path, 2)
    meta = json.loads((wrong / META).read_text())
    for content in (
        "7",
        "[]",
        "{}",
        json.dumps({k: v for k, v in meta.items() if k != "val_loss"}),
    ):
        (wrong / META).write_text(content)
        assert complete(tmp_path) == [whole] and damaged(tmp_path) == [wrong]


def test_a_name_that_leads_nowhere_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/step_00000001").symlink_to(tmp_path / "absent")
    assert newest(tmp_path) is None
