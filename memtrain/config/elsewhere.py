"""What other trainers call our keys: the word they would have, and the word to type here. No torch.

Names of transformers' TrainingArguments and model configs, Accelerate, Lightning's Trainer, nanoGPT's train.py,
DeepSpeed's JSON (dotted) and Axolotl's YAML. `meaning` is the only entry.
"""

from collections.abc import Mapping

from memtrain.config.elsewhere_values import COMPUTED, Typed


def _by_theirs(ours: Mapping[str, str]) -> dict[str, str]:
    """From `ours: "theirs theirs"`, which is shorter to write."""
    return {theirs: key for key, names in ours.items() for theirs in names.split()}


RENAMED = _by_theirs(
    {
        "micro_batch": (
            "per_device_train_batch_size per_gpu_train_batch_size train_micro_batch_size_per_gpu "
            "micro_batch_size batch_size"
        ),
        "accum": "gradient_accumulation_steps accumulate_grad_batches grad_accum_steps",
        "seq_len": (
            "block_size sequence_len sequence_length seq_length max_seq_length max_length "
            "model_max_length"
        ),
        "steps": (
            "max_steps max_iters num_iterations lr_decay_iters scheduler.params.total_num_steps"
        ),
        "epochs": "num_train_epochs num_epochs max_epochs",
        "optimizer.lr": "learning_rate lr optimizer.params.lr scheduler.params.warmup_max_lr",
        "optimizer.weight_decay": "weight_decay optimizer.params.weight_decay",
        "optimizer.betas": "optimizer.params.betas",
        "optimizer.eps": "adam_epsilon optimizer.params.eps",
        "optimizer.momentum": "momentum optimizer.params.momentum",
        "clip": "max_grad_norm gradient_clip_val gradient_clipping grad_clip",
        "schedule.warmup": (
            "warmup_steps num_warmup_steps warmup_iters scheduler.params.warmup_num_steps"
        ),
        "schedule.min_ratio": "cosine_min_lr_ratio scheduler.params.cos_min_ratio",
        "loss.label_smoothing": "label_smoothing_factor",
        "precision.tf32": "tf32",
        "precision.scale_growth_every": "fp16.loss_scale_window",
        "log_every": "logging_steps log_every_n_steps log_interval steps_per_print",
        "eval_every": "eval_steps eval_interval val_check_interval",
        "save_every": "save_steps save_interval",
        "keep": "save_total_limit",
        "name": "run_name wandb_run_name wandb_name",
        "outputs": "output_dir out_dir default_root_dir",
        "data.path": "dataset_path datasets train_file",
        "data.val_fraction": "val_set_size",
        "data.cache_dir": "dataset_prepared_path",
        "data.prefetch": "dataloader_num_workers dataloader_prefetch_factor",
        "seed": "data_seed",
        "tokenizer.path": "tokenizer_config",
        "offload.nvme_dir": (
            "offload_optimizer_nvme_path offload_param_nvme_path "
            "zero_optimization.offload_optimizer.nvme_path zero_optimization.offload_param.nvme_path"
        ),
        "offload.optimizer_fraction": "zero_optimization.offload_optimizer.ratio",
        "model.n_layers": "n_layer num_hidden_layers",
        "model.n_heads": "n_head num_attention_heads",
        "model.n_kv_heads": "num_key_value_heads",
        "model.dim": "n_embd hidden_size",
        "model.ffn_dim": "n_inner intermediate_size",
        "model.max_seq_len": "n_positions max_position_embeddings",
        "model.norm_eps": "rms_norm_eps layer_norm_epsilon",
        "model.tied": "tie_word_embeddings",
        "model.qkv_bias": "attention_bias",
        "model.dropout": "dropout",
        "model": "base_model",
    }
)

