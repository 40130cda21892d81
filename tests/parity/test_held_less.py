"""Selective recomputation, chunked MLPs and choices per block: the same numbers, recomputing exactly what is said."""

import gc
from collections import Counter

import pytest
import torch
from allpairspy import AllPairs
from torch.utils._python_dispatch import TorchDispatchMode

from memtrain.cards import load_card
from memtrain.config.derived import named_blocks
from memtrain.engine.build import build_dimensions
from memtrain.errors import UserError
from memtrain.planner.predict import predict


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def calls(step, window) -> Counter[str]:
    with Calls() as counted:
        step.accumulate(window)
    return counted.counts


def products(counts: Counter[str]) -> int:
    return counts["mm"] + counts["addmm"] + counts["bmm"]


ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
FORMS = {
    "selective": ("checkpointing=selective",),
    "half": ("checkpointing=selective", "checkpointing.matmul_fraction=0.5"),
    "attention alone": ("checkpointing=selective", "checkpointing.keep=[attention]"),
    "some blocks": ("checkpointing=selective", "checkpointing.blocks='0,last 1'"),
    "segments of some": ("checkpoint_every=2", "checkpointing.blocks=1-3"),
    "per block": (
        "checkpointing=per_block",
        "checkpointing.per_block=[recompute,selective,keep,recompute]",
    ),
    "with offload": (
        "checkpointing=selective",
        "offload=activations",
        "offload.min_tensor_bytes=0",
    ),
}


@pytest.mark.parametrize(
    ("precision", "form", "dropout"),
    list(AllPairs([("fp32", "bf16", "fp16", "bf16_true"), list(FORMS), (0.0, 0.3)])),
)
def test_gradients_are_bit_equal(tiny, bench, precision, form, dropout):
    base = (f"precision={precision}", f"model.dropout={dropout}")
    window = bench.window(bench.samples(), 4)
    plain = bench.gradients(bench.step(tiny(*base)), window)
    ours = bench.gradients(bench.step(tiny(*base, *FORMS[form])), window)
    assert all(torch.equal(ours[name], plain[name]) for name in plain)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_selective_recomputes_no_product_and_no_attention(tiny, bench, precision):
    window = bench.window(bench.samples(), 8)
    base = (f"precision={precision}", "loss=full")
    plain = calls(bench.step(tiny(*base)), window)
    ours = calls(bench.step(tiny(*base, "checkpointing=selective")), window)
    assert products(ours) == products(plain)
    assert ours[ATTENTION] == plain[ATTENTION] == 4
    assert ours["gelu"] == 2 * plain["gelu"] == 8


def test_every_second_product_is_kept(tiny, bench):
    """Four products a block; the last one's output is never needed again, so it is never computed again."""
    window = bench.window(bench.samples(), 8)
    plain = calls(bench.step(tiny()), window)
    half = calls(bench.step(tiny(*FORMS["half"])), window)
    none = calls(bench.step(tiny(*FORMS["attention alone"])), window)
    assert none[ATTENTION] == plain[ATTENTION]
    assert products(none) - products(plain) == 4 * 3
    assert products(half) - products(plain) == 4 * 2


def test_recompute_of_named_blocks(tiny, bench):
    window = bench.window(bench.samples(), 8)
    some = calls(
        bench.step(tiny("checkpoint_every=1", "checkpointing.blocks='first 1,last 1'")), window
    )
    assert some["gelu"] == 4 + 2
    per_block = calls(bench.step(tiny(*FORMS["per block"])), window)
    assert per_block["gelu"] == 4 + 3
    assert per_block[ATTENTION] == 4 + 2


@pytest.mark.parametrize("recompute", ["checkpoint_every=0", "checkpoint_every=2"])
@pytest.mark.parametrize("chunks", [2, 3, 16])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_chunked_mlps(tiny, bench, recompute, chunks, precision):
    """Weight gradients are summed over pieces: equal to rounding, the loss to the bit in fp32 or nearly."""
    window = bench.window(bench.samples(), 4)
    base = (f"precision={precision}", recompute)
    plain = bench.gradients(bench.step(tiny(*base)), window)
    ours = bench.gradients(bench.step(tiny(*base, f"model.mlp_chunks={chunks}")), window)
    for name, gradient in plain.items():
        error = (ours[name] - gradient).norm() / gradient.norm()
        assert error < (1e-5 if precision == "fp32" else 2e-2), name


def test_chunked_mlp_runs_once_per_piece_and_again(tiny, bench):
    window = bench.window(bench.samples(), 8)
    counted = calls(
        bench.step(tiny("model.mlp_chunks=4", "model.mlp_chunk_blocks='every 2'")), window
    )
    assert counted["gelu"] == 2 * (4 + 4) + 2


TECHNIQUES = {
    "recompute": ("checkpoint_every=2",),
    "selective": ("checkpointing=selective",),
    "mlp chunks": ("model.mlp_chunks=2",),
    "chunked loss": ("loss=chunked", "loss.chunk_mib=1"),
}


