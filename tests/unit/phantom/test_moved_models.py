"""Models made outside the block and moved in, and the real data they came with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from memtrain.errors import UserError
from memtrain.phantom import PhantomGPU


def step(model: nn.Module, optimizer: Any, device: torch.device) -> None:
    model(torch.empty(2, 64, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_an_optimizer_made_before_the_block_steps_on_the_device() -> None:
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    weight = model.weight
    with PhantomGPU() as gpu:
        model.to(gpu.device)
        assert model.weight is weight
        step(model, optimizer, gpu.device)
        assert weight.grad is None
        assert optimizer.state[weight]["exp_avg"].device == gpu.device
        memory = torch.get_device_module("phantom").memory_allocated
        before = memory()
        step(model, optimizer, gpu.device)
        assert memory() == before
    assert gpu.report().phases["optimizer"].categories["optimizer_state"] >= 2 * 64 * 64 * 4


def test_hooks_and_attributes_move_with_the_parameter() -> None:
    model = nn.Linear(64, 64)
    model.bias.requires_grad_(False)
    model.weight.name_of_mine = "weight"
    seen = []
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.device.type))
    handle = model.weight.register_hook(lambda grad: seen.append("grad"))
    with PhantomGPU() as gpu:
        model.to(gpu.device)
        assert model.weight.name_of_mine == "weight"
        assert isinstance(model.weight, nn.Parameter)
        assert not model.bias.requires_grad
        model(torch.empty(2, 64, device=gpu.device)).sum().backward()
        assert seen == ["grad", "phantom"]
        handle.remove()
        model(torch.empty(2, 64, device=gpu.device)).sum().backward()
        assert seen == ["grad", "phantom", "phantom"]


def test_tied_parameters_and_gradients_move_once() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[1].weight = model[0].weight
    model(torch.ones(1, 64)).sum().backward()
    with PhantomGPU() as gpu:
        model.to(gpu.device)
        assert model[0].weight is model[1].weight
        assert model[0].weight.grad.device == gpu.device
        assert torch.get_device_module("phantom").memory_allocated() == 2 * 64 * 64 * 4


def test_real_data_is_refused_wherever_an_operator_writes_to_it() -> None:
    real = torch.ones(3)
    writers = {
        "_foreach_add_": lambda x: torch._foreach_add_([x], 1),
        "add.out": lambda x: torch.add(torch.ones(3), 1, out=x),
    }
    with PhantomGPU() as gpu:
        for name, write in writers.items():
            with pytest.raises(UserError, match=f"{name}.*holds real data"):
                write(real)
        assert torch._foreach_add([real.to(gpu.device)], 1)[0].device == gpu.device
    assert real.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("new_optimizer", [True, False])
def test_a_model_that_goes_from_card_to_card_counts_on_each(new_optimizer: bool) -> None:
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    reports = []
    for card in ("a100_80gb", "a100_80gb", "h100"):
        with PhantomGPU(card) as gpu:
            model.to(gpu.device)
            if new_optimizer:
                optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(2):
                step(model, optimizer, gpu.device)
        reports.append(gpu.report())
    first, second, third = reports
    assert first.categories == second.categories
    assert first.peak_allocated_bytes == second.peak_allocated_bytes
    assert third.categories["weights"] == first.categories["weights"] == 64 * 64 * 4
    assert third.categories["optimizer_state"] == first.categories["optimizer_state"]


def test_tensors_of_an_earlier_block_count_once_when_they_are_used() -> None:
    with PhantomGPU() as gpu:
        tensors = [torch.empty(1024, device=gpu.device) for _ in range(3)]
    with PhantomGPU() as gpu:
        memory = torch.get_device_module("phantom").memory_allocated
        for t in tensors[:2]:
            t + 1
            t[10:].mul_(2)
        assert memory() == 2 * 4096
        del t, tensors
        assert memory() == 0


def test_weights_of_a_safetensors_file_are_loaded(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(nn.Linear(64, 64).state_dict(), path)
    with PhantomGPU() as gpu:
        model = nn.Linear(64, 64).to(gpu.device)
        model.load_state_dict(safetensors.torch.load_file(path))
        assert model.weight.device == gpu.device
    assert gpu.report().h2d_bytes == 2 * (64 * 64 + 64) * 4  # once by `to`, once from the file
