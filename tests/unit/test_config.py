"""The rules of the config, one by one, with values as the command line gives them."""

import re
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from typing import get_args, get_type_hints

import pytest
from workbench import Workbench

from memtrain.cards import Card
from memtrain.config import Config, parse
from memtrain.config.derived import last_segment, segment_blocks, with_steps
from memtrain.config.effects import EFFECTS, no_effect_warnings
from memtrain.config.tree import GpuConfig
from memtrain.errors import UserError

Compose = Callable[..., Config]

WRONG_TYPES = {
    "accum=off": "accum=off: must be a whole number",
    "accum=1.5": "accum=1.5: must be a whole number",
    "accum=true": "accum=True: must be a whole number",
    "accum=null": "accum=None: must be a whole number",
    "accum=[1]": "accum=[1]: must be a whole number",
    "deterministic=1": "deterministic=1: must be true or false",
    "deterministic=off": "deterministic=off: must be true or false",
    "optimizer.lr=fast": "optimizer.lr=fast: must be a number",
    "optimizer.lr=true": "optimizer.lr=True: must be a number",
    "optimizer.betas=0.9": "optimizer.betas=0.9: must be a list",
    "optimizer.name=adamw_4bit": "optimizer.name=adamw_4bit: choose one of adamw, adamw_8bit, ",
    "optimizer.betas=[a,b]": "optimizer.betas=a: must be a number",
    "name=7": "name=7: must be text",
    "data.path=7": "data.path=7: must be text",
    "compile=false": "compile=false: choose one of off, blocks, model",
    "model.n_kv_heads=two": "model.n_kv_heads=two: must be a whole number",
}
OUT_OF_RANGE = {
    "accum=0": "accum=0: must be at least 1",
    "steps=-1": "steps=-1: must be at least 1",
    "epochs=0": "epochs=0: must be above 0",
    "epochs=two": "epochs=two: must be a number",
    "seq_len=0": "seq_len=0: must be at least 1",
    "checkpoint_every=-1": "checkpoint_every=-1: must be at least 0",
    "clip=-0.5": "clip=-0.5: must be at least 0",
    "seed=-1": "seed=-1: must be at least 0",
    "optimizer.lr=0": "optimizer.lr=0: must be above 0",
    "optimizer.lr=nan": "optimizer.lr=nan: must be above 0 and at most 1e+38, not nan",
    "optimizer.lr=inf": "optimizer.lr=inf: must be above 0 and at most 1e+38, not infinite",
    "clip=-inf": "clip=-inf: must be at least 0 and at most 1e+38, not infinite",
    "optimizer.lr=1e39": "optimizer.lr=1e+39: must be above 0 and at most 1e+38",
    f"loss.z_loss=1{400 * '0'}": "loss.z_loss=inf: must be at least 0 and at most 1e+38, not infinite",
    "optimizer.betas=[0.9,nan]": "optimizer.betas=nan: must be at least 0 and at most 1, not nan",
    "checkpointing.budget_gib=inf": "checkpointing.budget_gib=inf: must be above 0 and at most 1e+38, not infinite",
    "gpu.efficiency=nan": "gpu.efficiency=nan: must be at least 0.001 and at most 1, not nan",
    "gpu.bandwidth_gb_s=inf": "gpu.bandwidth_gb_s=inf: must be at least 0.001 and at most 1000000000, not infinite",
    "data.val_fraction=0.6": "data.val_fraction=0.6: must be at least 0 and at most 0.5",
    "schedule.min_ratio=1.5": "schedule.min_ratio=1.5: must be at least 0 and at most 1",
    "model.dropout=1.0": "model.dropout=1.0: must be at least 0 and at most 0.999",
    "model.n_heads=0": "model.n_heads=0: must be at least 1",
    "model.n_heads=-2": "model.n_heads=-2: must be at least 1",
    "tokenizer.vocab_size=256": "tokenizer.vocab_size=256: must be at least 257",
    "model.n_layers=1000000": "model.n_layers=1000000: must be at least 1 and at most 10000",
    "accum=10000000": "accum=10000000: must be at least 1 and at most 1000000",
    "micro_batch=9223372036854775808": "micro_batch=9223372036854775808: must be at least 1 and at most 1000000",
    "model.dim=9223372036854775808": "model.dim=9223372036854775808: must be at least 1 and at most 1000000000",
    f"accum=1{400 * '0'}": "accum=1000",
    "precision.loss_scale=1e300": "precision.loss_scale=1e+300: must be above 0 and at most 1e+38",
    "gpu.bandwidth_gb_s=0": "gpu.bandwidth_gb_s=0: must be at least 0.001 and at most 1000000000",
    "gpu.context_mib=-5": "gpu.context_mib=-5: must be at least 0",
    "gpu.efficiency=1.5": "gpu.efficiency=1.5: must be at least 0.001 and at most 1",
    "gpu.bf16_tflops=-1": "gpu.bf16_tflops=-1: must be at least 0",
    "task=fly": "task=fly: choose one of train, ",
    "device=tpu": "device=tpu: choose one of auto, cpu, cuda",
    "model.norm=batchnorm": "model.norm=batchnorm: choose one of layernorm, rmsnorm",
}
COMBINATIONS = {
    "model.dim=100 model.n_heads=3": ["model.dim=100", "model.n_heads=3", "not divisible"],
    "gpu.memory_mib=400 gpu.context_mib=400": ["gpu.context_mib=400", "gpu.memory_mib=400"],
    "model.n_heads=4 model.n_kv_heads=3": ["model.n_kv_heads=3", "model.n_heads=4"],
    "model.dim=12 model.n_heads=4 model.positions=rope": ["model.positions=rope", "12", "4", "3"],
    "seq_len=32 model.max_seq_len=16": ["seq_len=32", "model.max_seq_len=16"],
    "data=text": ["data.path", "data=text"],
    "data=tokens": ["data.path", "data=tokens"],
    "data=jsonl": ["data.path", "data=jsonl"],
    "data=text data.path=a data.document_mask=true": [
        "data.document_mask=true",
        "data=text",
        "data=jsonl",
    ],
    "model=hf": ["model.path", "model=hf", "model.path=DIR"],
    "model=hf model.path=nowhere": ["nowhere", "not there"],
    "tokenizer=model": ["tokenizer=model", "model.path=DIR"],
    "adapter=lora": ["adapter=lora", "model=hf"],
    "adapter=qlora task=plan model.train_only=all": ["model.train_only", "adapter.also_train"],
    "adapter.path=a": ["adapter.path", "adapter=lora"],
    "data=tokens data.path=[a,b]": ["data.path", "one token file"],
    "tokenizer=file": ["tokenizer.path", "tokenizer=file"],
    "keep=0": ["keep=0", "-1 for all"],
    "resume=latest task=plan": ["resume=latest", "task=plan"],
    "offload=optimizer_nvme": ["offload=optimizer_nvme", "offload.nvme_dir=/mnt/nvme"],
    "offload=all_nvme offload.nvme_dir=/x optimizer=muon": ["offload=all_nvme", "optimizer=muon"],
    "offload=params compile=blocks": ["compile=blocks", "come and go", "offload=optimizer"],
    "offload=optimizer task=numerics": ["offload=optimizer", "task=numerics"],
    "precision.master_weights=false": ["precision.master_weights=false", "precision=bf16_true"],
    "precision=bf16_true precision.master_weights=false offload=optimizer": [
        "precision.master_weights=false",
        "offload=optimizer",
    ],
    "optimizer.in_backward=true accum=2": ["optimizer.in_backward=true", "offload.gradients=true"],
    "optimizer.in_backward=true offload=params": ["optimizer.in_backward=true", "offload=params"],
    "optimizer.in_backward=true precision=fp16 optimizer.in_backward_clip=per_parameter": [
        "optimizer.in_backward=true",
        "two_pass",
    ],
    "optimizer.betas=[0.9]": ["optimizer.betas=[0.9]", "two numbers"],
    "optimizer.betas=[0.9,1.0]": ["optimizer.betas=[0.9, 1.0]", "below 1"],
    "name=a/b": ["name='a/b'", "folder"],
    "name=.hidden": ["name='.hidden'", "folder"],
    "name=''": ["name=''", "folder"],
    "checkpointing=sqrt checkpoint_every=2": ["checkpoint_every=2", "checkpointing=sqrt"],
    "data=random task=generate": ["task=generate", "data=random"],
    "steps=5 epochs=2": ["epochs=2", "steps=5", "null"],
    "debug=tiny epochs=0.5": ["epochs=0.5", "data=random", "steps"],
    "steps=null": ["steps=null", "epochs"],
}
COMBINATIONS |= {
    "compile=blocks checkpointing=budget": ["compile=blocks", "checkpointing=budget"],
    "compile=blocks checkpointing=selective": ["compile=blocks", "selective", "compile=model"],
    "compile=model offload=activations": ["compile=model", "offload", "compile=blocks"],
}
NOT_AVAILABLE = [
    "precision=fp8",
]