@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize("trained", ["last 1", "first 1", "blocks.*.mlp.*"])
def test_frozen_layers_leave_the_gradients_of_the_rest(tiny, bench, technique, trained):
    window = bench.window(bench.samples(n=40), 20)  # two chunks of the loss
    base = (f"model.train_only='{trained}'", "loss=full")
    plain = bench.gradients(bench.step(tiny(*base)), window)
    ours = bench.gradients(bench.step(tiny(*base, *TECHNIQUES[technique])), window)
    assert ours.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_an_exception_in_backward_leaves_nothing_alive(tiny, bench, technique):
    def living() -> int:
        gc.collect()
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

    window = bench.window(bench.samples(n=40), 20)
    step = bench.step(tiny(*TECHNIQUES[technique]))
    plain = bench.gradients(step, window)
    step.model.zero_grad()
    before = living()

    def fail(grad):
        raise RuntimeError("in the middle")

    handle = step.model.get_parameter("blocks.1.mlp.up.weight").register_hook(fail)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="in the middle"):
            step.accumulate(window)
        step.model.zero_grad()
    handle.remove()
    ours = bench.gradients(step, window)
    assert all(torch.equal(ours[name], plain[name]) for name in plain)
    step.model.zero_grad()
    del ours
    assert living() <= before


def test_chunked_mlps_in_evaluation_are_the_whole(tiny, bench):
    tokens = bench.samples().tokens
    base = "model.dropout=0.5"
    found = [bench.step(tiny(base, f"model.mlp_chunks={n}")).model.eval()(tokens) for n in (1, 3)]
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


SHAPE = (
    "model=small",
    "model.n_layers=8",
    "micro_batch=4",
    "seq_len=1024",
    "precision=bf16",
    "accum=2",
)


def peak(config, *overrides):
    wanted = config(*SHAPE, *overrides)
    report = predict(wanted, build_dimensions(wanted, 2048), load_card("a100_80gb")).report
    return report.peak_allocated_bytes


@pytest.mark.slow
def test_peaks_fall_in_the_order_the_documentation_promises(config):
    """docs/fit-my-model.md, from top to bottom."""
    ladder = [
        ("loss=full",),
        (),
        ("checkpointing=selective",),
        ("checkpointing=sqrt",),
        ("checkpoint_every=1",),
    ]
    peaks = [peak(config, *overrides) for overrides in ladder]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)


# Bytes that a block keeps per token, in units of the width C, for bf16 autocast over an fp32 residual stream; the
# log-sum-exp of attention (4 per head) and the statistics of the norms (8 per norm) come on top.
KEPT = {
    # norm input 4, its cast 2, q k v 6, attention 2, norm input 4, its cast 2, hidden 8, activated 8
    (): (36, 4, 16),
    # the block's input 4; products: q k v 6, out 2, up 8, down 2; attention 2
    ("checkpointing=selective",): (24, 4, 0),
    ("checkpointing=selective", "checkpointing.keep=[attention]"): (6, 4, 0),
    # two of the four products: out 2, down 2
    ("checkpointing=selective", "checkpointing.matmul_fraction=0.5"): (10, 4, 0),
    ("checkpoint_every=1",): (4, 0, 0),
    ("checkpoint_every=2",): (2, 0, 0),  # one input for two blocks
    # as above up to the second norm's input, and no more
    ("model.mlp_chunks=8",): (18, 4, 8),
}


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(words, marks=[] if number % 2 else [pytest.mark.slow])
        for number, words in enumerate(KEPT)
    ],
    ids=" ".join,
)
def test_a_block_keeps_what_arithmetic_says(config, overrides):
    """From what four more blocks add to the activations at the end of forward; within 2 %."""
    held = []
    for n_layers in (4, 8):
        wanted = config(*SHAPE, *overrides, f"model.n_layers={n_layers}")
        report = predict(wanted, build_dimensions(wanted, 2048), load_card("a100_80gb")).report
        held.append(report.phases["forward"].categories["activations"])
    tokens, dim, heads = 4 * 1024, 768, 12
    per_width, per_head, per_token = KEPT[overrides]
    expected = tokens * (per_width * dim + per_head * heads + per_token)
    assert (held[1] - held[0]) / 4 == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("text", "blocks"),
    [("all", [0, 1, 2, 3, 4, 5]), (3, [3]), ("0-2", [0, 1, 2]), ("every 2", [0, 2, 4]), ("last 2", [4, 5]),
     ("first 9", [0, 1, 2, 3, 4, 5]), ("0,3-4", [0, 3, 4]), ("first 1, last 1", [0, 5])],
)  # fmt: skip
def test_named_blocks(text, blocks):
    assert named_blocks(text, 6, "key") == blocks


@pytest.mark.parametrize("text", ["6", "4-6", "3-1", "every 0", "some", "", "-1", "1.5"])
def test_blocks_that_do_not_exist(text):
    with pytest.raises(UserError, match=r"^key="):
        named_blocks(text, 6, "key")
