"""Hugging Face models, whole and with adapters: the numbers of transformers and peft, the same with every technique."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

from hf_models import VOCAB, causal_lm, make
from torch import Tensor
from workbench import CPU, Workbench

from memtrain.config import Config
from memtrain.engine import build
from memtrain.engine.loaded import Loaded
from memtrain.engine.pretrained import find_published
from memtrain.engine.published import write_adapter, write_model
from memtrain.errors import UserError

Compose = Callable[..., Config]
SEQ_LEN, STEPS, LR = 16, 20, 1e-2
PLAIN = ("schedule=constant", "schedule.warmup=0", f"optimizer.lr={LR}", "optimizer.weight_decay=0",
         "optimizer.betas=[0.9,0.999]", "clip=0", "micro_batch=2")  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hf")
    return {family: make(family, root / family) for family in ("llama", "gpt2", "gpt_neox")}


@pytest.fixture
def hf(config: Compose, folders: dict[str, Path]) -> Callable[..., Config]:
    def compose(family: str, *overrides: str) -> Config:
        path = f"model.path={folders[family]}"
        return config("debug=tiny", "model=hf", path, "device=cpu", *PLAIN, *overrides)

    return compose


def losses(config: Config, steps: int, bench: Workbench) -> tuple[list[float], Loaded]:
    """Of a run as the loop makes it, on batches that depend on the step alone."""
    build.prepare_torch(config)
    model = build.build_model(config, build.build_dimensions(config, VOCAB), CPU)
    step = build.build_step(config, model, CPU)
    found = []
    for number in range(steps):
        batch = bench.samples(2 * config.accum, SEQ_LEN, seed=number, ragged=False)
        for group in (group for update in step.updates for group in update.param_groups):
            group["lr"] = LR
        found.append(step(bench.window(batch, 2))[0].item())
    step.settle()
    return found, Loaded(config, find_published(config), model)


def reference(lm: Any, steps: int, bench: Workbench) -> list[float]:
    """The same by transformers, and torch's AdamW."""
    lm.train()
    trained = [p for p in lm.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0, eps=1e-8)
    found = []
    for number in range(steps):
        batch = bench.samples(2, SEQ_LEN, seed=number, ragged=False)
        logits = lm(input_ids=batch.tokens).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def logits(loaded: Loaded, tokens: Tensor) -> Tensor:
    model = loaded.model.eval()
    with torch.no_grad():
        return model.head(model(tokens))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_full_fine_tuning_is_that_of_transformers(hf, folders, bench, tmp_path, family):
    wanted = hf(family)
    ours, loaded = losses(wanted, STEPS, bench)
    lm = copy.deepcopy(causal_lm(folders[family]))
    assert ours == pytest.approx(reference(lm, STEPS, bench), rel=1e-4)
    write_model(loaded, tmp_path / "hf", tmp_path)
    tokens = bench.samples(2, SEQ_LEN).tokens
    again = causal_lm(tmp_path / "hf").eval()(input_ids=tokens).logits
    assert torch.allclose(again, logits(loaded, tokens), atol=1e-5 * float(again.abs().max()))


ADAPTERS = {
    "lora": ("adapter.targets=all_linear",),
    "rslora": ("adapter.targets=attention", "adapter.rslora=true"),
    "dora": ("adapter.dora=true",),
}


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_is_trained_as_peft_trains_it(hf, folders, bench, tmp_path, family, kind):
    """From the same start, which peft reads from what we wrote, to the same losses and, read back, the same logits."""
    peft = pytest.importorskip("peft")
    wanted = hf(family, "adapter=lora", "adapter.rank=4", "adapter.alpha=8", *ADAPTERS[kind])
    start = losses(wanted, 1, bench)[1]
    write_adapter(start, tmp_path / "start")
    base = copy.deepcopy(causal_lm(folders[family]))
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "start", is_trainable=True)
    going_on = hf(family, "adapter=lora", f"adapter.path={tmp_path / 'start'}")
    ours, loaded = losses(going_on, STEPS, bench)
    assert ours == pytest.approx(reference(theirs, STEPS, bench), rel=1e-4)
    theirs.save_pretrained(tmp_path / "theirs")
    back = losses(hf(family, "adapter=lora", f"adapter.path={tmp_path / 'theirs'}"), 0, bench)[1]
    tokens = bench.samples(2, SEQ_LEN).tokens
    expected = theirs.eval()(input_ids=tokens).logits
    scale = float(expected.abs().max())
    assert torch.allclose(expected, logits(loaded, tokens), atol=1e-3 * scale)
    assert torch.allclose(expected, logits(back, tokens), atol=1e-5 * scale)
    write_model(back, tmp_path / "merged", tmp_path)
    merged = causal_lm(tmp_path / "merged").eval()(input_ids=tokens).logits
    assert torch.allclose(expected, merged, atol=1e-5 * scale)