def refusal(config: Compose, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        config(*overrides)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


@pytest.mark.parametrize("override", [*WRONG_TYPES, *OUT_OF_RANGE])
def test_a_wrong_value_is_refused_with_its_key(override: str, config: Compose) -> None:
    expected = (WRONG_TYPES | OUT_OF_RANGE)[override]
    assert refusal(config, override).lower().startswith(expected.lower())


def test_every_number_of_a_card_has_a_range() -> None:
    hints = get_type_hints(GpuConfig, include_extras=True)
    assert {name for name in hints if hints[name] in (int, float)} == set()
    assert [field.name for field in fields(GpuConfig)] == [*Card.__dataclass_fields__, "auto"]


@pytest.mark.parametrize("overrides", COMBINATIONS)
def test_what_does_not_go_together_is_refused(overrides: str, config: Compose) -> None:
    message = refusal(config, *overrides.split())
    assert [text for text in COMBINATIONS[overrides] if text not in message] == []
    assert message.startswith(COMBINATIONS[overrides][0])


@pytest.mark.parametrize("override", NOT_AVAILABLE)
def test_what_is_not_built_yet_says_so(override: str, config: Compose) -> None:
    assert refusal(config, override).startswith(f"{override}: not available")


def test_an_unknown_or_missing_key_is_named(config: Compose) -> None:
    tree = asdict(config())
    with pytest.raises(UserError, match=r"^model\.n_head: unknown key; did you mean model\.n_head"):
        parse(tree | {"model": tree["model"] | {"n_head": 4}})
    with pytest.raises(UserError, match=r"^colour: unknown key"):
        parse(tree | {"colour": "red"})
    del tree["schedule"]["warmup"]
    with pytest.raises(UserError, match=r"^schedule\.warmup: missing"):
        parse(tree)
    with pytest.raises(UserError, match=r"^schedule: expected a group of keys"):
        parse(tree | {"schedule": None})


def test_a_parsed_config_is_parsed_again_to_the_same(config: Compose) -> None:
    parsed = config("experiment=4_bf16_accum_recompute", "clip=1")
    assert isinstance(parsed.clip, float)
    assert parse(asdict(parsed)) == parsed


def test_epochs_take_the_place_of_steps_by_default(config: Compose) -> None:
    assert (config().steps, config().epochs) == (300, None)
    told = [config("epochs=2"), config("steps=null", "epochs=2"), config("task=plan", "epochs=2")]
    told += [config("debug=tiny", "data=text", "data.path=a", "epochs=2")]
    assert [(one.steps, one.epochs) for one in told] == [(None, 2.0)] * 4


@pytest.mark.parametrize(
    ("windows", "epochs", "steps"),
    [(6, 1.5, 9), (6, 1.4, 9), (10, 0.7, 7), (10, 2.1, 21), (3, 0.01, 1)],
)
def test_epochs_are_that_many_steps(
    windows: int, epochs: float, steps: int, config: Compose
) -> None:
    """The last window of a part of an epoch is a whole one; 10 x 0.7 is 7, though not in floats."""
    found = with_steps(config(f"epochs={epochs}"), windows)
    assert (found.steps, found.epochs) == (steps, None)
    assert with_steps(found, windows) == found


def test_limits_are_inside(config: Compose) -> None:
    assert config("seq_len=16", "model.max_seq_len=16").seq_len == 16
    assert config("seed=9223372036854775807").seed == 2**63 - 1
    assert config("model.n_heads=4", "model.n_kv_heads=1").model.n_kv_heads == 1
    assert config("clip=0", "checkpoint_every=0", "optimizer.weight_decay=0").clip == 0
    assert config("data=text", "data.path=[a.txt,b]").data.path == ["a.txt", "b"]


@pytest.mark.parametrize(
    ("overrides", "blocks"),
    [
        ([], 0),
        (["checkpoint_every=3"], 3),
        (["checkpointing=every_layer"], 1),
        (["checkpointing=sqrt", "model.n_layers=12"], 3),
        (["checkpointing=sqrt", "model.n_layers=1"], 1),
    ],
)
def test_blocks_of_a_segment(overrides: list[str], blocks: int, config: Compose) -> None:
    assert segment_blocks(config(*overrides)) == blocks


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        ("precision=bf16 precision.tf32=true", "precision.tf32=true has no effect"),
        ("checkpointing=alternate checkpoint_every=1", "checkpointing=alternate"),
        ("checkpoint_every=9", "checkpoint_every=9"),
        ("steps=20", "schedule.warmup=20"),
        ("optimizer.momentum=0.9", "optimizer.momentum=0.9 has no effect"),
        (
            "optimizer=lion optimizer.implementation=foreach",
            "optimizer.implementation=foreach has no effect without optimizer=adamw or sgd",
        ),
        ("optimizer=lion optimizer.eps=1e-6", "optimizer.eps=1e-06 has no effect"),
        (
            "optimizer=adafactor optimizer.betas=[0.8,0.9]",
            "optimizer.betas=[0.8, 0.9] has no effect",
        ),
        (
            "optimizer=paged_adamw_8bit device=cpu",
            "optimizer=paged_adamw_8bit pages nothing with device=cpu",
        ),
        ("task=numerics model.dropout=0.1", "model.dropout=0.1 has no effect"),
        ("tokenizer=bytes tokenizer.vocab_size=300", "tokenizer.vocab_size=300 has no effect"),
        ("tokenizer.end_of_text=x", "tokenizer.end_of_text=x has no effect without tokenizer=file"),
        ("loss=full loss.chunk_mib=1", "loss.chunk_mib=1 has no effect"),
    ],
)
def test_a_switch_without_effect_warns(overrides: str, warning: str, config: Compose) -> None:
    (found,) = no_effect_warnings(config(*overrides.split()))
    assert found.startswith(warning)


