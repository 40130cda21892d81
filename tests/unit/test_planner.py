"""Planning: identical every time, the same in the child process, and advice that holds."""

import json
import re
import shlex
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from memtrain.cards import Card, load_card, match_card
from memtrain.config.effects import no_effect_warnings
from memtrain.engine.build import build_dimensions
from memtrain.errors import EXIT_OUT_OF_MEMORY, UserError
from memtrain.phantom import OpUse
from memtrain.planner.child import PlannerProcess, PlanningFailed
from memtrain.planner.fit import is_valid, merged, neighbours, smaller_sizes, suggest
from memtrain.planner.predict import make_plan, predict
from memtrain.planner.speed import NVME_BANDWIDTH_GB_S, estimate_speed
from memtrain.report import planned
from memtrain.tasks import run
from memtrain.tasks.predicted import explain_out_of_memory, plan_run
from memtrain.tasks.run import Place
from memtrain.units import GIB, MIB

SHAPE = ("data=random", "data.vocab_size=2048", "model.vocab_size=2048", "model.n_layers=6",
         "model.dim=256", "micro_batch=16", "seq_len=256")  # fmt: skip


def without_time(plan):
    return {key: value for key, value in plan.items() if key != "plan_seconds"}


@pytest.fixture
def shaped(config):
    return lambda *overrides: config(*SHAPE, *overrides)


def small_card(memory_bytes: int) -> Card:
    return replace(load_card("a100_80gb"), memory_mib=memory_bytes // MIB, context_mib=0)


def test_planning_twice_and_in_the_child_is_identical(shaped):
    wanted, card = shaped("precision=bf16", "accum=2", "checkpoint_every=2"), load_card("l4")
    dimensions = build_dimensions(wanted, 2048)
    first, second = (make_plan(wanted, dimensions, card) for _ in range(2))
    assert without_time(first) == without_time(second)
    child = PlannerProcess()
    try:
        child.ask("plan", tree=asdict(wanted), vocab_size=2048, card=asdict(card))
        assert without_time(child.answer()) == without_time(first)
    finally:
        child.close()


def test_a_child_that_fails_says_why_and_lives_on(shaped):
    wanted, card = shaped(), load_card("l4")
    child = PlannerProcess()
    try:
        child.ask("plan", tree={}, vocab_size=2048, card=asdict(card))
        with pytest.raises(PlanningFailed, match="task: missing"):
            child.answer()
        child.ask("plan", tree=asdict(wanted), vocab_size=2048, card=asdict(card))
        assert child.answer()["fits"]
        child.close()
        child.ask("plan", tree=asdict(wanted), vocab_size=2048, card=asdict(card))
        with pytest.raises(PlanningFailed, match="the planner ended"):
            child.answer()
    finally:
        child.close()


def test_planning_leaves_the_process_as_it_was(shaped):
    wanted = shaped("precision=bf16")
    before = torch.get_rng_state(), torch.get_default_dtype(), torch.is_grad_enabled()
    predict(wanted, build_dimensions(wanted, 2048), load_card("l4"))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (torch.get_default_dtype(), torch.is_grad_enabled()) == before[1:]
    assert torch.ones(2).device.type == "cpu"
    assert not torch.is_autocast_enabled("cpu")


def test_bytes_move_as_arithmetic_says(shaped):
    """Weights, gradients and moments by their sizes; accumulation adds nothing after the second."""
    card = load_card("a100_80gb")
    wanted = shaped()
    dimensions = build_dimensions(wanted, 2048)
    plain = predict(wanted, dimensions, card)
    state = plain.report.phases["optimizer"].categories
    n = plain.parameters
    assert state["weights"] == pytest.approx(4 * n, rel=0.02)
    assert state["gradients"] == pytest.approx(4 * n, rel=0.02)
    assert state["optimizer_state"] == pytest.approx(8 * n, rel=0.02)
    two, four = (predict(shaped(f"accum={a}"), dimensions, card).report for a in (2, 4))
    # A scalar loss is kept per micro-batch, in a block of 512 bytes.
    assert four.peak_allocated_bytes - two.peak_allocated_bytes == 2 * 512
    assert four.h2d_bytes == 2 * two.h2d_bytes
    assert four.flops["matmul"] == pytest.approx(2 * two.flops["matmul"])


@pytest.mark.parametrize(
    "overrides",
    [
        ("accum=6", "offload=optimizer", "offload.gradients=true"),
        ("accum=8", "micro_batch=3", "seq_len=100"),
    ],
    ids=" ".join,
)
def test_a_long_window_is_planned_from_a_short_one(shaped, monkeypatch, overrides):
    """All micro-batches run, against three of them and the rest reckoned."""
    from memtrain.planner import predict as module

    wanted, card = shaped(*overrides), load_card("l4")
    dimensions = build_dimensions(wanted, 2048)
    reckoned = predict(wanted, dimensions, card).report
    monkeypatch.setattr(module, "MOST_ACCUM", wanted.accum)
    run = predict(wanted, dimensions, card).report
    assert reckoned.peak_allocated_bytes == run.peak_allocated_bytes
    assert reckoned.peak_reserved_bytes == run.peak_reserved_bytes
    assert reckoned.host_peak_bytes == run.host_peak_bytes
    assert reckoned.host_pinned_peak_bytes == run.host_pinned_peak_bytes
    assert (reckoned.h2d_bytes, reckoned.d2h_bytes) == (run.h2d_bytes, run.d2h_bytes)
    assert reckoned.flops == run.flops
    assert {op.name: op.moved_bytes for op in reckoned.ops} == {
        op.name: op.moved_bytes for op in run.ops
    }
    seconds = [
        estimate_speed(report, card, False, wanted.accum).step_seconds for report in (reckoned, run)
    ]
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-6)


