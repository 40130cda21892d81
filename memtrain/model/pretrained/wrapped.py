"""Any decoder of transformers as it is, its list of layers as our segments."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from memtrain.errors import UserError
from memtrain.model.language_model import LanguageModel, Segment

TOLERANCE = 1e-3
"""Of the largest logit, by which two ways to the same logits may differ in 16 bits."""


class Wrapped(LanguageModel):
    """A causal language model of transformers. Its parameters are called `lm.` and what transformers calls them.

    A layer does not run when the model calls it, but when the last layer of its segment is called: that one runs the
    whole segment, so that whatever a technique put in the segment's place sees all of it.
    """

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm
        body = body_of(lm)
        head, blocks = lm.get_output_embeddings(), layers_of(body)
        # Beside the module tree: each parameter keeps one name.
        vars(self).update(body=body, blocks=blocks, head=head, norm=norm_after(body, blocks))
        self.body: nn.Module
        self.n_positions = learned_positions(lm)
        """The longest sequence; None where positions are computed, not looked up."""
        self.scale = logit_scale(lm.config)
        self.segments = [Segment([i], partial(self._run, i)) for i in range(len(blocks))]
        self._layers = [block.forward for block in blocks]
        self._calls: dict[int, tuple[Any, Any]] = {}
        self._gives_tuple: bool | None = None
        """Whether a layer returns its hidden states in a tuple; None: not seen yet."""
        for index, block in enumerate(blocks):
            block.forward = partial(self._enter, index)

    def forward(self, tokens: Tensor, starts: Tensor | None = None) -> Tensor:
        """(B, T) -> (B, T, C). `starts` are not taken: transformers' masks differ by model."""
        assert starts is None
        hidden: Tensor = self.body(input_ids=tokens, use_cache=False).last_hidden_state
        return hidden if self.scale == 1 else hidden * self.scale

    def front_parameters(self) -> list[nn.Parameter]:
        """All that is in no layer, norm or head of its own."""
        after = {id(p) for part in (self.blocks, self.norm) for p in part.parameters()}
        if self.head.weight is not self.lm.get_input_embeddings().weight:
            after |= {id(p) for p in self.head.parameters()}
        return [p for p in self.lm.parameters() if id(p) not in after]

    @torch.no_grad()
    def learn_returns(self, device: torch.device) -> None:
        """Whether a layer returns a tuple shows in a pass of two tokens; until then segments are not used."""
        self._gives_tuple = None
        self.body(input_ids=torch.zeros((1, 2), dtype=torch.int64, device=device), use_cache=False)

    def _enter(self, index: int, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """In the place of a layer's own forward."""
        if self._gives_tuple is None:
            out = self._layers[index](x, *args, **kwargs)
            self._gives_tuple = isinstance(out, tuple)
            return out
        self._calls[index] = (args, kwargs)
        segment = next(segment for segment in self.segments if index in segment.blocks)
        if index == segment.blocks[-1]:
            calls = {block: self._calls.pop(block) for block in segment.blocks}
            x = segment(x, calls, *tensors_in(calls))
        return (x,) if self._gives_tuple else x

    def _run(self, index: int, x: Tensor, calls: dict[int, tuple[Any, Any]], *_: Tensor) -> Tensor:
        args, kwargs = calls[index]
        out = self._layers[index](x, *args, **kwargs)
        hidden: Tensor = out[0] if isinstance(out, tuple) else out
        return hidden


def tensors_in(value: Any) -> list[Tensor]:
    """What layers share: tables of positions, masks. Each once."""
    if isinstance(value, Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list | tuple):
        return []
    found = [tensor for inner in values for tensor in tensors_in(inner)]
    return list({id(tensor): tensor for tensor in found}.values())


Place = Callable[[nn.Parameter], None]
Change = Callable[[Wrapped], None]


def load_wrapped(
    folder: Path, device: torch.device, dtype: torch.dtype, place: Place, change: Change
) -> Wrapped:
    """The model in `folder`, as `change` leaves it; each weight is moved to `device` and handed to `place`.

    transformers reads tensor by tensor from mapped files; no code of the folder's own is run. Raises UserError.
    """
    _, auto_model = import_transformers()
    with told(folder):
        lm = auto_model.from_pretrained(
            folder, **dtype_argument(dtype), use_safetensors=True, local_files_only=True
        )
    model = Wrapped(lm)
    check_logits(model, torch.device("cpu"))
    change(model)
    for parameter in model.parameters():
        parameter.data = torch.empty_like(parameter, device=device).copy_(parameter)
        place(parameter)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    return model.train()


def empty_wrapped(
    config: Path, device: torch.device, dtype: torch.dtype, place: Place, change: Change
) -> Wrapped:
    """The model that a config.json (or its folder) describes, without values: for planning. Raises UserError."""
    auto_config, auto_model = import_transformers()
    with told(config):
        described = auto_config.from_pretrained(config)
        with torch.device("meta"):
            lm = auto_model.from_config(described, **dtype_argument(dtype))
    model = Wrapped(lm)
    change(model)
    model.to_empty(device=device)
    model.learn_returns(device)
    for parameter in model.parameters():
        place(parameter)
    return model.train()


def import_transformers() -> tuple[Any, Any]:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise UserError("model=hf: needs transformers; pip install 'memtrain[hf]'") from error
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return AutoConfig, AutoModelForCausalLM


@contextmanager
def told(path: Path) -> Iterator[None]:
    """What transformers says of a model that it does not know or cannot read, in one line."""
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{path}: not a causal language model: {reason}") from error


def dtype_argument(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """transformers renamed it in 4.56 and has kept the old name as a property that warns."""
    from transformers import PretrainedConfig

    renamed = isinstance(getattr(PretrainedConfig, "torch_dtype", None), property)
    return {"dtype" if renamed else "torch_dtype": dtype}


@torch.no_grad()
def check_logits(model: Wrapped, device: torch.device) -> None:
    """Hold `hidden @ head` against transformers' own logits on one batch.

    Raises UserError where they differ: something happens after the head that the loss would not see.
    """
    model.eval()
    tokens = probe_tokens(model, device)
    model.learn_returns(device)
    theirs = model.lm(input_ids=tokens, use_cache=False).logits.float()
    ours = nn.functional.linear(model(tokens), model.head.weight, model.head.bias).float()
    difference, largest = (theirs - ours).abs().max(), theirs.abs().max()
    if not difference <= TOLERANCE * largest:
        raise UserError(
            f"model.path: {type(model.lm).__name__} changes its logits after the head (by "
            f"{float(difference / largest):.1e} of the largest), which the loss here would not see"
        )


def probe_tokens(model: Wrapped, device: torch.device) -> Tensor:
    """(2, 8)"""
    n_ids = min(model.head.weight.shape[0], 1000)
    return torch.randint(n_ids, (2, 8), generator=torch.Generator().manual_seed(0)).to(device)


def logit_scale(config: Any) -> float:
    """What the logits are multiplied by after the head (Granite divides, Cohere multiplies).

    Raises UserError for logits that are capped, as Gemma 2's.
    """
    text = config.get_text_config()
    if getattr(text, "final_logit_softcapping", None):
        raise UserError(
            f"model.path: {text.model_type} caps its logits after the head (final_logit_softcapping), which the loss "
            "here does not do"
        )
    return float(getattr(text, "logit_scale", None) or 1) / float(
        getattr(text, "logits_scaling", None) or 1
    )


def layers_of(body: nn.Module) -> nn.ModuleList:
    """The list of alike layers that has the most parameters. Raises UserError if there is none."""
    lists = [m for m in body.modules() if isinstance(m, nn.ModuleList) and len(m)]
    alike = [m for m in lists if len({type(layer) for layer in m}) == 1]
    if not alike:
        raise UserError(f"model.path: {type(body).__name__} has no list of layers")
    return max(alike, key=lambda layers: sum(p.numel() for p in layers.parameters()))


def norm_after(body: nn.Module, blocks: nn.ModuleList) -> nn.Module:
    """What comes after the layers and has parameters."""
    owner = next(m for m in body.modules() if any(child is blocks for child in m.children()))
    children = list(owner.children())
    after = children[next(i for i, child in enumerate(children) if child is blocks) + 1 :]
    return next((m for m in after if any(True for _ in m.parameters())), nn.Identity())


def body_of(lm: Any) -> nn.Module:
    """What makes hidden states. Raises UserError for a model without such a part, or without a head."""
    parts = (lm.base_model, lm.get_decoder(), getattr(lm, "model", None))
    body = next((part for part in parts if part is not None and part is not lm), None)
    if body is None or lm.get_output_embeddings() is None:
        raise UserError(f"model.path: {type(lm).__name__} has no separate body and head")
    found: nn.Module = body
    return found


def learned_positions(lm: Any) -> int | None:
    """Rows of the table of positions (OPT's has two more), if there is one."""
    n_positions = getattr(lm.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(n_positions, int) or n_positions < 1:
        return None
    tokens = lm.get_input_embeddings()
    tables = [m for m in lm.modules() if isinstance(m, nn.Embedding) and m is not tokens]
    has_table = any(0 <= table.num_embeddings - n_positions <= 2 for table in tables)
    return n_positions if has_table else None