@pytest.mark.parametrize(
    "overrides",
    [
        "optimizer=sgd optimizer.implementation=for_loop",
        "optimizer=adamw optimizer.implementation=foreach",
        "optimizer=muon optimizer.momentum=0.9 optimizer.betas=[0.8,0.9] optimizer.eps=1e-6",
        "optimizer=adamw_8bit optimizer.betas=[0.8,0.9] optimizer.eps=1e-6",
    ],
)
def test_a_setting_of_the_optimizer_that_has_it_does_not_warn(
    overrides: str, config: Compose
) -> None:
    assert no_effect_warnings(config(*overrides.split())) == []


LISTED = re.compile(r"(?!model)[a-z]+=\w+((, \w+)* or \w+)?")


@pytest.mark.parametrize(
    ("key", "needed", "has"), [effect for effect in EFFECTS if LISTED.fullmatch(effect[1])]
)
def test_a_key_has_its_effect_with_every_choice_that_is_named_and_no_other(
    key: str, needed: str, has: Callable[[Config], bool], config: Compose
) -> None:
    group, named = needed.split("=")
    found = [choice for choice, chosen in every_choice(config(), group) if has(chosen)]
    assert sorted(found) == sorted(re.split(", | or ", named))


def every_choice(config: Config, group: str) -> list[tuple[str, Config]]:
    """The first key of a group is the one that its files choose."""
    if group == "task":
        tasks = get_args(get_type_hints(Config)["task"])
        return [(task, replace(config, task=task)) for task in tasks]
    part = getattr(config, group)
    key = fields(part)[0].name
    choices = get_args(get_type_hints(type(part))[key])
    return [
        (choice, replace(config, **{group: replace(part, **{key: choice})})) for choice in choices
    ]


