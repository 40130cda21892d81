"""The words of a command line: Hydra's flags stay Hydra's, other trainers' words are answered with ours."""

import re
from pathlib import Path

import pytest
from command import ROOT
from hydra._internal.utils import get_args_parser

from memtrain import words
from memtrain.config import elsewhere
from memtrain.config.read import all_keys, groups
from memtrain.errors import UserError


def arranged(*typed: str) -> list[str]:
    return words.arrange(typed, ROOT)


def answer(*typed: str) -> str:
    with pytest.raises(UserError) as refused:
        arranged(*typed)
    return str(refused.value)


def test_every_flag_of_hydra_is_known_with_what_it_takes() -> None:
    parser = get_args_parser()
    takes = {
        flag: action.nargs or action.type or not isinstance(action.const, bool)
        for action in parser._actions
        for flag in action.option_strings
    }
    stores = {"_StoreAction": words.TAKES_A_VALUE, "_StoreTrueAction": words.ALONE}
    for action in parser._actions:
        known = stores.get(type(action).__name__, words.ALONE)
        known = words.MAY_TAKE_ONE if action.nargs == "?" else known
        assert set(action.option_strings) <= set(known)
    assert set(takes) == {*words.ALONE, *words.TAKES_A_VALUE, *words.MAY_TAKE_ONE}
    (info,) = (action for action in parser._actions if action.dest == "info")
    assert tuple(info.choices) == words.INFO


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("steps=3 --info defaults seed=1", "--info defaults -- steps=3 seed=1"),
        ("--info steps=3", "--info -- steps=3"),
        ("steps=3 --experimental-rerun x.pickle", "--experimental-rerun x.pickle -- steps=3"),
        ("steps=1 -cd own --multirun -- seed=1,2", "-cd own --multirun -- steps=1 seed=1,2"),
        ("-sc query=bash", "-sc -- query=bash"),
        ("house=x --config-n own", "--config-n own -- house=x"),
        ("-cjob steps=1 --resolve", "-cjob --resolve -- steps=1"),
        ("seed=1 --multi steps=1 -idefaults", "--multi -idefaults -- seed=1 steps=1"),
        ("--config-path own -m", f"--config-path {ROOT}/own -m --"),
        ("-cp=own ~model.foo=1", f"-cp={ROOT}/own -- ~model.foo=1"),
        (
            "+hydra.x=1 optimizer.betas.0=0.8 hydra/launcher=joblib model@model=gpt2",
            "-- +hydra.x=1 optimizer.betas.0=0.8 hydra/launcher=joblib model@model=gpt2",
        ),
    ],
)
def test_flags_come_first_with_their_values(typed: str, found: str) -> None:
    assert arranged(*typed.split()) == found.split()


def test_a_person_s_own_group_is_no_unknown_key(tmp_path: Path) -> None:
    (tmp_path / "conf/house").mkdir(parents=True)
    (tmp_path / "more/yard").mkdir(parents=True)
    for given in (["--config-dir", "more"], ["--config-d=more"]):
        typed = ["house=x", *given, "yard=y"]
        assert words.arrange(typed, tmp_path)[-2:] == ["house=x", "yard=y"]
    assert "house: unknown key" in answer("house=x")


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("--batch_size=8", "use micro_batch=8"),
        ("--learning-rate 1e-4", "use optimizer.lr=1e-4"),
        ("-lr 1e-4", "use optimizer.lr=1e-4"),
        ("--steps 5", "use steps=5"),
        ("--n_layers 5", "use model.n_layers=5"),
        ("--fp16 debug=tiny", "use precision=fp16"),
        ("--compile False", "use compile=off"),
        ("per_device_train_batch_size=8", "use micro_batch=8"),
        ("num_train_epochs=3", "use epochs=3"),
        ("fp16=true", "use precision=fp16"),
        ("fp16=False", "drop it: that is so by itself"),
        ("block_size=64", "use seq_len=64"),
        ("max_iters=10", "use steps=10"),
        ("accumulate_grad_batches=4", "use accum=4"),
        ("precision=16-mixed,bf16-true", "use precision=fp16,bf16_true"),
        ("learning_rate=1e-3,1e-4 -m", "use optimizer.lr=1e-3,1e-4"),
        ("+gradient_checkpointing=true", "use checkpoint_every=1"),
        ("optim=adamw_torch_fused", "use optimizer=adamw"),
        ("optimizer.type=Lion", "use optimizer=lion"),
        ("lr_scheduler_type=constant_with_warmup", "use schedule=constant"),
        ("zero_optimization.stage=0", "shares state out among GPUs, and there is one here; use offload=none"),
        ("zero_stage=3", "shares state out among GPUs; on one, host memory takes it: use offload=params"),
        ("strategy=deepspeed_stage_2_offload", "use offload=optimizer offload.gradients=true"),
        ("train_batch_size=32 accum=4", "is global, which is micro_batch x accum here; use micro_batch=8 accum=4"),
        ("adam_beta1=0.8", "use optimizer.betas=[0.8,0.95]"),
        ("beta2=0.99", "use optimizer.betas=[0.9,0.99]"),
        (
            "min_lr=1e-4 optimizer.lr=5e-4",
            "is a rate, schedule.min_ratio a share of optimizer.lr=5e-4; use schedule.min_ratio=0.2",
        ),
        (
            "warmup_ratio=0.03 steps=1000",
            "is a share, schedule.warmup counts steps; use schedule.warmup=30 for steps=1000",
        ),
        ("fp16.initial_scale_power=12", "use precision.loss_scale=4096"),
        ("resume_from_checkpoint=out/step_7", "use resume=out/step_7"),
        ("init_from=gpt2-xl", "use model=gpt2_xl, which starts from random weights"),
    ],
)  # fmt: skip
def test_a_word_of_another_trainer_is_answered_with_ours(typed: str, found: str) -> None:
    assert answer(*typed.split()).partition(": ")[2] == found


def test_zero_with_offload_names_where_the_state_goes() -> None:
    typed = "zero_stage=3 offload_optimizer_device=cpu offload_param_device=cpu"
    text = answer(*typed.split())
    assert text.startswith("zero_stage=3: use offload=params; ")
    assert text.endswith("offload_param_device=cpu: use offload=params")


def test_all_that_is_advised_exists() -> None:
    """Keys are ours, and a group's value is one of its files. `epochs` is a key to come."""
    advised = [f"{key}=1" for key in elsewhere.RENAMED.values()]
    for key, theirs in (*elsewhere.CHOICES.values(), *elsewhere.VALUES.items()):
        advised += [f"{key}={ours}" for ours in theirs.values()]
    advised += [word for pair in elsewhere.SWITCHES.values() for word in " ".join(pair).split()]
    typed = dict.fromkeys(elsewhere.COMPUTED, "3")
    for name in elsewhere.COMPUTED:
        advised += re.findall(r"[a-z_.]+=\w+", str(elsewhere.meaning(name, "3", typed)))
    for key, value in (word.split("=") for word in advised if "=" in word):
        assert key in (*all_keys(), *groups(), "epochs")
        if key in groups() and not value.isdigit():
            assert (ROOT / "conf" / key / f"{value}.yaml").exists(), (key, value)


def test_no_word_of_another_trainer_is_a_key_of_ours() -> None:
    keys = (elsewhere.RENAMED, elsewhere.CHOICES, elsewhere.SWITCHES)
    names = [name for table in (*keys, elsewhere.DROPPED, elsewhere.COMPUTED) for name in table]
    assert len(names) == len(set(names))
    assert not set(names) & {*all_keys(), *groups()}
