"""A Hugging Face checkpoint from the command line: plan, train, resume, generate, export."""

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from command import Run
from hf_models import causal_lm, make
from safetensors.torch import load_file, save_file

TEXT = "".join(f"line {number}: the quick brown fox\n" for number in range(400))
SIZES = ("seq_len=16", "micro_batch=2", "steps=4", "eval_every=0", "eval_sequences=4", "log_every=1",
         "data=text", "data.path=text.txt", "generate.tokens=4", "schedule.warmup=0")  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its tokenizer, and a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("place")
    make("llama", folder / "model", vocab_size=257, tie_word_embeddings=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate([*alphabet, "<end>"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "model/tokenizer.json"))
    about = {"eos_token": "<end>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "model/tokenizer_config.json").write_text(json.dumps(about))
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_trained_resumed_and_exported(run: Run, place: Path, tmp_path: Path, adapter: str) -> None:
    common = ("model=hf", "model.path=model", f"adapter={adapter}", "plan=off", *SIZES)
    whole = run(*common, "save_every=2", cwd=place, folder=tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    assert "memtrain's Transformer as llama" in whole.stdout
    run(*common, "save_every=2", "keep=-1", cwd=place, folder=tmp_path / "first")
    half = tmp_path / "first/checkpoints/step_00000002"
    resumed = run(*common, f"resume={half}", cwd=place, folder=tmp_path / "second")
    assert resumed.returncode == 0, resumed.stderr
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "second")]
    assert weights[0] == weights[1]
    left = "adapter/adapter_model.safetensors" if adapter == "lora" else "hf/model.safetensors"
    assert (tmp_path / "second" / left).exists()
    text = run("task=generate", f"generate.run={tmp_path / 'second'}", "generate.tokens=3",
               cwd=place)  # fmt: skip
    assert text.returncode == 0, text.stderr
    out = tmp_path / "exported"
    done = run("task=export", f"export.run={half}", f"export.path={out}", "export.merge=true",
               "export.dtype=bf16", cwd=place)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert str(causal_lm(out).dtype) == "torch.bfloat16"
    assert (out / "tokenizer.json").exists()


def test_a_base_is_known_by_its_content(run: Run, place: Path, tmp_path: Path) -> None:
    common = ("model=hf", "adapter=lora", "plan=off", "save_every=2", "keep=-1", *SIZES)
    run(*common, "model.path=model", cwd=place, folder=tmp_path / "first")
    half = f"resume={tmp_path / 'first/checkpoints/step_00000002'}"
    for name in ("moved", "other"):
        shutil.copytree(place / "model", tmp_path / name)
    moved = run(*common, half, f"model.path={tmp_path / 'moved'}", cwd=place)
    assert moved.returncode == 0, moved.stderr
    file = tmp_path / "other/model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] *= 2
    save_file(tensors, file)
    refused = run(*common, half, f"model.path={tmp_path / 'other'}", cwd=place)
    assert refused.returncode == 2 and "another base than model.path" in refused.stderr


def test_a_checkpoint_of_an_adapter_holds_the_adapter(
    run: Run, place: Path, tmp_path: Path
) -> None:
    sizes = {}
    for adapter in ("none", "lora"):
        folder = tmp_path / adapter
        done = run("model=hf", "model.path=model", f"adapter={adapter}", "adapter.rank=1", "save_every=2",
                   "plan=off", *SIZES, "steps=2", cwd=place, folder=folder)  # fmt: skip
        assert done.returncode == 0, done.stderr
        file = folder / "checkpoints/step_00000002/model.safetensors"
        sizes[adapter] = file.stat().st_size
    assert sizes["lora"] < sizes["none"] / 2


def test_planned_without_weights(run: Run, place: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    shutil.copy(place / "model/config.json", tmp_path / "model")
    done = run("task=plan", "model=hf", "model.path=model", "adapter=qlora", "precision=bf16", "gpu=l4",
               "seq_len=16", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "fits" in done.stdout


def bad(folder: Path, what: str) -> list[str]:
    """Spoil `folder`, a copy of a model, and give the overrides."""
    if what == "cut":
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    elif what == "pickle":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    elif what == "shard":
        index = {"weight_map": {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}}
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif what == "family":
        config = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 48}
        (folder / "config.json").write_text(json.dumps(config))
    elif what == "rope":
        config = json.loads((folder / "config.json").read_text())
        config["rope_parameters"] = {"rope_type": "spiral", "rope_theta": 10000.0}
        (folder / "config.json").write_text(json.dumps(config))
    elif what == "vocabulary":
        return ["tokenizer=bpe", "tokenizer.vocab_size=300"]
    elif what == "nothing":
        shutil.rmtree(folder)
    return []


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("cut", "not a whole safetensors file"),
        ("pickle", "save_pretrained"),
        ("shard", "model-00001-of-00002.safetensors"),
        ("family", "mlp"),
        ("rope", "spiral"),
        ("vocabulary", "257 ids"),
        ("nothing", "not there"),
    ],
)
def test_bad_input_is_one_line(run: Run, place: Path, tmp_path: Path, what: str, said: str) -> None:
    shutil.copytree(place, tmp_path / "place")
    more = bad(tmp_path / "place/model", what)
    done = run("model=hf", "model.path=model", "plan=off", *SIZES, *more, cwd=tmp_path / "place")
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and said in errors[0], done.stderr
