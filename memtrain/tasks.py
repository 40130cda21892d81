"""What `task=` selects. The only module that sees everything: config, engine, report."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from itertools import takewhile
from math import isfinite
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch would import it in the midst of a run
import yaml
from safetensors import SafetensorError

from memtrain.cards import Card, match_card, missing_type
from memtrain.config import Config
from memtrain.config.derived import optimizer_home, resolve_path, segment_blocks, with_steps
from memtrain.config.effects import warmup_warnings
from memtrain.data.loader import Windows
from memtrain.data.packing import Packed
from memtrain.data.store import unigram_entropy
from memtrain.data.tokenizer import Tokenizer, load_tokenizer
from memtrain.device import (
    describe_device,
    free_host_bytes,
    host_peak_bytes,
    host_peak_watched,
    select_device,
)
from memtrain.engine import build
from memtrain.engine.checkpoint import (
    Checkpoints,
    load_weights,
    not_ours,
    read_config,
    save_weights,
)
from memtrain.engine.generate import generate as generate_tokens
from memtrain.engine.loop import Progress, mean_loss
from memtrain.engine.loop import train as train_loop
from memtrain.engine.optimizers import state_bytes_per_parameter
from memtrain.engine.resume import ROUNDING, capture, changes, check_changes, last_good, restore
from memtrain.engine.step import TrainStep
from memtrain.engine.update import parameters_of
from memtrain.errors import NotFiniteError, NothingToDo, UserError
from memtrain.memory import file_store
from memtrain.model.loss import Terms
from memtrain.model.transformer import Dimensions, Transformer, count_parameters, step_flops
from memtrain.planner import budget, fit
from memtrain.planner.child import PlannerProcess, PlanningFailed
from memtrain.planner.predict import make_plan
from memtrain.report import console, formats, planned, tables
from memtrain.report.board import Board
from memtrain.report.recorder import Recorder
from memtrain.run import Place, run_task, write_config
from memtrain.run_folder import (
    CONFIG,
    PLAN,
    SUMMARY,
    WEIGHTS,
    damaged,
    last_trained,
    named_checkpoint,
    newest,
    read_summary,
    step_of,
    write_json,
)
from memtrain.stop import StopRequest
from memtrain.units import MIB, format_bytes, format_count


def run(tree: dict[str, Any], place: Place) -> float | None:
    """See `run_task`."""
    return run_task(tree, place, TASKS)


# --- train --------------------------------------------------------------------------------------------------------


def train(config: Config, place: Place) -> dict[str, Any]:
    device = select_device(config.device)
    if config.precision.tf32 and device.type == "cpu":
        console.print_warning("precision.tf32=true has no effect on the CPU")
    warn_of_missing_type(config, card_of_run(config, place, device))
    build.prepare_torch(config)
    data = build.build_data(config, place.base, console.task_progress)
    dimensions = build.build_dimensions(config, data.vocab_size)
    loader = build.build_loader(config, data, device)
    config = resolve_budget(config, place, dimensions.vocab_size, device)
    found = plan_run(config, place, dimensions.vocab_size, device)
    try:
        chosen = asdict(config)
        with own_nvme_folder(config, place) as config, host_peak_watched():
            summary = train_model(config, chosen, place, device, data, dimensions, loader, found)
    except torch.OutOfMemoryError as error:
        explain_out_of_memory(config, place, dimensions.vocab_size, device, found, error)
        raise
    finally:
        loader.close()
    console.print_summary(summary | {"run_dir": place.folder})
    return summary


def train_model(
    config: Config,
    chosen: dict[str, Any],
    place: Place,
    device: torch.device,
    data: build.Data,
    dimensions: Dimensions,
    loader: Windows,
    found: dict[str, Any] | None,
) -> dict[str, Any]:
    """Build, train, save, sample; the summary's figures come back.

    `chosen` is the config that checkpoints keep, `found` the run's plan.
    """
    config, epochs = with_steps(config, loader.windows_per_epoch), config.epochs
    assert config.steps is not None
    model = build.build_model(config, dimensions, device)
    step = build.build_step(config, model, device)
    if optimizer_home(config) == "nvme":
        check_room_for_files(config)
    progress, checkpoints = Progress(), Checkpoints(place.folder, config.keep)
    step.before_change = checkpoints.before_change
    if config.resume:
        progress = resume(config, chosen, place, step, model, loader)
    if found and place.held:  # else it is there
        write_json(place.folder / PLAN, without_timeline(found))
    if data.tokenizer:
        data.tokenizer.save(place.folder / "tokenizer.json")
    n_parameters = count_parameters(model)
    console.print_header(header(config, model, device, loader.windows_per_epoch))
    console.print_header(data_lines(data))
    if epochs is not None:
        windows = loader.windows_per_epoch
        console.print_header([f"epochs     {epochs:g} x {windows} = {config.steps} steps"])
        for warning in warmup_warnings(config):
            console.print_warning(warning)
    flops = (peak_flops(config, device), step_flops(dimensions, n_parameters, config.seq_len))
    predicted = predicted_figures(found)
    predicted_bytes = predicted.get("predicted_peak_allocated_bytes")
    config_text = yaml.safe_dump(chosen, sort_keys=False)

    def save(progress: Progress, val_loss: float | None) -> None:
        recorder.flush()
        checkpoints.save(capture(step, model, loader, progress, val_loss, config_text))

    with (
        naming_the_last_good(place.folder, progress),
        console.Progress(config.steps, first_step=progress.steps) as bar,
        Recorder(
            place.folder, bar.update, *flops, recorded_steps(config, progress), predicted_bytes
        ) as recorder,
    ):
        with checkpoints, StopRequest("stopping after this window, then saving") as request:

            def stop() -> bool:
                return bool(request.requested)

            train_loop(
                step,
                loader,
                build.build_schedule(config),
                config.steps,
                progress=progress,
                save=save,
                save_every=config.save_every,
                judge=checkpoints.followed,
                stop=stop,
                evaluate=evaluation(config, step, data, stop),
                observe=recorder,
                log_every=config.log_every,
                eval_every=config.eval_every,
                max_skipped=config.optimizer.max_skipped,
            )
            stopped = bool(progress.pending) or progress.steps < config.steps
            if stopped:
                checkpoints.followed(False)  # who goes on sees whether the last one is any good
            checkpoints.wait()
            if stopped:
                request.raise_if_requested(
                    f"stopped, saved at step {progress.steps}; go on with resume=latest"
                )
            step.settle()
            save_weights(model, place.folder)
        request.raise_if_requested(
            f"stopped after the last step; the weights are in {place.folder}"
        )
        summary = predicted | recorder.summary
        summary |= {"parameters": n_parameters, "device": describe_device(device)}
        summary |= optimizer_size(config, step)
        summary |= how_it_ended(config, place.folder, progress, summary.get("val_loss"))
        summary |= what_was_learned(config, model, data, place)
        if "sample" in summary:
            recorder.board.text("sample", f"```\n{summary['sample']}\n```")
        for line in data_lines(data):
            recorder.board.text("data", line)
        recorder.board.hparams(hyperparameters(config, place.overrides), metrics(summary))
    return summary | {"host_peak_rss_bytes": host_peak_bytes()}


def resume(
    config: Config,
    chosen: dict[str, Any],
    place: Place,
    step: TrainStep,
    model: Transformer,
    loader: Windows,
) -> Progress:
    """Go on where `resume` says. Raises UserError where there is nothing, or the run is another one."""
    assert config.resume and config.steps is not None
    latest = config.resume == "latest"  # the folder is that run's, if there is one
    checkpoint = newest(place.folder) if latest else named_checkpoint(config.resume, place.base)
    if checkpoint is None:
        where = unsaved_run(place.folder) if latest else config.resume
        raise UserError(
            f"resume={config.resume}: no whole checkpoint in {where}; start without it, or name another run"
        )
    for path in damaged(checkpoint.parent.parent):
        console.print_warning(f"{path}: not whole; left alone")
    old = read_config(checkpoint)
    found = changes(old, chosen)
    try:
        check_changes(found, old, chosen)
    except (KeyError, TypeError) as error:
        raise not_ours(checkpoint / CONFIG) from error
    if step_of(checkpoint) > config.steps:
        epochs = chosen["epochs"]
        asked = f"steps={config.steps}" if epochs is None else f"epochs={epochs:g}"
        raise UserError(
            f"{asked}: {config.steps} steps, and {checkpoint} is at step {step_of(checkpoint)}; "
            f"raise {asked.split('=')[0]} to go on"
        )
    if place.held and step_of(checkpoint) == config.steps and is_done(place.folder):
        raise NothingToDo(
            f"nothing to do: {place.folder} is at step {config.steps} of {config.steps}; raise steps to go on"
        )
    try:
        progress = restore(checkpoint, step, model, loader)
    except (KeyError, TypeError, SafetensorError) as error:
        raise not_ours(checkpoint) from error
    if progress.steps != step_of(checkpoint):
        raise not_ours(checkpoint)
    console.print_header([f"resumed    {checkpoint}, step {progress.steps} of {config.steps}"])
    if progress.skipped_in_a_row:
        console.print_warning(
            f"{checkpoint}: the last {progress.skipped_in_a_row} steps before it were not finite"
            f"{back(checkpoint.parent.parent, progress)}"
        )
    if found:
        console.print_table(tables.changes_table(found))
    if any(key in ROUNDING for key, _, _ in found):
        console.print_warning("the same window in other micro-batches is rounded differently")
    if place.held:
        place.held.release()
    write_config(chosen, place.folder)
    (place.folder / SUMMARY).unlink(missing_ok=True)  # of the run as it was
    return progress


def is_done(folder: Path) -> bool:
    """Whether the run there came to its end, with its weights and its summary."""
    return (folder / WEIGHTS).exists() and (read_summary(folder) or {}).get("status") == "ok"


def back(run_folder: Path, progress: Progress) -> str:
    """Where else to go on from, inside a streak of steps that were not finite, or after it."""
    good = last_good(run_folder, progress.steps, progress.stepped)
    return f"; resume={good} goes on from the last good state" if good else ""


@contextmanager
def naming_the_last_good(folder: Path, progress: Progress) -> Iterator[None]:
    try:
        yield
    except NotFiniteError as error:
        raise NotFiniteError(f"{error}{back(folder, progress)}") from error


def how_it_ended(
    config: Config, folder: Path, progress: Progress, val_loss: float | None
) -> dict[str, Any]:
    """Whether in steps that were not finite. A single one in fp16 is how the loss scale finds its height."""
    count = progress.skipped_in_a_row
    found: dict[str, Any] = {"skipped_in_a_row": count}
    text = (
        f"not finite: the last {count} of {progress.steps} steps; the weights are those before; "
        "lower optimizer.lr, or use precision=bf16 or fp32"
    )
    if count > (config.precision.name == "fp16"):
        found |= {"status": "not_finite", "error": text + back(folder, progress)}
    elif count:
        console.print_warning(text)
    elif val_loss is not None and not isfinite(val_loss):
        console.print_warning("the last validation loss is not finite; were there targets in it?")
    return found


def unsaved_run(folder: Path) -> Path:
    """Where `latest` looked for a checkpoint: the last run of that name, if that has saved nothing."""
    last = last_trained(folder.parent)
    return last if last and newest(last) is None else folder


def recorded_steps(config: Config, progress: Progress) -> int | None:
    """How far the records go of a run that goes on; one that is pending may be there, and is made again."""
    return progress.steps - bool(progress.pending) if config.resume else None


def optimizer_size(config: Config, step: TrainStep) -> dict[str, float | None]:
    """Bytes of optimizer state per trained parameter, as it really is; files are not read again for it."""
    if optimizer_home(config) == "nvme":
        return {}
    states = [(p, update.state(p)) for update in step.updates for p in parameters_of(update)]
    size = state_bytes_per_parameter(states)
    return {
        "optimizer_bytes_per_parameter": size.bytes_per_parameter,
        "optimizer_share_32_bit": size.share_32_bit,
    }


def evaluation(
    config: Config, step: TrainStep, data: build.Data, stop: Callable[[], bool]
) -> Callable[[], float] | None:
    """Mean loss over the held-out text, up to `stop`, without smoothing and the like; None without such text."""
    if data.val is None:
        return None
    plain_loss = build.build_loss(config, Terms())

    def evaluate() -> float:
        batches = build.validation_batches(config, data)
        return mean_loss(step, plain_loss, takewhile(lambda _: not stop(), batches))

    return evaluate


def what_was_learned(
    config: Config, model: Transformer, data: build.Data, place: Place
) -> dict[str, Any]:
    """What the loss is to be held against, and a sample of text."""
    found: dict[str, Any] = {"vocab_size": model.dimensions.vocab_size}
    if isinstance(data.train, Packed):
        found |= document_figures(data.train)
        found["unigram_entropy"] = data.train.target_entropy(data.vocab_size)
    elif data.train is not None:
        found["unigram_entropy"] = unigram_entropy(data.train, data.vocab_size)
    if data.tokenizer and config.generate.tokens:
        try:
            found["sample"] = sample(config, model, data.tokenizer)
        except NotFiniteError as error:
            console.print_warning(f"no sample: {error}")
    return found


def header(config: Config, model: Transformer, device: torch.device, windows: int) -> list[str]:
    """What is about to run, in the words of the four switches."""
    d = model.dimensions
    n_parameters = count_parameters(model)
    n_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    trained = f" ({format_count(n_trained)} trained)" if n_trained < n_parameters else ""
    tokens = format_count(config.micro_batch * config.seq_len * config.accum)
    padded = " with padding" if config.data.source == "jsonl" else ""
    precision = config.precision.name
    lines = [
        f"model      {format_count(n_parameters)} parameters{trained} · {d.n_layers} layers x {d.dim} wide · "
        f"vocabulary {d.vocab_size} · on {describe_device(device)}",
        f"step       {config.accum} x {config.micro_batch} x {config.seq_len} = {tokens} tokens{padded} · "
        f"{windows} steps an epoch · {config.optimizer.name} lr {config.optimizer.lr:g}",
        f"switches   precision={precision} accum={config.accum} "
        f"checkpoint_every={segment_blocks(config)} offload={config.offload.mode}"
        f"{''.join(f' {text}' for text in further_switches(config))}",
    ]
    if precision in ("bf16", "fp16"):
        lines.append(
            f"           {precision} is what is computed in: weights, gradients and moments stay fp32"
        )
    if config.optimizer.in_backward:
        lines.append(f"           {IN_BACKWARD[config.optimizer.in_backward_clip]}")
    return lines


IN_BACKWARD = {
    "two_pass": "gradients are made twice, first for their norm: exact, at the price of a second forward and backward",
    "per_parameter": "each gradient is clipped by its own norm, and skipped by itself if it is not finite",
}


def document_figures(packed: Packed) -> dict[str, float]:
    return {
        "documents": packed.n_documents,
        "rows": packed.n_rows,
        "padding_share": packed.padding_share,
        "target_share": packed.target_share,
    }


def data_lines(data: build.Data) -> list[str]:
    """How much there is to learn from, and how documents fill their rows; random tokens never end."""
    if data.train is None:
        return []
    if not isinstance(data.train, Packed):
        held_out = 0 if data.val is None or isinstance(data.val, Packed) else len(data.val)
        counts = f"{format_count(len(data.train))} tokens · {format_count(held_out)} held out"
        return [f"data       {counts} for validation"]
    packed = data.train
    apart = "kept apart" if packed.keep_apart else "one sees those before it in its row"
    return [
        f"documents  {packed.n_documents} in {packed.n_rows} rows of {packed.seq_len} · "
        f"{packed.padding_share:.1%} padding · {packed.target_share:.1%} targets · {apart}"
    ]


def further_switches(config: Config) -> list[str]:
    """Those that are not at their default."""
    chosen = (
        ("checkpointing", config.checkpointing.policy, "segments"),
        ("compile", config.compile, "off"),
        ("model.mlp_chunks", config.model.mlp_chunks, 1),
        ("loss", config.loss.name, "chunked"),
        ("offload.gradients", str(config.offload.gradients).lower(), "false"),
        ("offload.optimizer_fraction", config.offload.optimizer_fraction, 1.0),
        ("precision.master_weights", str(config.precision.master_weights).lower(), "true"),
        ("precision.gradients", config.precision.gradients, None),
        ("optimizer.in_backward", str(config.optimizer.in_backward).lower(), "false"),
        ("model.train_only", config.model.train_only, None),
    )
    return [f"{key}={value}" for key, value, default in chosen if value != default]


def peak_flops(config: Config, device: torch.device) -> float:
    """The device's dense peak for what the run computes in, in FLOP/s; 0 if not known."""
    card = machine_card(device)
    if card is None:
        return 0.0
    kind = {"bf16_true": "bf16"}.get(config.precision.name, config.precision.name)
    return card.peak_tflops("tf32" if config.precision.tf32 and kind == "fp32" else kind) * 1e12