def test_offloaded_state_is_on_the_host(shaped):
    card = load_card("a100_80gb")
    wanted = shaped("offload=optimizer")
    found = predict(wanted, build_dimensions(wanted, 2048), card)
    assert "optimizer_state" not in found.report.categories
    n = found.parameters
    # Master, two moments and a gradient each; two buffers, a cast and a copy for the largest.
    largest = 4 * 2048 * 256
    assert 16 * n < found.report.host_peak_bytes < 1.02 * 16 * n + 5 * largest
    assert found.report.d2h_bytes == pytest.approx(4 * n, rel=0.02)
    assert found.report.h2d_bytes == pytest.approx(4 * n + 16 * 256 * 8 * 2, rel=0.02)


@pytest.mark.slow
def test_every_suggestion_fits_when_planned(shaped):
    wanted = shaped()
    dimensions = build_dimensions(wanted, 2048)
    needs = predict(wanted, dimensions, load_card("a100_80gb")).report.peak_reserved_bytes
    card = small_card(needs // 2)
    assert not make_plan(wanted, dimensions, card)["fits"]
    suggestions = suggest(wanted, dimensions, card)
    assert suggestions
    rates = [found.tokens_per_second for found in suggestions]
    assert rates == sorted(rates, reverse=True)
    for found in suggestions:
        # What is pasted is composed by Hydra and must mean what was planned.
        plan = make_plan(shaped(*found.overrides), dimensions, card)
        assert plan["fits"]
        assert plan["peak_allocated_bytes"] == found.peak_allocated_bytes


def test_neighbours_keep_the_tokens_of_a_step(shaped):
    wanted = shaped("micro_batch=8", "accum=2")
    for neighbour in neighbours(wanted):
        assert neighbour.config.micro_batch * neighbour.config.accum == 16
        assert neighbour.overrides


def test_an_odd_micro_batch_goes_down_through_its_divisors(shaped):
    found = [n.overrides for n in neighbours(shaped("micro_batch=15", "accum=2"))]
    smaller = [words for words in found if len(words) == 2 and words[0].startswith("micro_batch=")]
    assert smaller == [
        ("micro_batch=5", "accum=6"),
        ("micro_batch=3", "accum=10"),
        ("micro_batch=1", "accum=30"),
    ]
    assert list(smaller_sizes(30)) == [15, 5, 3, 1]
    assert list(smaller_sizes(1)) == []


def test_full_logits_can_be_given_up(shaped):
    found = [n.overrides for n in neighbours(shaped("loss=full"))]
    assert ("loss=chunked",) in found
    assert ("loss=chunked", "checkpoint_every=1") in found
    assert not any("loss=chunked" in n.overrides for n in neighbours(shaped()))


def test_what_is_suggested_would_be_accepted(shaped):
    per_block = "checkpointing.per_block=[keep,keep,keep,keep,keep,keep]"
    for overrides in (("compile=model",), ("checkpointing=per_block", per_block)):
        options = [n for n in neighbours(shaped(*overrides)) if is_valid(n.config)]
        assert options
        for option in options:
            typed = merged(overrides, option.overrides)
            typed = [word for word in typed if "per_block" not in word]
            assert shaped(*typed).micro_batch == option.config.micro_batch


def test_out_of_memory_ends_with_one_screen(shaped, tmp_path, capsys):
    wanted = shaped("model.n_layers=2")
    dimensions = build_dimensions(wanted, 2048)
    needs = predict(wanted, dimensions, load_card("a100_80gb")).report.peak_reserved_bytes
    card = {**asdict(wanted.gpu), "memory_mib": needs // 2 // MIB, "context_mib": 0}
    wanted = replace(wanted, gpu=type(wanted.gpu)(**card))
    typed = ["data=random", "micro_batch=16", "name=a b"]
    place = Place(tmp_path, tmp_path, typed, PlannerProcess())
    cpu = torch.device("cpu")
    error = torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")
    try:
        plan = plan_run(wanted, place, 2048, cpu)
        explain_out_of_memory(wanted, place, 2048, cpu, plan, error)
    finally:
        place.planner.close()
    screen = capsys.readouterr().out
    assert "OUT OF MEMORY" in screen
    assert "Tried to allocate 2.00 GiB." in screen
    assert "DOES NOT FIT" in screen
    assert "optimizer_state" in screen
    commands = re.findall(r"^ +python train.py (.*)$", screen, re.MULTILINE)
    assert 1 <= len(commands) <= 3
    for command in commands:
        words = shlex.split(command)
        assert "name=a b" in words
        assert sum(word.startswith("micro_batch=") for word in words) == 1
    assert run.outcome(error) == ("out_of_memory", EXIT_OUT_OF_MEMORY)
    assert json.loads((tmp_path / "plan.json").read_text())["fits"] is False


def test_suggestions_replace_what_they_change():
    lines = merged(["micro_batch=8", "data.path=a,b", "+x=(1)"], ["micro_batch=4", "accum=2"])
    assert lines == ["data.path=a,b", "'+x=(1)'", "micro_batch=4", "accum=2"]
    assert "nothing near" in planned.suggestion_lines([], [])[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "typed",
    [
        ("checkpointing=alternate", "++checkpoint_every=2", "precision.name=fp32", "loss.name=full",
         "offload=all", "offload.mode=optimizer", "offload.optimizer_fraction=0.9"),
        ("experiment=4_bf16_accum_recompute", "checkpoint_every=2", "accumulation=x2"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_is_pasted_is_what_was_planned(config, typed):
    wanted = config(*typed)
    options = [option for option in neighbours(wanted) if is_valid(option.config)]
    assert options
    for option in options:
        pasted = [shlex.split(word)[0] for word in merged(typed, option.overrides)]
        assert config(*pasted) == option.config, option.overrides


def test_speed_is_the_roofline(shaped):
    """Matrix products at the card's peak times its efficiency; a faster link is faster offload."""
    wanted = shaped("offload=optimizer")
    report = predict(wanted, build_dimensions(wanted, 2048), load_card("a100_80gb")).report
    card = load_card("a100_80gb")
    slow = estimate_speed(report, card, tf32=False)
    # A link so slow that nothing hides it, and one twice as fast.
    links = [estimate_speed(report, replace(card, link_gb_s=r), tf32=False) for r in (0.01, 0.02)]
    moved_s = (report.h2d_bytes + report.d2h_bytes) / 0.01e9
    assert links[0].parts["host link"] == pytest.approx(moved_s, rel=0.01)
    assert links[0].step_seconds - links[1].step_seconds == pytest.approx(moved_s / 2, rel=0.01)
    assert sum(slow.parts.values()) == pytest.approx(slow.step_seconds)
    tf32 = estimate_speed(report, card, tf32=True)
    assert tf32.parts["matrix products"] < slow.parts["matrix products"]


def use(kind: str, phase: str, moved_bytes: float, on_device: bool = False) -> OpUse:
    return OpUse(kind, phase, "float32", kind, on_device, 1, 0, int(moved_bytes))


@pytest.mark.parametrize(
    ("phase", "host_s"),
    [
        ("optimizer", 2),
        ("backward", 2 - 1),  # beside the device
    ],
)
def test_host_link_and_files_work_beside_each_other(shaped, phase, host_s):
    wanted, card = shaped(), load_card("l4")
    report = predict(wanted, build_dimensions(wanted, 2048), card).report
    ops = [
        use("nvme_read", phase, 4 * NVME_BANDWIDTH_GB_S * 1e9),
        use("nvme_write", phase, 1 * NVME_BANDWIDTH_GB_S * 1e9),  # reads and writes share the device
        use("other", phase, 2 * card.host_bandwidth_gb_s * 1e9),
        use("other", phase, 1 * card.bandwidth_gb_s * 1e9, on_device=True),
        use("h2d", phase, 3.5 * card.link_gb_s * 1e9),
    ]  # fmt: skip
    speed = estimate_speed(replace(report, ops=ops), card, tf32=False)
    assert speed.parts == pytest.approx(
        {"matrix products": 0, "memory": 1, "host": host_s, "host link": 1.5, "files": 1.5}
    )
    few = [replace(op, moved_bytes=op.moved_bytes // 5) if "nvme" in op.kind else op for op in ops]
    assert estimate_speed(replace(report, ops=few), card, tf32=False).parts["files"] == 0


def test_the_host_steps_beside_the_first_forward(shaped):
    """4 s of forward in 4 micro-batches hide 1 s of a step that takes the host 3 s."""
    wanted, card = shaped(), load_card("l4")
    report = predict(wanted, build_dimensions(wanted, 2048), card).report
    ops = [
        use("other", "forward", 4 * card.bandwidth_gb_s * 1e9, on_device=True),
        use("other", "optimizer", 3 * card.host_bandwidth_gb_s * 1e9),
    ]
    speed = estimate_speed(replace(report, ops=ops), card, tf32=False, accum=4)
    assert speed.step_seconds == pytest.approx(4 + 3 - 1)


def test_a_plan_shows_files_only_if_there_are_any(shaped):
    wanted = shaped()
    plan = make_plan(wanted, build_dimensions(wanted, 2048), load_card("l4"))
    assert plan["nvme_read_bytes_per_step"] == plan["nvme_written_bytes_per_step"] == 0
    assert not any(line.startswith("nvme") for line in planned.plan_lines(plan))
    moved = {"nvme_read_bytes_per_step": 3 * GIB, "nvme_written_bytes_per_step": 2 * GIB}
    line = "nvme       5.00 GiB of files · 3.00 GiB read and 2.00 GiB written per step"
    assert line in planned.plan_lines(plan | moved | {"nvme_bytes": 5 * GIB})


@pytest.mark.parametrize(
    ("device", "memory_gib", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.2, "A100 80GB"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "A100 40GB"),
        ("NVIDIA GeForce RTX 4090", 23.6, "RTX 4090"),
        ("NVIDIA H100 80GB HBM3", 79.1, "H100"),
        ("NVIDIA H200", 139.8, "H200"),
        ("Tesla V100-SXM2-16GB", 15.8, "V100 16GB"),
        ("Tesla T4", 14.6, "T4"),
    ],
)
def test_the_card_in_the_machine_is_recognised(device, memory_gib, name):
    card = match_card(device, int(memory_gib * GIB))
    assert card is not None
    assert name in card.name


def test_an_unknown_card_is_none():
    assert match_card("Radeon Pro W9100", 16 * GIB) is None


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "qwen2"])
def test_transformers_models_are_planned_from_their_config(config, tmp_path: Path, family):
    pytest.importorskip("transformers", reason="needs pip install -e '.[hf]'")
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64} if family == "gpt2" else {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
        "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": family, "vocab_size": 300, **sizes}))
    wanted = config("task=plan", "model=hf", f"model.config={path}", "checkpoint_every=1",
                    "precision=bf16", "micro_batch=2", "seq_len=32")  # fmt: skip
    plan = make_plan(wanted, build_dimensions(wanted, 257), load_card("l4"))
    assert plan["fits"]
    assert plan["parameters"] > 300 * 64


@pytest.fixture
def hf(config, tmp_path: Path):
    """`hf(family, *overrides)`: the plan of a small model of that family."""
    pytest.importorskip("transformers", reason="needs pip install -e '.[hf]'")

    def plan(family, *overrides):
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "dff": 128,
            "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
            "num_key_value_heads": 2, "intermediate_size": 128, "num_local_experts": 2}  # fmt: skip
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"model_type": family, "vocab_size": 300, **sizes}))
        wanted = config("task=plan", "model=hf", f"model.config={path}", "micro_batch=2",
                        "seq_len=32", *overrides)  # fmt: skip
        return make_plan(wanted, build_dimensions(wanted, 257), load_card("l4"))

    return plan


