"""Documents kept apart: none sees another, each is as if it were alone, and every saving still leaves the numbers."""

import dataclasses
import json
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from allpairspy import AllPairs

from memtrain.cards import load_card
from memtrain.data.loader import IGNORE_INDEX, Batch
from memtrain.engine import build
from memtrain.engine.build import build_dimensions
from memtrain.planner.predict import predict

CPU = torch.device("cpu")
LLAMA = ("model.positions=rope", "model.norm=rmsnorm", "model.activation=swiglu",
         "model.n_kv_heads=1", "model.tied=false")  # fmt: skip
MODELS = {"gpt": (), "llama": LLAMA}
LENGTHS = [(5, 7, 4), (16,), (1, 15), (9, 6)]
"""Documents of each row of 16 tokens; what is left is padding."""


def rows(seed=0, n_ignored=2) -> Batch:
    """Packed rows; of each document the first `n_ignored` tokens are read only."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 64, (len(LENGTHS), 16), generator=generator)
    targets = torch.full_like(tokens, IGNORE_INDEX)
    starts = torch.empty_like(tokens)
    for row, lengths in enumerate(LENGTHS):
        place = 0
        for length in lengths:
            end = place + length
            starts[row, place:end] = place
            learned = slice(place + max(n_ignored - 1, 0), end - 1)
            targets[row, learned] = tokens[row, learned.start + 1 : end]
            place = end
        starts[row, place:] = place
    return Batch(tokens, targets, int((targets != IGNORE_INDEX).sum()), starts)


def micro_batches(batch: Batch, size: int) -> list[Batch]:
    parts = zip(*(t.split(size) for t in (batch.tokens, batch.targets, batch.starts)), strict=True)
    return [Batch(x, y, int((y != IGNORE_INDEX).sum()), s) for x, y, s in parts]


def documents(batch: Batch):
    """(row, begin, end)"""
    for row, lengths in enumerate(LENGTHS):
        place = 0
        for length in lengths:
            yield row, place, place + length
            place += length


def alone(batch: Batch) -> list[Batch]:
    """Each document as a sample of its own."""
    found = []
    for row, begin, end in documents(batch):
        x, y = batch.tokens[row : row + 1, begin:end], batch.targets[row : row + 1, begin:end]
        found.append(Batch(x, y, int((y != IGNORE_INDEX).sum())))
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16_true"])
@pytest.mark.parametrize("model", MODELS)
def test_no_document_sees_another(tiny, bench, model, precision):
    """Other tokens in one document: hidden states of all others to the bit, its own not."""
    step = bench.step(tiny(*MODELS[model], f"precision={precision}"))
    batch = rows()

    def hidden(tokens):
        with (
            torch.no_grad(),
            torch.autocast("cpu", step.compute_dtype, step.compute_dtype is not None),
        ):
            return step.model(tokens, batch.starts)

    before = hidden(batch.tokens)
    for row, begin, end in documents(batch):
        changed = batch.tokens.clone()
        changed[row, begin:end] = (changed[row, begin:end] + 1) % 64
        same = (hidden(changed) == before).all(-1)
        expected = torch.ones_like(same)
        expected[row, begin:end] = False
        assert torch.equal(same, expected)


def test_the_loss_of_a_document_is_its_own(tiny, bench):
    """Loss and gradients of the last document's targets, to the bit, whatever stands before it in the row."""
    results = []
    for shift in (0, 1):
        batch = rows()
        batch.targets[:] = IGNORE_INDEX
        batch.targets[0, 12:15] = batch.tokens[0, 13:16]
        batch.tokens[0, :12] = (batch.tokens[0, :12] + shift) % 64
        step = bench.step(tiny("model.tied=false"))
        loss = step.accumulate([dataclasses.replace(batch, n_targets=3)])
        seen = batch.tokens[0, 12:16].unique()
        named = step.model.named_parameters()
        gradients = {name: p.grad for name, p in named if name != "embedding.weight"}
        results.append((loss, step.model.embedding.weight.grad[seen], gradients))
    (loss, embedding, gradients), (other_loss, other_embedding, other_gradients) = results
    assert torch.equal(loss, other_loss) and torch.equal(embedding, other_embedding)
    assert [n for n in gradients if not torch.equal(gradients[n], other_gradients[n])] == []


@pytest.mark.parametrize("model", MODELS)
def test_packed_is_as_each_alone(tiny, bench, model):
    """fp32; to 1e-5 of each parameter's gradient, as attention sums in another order."""
    batch = rows()
    packed, single = (bench.step(tiny(*MODELS[model])) for _ in range(2))
    loss, other = packed.accumulate([batch]), single.accumulate(alone(batch))
    torch.testing.assert_close(loss, other, rtol=1e-6, atol=0)
    for (name, p), q in zip(
        packed.model.named_parameters(), single.model.parameters(), strict=True
    ):
        assert (p.grad - q.grad).norm() <= 1e-5 * q.grad.norm(), name
    unmasked = bench.step(tiny(*MODELS[model])).accumulate(
        [dataclasses.replace(batch, starts=None)]
    )
    assert (unmasked - other).abs() > 1e-4


