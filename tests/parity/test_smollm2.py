"""A real pretrained model, SmolLM2-135M-Instruct in 4 bits: `make smollm2` fetches it."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

from command import ROOT, Run
from workbench import CPU

from memtrain.config import Config
from memtrain.data.loader import Batch
from memtrain.engine import build
from memtrain.engine.loaded import Loaded
from memtrain.engine.pretrained import find_published
from memtrain.engine.published import write_adapter, write_model

FILES = sorted((ROOT / ".cache/smollm2").glob("*.gguf"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FILES, reason="SmolLM2 was not fetched: make smollm2"),
]
LR, STEPS = 1e-4, 3


@pytest.fixture(scope="module")
def lm() -> Any:
    """Free of what transformers notes of the quantization, which forbids to train and to save it."""
    from transformers import AutoModelForCausalLM

    file = FILES[0]
    read = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    del read.config.quantization_config
    plain = AutoModelForCausalLM.from_config(read.config)
    plain.load_state_dict(read.state_dict())
    return plain.eval()


@pytest.fixture
def loaded(config: Callable[..., Config]) -> Callable[..., tuple[Loaded, Callable[[Batch], float]]]:
    """The model as a run builds it, and its step."""

    def build_it(*overrides: str) -> tuple[Loaded, Callable[[Batch], float]]:
        wanted = config("model=hf", f"model.path={FILES[0]}", "data=random", "device=cpu", "clip=0",
                        "optimizer.weight_decay=0", "optimizer.betas=[0.9,0.999]", "seq_len=32",
                        f"optimizer.lr={LR}", *overrides)  # fmt: skip
        build.prepare_torch(wanted)
        model = build.build_model(wanted, build.build_dimensions(wanted, 1), CPU)
        step = build.build_step(wanted, model, CPU)
        return Loaded(wanted, find_published(wanted), model), lambda b: step([b])[0].item()

    return build_it


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 49152, (STEPS, 2, 33), generator=generator)
    return [Batch(i[:, :-1].contiguous(), i[:, 1:].contiguous(), 64) for i in ids]


def reference(model: Any) -> list[float]:
    model.train()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=LR, weight_decay=0, eps=1e-8
    )
    found = []
    for batch in batches():
        logits = model(input_ids=batch.tokens).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@torch.no_grad()
def logits(found: Loaded) -> torch.Tensor:
    return found.model.eval().head(found.model(batches()[0].tokens))


def test_read_written_and_trained_as_transformers_does(loaded, lm, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    found, step = loaded()
    expected = lm(input_ids=batches()[0].tokens).logits
    scale = float(expected.abs().max())
    assert torch.allclose(logits(found), expected, atol=1e-5 * scale)
    write_model(found, tmp_path / "hf", tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert torch.allclose(again(input_ids=batches()[0].tokens).logits, expected, atol=1e-5 * scale)
    written = AutoConfig.from_pretrained(tmp_path / "hf")
    assert getattr(written, "quantization_config", None) is None
    assert (tmp_path / "hf/tokenizer.json").exists()
    found.model.train()
    assert [step(b) for b in batches()] == pytest.approx(reference(copy.deepcopy(lm)), rel=1e-4)


def test_an_adapter_is_trained_as_peft_trains_it(loaded, lm, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    write_adapter(loaded("adapter=lora")[0], tmp_path / "start")
    theirs = peft.PeftModel.from_pretrained(
        copy.deepcopy(lm), tmp_path / "start", is_trainable=True
    )
    _, step = loaded("adapter=lora", f"adapter.path={tmp_path / 'start'}")
    assert [step(b) for b in batches()] == pytest.approx(reference(theirs), rel=1e-4)


def test_it_answers_with_its_own_tokenizer(run: Run, tmp_path: Path) -> None:
    text = "The capital of France is"
    (tmp_path / "text.txt").write_text(f"{text} Paris.\n" * 300, encoding="utf-8")
    done = run("model=hf", f"model.path={FILES[0]}", "adapter=lora", "data=text", "data.path=text.txt",
               "steps=1", "micro_batch=1", "seq_len=16", "eval_sequences=1", "plan=off",
               "generate.temperature=0", "generate.tokens=2", f'generate.prompt="{text}"',
               cwd=tmp_path, timeout=240)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"{text} Paris" in done.stdout