PRECISIONS = _by_theirs(
    {
        "fp32": "32 32-true float32 fp32 float no none",
        "bf16": "bf16-mixed bfloat16 bf16",
        "fp16": "16 16-mixed float16 fp16 half",
        "bf16_true": "bf16-true",
        "fp8": "transformer-engine fp8",
    }
)
OPTIMIZERS = _by_theirs(
    {
        "adamw": (
            "adam adamw adamw_hf adamw_torch adamw_torch_fused fusedadam adamw_apex_fused "
            "adamw_anyprecision cpuadam"
        ),
        "adamw_8bit": "adamw_8bit adamw_bnb_8bit adamw_torch_8bit",
        "paged_adamw_8bit": "paged_adamw paged_adamw_32bit paged_adamw_8bit",
        "lion": "lion lion_32bit lion_8bit lion_pytorch paged_lion_32bit paged_lion_8bit",
        "adafactor": "adafactor",
        "sgd": "sgd",
        "muon": "muon",
    }
)
SCHEDULES = _by_theirs(
    {
        "cosine": (
            "cosine cosine_with_min_lr cosine_warmup_with_min_lr cosineannealinglr warmupcosinelr"
        ),
        "linear": "linear polynomial warmupdecaylr",
        "constant": "constant constant_with_warmup warmuplr",
    }
)
TYPES = _by_theirs(
    {
        "fp32": "fp32 float32",
        "bf16": "bf16 bfloat16",
    }
)
DEVICES = _by_theirs(
    {
        "cuda": "gpu cuda",
        "cpu": "cpu",
        "auto": "auto",
    }
)

CHOICES: dict[str, tuple[str, dict[str, str]]] = {
    "mixed_precision": ("precision", PRECISIONS),
    "dtype": ("precision", PRECISIONS),
    "torch_dtype": ("precision", PRECISIONS),
    "optim": ("optimizer", OPTIMIZERS),
    "optimizer.type": ("optimizer", OPTIMIZERS),
    "lr_scheduler_type": ("schedule", SCHEDULES),
    "lr_scheduler": ("schedule", SCHEDULES),
    "scheduler.type": ("schedule", SCHEDULES),
    "data_types.grad_accum_dtype": ("precision.gradients", TYPES),
    "accelerator": ("device", DEVICES),
    "model_type": ("model", {"gpt2": "gpt2"}),
}
"""Their name: our key, and which of their values is which of ours."""

VALUES: dict[str, dict[str, str]] = {
    "precision": PRECISIONS | {"mixed": "bf16"},
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "device": DEVICES | {"cuda:0": "cuda"},
    "compile": {"true": "blocks", "false": "off", "on": "blocks"},
    "plan": {"true": "on", "false": "off"},
    "resume": {"true": "latest", "false": "null"},
    "offload": {
        "cpu": "optimizer",
        "nvme": "optimizer_nvme",
        "false": "none",
        "true": "activations",
    },
    "checkpointing": {"true": "every_layer", "full": "every_layer", "false": "none"},
    "checkpoint_every": {"true": "1", "false": "0"},
    "accumulation": {str(n): f"x{n}" for n in (2, 4, 8, 16)} | {"1": "none"},
}
"""Of our own keys: values that other trainers give them."""

SWITCHES: dict[str, tuple[str, str]] = {
    "fp16": ("precision=fp16", ""),
    "fp16.enabled": ("precision=fp16", ""),
    "float16": ("precision=fp16", ""),
    "bf16": ("precision=bf16", ""),
    "bf16.enabled": ("precision=bf16", ""),
    "bfloat16": ("precision=bf16_true", ""),
    "fp8": ("precision=fp8", ""),
    "gradient_checkpointing": ("checkpoint_every=1", "checkpoint_every=0"),
    "activation_checkpointing": ("checkpoint_every=1", "checkpoint_every=0"),
    "activation_offloading": ("offload=activations", ""),
    "activation_checkpointing.cpu_checkpointing": ("checkpoint_every=1 offload=activations", ""),
    "zero_optimization.cpu_offload": ("offload=optimizer", ""),
    "torch_compile": ("compile=blocks", "compile=off"),
    "use_liger_kernel": ("loss=chunked", "loss=full"),
    "decay_lr": ("schedule=cosine", "schedule=constant"),
    "use_cpu": ("device=cpu", ""),
    "no_cuda": ("device=cpu", ""),
    "full_determinism": ("deterministic=true", "deterministic=false"),
    "auto_resume_from_checkpoints": ("resume=latest", ""),
    "overwrite_output_dir": ("", ""),
    "enable_checkpointing": ("", "save_every=0"),
    "fast_dev_run": ("debug=tiny steps=1", ""),
    "auto_find_batch_size": ("task=plan, which says what fits", ""),
    "eval_only": ("task=generate for a sample; validation is part of training", ""),
    "do_train": ("task=train", ""),
}
"""Their name: what to type where it is on, and where it is off; nothing: that is so anyway."""

