import math

import pytest
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata

from memtrain.report.board import TAGS, Board
from memtrain.units import GIB


def read(run_dir) -> EventAccumulator:
    events = EventAccumulator(str(run_dir))
    return events.Reload()


def test_scalars_have_their_tag_unit_and_step(tmp_path):
    board = Board(tmp_path)
    record = {"step": 3, "loss": 5.0, "peak_allocated_bytes": 2 * GIB, "mfu": None}
    board.scalars(record, 3)
    board.close()
    events = read(tmp_path)
    assert sorted(events.Tags()["scalars"]) == ["memory/peak_allocated_window_gib", "train/loss"]
    (point,) = events.Scalars("memory/peak_allocated_window_gib")
    assert (point.step, point.value) == (3, 2.0)


def test_a_nan_stays_a_nan(tmp_path):
    board = Board(tmp_path)
    board.scalars({"loss": math.nan}, 0)
    board.hparams({"lr": 1e-3}, {"final_loss": math.nan})
    board.close()
    events = read(tmp_path)
    assert math.isnan(events.Scalars("train/loss")[0].value)


def test_an_unknown_key_is_our_mistake(tmp_path):
    board = Board(tmp_path)
    with pytest.raises(AssertionError, match="colour"):
        board.scalars({"colour": 1.0}, 0)
    board.close()


def test_tags_are_distinct():
    assert len(set(TAGS.values())) == len(TAGS)


def test_a_resumed_run_has_each_step_once(tmp_path):
    for first, last, purge_step in ((0, 150, None), (100, 120, 100)):
        board = Board(tmp_path, purge_step=purge_step)
        for step in range(first, last):
            board.scalars({"loss": float(step)}, step)
        board.close()
    assert [point.step for point in read(tmp_path).Scalars("train/loss")] == list(range(120))


def test_hparams_are_in_the_same_run(tmp_path):
    board = Board(tmp_path)
    hparams = {
        "lr": 1e-3,
        "precision": "bf16",
        "compile": False,
        "betas": [0.9, 0.95],
        "seed": None,
    }
    metrics = {"val_loss": 4.0, "peak_allocated_bytes": GIB, "peak_reserved_bytes": None}
    board.scalars({"val_loss": 4.0, "run_peak_allocated_bytes": GIB}, 1)
    board.hparams(hparams, metrics)
    board.close()
    assert len(list(tmp_path.rglob("*tfevents*"))) == 1
    events = read(tmp_path)
    assert events.Scalars("val/loss")[0].value == 4.0
    assert events.Scalars("memory/peak_allocated_run_gib")[0].value == 1.0
    data = events.PluginTagToContent(metadata.PLUGIN_NAME)
    started = metadata.parse_session_start_info_plugin_data(data[metadata.SESSION_START_INFO_TAG])
    assert started.hparams["lr"].number_value == 1e-3
    assert started.hparams["precision"].string_value == "bf16"
    assert started.hparams["compile"].bool_value is False
    assert started.hparams["betas"].string_value == "[0.9, 0.95]"
    assert started.hparams["seed"].string_value == "None"
    experiment = metadata.parse_experiment_plugin_data(data[metadata.EXPERIMENT_TAG])
    names = {info.name.tag for info in experiment.metric_infos}
    assert names == {"val/loss", "memory/peak_allocated_run_gib"}


def test_text_and_figure(tmp_path):
    board = Board(tmp_path)
    board.text("sample", "once upon")
    board.figure("timeline", Figure(figsize=(2, 1), dpi=100))
    board.close()
    events = read(tmp_path)
    (text,) = events.Tensors("sample/text_summary")
    assert text.tensor_proto.string_val[0] == b"once upon"
    (image,) = events.Images("timeline")
    assert (image.width, image.height) == (200, 100)