def test_a_document_of_a_whole_row_is_as_without_a_mask(tiny, bench):
    batch = rows()
    plain = dataclasses.replace(batch, starts=None)
    step = bench.step(tiny())
    with torch.no_grad():
        masked, causal = step.model(batch.tokens, batch.starts), step.model(plain.tokens)
    torch.testing.assert_close(masked[1], causal[1], rtol=0, atol=1e-6)


FORMS = {
    "every": ("checkpoint_every=1",),
    "segments": ("checkpoint_every=3",),
    "sqrt": ("checkpointing=sqrt",),
    "alternate": ("checkpointing=alternate", "checkpoint_every=2"),
    "selective": ("checkpointing=selective",),
    "half": ("checkpointing=selective", "checkpointing.matmul_fraction=0.5"),
    "per block": (
        "checkpointing=per_block",
        "checkpointing.per_block=[recompute,selective,offload,keep]",
    ),
    "offload": ("offload=activations",),
    "offload and recompute": ("offload=activations", "checkpoint_every=2"),
}


@pytest.mark.parametrize(
    ("model", "form", "precision"),
    list(AllPairs([list(MODELS), list(FORMS), ["fp32", "bf16", "bf16_true"]])),
)
def test_savings_leave_gradients_bit_equal(tiny, bench, model, form, precision):
    base = (
        *MODELS[model],
        f"precision={precision}",
        "model.dropout=0.3",
        "offload.min_tensor_bytes=0",
    )
    window = micro_batches(rows(), 2)
    plain = bench.gradients(bench.step(tiny(*base)), window)
    ours = bench.gradients(bench.step(tiny(*base, *FORMS[form])), window)
    assert [name for name in plain if not torch.equal(ours[name], plain[name])] == []


def test_the_mask_is_not_moved_to_the_host(tiny, bench):
    """Every block saves it: one tensor that stays."""
    moved = []
    for n_layers in (2, 3):
        step = bench.step(
            tiny("offload=activations", f"model.n_layers={n_layers}", "offload.min_tensor_bytes=0")
        )
        offload = step.model.segments[0].run.__closure__
        offload = next(c.cell_contents for c in offload if hasattr(c.cell_contents, "moved_bytes"))
        for batch in (rows(), dataclasses.replace(rows(), starts=None)):
            before = offload.moved_bytes
            step.accumulate([batch])
            moved.append(offload.moved_bytes - before)
    assert moved[0] == moved[1] and moved[2] == moved[3] and moved[2] > moved[0]


