"""Models of transformers and adapters of peft, as they are: on the phantom GPU, and held against a real CPU run."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from measured import real_peak_bytes
from torch import nn

from memtrain.phantom import PhantomCPU, PhantomGPU

transformers = pytest.importorskip("transformers", reason="needs pip install -e '.[hf]'")
peft = pytest.importorskip("peft", reason="needs pip install -e '.[hf]'")

FAMILIES = ["gpt2", "llama", "mistral", "qwen2"]
VOCAB, WIDTH, LAYERS = 512, 128, 2
CPU = torch.device("cpu")


def make(family: str, recompute: bool = False, adapters: bool = False) -> nn.Module:
    """A small model of `family`: two layers, grouped queries where it has them."""
    sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "n_positions": 64} if family == "gpt2" else {
        "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 256, "max_position_embeddings": 64}  # fmt: skip
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(family, vocab_size=VOCAB, **sizes, **ends)
    config.use_cache = False
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if adapters:
        model.enable_input_require_grads()
        settings = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, settings)
    return model.train()


def train(
    model: nn.Module, device: torch.device, dtype: torch.dtype | None = None, gpu: Any = None
) -> None:
    """Two steps."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    for _ in range(2):
        tokens = torch.zeros(4, 64, dtype=torch.int64, device=device)
        with torch.autocast(device.type, dtype=dtype) if dtype else nullcontext():
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        del loss  # and with it what adapters leave at the embedding
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if gpu is not None:
            gpu.step_boundary()


@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "recompute"])
@pytest.mark.parametrize("family", FAMILIES)
def test_peak_is_that_of_a_real_run(family: str, recompute: bool) -> None:
    with PhantomCPU() as cpu:
        train(make(family, recompute), CPU)
    measured = real_peak_bytes(lambda: train(make(family, recompute), CPU))
    assert cpu.report().peak_allocated_bytes == pytest.approx(measured, rel=0.005)


def test_peak_with_adapters_is_that_of_a_real_run() -> None:
    with PhantomCPU() as cpu:
        train(make("llama", adapters=True), CPU)
    measured = real_peak_bytes(lambda: train(make("llama", adapters=True), CPU))
    assert cpu.report().peak_allocated_bytes == pytest.approx(measured, rel=0.005)


@pytest.mark.parametrize("family", FAMILIES)
def test_trains_on_the_gpu_as_it_is(family: str) -> None:
    with torch.device("meta"):
        model = make(family, recompute=True)
    with PhantomGPU("l4") as gpu:
        model.to_empty(device=gpu.device)
        train(model, gpu.device, torch.bfloat16, gpu)
    report = gpu.report()
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    at_update = report.phases["optimizer"].categories
    assert at_update["weights"] == pytest.approx(4 * n_parameters, rel=0.01)
    assert at_update["gradients"] == pytest.approx(4 * n_parameters, rel=0.01)
    assert at_update["optimizer_state"] == pytest.approx(8 * n_parameters, rel=0.02)


def test_adapters_alone_have_gradients_and_state_on_the_gpu() -> None:
    with torch.device("meta"):
        model = make("llama", adapters=True)
    with PhantomGPU("l4") as gpu:
        model.to_empty(device=gpu.device)
        train(model, gpu.device, torch.bfloat16, gpu)
    trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    assert 0 < sum(trained) < 0.2 * sum(parameter.numel() for parameter in model.parameters())
    at_update = gpu.report().phases["optimizer"].categories  # state: two moments and a counter
    assert at_update["gradients"] == 4 * sum(trained)
    assert at_update["optimizer_state"] == 8 * sum(trained) + 512 * len(trained)