def machine_card(device: torch.device) -> Card | None:
    """The data sheet of the card in the machine, if it is one we have."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return match_card(properties.name, properties.total_memory)


def sample(config: Config, model: Transformer, tokenizer: Tokenizer) -> str:
    """The prompt and what the model makes of it."""
    tokens = generate_tokens(
        model,
        build.prompt_ids(config, tokenizer),
        config.generate.tokens,
        config.generate.temperature,
        config.generate.top_k,
        torch.Generator().manual_seed(config.seed),
    )
    return tokenizer.decode(tokens)


def hyperparameters(config: Config, overrides: list[str]) -> dict[str, Any]:
    """The four switches and what was typed, numbers as numbers, for TensorBoard's HPARAMS tab."""
    pairs = (text.lstrip("+").split("=", 1) for text in overrides if "=" in text)
    typed = {key: number_or_text(value) for key, value in pairs}
    return typed | {
        "precision": config.precision.name,
        "accum": config.accum,
        "checkpoint_every": segment_blocks(config),
        "offload": config.offload.mode,
    }


def number_or_text(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def metrics(summary: dict[str, Any]) -> dict[str, float | None]:
    keys = ("final_loss", "val_loss", "tokens_per_second", "peak_allocated_bytes")
    return {key: summary.get(key) for key in (*keys, "peak_reserved_bytes", "host_peak_rss_bytes")}


# --- plan ---------------------------------------------------------------------------------------------------------

PLAN_SUMMARY = (
    "gpu",
    "fits",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "device_total_bytes",
    "host_bytes",
    "step_seconds",
    "tokens_per_second",
    "parameters",
)
"""What summary.json takes over from plan.json."""


def plan(config: Config, place: Place) -> dict[str, Any]:
    """What the run would take on a card: the verdict first, then who holds it, the host, the speed."""
    if config.model.config:
        path = str(resolve_path(config.model.config, place.base))
        config = replace(config, model=replace(config.model, config=path))
    from memtrain.report import plots  # matplotlib takes a third of a second to import

    card = chosen_card(config, select_device(config.device))
    warn_of_missing_type(config, card)
    vocab_size = build.expected_vocab_size(config, place.base)
    dimensions = build.build_dimensions(config, vocab_size)
    choice_lines: list[str] = []
    if config.checkpointing.policy == "budget":
        choice = budget.choose(config, dimensions, card)
        choice_lines = planned.choice_lines(asdict(choice))
        config = budget.with_choice(config, choice.per_block)
    found = make_plan(config, dimensions, card)
    timeline = found.pop("timeline")
    write_json(place.folder / PLAN, found)
    figure = plots.timeline_figure(
        timeline, found["capacity_bytes"], f"{' '.join(place.overrides)} on {card.name}"
    )
    plots.save_png(figure, place.folder / "timeline.png")
    with closing(Board(place.folder)) as board:
        board.figure("plan/timeline", figure)
    console.print_verdict(planned.verdict(found), found["fits"])
    console.print_table(planned.plan_table(found))
    console.print_header([*choice_lines, *planned.plan_lines(found), f"files      {place.folder}"])
    return {key: found[key] for key in PLAN_SUMMARY}


def chosen_card(config: Config, device: torch.device) -> Card:
    """`gpu=auto` is the card in the machine, else the one the config states."""
    stated = Card(**{name: getattr(config.gpu, name) for name in Card.__dataclass_fields__})
    if not config.gpu.auto or device.type != "cuda":
        return stated
    properties = torch.cuda.get_device_properties(device)
    known = machine_card(device)
    if known is None:
        console.print_warning(
            f"no data sheet of {properties.name}: its speed is predicted as that of {stated.name}"
        )
        known = stated
    return replace(known, name=properties.name, memory_mib=properties.total_memory // MIB)


def card_of_run(config: Config, place: Place, device: torch.device) -> Card | None:
    """What the run computes on; without a GPU, what it is planned for. None if not known."""
    if device.type == "cuda":
        return machine_card(device)
    return None if place.planner is None else chosen_card(config, device)


def warn_of_missing_type(config: Config, card: Card | None) -> None:
    precision = config.precision
    if card is not None and (line := missing_type(card, precision.name, precision.tf32)):
        console.print_warning(line)


def plan_run(
    config: Config, place: Place, vocab_size: int, device: torch.device
) -> dict[str, Any] | None:
    """The verdict before anything is allocated. What fails here is a warning, never the end of a run."""
    if place.planner is None:
        return None
    card = asdict(chosen_card(config, device))
    place.planner.ask("plan", tree=asdict(config), vocab_size=vocab_size, card=card)
    try:
        found: dict[str, Any] = place.planner.answer()
    except PlanningFailed as error:
        console.print_warning(f"this run could not be planned: {error}")
        return None
    if not place.held:
        write_json(place.folder / PLAN, without_timeline(found))
    console.print_verdict(planned.verdict(found), found["fits"])
    if not found["fits"]:
        console.print_warning("this run is predicted to end out of memory on that card")
    if device.type != "cpu":
        question = {"tree": asdict(config), "vocab_size": vocab_size, "card": card}
        check_host_memory(found, free_host_bytes(), place.planner, question)
    return found


def check_host_memory(
    plan: dict[str, Any], free_bytes: int, planner: PlannerProcess, question: dict[str, Any]
) -> None:
    """What is offloaded has to fit the host. Raises UserError with the figures and the nearest setting that fits."""
    if plan["host_bytes"] <= free_bytes:
        return
    planner.ask("suggest", **question, host_bytes=free_bytes)
    console.print_header(["planning what the host has room for ..."])
    try:
        found = planner.answer()
    except PlanningFailed:
        found = []
    nearest = " ".join(found[0]["overrides"]) if found else "a smaller model; nothing nearby does"
    offload, checkpointing = (question["tree"][key] for key in ("offload", "checkpointing"))
    asked = f"offload={offload['mode']}"
    if checkpointing["policy"] == "per_block" and "offload" in checkpointing["per_block"]:
        asked = "checkpointing=per_block" + (f" {asked}" if offload["mode"] != "none" else "")
    raise UserError(
        f"{asked}: needs {format_bytes(plan['host_bytes'])} of host memory "
        f"({format_bytes(plan['host_pinned_bytes'])} of it pinned), {format_bytes(free_bytes)} are free; "
        f"what fits: {nearest}"
    )


def check_room_for_files(config: Config) -> None:
    """Some are written, others are still to grow. Raises UserError if there is no room for that."""
    assert config.offload.nvme_dir
    folder = Path(config.offload.nvme_dir)
    still_bytes = file_store.files_bytes(folder) - file_store.taken_bytes(folder)
    file_store.check_folder(folder, max(0, still_bytes))


@contextmanager
def own_nvme_folder(config: Config, place: Place) -> Iterator[Config]:
    """For the _nvme modes: `offload.nvme_dir` becomes a folder of this run's own, which is gone afterwards."""
    if optimizer_home(config) != "nvme":
        yield config
        return
    assert config.offload.nvme_dir
    nvme_dir = resolve_path(config.offload.nvme_dir, place.base)
    file_store.check_folder(nvme_dir, 0)
    for folder, size_bytes in file_store.leftovers(nvme_dir):
        console.print_warning(
            f"{folder}: {format_bytes(size_bytes)} left behind by a run that ended before it could remove them; "
            "delete it"
        )
    folder = file_store.claim_folder(nvme_dir, config.name)
    try:
        yield replace(config, offload=replace(config.offload, nvme_dir=str(folder)))
    finally:
        file_store.release_folder(folder)


def resolve_budget(config: Config, place: Place, vocab_size: int, device: torch.device) -> Config:
    """A byte budget becomes one choice for every block. Raises UserError if nothing fits or it cannot be planned."""
    if config.checkpointing.policy != "budget":
        return config
    if place.planner is None:
        raise UserError("checkpointing=budget: is chosen by planning; drop plan=off")
    question = {"tree": asdict(config), "vocab_size": vocab_size}
    question |= {"card": asdict(chosen_card(config, device))}
    free_bytes = None if device.type == "cpu" else free_host_bytes()
    place.planner.ask("budget", **question, host_bytes=free_bytes)
    try:
        choice = place.planner.answer()
    except PlanningFailed as error:
        raise UserError(str(error)) from error
    console.print_header(planned.choice_lines(choice))
    return budget.with_choice(config, tuple(choice["per_block"]))


def without_timeline(found: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key != "timeline"}


def predicted_figures(found: dict[str, Any] | None) -> dict[str, Any]:
    if found is None:
        return {}
    return {
        "planned_gpu": found["gpu"],
        "predicted_peak_allocated_bytes": found["peak_allocated_bytes"],
        "predicted_peak_reserved_bytes": found["peak_reserved_bytes"],
    }


def explain_out_of_memory(
    config: Config,
    place: Place,
    vocab_size: int,
    device: torch.device,
    found: dict[str, Any] | None,
    error: BaseException,
) -> None:
    """One screen: what was asked, who held the memory, and the cheapest changes that fit."""
    if device.type == "cuda":
        torch.cuda.memory._dump_snapshot(str(place.folder / "memory_snapshot.pickle"))  # type: ignore[no-untyped-call]
    console.print_header(["", f"OUT OF MEMORY on {describe_device(device)}", f"asked      {error}"])
    if found is None or place.planner is None:
        console.print_header(["plan=on would say here what to change"])
        return
    console.print_header([f"predicted  {planned.verdict(found)}"])
    console.print_table(planned.plan_table(found))
    card = asdict(chosen_card(config, device))
    place.planner.ask("suggest", tree=asdict(config), vocab_size=vocab_size, card=card)
    console.print_header(["planning what would fit ..."])
    try:
        found_to_fit = place.planner.answer()
        commands = [fit.merged(place.overrides, one["overrides"]) for one in found_to_fit]
        console.print_header(planned.suggestion_lines(found_to_fit, commands))
    except PlanningFailed as failure:
        console.print_warning(f"no advice: {failure}")


# --- generate -----------------------------------------------------------------------------------------------------


def generate(config: Config, place: Place) -> dict[str, Any]:
    """Continue `generate.prompt` with a finished run."""
    folder = finished_run(config, place)
    model = load_weights(folder, select_device(config.device))
    tokenizer = load_tokenizer(run_folder_of(folder) / "tokenizer.json")
    text = sample(config, model, tokenizer)
    console.print_header([f"from {folder}", "", console.printable(text)])
    return {"sample": text, "from": str(folder), "parameters": count_parameters(model)}


def run_folder_of(folder: Path) -> Path:
    """The run that `folder`, a run's or a checkpoint's, belongs to."""
    return folder if (folder / "tokenizer.json").exists() else folder.parent.parent


def finished_run(config: Config, place: Place) -> Path:
    if config.generate.run:
        return resolve_path(config.generate.run, place.base)
    runs = place.runs or place.folder.parent
    weights = runs.glob(f"*/{WEIGHTS}")
    with_text = (path for path in weights if (path.parent / "tokenizer.json").exists())
    found = sorted(with_text, key=lambda path: path.stat().st_mtime)
    if not found:
        raise UserError(
            f"generate.run: no finished run in {runs}; name={config.name} says whose, or name a run's folder"
        )
    return found[-1].parent


# --- numerics -----------------------------------------------------------------------------------------------------


def numerics(config: Config, place: Place) -> dict[str, Any]:
    """What each float format can hold, and what it would lose of this model's gradients."""
    from memtrain.report import plots

    console.print_table(formats.formats_table(formats.float_formats()))
    device = select_device(config.device)
    build.prepare_torch(config)
    data = build.build_data(config, place.base, console.task_progress)
    model = build.build_model(config, build.build_dimensions(config, data.vocab_size), device)
    step = build.build_step(config, model, device)
    gradients = gradients_after(config, step, build.build_loader(config, data, device))
    histograms = formats.gradient_histograms(gradients)
    shares = formats.underflow_shares(gradients, config.precision.loss_scale)
    console.print_table(formats.histograms_table(histograms))
    console.print_table(formats.shares_table(shares))
    figure = plots.gradient_histogram_figure(histograms, formats.float_formats())
    plots.save_png(figure, place.folder / "numerics.png")
    with closing(Board(place.folder)) as board:
        board.figure("numerics/gradients", figure)
    console.print_header([f"histogram  {place.folder / 'numerics.png'}, also in TensorBoard"])
    return {
        "parameters": count_parameters(model),
        "device": describe_device(device),
        "underflow": {f"{s.format} x {s.loss_scale:g}": s.underflow for s in shares},
        "overflow": {f"{s.format} x {s.loss_scale:g}": s.overflow for s in shares},
    }


def gradients_after(config: Config, step: TrainStep, loader: Any) -> dict[str, torch.Tensor]:
    """Gradients of one window, unscaled and unclipped, after `numerics.steps` training steps."""
    windows = iter(loader)
    if config.numerics.steps:
        steps = config.numerics.steps
        short = replace(config, steps=steps, epochs=None)
        with console.Progress(steps) as progress:
            train_loop(
                step,
                windows,
                build.build_schedule(short),
                steps,
                evaluate=None,
                observe=progress.update,
                log_every=config.log_every,
                eval_every=0,
                max_skipped=config.optimizer.max_skipped,
            )
    scale = step.scaler.get_scale()
    step.accumulate(next(windows))
    loader.close()
    named = step.model.named_parameters()
    return {name: p.grad.float() / scale for name, p in named if p.grad is not None}


TASKS = {"train": train, "plan": plan, "generate": generate, "numerics": numerics}