def test_mlps_in_pieces(tiny, bench):
    window = micro_batches(rows(), 2)
    plain = bench.gradients(bench.step(tiny()), window)
    ours = bench.gradients(bench.step(tiny("model.mlp_chunks=4")), window)
    for name, gradient in plain.items():
        assert (ours[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.parametrize("compiled", ["compile=blocks", "compile=model"])
@pytest.mark.parametrize("model", MODELS)
def test_compiled(tiny, bench, model, compiled):
    torch._dynamo.reset()
    window = micro_batches(rows(), 2)
    base = (*MODELS[model], "model.n_layers=2", "loss=full")
    plain = bench.gradients(bench.step(tiny(*base)), window)
    with torch.compiler.set_stance("default", force_backend="aot_eager"):
        ours = bench.gradients(bench.step(tiny(*base, compiled)), window)
    for name, gradient in plain.items():
        assert (ours[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


RECORDS = [
    {"prompt": "ask: ", "completion": "told"},
    {"text": "a whole text"},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho ho"}]},
    {"prompt": "", "completion": "x"},
    {"text": "longer than a row of thirty-two tokens, so it is cut into pieces of such length"},
]
N_TARGETS = 5 + 12 + 6 + 1 + 79


@pytest.fixture
def documents_of(config, tmp_path):
    """The config of a run on these records, and the step and windows that it would build."""

    def build_run(records, *overrides):
        path = tmp_path / "records.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        wanted = config(
            "data=jsonl", f"data.path={path}", f"data.cache_dir={tmp_path}", "tokenizer=bytes", "device=cpu",
            "model.dim=32", "model.n_layers=2", "model.n_heads=2", "seq_len=32", "clip=0",
            "data.val_fraction=0", "data.prefetch=0", *overrides,
        )  # fmt: skip
        build.prepare_torch(wanted)
        data = build.build_data(wanted, tmp_path, quiet)
        model = build.build_model(wanted, build_dimensions(wanted, data.vocab_size), CPU)
        return (
            build.build_step(wanted, model, CPU),
            iter(build.build_loader(wanted, data, CPU)),
            data,
        )

    return build_run


def quiet(title, size_bytes):
    return nullcontext(lambda done, total: None)


def test_only_what_is_learned_counts(documents_of):
    """The loss of the window against one computed by hand from the records, token by token."""
    step, windows, data = documents_of(RECORDS, "micro_batch=8")
    (batch,) = next(windows)
    assert batch.n_targets == data.train.n_targets == N_TARGETS
    total, n_targets = 0.0, 0
    for tokens, learned in by_hand(RECORDS):
        for start in range(0, len(tokens), 32):
            hidden = step.model(torch.tensor([tokens[start : start + 32]]))
            logits = step.model.head(hidden)[0].log_softmax(-1)
            for i in range(start, min(start + 32, len(tokens) - 1)):
                if learned[i + 1]:
                    total -= logits[i - start, tokens[i + 1]].item()
                    n_targets += 1
    assert n_targets == N_TARGETS
    assert step.accumulate([batch]).item() == pytest.approx(total / n_targets, rel=1e-6)


def by_hand(records):
    """(tokens, which are learned) of each record, in bytes and 256 for end-of-text."""
    for record in records:
        parts = [
            (record.get("prompt", ""), 0),
            (record.get("text", record.get("completion", "")), 1),
        ]
        for message in record.get("messages", []):
            learned = message["role"] == "assistant"
            parts += [(message["role"] + "\n", 0), (message["content"], learned), (None, learned)]
        parts += [(None, 1)] if "messages" not in record else []
        pairs = [
            (t, kept) for text, kept in parts for t in ([256] if text is None else text.encode())
        ]
        yield [t for t, _ in pairs], [kept for _, kept in pairs]


@pytest.mark.parametrize("mask", ["true", "false"])
def test_one_and_sixteen_targets_weigh_as_seventeen(documents_of, mask):
    """However the two documents fall into micro-batches: the same weights, and the mean over 17 targets."""
    records = [{"prompt": "p" * 15, "completion": "c" * 15}, {"text": "d"}]  # and end-of-text
    results = []
    for shape in (("micro_batch=2", "accum=1"), ("micro_batch=1", "accum=2")):
        step, windows, _ = documents_of(
            records, *shape, "optimizer=sgd", "optimizer.lr=1", f"data.document_mask={mask}"
        )
        window = next(windows)
        assert sorted(targets_by_row(window)) == [1, 16]
        loss = step(window)[0].item()
        sums = loss_sums(documents_of(records)[0], window)  # at the weights of before the step
        assert loss == pytest.approx(sum(sums) / 17, rel=1e-6)
        results.append({name: p.detach() for name, p in step.model.named_parameters()})
    for name, weight in results[0].items():
        torch.testing.assert_close(weight, results[1][name], rtol=0, atol=1e-6)


def targets_by_row(window):
    return [int((row != IGNORE_INDEX).sum()) for batch in window for row in batch.targets]


def loss_sums(step, window):
    for batch in window:
        for tokens, targets in zip(batch.tokens, batch.targets, strict=True):
            logits = step.model.head(step.model(tokens[None]))[0]
            yield F.cross_entropy(
                logits, targets, reduction="sum", ignore_index=IGNORE_INDEX
            ).item()


SHAPE = (
    "data=jsonl",
    "data.path=x",
    "model=small",
    "micro_batch=4",
    "seq_len=1024",
    "precision=bf16",
)


def predicted(config, *overrides):
    wanted = config(*SHAPE, *overrides)
    return predict(wanted, build_dimensions(wanted, 2048), load_card("a100_80gb")).report


@pytest.mark.parametrize("grouped", [(), ("model.n_kv_heads=4",)], ids=["all heads", "grouped"])
def test_the_mask_is_planned_once_for_all_blocks(config, grouped):
    """2 bytes per pair of tokens of a sequence; no head by head scores, which would be 12 times that in every block."""
    mask_bytes = 4 * 1024 * 1024 * 2
    extra = []
    for n_layers in (4, 8):
        with_mask, without = (
            predicted(config, *grouped, f"model.n_layers={n_layers}", f"data.document_mask={on}")
            for on in ("true", "false")
        )
        held = [r.phases["forward"].categories["activations"] for r in (with_mask, without)]
        extra.append(held[0] - held[1])
    repeated = (
        4 * 2 * 4 * 1024 * 768 * 2 if grouped else 0
    )  # keys and values for every head, in four blocks
    statistics = 4 * 4 * 1024 * 12 * 4  # of attention and norms, in four blocks
    assert extra[1] - extra[0] == pytest.approx(repeated, abs=2 * statistics)
    assert extra[0] - repeated == pytest.approx(mask_bytes, abs=2 * statistics)