DROPPED = _by_theirs(
    {
        "validation takes micro_batch, too": (
            "per_device_eval_batch_size per_gpu_eval_batch_size eval_batch_size"
        ),
        "validation computes as training does": "bf16_full_eval fp16_full_eval",
        "recomputation is never reentrant": (
            "gradient_checkpointing_kwargs activation_checkpointing_kwargs"
        ),
        "it is always inductor's": "torch_compile_backend torch_compile_mode",
        "TensorBoard's files and metrics.jsonl are always written": (
            "report_to logger wandb_log wandb_project tensorboard.enabled project"
        ),
        "log_every=N says how often a step is shown": (
            "logging_strategy logging_first_step disable_tqdm enable_progress_bar"
        ),
        "the checkpoint with the least validation loss is always kept": (
            "load_best_model_at_end metric_for_best_model greater_is_better"
        ),
        "torch chooses the attention kernel": (
            "flash_attention flash_attn sdp_attention xformers_attention"
        ),
        "documents are always packed": "sample_packing group_by_length",
        "every row has seq_len tokens": "pad_to_sequence_len dataloader_drop_last",
        "that is chosen by itself": (
            "dataloader_pin_memory low_cpu_mem_usage use_cache benchmark inference_mode "
            "zero3_init_flag zero_optimization.overlap_comm wall_clock_breakdown "
            "zero_optimization.contiguous_gradients zero_optimization.reduce_bucket_size"
        ),
        "there is nothing like it here": (
            "min_epochs min_steps eval_accumulation_steps torch_empty_cache_steps"
        ),
        "validation is part of training": "do_eval do_predict",
        "a run begins with a plan": "num_sanity_val_steps enable_model_summary",
        "type its keys, as schedule.min_ratio=": "lr_scheduler_kwargs optim_args",
        "one process trains on one GPU; offload=params keeps weights in host memory": (
            "fsdp fsdp_config local_rank num_nodes num_processes backend"
        ),
        "one process trains on one GPU": (
            "ddp_backend ddp_timeout ddp_find_unused_parameters ddp_bucket_cap_mb"
        ),
        "its settings are keys here: offload=, precision=, accum=, clip=": "deepspeed",
        "model.safetensors is in the run's folder": "push_to_hub",
        "a document's known fields are read, the others are not": "remove_unused_columns",
    }
)
"""Their name: why nothing has to be typed for it."""


def meaning(name: str, value: str, typed: Typed) -> str | None:
    """What to do for `name=value` that was typed for another trainer, as in `use optimizer.lr=1e-4`; None: unknown."""
    name = name.lower().replace("-", "_")
    if name in RENAMED:
        return f"use {RENAMED[name]}={value}"
    if name in CHOICES:
        key, theirs = CHOICES[name]
        return _translated(key, value, theirs) or f"use {key}=, one of {_known(theirs)}"
    if name in SWITCHES:
        return _switched(value, *SWITCHES[name])
    if name in DROPPED:
        return f"drop it: {DROPPED[name]}"
    return COMPUTED[name](value.lower(), typed) if name in COMPUTED else None


def our_value(key: str, value: str) -> str | None:
    """What to do where one of our own keys has another trainer's value; None: it has not."""
    theirs = VALUES.get(key, {})
    parts = value.lower().split(",")
    if all(theirs.get(part, part) == part for part in parts):
        return None
    return _translated(key, value, theirs | {ours: ours for ours in theirs.values()})


def _translated(key: str, value: str, theirs: Mapping[str, str]) -> str | None:
    """Of a sweep's list, too."""
    ours = [theirs.get(part.strip().lower()) for part in value.split(",")]
    return f"use {key}={','.join(part for part in ours if part)}" if all(ours) else None


def _known(theirs: Mapping[str, str]) -> str:
    return ", ".join(dict.fromkeys(theirs.values()))


def _switched(value: str, on: str, off: str) -> str:
    wanted = off if value.lower() in ("false", "0", "no", "off", "none", "null") else on
    return f"use {wanted}" if wanted else "drop it: that is so by itself"
