"""Every family, in and out, against transformers: tiny models with random norms and biases."""

import json

import pytest
import torch

transformers = pytest.importorskip("transformers")

from memtrain.model.pretrained.as_family import hf_config_of  # noqa: E402
from memtrain.model.pretrained.export import tensors_as, write_folder  # noqa: E402
from memtrain.model.pretrained.families import find_family, shapes_of  # noqa: E402
from memtrain.model.pretrained.load import Source  # noqa: E402
from memtrain.model.transformer import make_transformer  # noqa: E402

CPU = torch.device("cpu")
SEQ_LEN = 48
SIZES = {
    "vocab_size": 129,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {
    "vocab_size": 129,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
EVERY_SECOND = ["full_attention", "sliding_attention", "full_attention"]

MODELS = {
    "gpt2": ("gpt2", GPT2 | {"n_inner": 100}),
    "gpt2 exact gelu, untied": (
        "gpt2",
        GPT2 | {"activation_function": "gelu", "tie_word_embeddings": False},
    ),
    "llama 2": ("llama", SIZES | {"num_key_value_heads": 6}),
    "llama 3": ("llama", SIZES | {"rope_theta": 5e5}),
    "llama 3.1": ("llama", SIZES | {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    "llama 3.2": (
        "llama",
        SIZES
        | {"rope_scaling": LLAMA3 | {"factor": 32.0}, "tie_word_embeddings": True, "head_dim": 16},
    ),
    "llama linear": ("llama", SIZES | {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama yarn": ("llama", SIZES | {"rope_scaling": YARN}),
    "llama yarn with all": (
        "llama",
        SIZES
        | {
            "rope_scaling": YARN
            | {"beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.4}
        },
    ),
    "llama biases": ("llama", SIZES | {"attention_bias": True, "mlp_bias": True}),
    "smollm2": (
        "llama",
        SIZES
        | {
            "rope_theta": 1e5,
            "tie_word_embeddings": True,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
        },
    ),
    "smollm3": ("smollm3", SIZES | {"no_rope_layer_interval": 2}),
    "smollm3 window": (
        "smollm3",
        SIZES
        | {
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 9,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "mistral": ("mistral", SIZES | {"sliding_window": None}),
    "mistral window": ("mistral", SIZES | {"sliding_window": 16, "head_dim": 16}),
    "qwen2": ("qwen2", SIZES | {"rope_theta": 1e6}),
    "qwen2.5 tied, window": (
        "qwen2",
        SIZES
        | {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
        },
    ),
    "qwen3": (
        "qwen3",
        SIZES | {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "qwen3 windows, yarn": (
        "qwen3",
        SIZES
        | {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": EVERY_SECOND,
            "rope_scaling": YARN,
        },
    ),
    "phi3": ("phi3", SIZES | {"num_key_value_heads": 6}),
    "phi3 window": ("phi3", SIZES | {"sliding_window": 11}),
}


def causal_lm(kind, keys):
    """Random, also where a fresh model has ones and zeros: those would hide a wrong name."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **keys)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3) if parameter.ndim > 1 else parameter.add_(
                0.3 * torch.randn_like(parameter)
            )
    return model


def saved(kind, keys, folder, shard="5GB"):
    model = causal_lm(kind, keys)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def loaded(folder, dtype=torch.float32):
    source = Source(folder)
    family = find_family(source.config)
    dimensions = family.dimensions(source.config)
    rows = family.rows(dimensions)
    source.check(rows, shapes_of(dimensions))
    return make_transformer(dimensions, CPU, dtype, source.filler(rows)).eval()


def tokens():
    return torch.randint(0, 129, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits_of(model):
    if isinstance(model, transformers.PreTrainedModel):
        return model(input_ids=tokens()).logits
    return model(tokens()) @ model.head.weight.t()


def assert_close(found, wanted):
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def weights_of(model):
    parameters = dict(model.named_parameters())
    return lambda name: model.weight(parameters[name])


def exported(model, hf_config, folder, **options):
    dimensions = model.dimensions
    rows = find_family(hf_config).rows(dimensions)
    tensors = tensors_as(rows, shapes_of(dimensions), torch.float32, weights_of(model))
    write_folder(folder, hf_config, tensors, **options)


def reloaded(folder):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval()


@pytest.mark.parametrize("name", MODELS)
def test_the_same_logits_in_and_out(name, tmp_path):
    """Through our own export, sharded for every second one, and as the family that the dimensions alone say."""
    sharded = list(MODELS).index(name) % 2
    model = saved(*MODELS[name], tmp_path / "in", shard="40KB" if sharded else "5GB")
    assert (tmp_path / "in/model.safetensors.index.json").exists() == bool(sharded)
    wanted = logits_of(model)
    ours = loaded(tmp_path / "in")
    assert_close(logits_of(ours), wanted)

    config = json.loads((tmp_path / "in/config.json").read_text())
    exported(ours, config, tmp_path / "out", shard_bytes=40_000 if sharded else 5 * 10**9)
    assert (tmp_path / "out/model.safetensors.index.json").exists() == bool(sharded)
    again = reloaded(tmp_path / "out")
    assert_close(logits_of(again), wanted)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)

    if MODELS[name][0] != "phi3":  # a Mistral or a Llama by what it is
        assert hf_config_of(ours.dimensions)["model_type"] == MODELS[name][0] or "mistral" in name
    exported(ours, hf_config_of(ours.dimensions), tmp_path / "own")
    assert_close(logits_of(reloaded(tmp_path / "own")), wanted)
