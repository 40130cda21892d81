"""LoRA on our Transformer against transformers and peft: tokens/s on the CPU, peak memory on the phantom.

    pip install -e '.[hf]'
    python benchmarks/adapters.py [--save]

A Llama of SmolLM2-135M's sizes with random weights, rank 16 on all linear layers. Speed: fp32, 4 x 64 tokens, steps of
both in turn, medians. Peak: A100 80GB, 8 x 1024 tokens, a bf16 base under bf16 autocast, nothing recomputed; peft's
program is the one of published.py (full logits inside the model, foreach AdamW).
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import composed_config, print_rows, save_result
from published import run as run_published
from torch import nn

from memtrain.cards import load_card
from memtrain.data.loader import Batch
from memtrain.engine import build
from memtrain.planner.predict import predict
from memtrain.units import GIB

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "rope_theta": 100000.0,
}
TARGETS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"
GOALS = {"speed": 1.1, "peak": 0.85}
SHAPE = (4, 64)
TURNS = 12


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write(folder)
        result = compare_speed(folder) | compare_peak(folder)
    rows = [
        ("tokens/s", f"{result['speed']:.2f} x", f">= {GOALS['speed']}"),
        ("peak", f"{result['peak']:.2f} x", f"<= {GOALS['peak']}"),
    ]
    print_rows("LoRA, ours against transformers and peft", ("what", "ratio", "goal"), rows)
    if arguments.save:
        print(save_result("adapters", ("torch", "transformers", "peft"), result))


def write(folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    (folder / "config.json").write_text(json.dumps(SIZES))
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(SIZES))


def compare_speed(folder: Path) -> dict[str, Any]:
    steps = {"ours": our_step(folder), "theirs": peft_step(folder)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(TURNS + 2):
        for name in sorted(steps, reverse=bool(turn % 2)):
            start_s = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - start_s)
    ratios = [
        theirs / ours
        for ours, theirs in zip(seconds["ours"][2:], seconds["theirs"][2:], strict=True)
    ]
    return {
        "speed": statistics.median(ratios),
        "speed_spread": [min(ratios), max(ratios)],
        "our_step_s": statistics.median(seconds["ours"][2:]),
    }


def our_step(folder: Path) -> Callable[[], object]:
    config = composed_config(["model=hf", f"model.path={folder}", "adapter=lora", "adapter.alpha=16", "data=random",
                     "device=cpu", "micro_batch=4", "seq_len=64", "clip=1"])  # fmt: skip
    model = build.build_model(config, build.build_dimensions(config, 1), CPU)
    step = build.build_step(config, model, CPU)
    tokens = torch.randint(SIZES["vocab_size"], (SHAPE[0], SHAPE[1] + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return lambda: step([Batch(inputs, targets, targets.numel())]).tolist()


def peft_step(folder: Path) -> Callable[[], object]:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    settings = LoraConfig(
        r=16, lora_alpha=16, target_modules=TARGETS.split(), task_type="CAUSAL_LM"
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), settings).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    tokens = torch.randint(SIZES["vocab_size"], SHAPE)

    def step() -> None:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def compare_peak(folder: Path) -> dict[str, Any]:
    config = composed_config(["task=plan", "model=hf", f"model.path={folder}", "adapter=lora", "adapter.alpha=16",
                     "data=random", "precision=bf16", "micro_batch=8", "seq_len=1024"])  # fmt: skip
    ours = predict(config, build.build_dimensions(config, 1), load_card("a100_80gb")).report
    row = {"hf_config": "config.json", "param_dtype": "bfloat16", "gradient_checkpointing": "", "lora_rank": "16",
           "lora_alpha": "16", "lora_dropout": "0", "lora_targets": TARGETS, "gpu": "a100-80gb", "quantization": "",
           "optimizer": "adamw foreach", "micro_batch": "8", "seq_len": "1024", "autocast": "bfloat16",
           "clip": "1.0"}  # fmt: skip
    theirs = run_published(row, folder)
    return {
        "peak": ours.peak_allocated_bytes / theirs.peak_allocated_bytes,
        "our_peak_gib": ours.peak_allocated_bytes / GIB,
        "their_peak_gib": theirs.peak_allocated_bytes / GIB,
    }


if __name__ == "__main__":
    main()