def test_transformers_models_have_their_own_longest_sequence(hf):
    assert hf("mistral", "seq_len=2048")["parameters"] > 300 * 64
    with pytest.raises(UserError, match=r"^seq_len=128: the model has 64 positions"):
        hf("gpt2", "seq_len=128")


def test_a_body_is_found_under_another_name(hf):
    assert hf("llama4_text", "precision=bf16")["parameters"] > 300 * 64


@pytest.mark.parametrize("family", ["ctrl", "openai-gpt"])
def test_what_transformers_cannot_recompute_is_recomputed(hf, family):
    plain, less = (hf(family, f"checkpoint_every={every}", "micro_batch=16") for every in (0, 1))
    assert less["peak_allocated_bytes"] < plain["peak_allocated_bytes"]


def test_no_deprecated_name_is_used(hf, monkeypatch):
    from transformers import logging
    from transformers.configuration_utils import logger

    said = []
    monkeypatch.setattr(type(logger), "warning_once", lambda _, text, *__: said.append(text))
    logging.set_verbosity_warning()
    hf("mistral", "precision=bf16_true")
    assert not [text for text in said if "deprecated" in text]


@pytest.mark.parametrize("override", ["model.mlp_chunks=2", "compile=blocks"])
def test_what_a_transformers_model_would_ignore_is_refused(hf, override):
    with pytest.raises(UserError, match=f"^{override}: needs memtrain's own Transformer"):
        hf("gpt_neox", override)


def test_keys_that_a_published_model_does_not_use_warn(config, tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    wanted = config("task=plan", "model=hf", f"model.config={tmp_path}", "model.dim=30")
    assert no_effect_warnings(wanted) == ["model.dim=30 has no effect with model=hf"]


@pytest.mark.parametrize(
    "overrides",
    [
        ("precision=bf16", "checkpoint_every=2", "accum=2"),
        ("precision=fp16", "offload=activations", "model.dropout=0.1"),
        ("precision=bf16_true", "offload=optimizer", "model.positions=rope", "model.norm=rmsnorm"),
    ],
    ids=" ".join,
)
def test_replaying_known_operators_changes_nothing(shaped, monkeypatch, overrides):
    """The shortcut: an operator seen before with the same shapes is not dispatched again."""
    wanted, card = shaped(*overrides), load_card("a100_80gb")
    dimensions = build_dimensions(wanted, 2048)
    quick = make_plan(wanted, dimensions, card)
    monkeypatch.setattr("memtrain.phantom.dispatch.replayable", lambda *_: False)
    assert without_time(make_plan(wanted, dimensions, card)) == without_time(quick)