@pytest.mark.parametrize("name", ["adafactor", "adamw_8bit", "lion", "muon", "paged_adamw_8bit"])
def test_the_choices_of_optimizers_warn_of_nothing(name: str, config: Compose) -> None:
    assert no_effect_warnings(config(f"optimizer={name}")) == []


def test_the_defaults_warn_of_nothing(config: Compose) -> None:
    assert no_effect_warnings(config()) == []


@pytest.mark.parametrize(
    "overrides",
    [
        "model.mlp_chunks=200 seq_len=128",
        "model.mlp_chunks=2 checkpointing=selective",
        "model.mlp_chunks=2 checkpointing=selective model.mlp_chunk_blocks=1-2 checkpointing.blocks=2-3",
        "model.mlp_chunks=2 checkpointing=per_block checkpointing.per_block=[selective,keep,keep,keep]",
        "model.mlp_chunks=2 checkpointing=budget",
        "model.mlp_chunks=2 checkpointing=budget model.mlp_chunk_blocks=0",
    ],
)
def test_mlp_chunks_that_cannot_help_are_refused(overrides: str, config: Compose) -> None:
    with pytest.raises(UserError, match=r"^model.mlp_chunks="):
        config(*overrides.split())


@pytest.mark.parametrize(
    "overrides",
    [
        "model.mlp_chunk_blocks=0 checkpointing=selective checkpointing.blocks=3",
        "model.mlp_chunk_blocks=1-3 checkpointing=per_block checkpointing.per_block=[selective,keep,keep,recompute]",
    ],
)
def test_mlp_chunks_of_other_blocks_are_accepted(overrides: str, tiny: Compose) -> None:
    assert tiny("model.mlp_chunks=2", *overrides.split()).model.mlp_chunks == 2


