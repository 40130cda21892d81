"""What the phantom cannot do, it says in one line; what it can, it does without noise."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from memtrain.errors import UserError
from memtrain.phantom import PhantomGPU, UnsupportedOperator


def test_the_device_is_of_use_inside_the_block_only() -> None:
    gpu = PhantomGPU()
    with pytest.raises(UserError, match="outside the `with` block") as caught:
        torch.empty(3, device=gpu.device)
    assert "\n" not in str(caught.value)
    with gpu:
        assert (torch.empty(3, device=gpu.device) + 1).device == gpu.device


def test_another_thread_is_told_so() -> None:
    errors = []

    def work() -> None:
        try:
            torch.empty(3, device=gpu.device)
        except UserError as error:
            errors.append(str(error))

    with PhantomGPU() as gpu:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    (message,) = errors
    assert "another thread" in message and "\n" not in message


def test_a_loop_on_a_value_ends() -> None:
    with PhantomGPU() as gpu:
        x = torch.zeros((), device=gpu.device)
        with pytest.raises(UnsupportedOperator, match="never ends"):
            while not x:
                pass


def test_a_truth_value_that_decides_is_warned_of_where_it_is_read() -> None:
    with PhantomGPU() as gpu:
        loss = torch.zeros((), device=gpu.device)
        with pytest.warns(UserWarning, match="it is False") as caught:
            if torch.isfinite(loss):
                raise AssertionError
    assert caught[0].filename == __file__


def test_a_scaler_and_numbers_are_read_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    warnings.simplefilter("always")
    with PhantomGPU() as gpu:
        model = nn.Linear(2, 2, device=gpu.device)
        optimizer = torch.optim.SGD(model.parameters())
        scaler = torch.amp.GradScaler("phantom")
        scaler.scale(model(torch.empty(1, 2, device=gpu.device)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        model.weight.sum().item()
    assert not [warning for warning in recwarn if "truth value" in str(warning.message)]


def test_values_read_once_a_step_are_no_loop() -> None:
    with PhantomGPU() as gpu:
        model = nn.Linear(2, 2, device=gpu.device)
        loss = model(torch.empty(1, 2, device=gpu.device)).sum()
        for _ in range(2):
            for _ in range(6000):
                loss.item()
            loss.backward(retain_graph=True)


@pytest.mark.parametrize("pinned", [False, True])
def test_a_loader_with_workers_runs_inside(pinned: bool) -> None:
    data = TensorDataset(torch.arange(100).view(10, 10))
    loader = DataLoader(data, batch_size=2, num_workers=2, pin_memory=pinned, timeout=5)
    with PhantomGPU() as gpu:
        batches = [batch.to(gpu.device) for (batch,) in loader]
        assert [batch.shape for batch in batches] == 5 * [(2, 10)]
    assert gpu.report().h2d_bytes == 800
    assert (loader.num_workers, loader.timeout) == (2, 5)


def test_a_failed_shape_function_logs_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    with PhantomGPU() as gpu, pytest.raises(RuntimeError):
        torch.mm(torch.empty(2, 3, device=gpu.device), torch.empty(2, 3, device=gpu.device))
    assert not caplog.records
    assert logger.level == before


FAILS = """
import torch
from torch.utils.checkpoint import checkpoint
from memtrain.phantom import PhantomGPU

def fails(x):
    if torch._C._current_graph_task_id() != -1:
        raise ValueError("of the program's own")
    return x.sin()

with PhantomGPU() as gpu:
    x = torch.zeros(4, device=gpu.device, requires_grad=True)
    {}
    y.sum().backward()
"""


@pytest.mark.parametrize(
    "call",
    [
        "y = x.sin(); x.register_hook(fails)",
        "y = x.sin(); x.register_post_accumulate_grad_hook(fails)",
        "y = checkpoint(fails, x, use_reentrant=False)",
    ],
)
def test_an_error_inside_backward_is_told_before_the_engine_ends(call: str) -> None:
    command = [sys.executable, "-c", FAILS.format(call)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode != 0
    assert "ValueError: of the program's own" in ended.stderr
    assert "in fails" in ended.stderr


def test_recomputing_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """It ends early by an exception of its own."""
    with PhantomGPU() as gpu:
        x = torch.zeros(4, device=gpu.device, requires_grad=True)
        checkpoint(lambda x: x.sin().cos().sum(), x, use_reentrant=False).backward()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("card", [None, 3])
def test_what_is_no_card_is_refused(card: Any) -> None:
    with pytest.raises(UserError, match="is no card"):
        PhantomGPU(card)


def test_a_capacity_phase_or_category_that_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match="at least 1"):
        PhantomGPU(capacity_bytes=0)
    with PhantomGPU() as gpu:
        with pytest.raises(UserError, match="'eval': choose one of forward"), gpu.phase("eval"):
            pass
        with pytest.raises(UserError, match="'gradient': choose one of weights, gradients"):
            gpu.label([], "gradient")


def test_a_report_can_be_printed() -> None:
    with PhantomGPU() as gpu:
        gpu.label([torch.empty(2**20, device=gpu.device)], "weights")
    lines = str(gpu.report()).splitlines()
    assert lines[0].endswith("fits")
    assert lines[1] == "peak in other: 4.0 MiB allocated, 4.0 MiB active, 20.0 MiB reserved"
    assert lines[2:] == ["  weights: 4.0 MiB"]
