"""Continue a prompt, one token at a time."""

import torch
from torch import Tensor

from memtrain.errors import NotFiniteError
from memtrain.model.language_model import LanguageModel


@torch.no_grad()
def generate(
    model: LanguageModel,
    tokens: list[int],
    n_new: int,
    temperature: float,
    top_k: int,
    generator: torch.Generator,
) -> list[int]:
    """`tokens` and up to `n_new` more. Temperature 0 takes the likeliest; `generator` lives on the CPU.

    Raises NotFiniteError for a model whose logits are not.
    """
    device, longest = model.head.weight.device, model.dimensions.max_seq_len
    was_training = model.training
    model.eval()
    tokens = list(tokens)
    for _ in range(n_new):
        context = torch.tensor([tokens[-longest:]], device=device)
        logits = model.head(model(context)[:, -1])[0].float().cpu()  # (V,)
        if not logits.isfinite().all():
            raise NotFiniteError("the model's logits are not finite: there is no text in it")
        tokens.append(draw(logits, temperature, top_k, generator))
    model.train(was_training)
    return tokens


def draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """One token id from logits (V,)."""
    if temperature == 0:
        return int(logits.argmax())
    if top_k:
        threshold = logits.topk(min(top_k, logits.numel())).values[-1]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    # The largest is 0 then, whatever it is divided by.
    probabilities = torch.softmax((logits - logits.max()).double() / temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))
