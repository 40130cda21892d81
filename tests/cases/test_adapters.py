"""What went wrong with adapters elsewhere: scale, types, sizes, files without tensors, merges into another base."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from hf_models import VOCAB, causal_lm, make
from safetensors.torch import load_file, save_file
from workbench import CPU, Workbench

from memtrain.config import Config
from memtrain.engine import build
from memtrain.engine.loaded import Loaded
from memtrain.engine.pretrained import find_published
from memtrain.engine.published import write_adapter, write_model
from memtrain.errors import UserError
from memtrain.model.adapters.nf4 import NF4Linear

Compose = Callable[..., Config]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("hf") / "llama", tie_word_embeddings=True)


@pytest.fixture
def loaded(config: Compose, folder: Path) -> Callable[..., Loaded]:
    """A model with an adapter, after `steps` steps."""

    def build_it(*overrides: str, steps: int = 0) -> Loaded:
        wanted = config("debug=tiny", "model=hf", f"model.path={folder}", "device=cpu", *overrides)
        build.prepare_torch(wanted)
        model = build.build_model(wanted, build.build_dimensions(wanted, VOCAB), CPU)
        step = build.build_step(wanted, model, CPU)
        bench = Workbench()
        for _ in range(steps):
            assert step(bench.window(bench.samples(), 2))[2] == 1
        model.eval()
        return Loaded(wanted, find_published(wanted), model)

    return build_it


TOKENS = torch.arange(2 * 16).view(2, 16) % VOCAB


@torch.no_grad()
def logits(found: Loaded) -> torch.Tensor:
    return found.model.head(found.model(TOKENS))


def test_a_fresh_adapter_changes_nothing_and_its_scale_is_alpha_over_rank(loaded) -> None:
    found = loaded("adapter=lora", "adapter.rank=8", "adapter.alpha=16")
    assert torch.equal(logits(found), logits(loaded()))
    layer = found.model.get_submodule("blocks.0.mlp.gate")
    part = layer.adapter.gate_proj
    with torch.no_grad():
        part.b.normal_()
        x = torch.randn(3, 5, 32)
        added = layer(x) - x @ layer.weight.t()
        assert torch.allclose(added, 2.0 * (x @ part.a.t()) @ part.b.t(), atol=1e-5)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "bf16_true"])
def test_what_is_trained_is_fp32(loaded, precision) -> None:
    found = loaded("adapter=lora", f"precision={precision}", steps=2)
    trained = [p for p in found.model.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.float32}


def test_every_matrix_has_a_gradient_with_a_frozen_embedding(loaded, bench) -> None:
    plain, recomputed = (
        bench.gradients(
            build.build_step((found := loaded("adapter=lora", f"checkpoint_every={every}")).config,
                             found.model.train(), CPU),
            bench.window(bench.samples(), 2),
        )
        for every in (0, 1)
    )  # fmt: skip
    assert len(plain) == 4 * 7 * 2
    for name, gradient in plain.items():
        assert torch.equal(gradient, recomputed[name])
        assert gradient.any() or name.endswith(".a")  # B is 0: nothing reaches A yet


def test_four_bits_save_memory(loaded) -> None:
    pytest.importorskip("bitsandbytes")
    model = loaded("adapter=qlora", "precision=bf16").model
    packed = [module for module in model.modules() if isinstance(module, NF4Linear)]
    assert len(packed) == 4 * 5
    stored = sum(p.nbytes for m in packed for p in m.parameters(recurse=False))
    assert stored / sum(m.n_values for m in packed) <= 0.57
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert {p.dtype for p in frozen} <= {torch.uint8, torch.float32, torch.bfloat16}
    assert model.embedding.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["lora", "qlora"])
def test_merged_is_what_was_trained(loaded, tmp_path, name) -> None:
    pytest.importorskip("bitsandbytes")
    found = loaded(f"adapter={name}", "adapter.also_train=embedding.*", steps=2)
    write_model(found, tmp_path / "merged", tmp_path)
    merged = causal_lm(tmp_path / "merged").eval()(input_ids=TOKENS).logits
    ours = logits(found)
    assert torch.allclose(merged, ours, atol=1e-5 * float(ours.abs().max()))


def test_a_trained_embedding_that_is_the_head_arrives_as_both(loaded, tmp_path, folder) -> None:
    peft = pytest.importorskip("peft")
    found = loaded("adapter=lora", "adapter.also_train=embedding.*", "optimizer.lr=0.1", steps=2)
    write_adapter(found, tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(
        type(causal_lm(folder)).from_pretrained(folder), tmp_path / "adapter"
    )
    assert torch.allclose(theirs.eval()(input_ids=TOKENS).logits, logits(found), atol=1e-4)
    again = loaded("adapter=lora", f"adapter.path={tmp_path / 'adapter'}")
    assert torch.equal(logits(again), logits(found))


def test_a_file_holds_two_matrices_for_each_target_and_all_are_needed(loaded, tmp_path) -> None:
    write_adapter(loaded("adapter=lora", steps=2), tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_model.safetensors"
    tensors = load_file(file)
    assert len(tensors) == 4 * 7 * 2
    assert all(values.any() for values in tensors.values())
    first = min(tensors)
    for wrong, said in (
        ({name: t for name, t in tensors.items() if name != first}, "get it again|no counterpart"),
        (tensors | {"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": torch.ones(1, 1)}, "another base"),
        (tensors | {first: torch.ones(2, 3)}, "another base"),
        (tensors | {"base_model.model.model.layers.0.lora_embedding_A": torch.ones(1)}, "no counterpart"),
    ):  # fmt: skip
        save_file(wrong, file)
        with pytest.raises(UserError, match=said):
            loaded("adapter=lora", f"adapter.path={tmp_path / 'adapter'}")
