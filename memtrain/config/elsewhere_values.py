"""Other trainers' keys whose values differ from ours: what differs and what to type. No torch."""

from collections.abc import Callable, Mapping

Typed = Mapping[str, str]
"""All that was typed, by name: some meanings depend on a neighbour."""


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _batch(value: str, typed: Typed) -> str:
    """Theirs counts all GPUs and all accumulation, ours one forward."""
    accum = typed.get("accum") or typed.get("gradient_accumulation_steps") or "1"
    whole = value.isdigit() and accum.isdigit() and int(accum) and not int(value) % int(accum)
    micro = str(int(value) // int(accum)) if whole else "N"
    return f"is global, which is micro_batch x accum here; use micro_batch={micro} accum={accum}"


def _warmup(value: str, typed: Typed) -> str:
    steps = next((typed[key] for key in ("steps", "max_steps", "max_iters") if key in typed), "300")
    share = _number(value)
    count = f"{share * int(steps):.0f}" if share is not None and steps.isdigit() else "N"
    return (
        f"is a share, schedule.warmup counts steps; use schedule.warmup={count} for steps={steps}"
    )


def _min_lr(value: str, typed: Typed) -> str:
    lr = next(
        (typed[key] for key in ("optimizer.lr", "learning_rate", "lr") if key in typed), "1e-3"
    )
    low, high = _number(value), _number(lr)
    ratio = f"{low / high:g}" if low is not None and high else "R"
    return f"is a rate, schedule.min_ratio a share of optimizer.lr={lr}; use schedule.min_ratio={ratio}"


def _betas(place: int) -> Callable[[str, Typed], str]:
    def betas(value: str, typed: Typed) -> str:
        other = (f"adam_beta{2 - place}", f"beta{2 - place}")
        both = [next((typed[key] for key in other if key in typed), ("0.95", "0.9")[place])]
        both.insert(place, value)
        return f"use optimizer.betas=[{both[0]},{both[1]}]"

    return betas


def _batches(value: str, typed: Typed) -> str:
    size = next((typed[k] for k in ("micro_batch", "batch_size") if k in typed), "16")
    count = str(int(value) * int(size)) if value.isdigit() and size.isdigit() else "N"
    return f"counts batches, eval_sequences counts sequences; use eval_sequences={count}"


ZERO = {"0": "none", "1": "optimizer", "2": "optimizer", "3": "params"}


def _zero(value: str, typed: Typed) -> str:
    """A stage says what is shared out among GPUs; on one GPU the same tensors leave for the host instead."""
    mode = ZERO.get(value)
    if mode is None:
        return f"use offload=, one of {', '.join(dict.fromkeys(ZERO.values()))}"
    homes = {home for key, home in typed.items() if "offload_" in key and key.endswith("device")}
    if (homes and homes <= {"none"}) or mode == "none":
        return "shares state out among GPUs, and there is one here; use offload=none"
    if "nvme" in homes:
        mode = (
            "all_nvme"
            if typed.get(PARAMETER_HOMES[0], typed.get(PARAMETER_HOMES[1])) == "nvme"
            else f"{mode}_nvme"
        )
    text = f"use offload={mode}"
    gradients = " offload.gradients=true" if value == "2" else ""
    if homes:
        return text + gradients
    return f"shares state out among GPUs; on one, host memory takes it: {text}{gradients}"


OPTIMIZER_HOMES = ("zero_optimization.offload_optimizer.device", "offload_optimizer_device")
PARAMETER_HOMES = ("zero_optimization.offload_param.device", "offload_param_device")


def _home(mode: str, in_files: str) -> Callable[[str, Typed], str]:
    def home(value: str, typed: Typed) -> str:
        both = {"cpu": mode, "nvme": in_files, "none": "none"}
        stays = mode == "optimizer" and any(
            typed.get(key, "none") != "none" for key in PARAMETER_HOMES
        )
        if stays:
            return "is part of offload=params, which takes the optimizer along; drop it"
        known = ", ".join(both)
        return f"use offload={both[value]}" if value in both else f"{value} is none of {known}"

    return home


def _strategy(value: str, typed: Typed) -> str:
    stage, _, offload = value.removeprefix("deepspeed_stage_").partition("_")
    if value.startswith("deepspeed") and stage in ZERO:
        return _zero(stage, {"offload_optimizer_device": "cpu"} if offload else {})
    return "drop it: one process trains on one GPU; offload=params keeps weights in host memory"


def _devices(value: str, typed: Typed) -> str:
    return "drop it: one process trains on one GPU" + (
        "" if value in ("1", "auto") else ", not more"
    )


def _strategy_of(key: str) -> Callable[[str, Typed], str]:
    def strategy(value: str, typed: Typed) -> str:
        off = f"use {key}=0" + (" (at the end only)" if key == "eval_every" else "")
        return off if value in ("no", "false") else f"use {key}=N, which counts steps"

    return strategy


def _steps_alone(key: str) -> Callable[[str, Typed], str]:
    return lambda value, typed: f"counts epochs or parts of one; use {key}=N, which counts steps"


def _scale(value: str, typed: Typed) -> str:
    power = int(value) if value.isdigit() else 16
    return f"use precision.loss_scale={2 ** min(power, 64)}"


def _static_scale(value: str, typed: Typed) -> str:
    if _number(value) == 0:
        return "drop it: the scale is always dynamic"
    return f"is a fixed scale, here it is dynamic; use precision.loss_scale={value} to begin with"


def _resume(value: str, typed: Typed) -> str:
    return {"true": "use resume=latest", "false": "drop it"}.get(value, f"use resume={value}")


def _begin(value: str, typed: Typed) -> str:
    if value == "resume":
        return "use resume=latest"
    preset = value.replace("-", "_")
    if value == "scratch":
        return "drop it: training starts from random weights"
    return f"use model={preset}, which starts from random weights"


def _absent(what: str) -> Callable[[str, Typed], str]:
    return lambda value, typed: f"{what}: not available in this version"


def _clip_by(value: str, typed: Typed) -> str:
    return "drop it: clip=N is by the norm" + ("" if value == "norm" else ", never by value")


COMPUTED: dict[str, Callable[[str, Typed], str]] = {
    "train_batch_size": _batch,
    "global_batch_size": _batch,
    "total_batch_size": _batch,
    "effective_batch_size": _batch,
    "warmup_ratio": _warmup,
    "min_lr": _min_lr,
    "scheduler.params.warmup_min_lr": _min_lr,
    "adam_beta1": _betas(0),
    "beta1": _betas(0),
    "adam_beta2": _betas(1),
    "beta2": _betas(1),
    "eval_iters": _batches,
    "limit_val_batches": _batches,
    "zero_stage": _zero,
    "zero_optimization.stage": _zero,
    **dict.fromkeys(OPTIMIZER_HOMES, _home("optimizer", "optimizer_nvme")),
    **dict.fromkeys(PARAMETER_HOMES, _home("params", "all_nvme")),
    "strategy": _strategy,
    "devices": _devices,
    "gpus": _devices,
    "eval_strategy": _strategy_of("eval_every"),
    "evaluation_strategy": _strategy_of("eval_every"),
    "save_strategy": _strategy_of("save_every"),
    "check_val_every_n_epoch": _steps_alone("eval_every"),
    "evals_per_epoch": _steps_alone("eval_every"),
    "saves_per_epoch": _steps_alone("save_every"),
    "limit_train_batches": _steps_alone("steps"),
    "fp16.initial_scale_power": _scale,
    "fp16.loss_scale": _static_scale,
    "resume_from_checkpoint": _resume,
    "init_from": _begin,
    "gradient_clip_algorithm": _clip_by,
    **dict.fromkeys(("lora_r", "lora_alpha", "lora_dropout", "use_peft"), _absent("LoRA")),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), _absent("quantized weights")),
    "neftune_noise_alpha": _absent("noise on embeddings"),
    "early_stopping_patience": _absent("early stopping"),
}
"""Where their value and ours differ: the whole answer."""
