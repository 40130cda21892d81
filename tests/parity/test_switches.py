"""Every pair of the switches: a saving must not change the numbers."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from allpairspy import AllPairs
from optimizer_choices import HOST_OPTIMIZERS
from torch import nn

from memtrain.model.layers import Block

PRECISIONS = ("fp32", "bf16", "fp16", "bf16_true")
RECOMPUTE = ("checkpoint_every=0", "checkpoint_every=1", "checkpoint_every=3", "checkpointing=sqrt",
             "checkpointing=alternate")  # fmt: skip
OFFLOAD = ("none", "activations", "optimizer")
OPTIMIZERS = ("adamw", "sgd", "adafactor")


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize(
    ("precision", "micro_batch", "dropout"), list(AllPairs([PRECISIONS, (8, 2), (0.0, 0.5)]))
)
def test_recompute_and_offload_leave_gradients_bit_equal(
    tiny, bench, precision, micro_batch, dropout
):
    window = bench.window(bench.samples(), micro_batch)
    base = [f"precision={precision}", f"model.dropout={dropout}", "offload.min_tensor_bytes=0"]
    plain = bench.gradients(bench.step(tiny(*base)), window)
    for recompute, offload in itertools.product(RECOMPUTE, ("none", "activations")):
        step = bench.step(tiny(*base, recompute, f"offload={offload}"))
        assert_equal(bench.gradients(step, window), plain)


@pytest.mark.parametrize(
    ("recompute", "offload", "clip", "optimizer"),
    list(
        AllPairs([("checkpoint_every=0", "checkpoint_every=2"), OFFLOAD, (0.0, 0.1), OPTIMIZERS]),
    ),
)
def test_accumulation_is_the_mean_over_all_targets(
    tiny, bench, recompute, offload, clip, optimizer
):
    overrides = [recompute, f"offload={offload}", f"clip={clip}", f"optimizer={optimizer}"]
    results = []
    for micro_batch in (8, 2):
        step = bench.step(
            tiny(*overrides, f"optimizer.lr={'1e-3' if optimizer == 'adamw' else '0.1'}")
        )
        for number in range(3):
            figures = step(bench.window(bench.samples(seed=number), micro_batch))
        results.append((figures, bench.weights(step)))
    (figures, weights), (other_figures, other_weights) = results
    torch.testing.assert_close(figures, other_figures, rtol=1e-6, atol=1e-6)
    for name, weight in weights.items():
        # Adam divides by the root of a tiny moment: rounding of a gradient shows up to lr.
        tolerance = 1e-4 if optimizer != "sgd" else 1e-6
        torch.testing.assert_close(weight, other_weights[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("offload", ["none", "activations"])
def test_accumulated_gradients_are_those_of_one_micro_batch(tiny, bench, recompute, offload):
    """4 x 2 against 1 x 8, each sample with another number of targets."""
    found = []
    for micro_batch in (8, 2):
        step = bench.step(tiny(recompute, f"offload={offload}"))
        found.append(bench.gradients(step, bench.window(bench.samples(), micro_batch)))
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16_true"])
@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_accumulation_in_low_precision(tiny, bench, precision, clip):
    losses = []
    for micro_batch in (8, 2):
        step = bench.step(tiny(f"precision={precision}", f"clip={clip}"))
        losses.append(step(bench.window(bench.samples(), micro_batch)))
    torch.testing.assert_close(losses[0], losses[1], rtol=2e-2, atol=1e-3)


def test_gradients_equal_an_independent_computation(tiny, bench):
    """Against a loop over single targets that knows nothing of batches or masks."""
    step = bench.step(tiny())
    batch = bench.samples()
    ours = bench.gradients(step, bench.window(batch, 4))
    step.model.zero_grad()
    total = sum(
        F.cross_entropy(step.model.head(step.model(tokens[None, : i + 1])[:, -1]), target[None])
        for tokens, targets in zip(batch.tokens, batch.targets, strict=True)
        for i, target in enumerate(targets)
        if target >= 0
    )
    (total / batch.n_targets).backward()
    for name, parameter in step.model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("recompute", "micro_batch", "clip", "optimizer"),
    list(AllPairs([RECOMPUTE, (8, 2), (0.0, 0.1), OPTIMIZERS])),
)
def test_optimizer_on_the_host_is_bit_equal(tiny, bench, recompute, micro_batch, clip, optimizer):
    overrides = [recompute, f"clip={clip}", f"optimizer={optimizer}"]
    results = []
    for offload in ("none", "optimizer"):
        step = bench.step(tiny(*overrides, f"offload={offload}"))
        for number in range(4):
            step(bench.window(bench.samples(seed=number), micro_batch))
        results.append(bench.weights(step))
    assert_equal(*results)


@pytest.mark.parametrize("optimizer", HOST_OPTIMIZERS)
@pytest.mark.parametrize("implementation", ["fused", "foreach", "for_loop"])
def test_every_optimizer_on_the_host_is_bit_equal(tiny, bench, optimizer, implementation):
    overrides = [f"optimizer={optimizer}", f"optimizer.implementation={implementation}"]
    results = []
    for offload in ("none", "optimizer"):
        step = bench.step(tiny(*overrides, f"offload={offload}"))
        for number in range(4):
            step(bench.window(bench.samples(seed=number), 2))
        results.append(bench.weights(step))
    assert_equal(*results)


@pytest.mark.parametrize("offload", ["none", "optimizer"])
@pytest.mark.parametrize("masters", ["true", "false"])
def test_bf16_weights_move_at_a_normal_rate(tiny, bench, offload, masters):
    """A plain bf16 update of 1e-3 on a weight of 1 is rounded away; a master, or rounding at random, keeps it."""
    if (offload, masters) == ("optimizer", "false"):
        pytest.skip("refused: the host always keeps masters")
    choice = ["precision=bf16_true", f"precision.master_weights={masters}", f"offload={offload}"]
    step = bench.step(tiny(*choice, "optimizer.weight_decay=0", "optimizer.lr=1e-3"))
    weights = list(step.model.parameters())
    before = [weight.detach().float().clone() for weight in weights]
    (update,) = step.updates
    for _ in range(100):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        update.norms()
        update.step(None, torch.zeros(()), lambda: None)
    update.settle()
    moved = torch.cat(
        [(b - w.detach().float()).flatten() for b, w in zip(before, weights, strict=True)]
    )
    assert moved.mean().item() == pytest.approx(0.1, abs=2e-3)
    assert all(weight.dtype == torch.bfloat16 for weight in weights)


@pytest.mark.parametrize("every", [0, 1, 2, 3, 4, 5])
def test_recompute_really_recomputes(tiny, bench, every):
    """Each block runs once more in backward, and only if its segment is recomputed."""
    step = bench.step(tiny(f"checkpoint_every={every}"))
    counts = count_forwards(step)
    step.accumulate(bench.window(bench.samples(), 8))
    assert counts == [2 if every else 1] * 4


@pytest.mark.parametrize("every", [1, 2, 3, 4])
def test_alternate_recomputes_all_but_every_nth(tiny, bench, every):
    step = bench.step(tiny("checkpointing=alternate", f"checkpoint_every={every}"))
    counts = count_forwards(step)
    step.accumulate(bench.window(bench.samples(), 8))
    assert counts == [1 if index % every == 0 else 2 for index in range(4)]


def count_forwards(step) -> list[int]:
    counts = [0] * 4
    for index, block in enumerate(step.model.blocks):

        def count(module, inputs, index=index):
            counts[index] += 1

        block.register_forward_pre_hook(count)
    return counts


def test_block_is_the_textbook_block():
    """Our attention and MLP against torch's own modules with the same weights."""
    from memtrain.model.transformer import Dimensions, make_block

    torch.manual_seed(0)
    d = Dimensions(
        vocab_size=64, dim=32, n_layers=1, n_heads=4, n_kv_heads=4, ffn_dim=128, max_seq_len=16
    )
    block: Block = make_block(d)
    reference = nn.TransformerEncoderLayer(
        32, 4, 128, dropout=0.0, activation=nn.GELU("tanh"), batch_first=True, norm_first=True
    )
    reference.self_attn.in_proj_weight.data.copy_(block.attention.qkv.weight)
    reference.self_attn.in_proj_bias.data.copy_(block.attention.qkv.bias)
    for ours, theirs in (
        (block.attention.out, reference.self_attn.out_proj),
        (block.mlp.up, reference.linear1),
        (block.mlp.down, reference.linear2),
        (block.attention_norm, reference.norm1),
        (block.mlp_norm, reference.norm2),
    ):
        theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 16, 32)
    mask = nn.Transformer.generate_square_subsequent_mask(16)
    torch.testing.assert_close(block(x, None), reference(x, src_mask=mask, is_causal=True))