@pytest.mark.parametrize(
    "overrides",
    [
        "model.n_layers=1",
        "offload.blocks=3",
        "offload.blocks='last 1'",
        "offload.activations_fraction=0.2",
        "offload.activations_fraction=0",
        "checkpoint_every=4",
        "checkpointing=sqrt offload.blocks='last 2'",
        "checkpoint_every=3 checkpointing.blocks=1-3 offload.blocks='last 3'",
    ],
)
def test_activations_that_cannot_leave_warn(overrides: str, tiny: Compose) -> None:
    parts = re.findall(r"(?:[^ ']|'[^']*')+", overrides)
    (found,) = no_effect_warnings(tiny("offload=activations", *parts))
    assert found.startswith("offload=activations moves no activations: ")


@pytest.mark.parametrize(
    "overrides",
    [
        ["checkpoint_every=3"],
        ["checkpointing=sqrt"],
        ["checkpointing=alternate", "checkpoint_every=2"],
        ["checkpoint_every=2", "checkpointing.blocks=1-3"],
        ["checkpoint_every=3", "checkpointing.blocks='0,last 2'"],
        ["checkpoint_every=2", "checkpointing.blocks='first 3'"],
        ["checkpointing=selective"],
    ],
    ids=" ".join,
)
def test_the_last_segment_is_that_of_the_model(
    overrides: list[str], tiny: Compose, bench: Workbench
) -> None:
    wanted = tiny(*overrides)
    assert last_segment(wanted) == set(bench.step(wanted).model.segments[-1].blocks)


def test_a_last_block_that_is_to_leave_warns(tiny: Compose) -> None:
    per_block = "checkpointing.per_block=[keep,keep,keep,offload]"
    (found,) = no_effect_warnings(tiny("checkpointing=per_block", per_block))
    assert found.startswith(f"{per_block} moves no activations: ")


@pytest.mark.parametrize(
    "overrides",
    [
        ["offload=activations"],
        ["offload=activations", "checkpoint_every=3"],
        ["offload=activations", "checkpointing=sqrt", "offload.blocks='1,last 1'"],
        ["offload=activations", "checkpoint_every=4", "checkpointing.blocks='first 3'"],
        ["offload=activations", "checkpointing=alternate", "checkpoint_every=3"],
        ["checkpointing=per_block", "checkpointing.per_block=[keep,offload,keep,keep]"],
        ["checkpointing=budget"],
    ],
    ids=" ".join,
)
def test_activations_that_leave_do_not_warn(overrides: list[str], tiny: Compose) -> None:
    assert no_effect_warnings(tiny(*overrides)) == []


@pytest.mark.parametrize(
    "overrides",
    [
        "checkpointing=selective checkpointing.keep=[attention] checkpointing.matmul_fraction=0.5",
        "offload=activations offload.activations_fraction=0",
        "checkpointing=per_block checkpointing.per_block=[keep,keep,keep,keep] offload.min_tensor_bytes=0",
    ],
)
def test_a_saving_that_saves_nothing_warns(overrides: str, config: Compose) -> None:
    assert no_effect_warnings(config(*overrides.split()))