TECHNIQUES = [
    ("checkpoint_every=1",),
    ("checkpoint_every=3",),
    ("checkpointing=selective",),
    ("offload=activations", "offload.min_tensor_bytes=1", "checkpoint_every=1"),
    ("offload=optimizer",),
    ("offload=params", "checkpoint_every=2"),
    ("offload=all", "offload.min_tensor_bytes=1"),
    ("optimizer.in_backward=true",),
]


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize(
    "kind",
    [
        (),
        ("adapter=lora", "adapter.dropout=0.2"),
        ("adapter=lora", "adapter.dora=true"),
        ("adapter=qlora",),
    ],
)
def test_every_technique_gives_the_same_bits(hf, bench, family, kind):
    if "adapter=qlora" in kind:
        pytest.importorskip("bitsandbytes")
    plain = losses(hf(family, *kind), 3, bench)[0]
    assert plain[0] != plain[1]
    for technique in TECHNIQUES:
        assert losses(hf(family, *kind, *technique), 3, bench)[0] == plain, technique


def test_packed_weights_are_those_of_bitsandbytes(hf, folders, bench):
    functional = pytest.importorskip("bitsandbytes.functional")
    loaded = losses(hf("llama", "adapter=qlora"), 0, bench)[1]
    for name in ("q_proj", "k_proj", "v_proj"):
        dense = causal_lm(folders["llama"]).model.layers[1].self_attn.get_submodule(name).weight
        expected = functional.dequantize_4bit(*functional.quantize_4bit(
            dense.detach(), blocksize=64, compress_statistics=True, quant_type="nf4"))  # fmt: skip
        packed = loaded.model.get_submodule("blocks.1.attention.qkv").dequantized(torch.float32)
        start = {"q_proj": 0, "k_proj": 32, "v_proj": 48}[name]
        assert torch.equal(packed[start : start + len(expected)], expected)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("adapter=lora", "adapter.targets=[q_porj]"), "there are o_proj, down_proj, q_proj"),
        (("adapter=lora", "adapter.also_train=nothing"), "names no parameter"),
        (("adapter=lora", "adapter.path=nowhere"), "nowhere"),
        (("seq_len=65",), "does not fit"),
        (("model.backend=native",), "use auto"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(hf, bench, overrides, said):
    family = "gpt_neox" if "model.backend=native" in overrides else "llama"
    if overrides == ("seq_len=65",):
        family, said = "gpt2", "64 positions"
    with pytest.raises(UserError, match=said) as error:
        losses(hf(family, *overrides), 0, bench)
    assert "\n" not in str(error.value)


def test_matrices_outside_the_layers_are_not_offloaded(config, bench, tmp_path):
    """OPT's small models project the embedding, and back after the last layer."""
    folder = make("opt", tmp_path / "opt", ffn_dim=64, word_embed_proj_dim=16)
    wanted = config(
        "debug=tiny", "model=hf", f"model.path={folder}", "device=cpu", "offload=params"
    )
    with pytest.raises(UserError, match="is in no layer of the model"):
        losses(wanted, 0, bench)


def test_an_adapter_on_a_fused_matrix_stays_with_transformers(config, tmp_path):
    folder = make("phi3", tmp_path / "phi3", pad_token_id=0)
    plain, adapted = (
        find_published(config("debug=tiny", "task=plan", "model=hf", f"model.path={folder}", *more))
        for more in ((), ("adapter=lora",))
    )
    assert plain.family is not None and adapted.family is None
    assert "gate_up_proj" in adapted.why


def test_an_adapter_of_another_base_is_refused(hf, bench, tmp_path):
    pytest.importorskip("peft")
    write_adapter(losses(hf("llama", "adapter=lora"), 0, bench)[1], tmp_path / "adapter")
    with pytest.raises(UserError, match="is it of another base"):
        losses(hf("gpt2", "adapter=lora", f"adapter.path={tmp_path / 'adapter'}"), 0, bench)
