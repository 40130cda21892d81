"""The phantom as a program sees it, and what it leaves behind."""

from __future__ import annotations

import mmap
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from phantom_models import LM, Step
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from memtrain.errors import UserError
from memtrain.phantom import (
    CATEGORIES,
    OutOfMemoryError,
    PhantomCPU,
    PhantomGPU,
    RaceError,
    UnsupportedOperator,
)
from memtrain.phantom.held import walk
from memtrain.phantom.ledger import DEVICE
from memtrain.phantom.patches import FOREACH_TYPES

MIB = 2**20
GPT = {"vocab": 512, "width": 256, "layers": 3, "heads": 4}

STEPS = {
    "fp32": Step(),
    "bf16": Step(dtype=torch.bfloat16, options={"fused": True}),
    "fp16, scaler": Step(dtype=torch.float16, scaler=True),
    "for loop": Step(options={"foreach": False}),
    "checkpoint": Step(dtype=torch.bfloat16, recompute="non-reentrant", accum=2),
    "checkpoint, reentrant": Step(dtype=torch.bfloat16, recompute="reentrant"),
    "sgd": Step(optimizer=torch.optim.SGD),
    "offload": Step(
        offload=lambda: torch.autograd.graph.save_on_cpu(pin_memory=True, device_type="phantom")
    ),
}


def train(step: Step, **options: object) -> PhantomGPU:
    with PhantomGPU("a100_80gb") as gpu:
        model = LM(**GPT, **options).to(gpu.device)
        step.run(model, gpu.device, gpu=gpu)
    return gpu


@pytest.mark.parametrize("name", STEPS)
def test_categories_sum_to_the_total_at_every_event(name: str) -> None:
    gpu = train(STEPS[name])
    report = gpu.report()
    events = 0
    for now in walk(gpu.meter.ledger, DEVICE):
        events += 1
        assert sum(now.categories.values()) == sum(now.modules.values()) == now.allocated_bytes
        assert min(now.categories.values()) >= 0
    assert events > 100
    assert sum(report.categories.values()) == report.peak_allocated_bytes
    assert sum(report.modules_at_peak.values()) == report.peak_allocated_bytes
    assert report.peak_allocated_bytes == gpu.meter.ledger.allocator.peak_allocated_bytes
    assert set(report.categories) <= set(CATEGORIES)
    assert sum(report.host_categories.values()) == report.host_peak_bytes
    assert sum(report.host_modules.values()) == report.host_peak_bytes
    for point in (*report.timeline, *report.host_timeline):
        assert sum(point.categories.values()) == point.allocated_bytes
        assert sum(point.modules.values()) == point.allocated_bytes


@pytest.mark.parametrize("name", STEPS)
def test_the_same_program_gives_the_same_numbers(name: str) -> None:
    assert train(STEPS[name]).report() == train(STEPS[name]).report()


def test_weights_gradients_and_state_have_their_size() -> None:
    gpu = train(Step(options={"fused": True}))
    report = gpu.report()
    parameters = sum(p.numel() * 4 for p in LM(**GPT).parameters())
    slack = 1.05
    assert parameters <= report.categories["weights"] <= slack * parameters
    assert 2 * parameters <= report.categories["optimizer_state"] <= slack * 2 * parameters
    at_step = report.phases["optimizer"].categories
    assert parameters <= at_step["gradients"] <= slack * parameters
    assert report.categories["activations"] > 0
    assert report.categories["workspaces"] == 2 * int(8.125 * MIB)
    assert "blocks.0.up" in report.modules_at_peak


def test_mixed_precision_counts_weight_copies() -> None:
    report = train(Step(dtype=torch.bfloat16, batch=16)).report()
    matrices = sum(p.numel() * 2 for n, p in LM(**GPT).named_parameters() if "embed" not in n)
    assert report.categories["weight_copies"] == pytest.approx(matrices, rel=0.1)


def test_recomputation_trades_activations_for_flops() -> None:
    plain = train(Step(batch=16, length=128)).report()
    for variant in ("reentrant", "non-reentrant"):
        repeated = train(Step(batch=16, length=128, recompute=variant)).report()
        assert repeated.categories["activations"] < plain.categories["activations"]
        assert repeated.flops["matmul"] > 1.2 * plain.flops["matmul"]


def test_a_peak_has_its_phase() -> None:
    report = train(Step(batch=64, length=128)).report()
    assert report.peak_phase in ("forward", "backward")
    few = train(Step(batch=1, length=8, options={"foreach": True})).report()
    assert few.peak_phase == "optimizer"
    assert set(few.phases) == {"forward", "backward", "optimizer", "other"}
    assert few.peak_step == 0
    assert report.peak_step == 1
    assert len(few.step_peak_bytes) == 3


def test_default_optimizers_and_clipping_take_lists_of_tensors_as_on_cuda() -> None:
    default = train(Step()).report()
    assert default == train(Step(options={"foreach": True})).report()
    one_by_one = train(Step(options={"foreach": False})).report()
    assert (
        default.phases["optimizer"].allocated_bytes > one_by_one.phases["optimizer"].allocated_bytes
    )
    assert "aten._foreach_norm.Scalar" in {op.name for op in default.ops}
    with PhantomCPU() as cpu:
        Step().run(LM(), cpu.device, gpu=cpu)
    assert not any("lerp" in op.name and "foreach" in op.name for op in cpu.report().ops)
    for types in FOREACH_TYPES:
        assert FakeTensor not in types


def test_a_loss_outside_modules_belongs_to_forward() -> None:
    with PhantomGPU() as gpu:
        model = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 1000)).to(gpu.device)
        t = torch.zeros(64, 128, dtype=torch.long, device=gpu.device)
        for _ in range(3):
            F.cross_entropy(model(t).view(-1, 1000), t.view(-1)).backward()
    phases = gpu.report().phases
    logits_bytes = 64 * 128 * 1000 * 4
    assert phases["forward"].allocated_bytes > 2 * logits_bytes
    assert phases["other"].allocated_bytes < logits_bytes


def test_offloaded_activations_are_pinned_host_memory() -> None:
    report = train(STEPS["offload"]).report()
    assert report.host_peak_phase in ("forward", "backward")
    assert sum(report.host_categories.values()) == report.host_peak_bytes
    assert report.host_categories["activations"] > MIB
    assert report.host_pinned_peak_bytes > MIB
    assert report.d2h_bytes == report.h2d_bytes > MIB
    assert "activations" not in report.categories or (
        report.categories["activations"] < train(Step()).report().categories["activations"]
    )


def test_transfers_are_counted_each_way_and_per_step() -> None:
    with PhantomGPU() as gpu:
        host = torch.empty(1000)
        device = host.to(gpu.device)
        gpu.step_boundary()
        host.copy_(device)
        device.copy_(host[:1000])
        device.cpu()
        gpu.step_boundary()
    report = gpu.report()
    assert (report.h2d_bytes, report.d2h_bytes) == (4000, 8000)


def test_flops_are_those_of_the_formula() -> None:
    with PhantomGPU() as gpu:
        a = torch.empty(16, 32, device=gpu.device)
        b = torch.empty(32, 64, device=gpu.device)
        a @ b
        a @ b
    report = gpu.report()
    assert report.flops == {"matmul": 2 * 2 * 16 * 32 * 64}
    (mm,) = [op for op in report.ops if op.name == "aten.mm"]
    assert (mm.calls, mm.dtype, mm.phase) == (2, "float32", "other")
    assert mm.moved_bytes == 2 * 4 * (16 * 32 + 32 * 64 + 16 * 64)


def test_tied_weights_count_once_and_stay_tied() -> None:
    with PhantomGPU() as gpu:
        model = LM(**GPT, tied=True).to(gpu.device)
        assert model.head.weight is model.embed.weight
        weights = torch.get_device_module("phantom").memory_allocated()
    parameters = sum(p.numel() * 4 for p in LM(**GPT, tied=True).parameters())
    assert parameters <= weights <= 1.1 * parameters


def test_models_built_outside_or_on_meta_move_in() -> None:
    real = LM(**GPT, tied=True)
    with torch.device("meta"):
        meta = LM(**GPT, tied=True)
    with PhantomGPU() as gpu:
        for model in (real.to(gpu.device), meta.to_empty(device=gpu.device)):
            assert {p.device.type for p in model.parameters()} == {"phantom"}
            assert model.head.weight is model.embed.weight
            model(torch.zeros(1, 4, dtype=torch.long, device=gpu.device)).sum().backward()
        with torch.device("meta"):
            inside = LM(**GPT, tied=True)
        inside.to_empty(device=gpu.device)
        assert inside.head.weight is inside.embed.weight


def test_an_optimizer_made_before_the_move_follows_it() -> None:
    with PhantomGPU() as gpu:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.to(gpu.device)
        assert optimizer.param_groups[0]["params"][0].device == gpu.device
        model(torch.empty(2, 4, device=gpu.device)).sum().backward()
        optimizer.step()


def test_parameter_data_may_live_elsewhere_for_a_while() -> None:
    with PhantomGPU() as gpu:
        memory = torch.get_device_module("phantom").memory_allocated
        model = nn.Linear(1024, 1024, bias=False, device=gpu.device)
        x = torch.empty(1, 1024, device=gpu.device, requires_grad=True)
        before = memory()
        model.weight.data = model.weight.data.cpu()
        assert memory() == before - 4 * MIB
        assert model.weight.device.type == "cpu"
        model.weight.data = model.weight.data.to(gpu.device)
        assert memory() == before
        model(x).sum().backward()
        assert model.weight.grad.device == gpu.device


def test_views_and_in_place_operators_allocate_nothing() -> None:
    with PhantomGPU() as gpu:
        memory = torch.get_device_module("phantom").memory_allocated
        x = torch.empty(64, 64, device=gpu.device)
        before = memory()
        y = x.view(-1)[10:].narrow(0, 1, 100).unsqueeze(0).expand(5, 100)
        x.t().add_(1).mul_(2)
        x[3] = 1.0
        a, b = x.chunk(2)
        assert memory() == before
        assert y.untyped_storage()._cdata == x.untyped_storage()._cdata
        assert y.storage_offset() == 11
        assert b.storage_offset() == 32 * 64
        del x, a, b
        assert memory() == before
        del y
        assert memory() < before


def test_a_storage_may_be_emptied_and_filled() -> None:
    with PhantomGPU() as gpu:
        memory = torch.get_device_module("phantom").memory_allocated
        x = torch.empty(MIB, device=gpu.device)
        storage = x.untyped_storage()
        storage.resize_(0)
        assert memory() == 0
        storage.resize_(4 * MIB)
        assert memory() == 4 * MIB
        x.resize_(2 * MIB)
        assert memory() == 8 * MIB
        del x, storage
        assert memory() == 0


def test_pinned_memory() -> None:
    with PhantomGPU() as gpu:
        a = torch.empty(1000, pin_memory=True)
        b = torch.empty(1000).pin_memory()
        assert a.is_pinned() and b.is_pinned() and not torch.empty(10).is_pinned()
        assert b.pin_memory() is b
        gpu.meter.settle()
        assert gpu.meter.ledger.live["pinned"] == 8192  # torch's pool rounds up to powers of two
        c = torch.empty(1000, device=gpu.device).to("cpu", non_blocking=True)
        assert c.is_pinned()
        del a, b
    assert gpu.report().host_pinned_peak_bytes == 12288


@pytest.mark.parametrize(
    ("settings", "expected_mib"),
    [
        ("", 4),
        ("pinned_max_round_threshold_mb:1", 3),
        ("pinned_max_round_threshold_mb:3", 4),
        ("pinned_max_cached_size_mb:2", 3),
    ],
)
def test_pinned_memory_takes_what_torch_takes_for_it(monkeypatch, settings, expected_mib) -> None:
    """Of torch's pool a power of two below its thresholds; of its own, whole pages."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", settings)
    with PhantomGPU() as gpu:
        of_the_pool = torch.empty(3 * MIB, dtype=torch.uint8, pin_memory=True)
        assert gpu.meter.ledger.live["pinned"] == expected_mib * MIB
        module = torch.get_device_module("phantom")
        own = module.page_locked_empty(3 * MIB + 1, torch.uint8)
        assert own.is_pinned() and own.shape == (3 * MIB + 1,)
        own_bytes = 3 * MIB + mmap.PAGESIZE
        assert gpu.meter.ledger.live["pinned"] == expected_mib * MIB + own_bytes
        del of_the_pool
        gpu.meter.settle()
        assert gpu.meter.ledger.live["pinned"] == own_bytes


def test_values_of_device_tensors_are_zero_and_constants_keep_theirs() -> None:
    with PhantomGPU() as gpu:
        x = torch.ones(2, device=gpu.device)
        assert x.sum().item() == 0.0
        assert x.tolist() == [0.0, 0.0]
        assert not bool((x > 0).all())
        assert int(x.long()[0]) == 0
        assert torch.tensor(3.0).item() == 3.0
        assert not torch.equal(x, x)


def test_constants_move_to_the_device() -> None:
    with PhantomGPU() as gpu:
        assert torch.tensor([1.0, 2.0], device=gpu.device).device == gpu.device
        assert torch.tensor(3.0).to(gpu.device).device == gpu.device
        assert torch.arange(3, device=gpu.device).add(torch.tensor(1)).device == gpu.device
        with torch.device(gpu.device):
            assert torch.tensor([]).device == gpu.device


def test_the_card_may_be_too_small() -> None:
    step = Step(batch=64, length=128)
    with pytest.raises(OutOfMemoryError) as caught, PhantomGPU(capacity_bytes=100 * MIB) as gpu:
        step.run(LM(**GPT).to(gpu.device), gpu.device)
    error = caught.value
    assert isinstance(error, torch.OutOfMemoryError)
    assert error.capacity_bytes == 100 * MIB
    assert sum(error.by_category.values()) == error.allocated_bytes
    assert error.by_category["weights"] > 0
    assert "activations" in str(error)
    assert not gpu.report().fits
    with PhantomGPU(capacity_bytes=100 * MIB) as gpu:
        with pytest.raises(OutOfMemoryError):
            torch.empty(200 * MIB, device=gpu.device)
    assert gpu.report().fits
    with PhantomGPU(capacity_bytes=100 * MIB, enforce_capacity=False) as gpu:
        step.run(LM(**GPT).to(gpu.device), gpu.device)
    report = gpu.report()
    assert not report.fits
    assert report.peak_allocated_bytes > 100 * MIB
    assert train(step).report().fits


def test_expandable_segments_reserve_no_more() -> None:
    step = Step(batch=8, length=100)
    reports = []
    for expandable in (False, True):
        with PhantomGPU(expandable_segments=expandable) as gpu:
            step.run(LM(**GPT).to(gpu.device), gpu.device)
        reports.append(gpu.report())
    assert reports[1].peak_reserved_bytes <= reports[0].peak_reserved_bytes
    assert reports[1].peak_allocated_bytes <= reports[0].peak_allocated_bytes


def test_an_operator_that_needs_data_is_named_with_its_module() -> None:
    class Picky(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.nonzero()

    with PhantomGPU() as gpu:
        model = nn.Sequential(nn.Identity(), Picky())
        with pytest.raises(UnsupportedOperator) as caught:
            model(torch.empty(4, device=gpu.device))
    message = str(caught.value)
    assert "aten.nonzero" in message and "in module 1" in message
    assert "\n" not in message


def test_real_tensors_may_be_read_and_not_written() -> None:
    batch = torch.ones(4, 8)
    with PhantomGPU() as gpu:
        x = batch.to(gpu.device)
        assert x.device == gpu.device
        with pytest.raises(UserError, match="holds real data"):
            batch.add_(1)
        with pytest.raises(UserError, match="holds real data"):
            batch.copy_(x)
    assert gpu.report().h2d_bytes == 128
    assert batch.sum() == 32


def test_an_unknown_card_is_a_user_error() -> None:
    with pytest.raises(UserError, match="choose one of"):
        PhantomGPU("voodoo2")


def test_no_phantom_inside_a_phantom() -> None:
    with PhantomGPU(), pytest.raises(UserError, match="already in use"), PhantomGPU():
        pass


@pytest.mark.parametrize("fails", [False, True])
def test_it_leaves_nothing_behind(fails: bool) -> None:
    PhantomGPU()
    torch.manual_seed(1)
    expected_numbers = torch.rand(3)
    torch.manual_seed(1)
    before = _traces()
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        with PhantomGPU() as gpu:
            torch.manual_seed(5)
            STEPS["bf16"].run(LM(**GPT).to(gpu.device), gpu.device)
            torch.rand(10)
            if fails:
                with torch.autocast("phantom", dtype=torch.bfloat16):
                    raise ZeroDivisionError
    assert _traces() == before
    assert torch.equal(torch.rand(3), expected_numbers)
    assert type(torch.ones(2) + 1) is torch.Tensor
    assert not torch.cuda.is_available() or torch.cuda.is_initialized() is not None


def _traces() -> tuple[object, ...]:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.nn.modules import module
    from torch.optim import optimizer
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return (
        torch.get_default_device(),
        torch.is_autocast_enabled("phantom"),
        torch.is_grad_enabled(),
        list(module._global_forward_hooks),
        list(module._global_forward_pre_hooks),
        list(optimizer._global_optimizer_pre_hooks),
        list(optimizer._global_optimizer_post_hooks),
        _get_current_dispatch_mode_stack(),
        torch.clear_autocast_cache,
        torch.UntypedStorage.resize_,
        nn.Module._apply,
        "data" in vars(FakeTensor),
    )


def test_importing_registers_nothing() -> None:
    code = (
        "import torch, memtrain.phantom; "
        "assert torch._C._get_privateuse1_backend_name() == 'privateuseone'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_deleted_model_is_gone() -> None:
    with PhantomGPU() as gpu:
        model = LM(**GPT).to(gpu.device)
        model(torch.zeros(1, 4, dtype=torch.long, device=gpu.device))
        del model
        left = torch.get_device_module("phantom").memory_allocated()
    assert left == int(8.125 * MIB)


def test_memory_statistics_answer() -> None:
    with PhantomGPU() as gpu:
        module = torch.get_device_module("phantom")
        x = torch.empty(MIB, device=gpu.device)
        del x
        assert module.memory_allocated() == 0
        assert module.max_memory_allocated() == 4 * MIB
        assert module.max_memory_reserved() == 20 * MIB
        module.reset_peak_memory_stats()
        module.empty_cache()
        assert module.max_memory_allocated() == module.memory_reserved() == 0
        assert module.memory_stats()["allocated_bytes.all.peak"] == 0
        free, total = module.mem_get_info()
        assert free == total == gpu.meter.capacity_bytes
    assert gpu.report().peak_allocated_bytes == 4 * MIB


def test_a_phase_can_be_named() -> None:
    with PhantomGPU() as gpu:
        with gpu.phase("optimizer"):
            state = torch.empty(MIB, device=gpu.device)
        other = torch.empty(MIB, device=gpu.device)
        gpu.label([other], "weights")
        assert state is not other
    assert gpu.report().categories == {"optimizer_state": 4 * MIB, "weights": 4 * MIB}


def test_in_inference_mode_too() -> None:
    with PhantomGPU() as gpu, torch.inference_mode():
        model = LM(**GPT).to(gpu.device)
        model(torch.zeros(2, 8, dtype=torch.long, device=gpu.device))
    assert gpu.report().flops["matmul"] > 0
    assert gpu.report().flops["attention"] > 0


def test_checkpoint_of_a_function_keeps_its_input_only() -> None:
    def wide(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.gelu(x) * 2) + 1

    with PhantomGPU() as gpu:
        memory = torch.get_device_module("phantom").memory_allocated
        x = torch.empty(MIB, device=gpu.device, requires_grad=True)
        y = checkpoint(wide, x, use_reentrant=False)
        assert memory() == 8 * MIB
        y.sum().backward()
        assert x.grad is not None


def test_streams_know_who_waits_for_whom() -> None:
    with PhantomGPU() as gpu:
        module = torch.get_device_module("phantom")
        side, main = module.Stream(), module.current_stream()
        x = torch.empty(4, device=gpu.device)
        with module.stream(side), pytest.raises(RaceError, match=r"aten\.add.*stream \d+ reads"):
            x + 1
        side.wait_stream(main)
        with module.stream(side):
            assert module.current_stream() is side
            y = x + 1
        with pytest.raises(RaceError):
            y * 2
        event = side.record_event()
        main.wait_event(event)
        y * 2
        side.wait_stream(main)
        with module.stream(side):
            y.add_(1)
        module.synchronize()
        y * 2


def test_a_stream_made_before_the_run_is_known_in_it() -> None:
    PhantomGPU()
    module = torch.get_device_module("phantom")
    side = module.Stream()
    with PhantomGPU() as gpu:
        x = torch.empty(4, device=gpu.device)
        with module.stream(side):
            y = x + 1
        with pytest.raises(RaceError):
            y + 1
        module.current_stream().wait_stream(side)
        y + 1


def test_the_host_waits_for_pinned_copies() -> None:
    with PhantomGPU() as gpu:
        module = torch.get_device_module("phantom")
        module.Stream()
        x = torch.ones(4, device=gpu.device)
        copy = x.to("cpu", non_blocking=True)
        with pytest.raises(RaceError, match="the host reads"):
            copy + 1
        module.current_stream().synchronize()
        copy + 1
        x.to("cpu") + 1  # blocks


def test_a_block_used_on_a_side_stream_stays_active() -> None:
    with PhantomGPU() as gpu:
        module = torch.get_device_module("phantom")
        side = module.Stream()
        x = torch.empty(MIB, device=gpu.device)
        side.wait_stream(module.current_stream())
        with module.stream(side):
            y = x.view(-1)
            y.add_(1)
            x.record_stream(side)
        del x, y
        assert module.memory_allocated() == 0
        stats = module.memory_stats()
        assert stats["active_bytes.all.current"] == 4 * MIB
        module.current_stream().wait_stream(side)
        assert module.memory_stats()["active_bytes.all.current"] == 0


def test_fully_sharded_parameters_count_their_shard() -> None:
    gpu = PhantomGPU()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("phantom", (4,))
        with gpu:
            model = LM(**GPT).to(gpu.device)
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(2):
                model(torch.zeros(2, 8, dtype=torch.long, device=gpu.device)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        dist.destroy_process_group()
    parameters = sum(p.numel() * 4 for p in LM(**GPT).parameters())
    report = gpu.report()
    assert report.categories["weights"] == pytest.approx(parameters / 4, rel=0.1)
    assert report.categories["optimizer_state"] == pytest.approx(parameters / 2, rel=0.1)
    assert report.peak_allocated_bytes < 4 * parameters


def test_a_model_that_does_not_fit_is_full_of_weights() -> None:
    with pytest.raises(OutOfMemoryError) as caught, PhantomGPU(capacity_bytes=8 * MIB) as gpu:
        LM(**GPT).to(gpu.device)
    assert set(caught.value.by_category) <= {"weights", "temporaries", "other"}
    assert caught.value.by_category["weights"] > MIB


def test_random_state_is_asked_for_and_given() -> None:
    with PhantomGPU():
        module = torch.get_device_module("phantom")
        module.set_rng_state(module.get_rng_state())
        module.manual_seed_all(1)
        assert torch.amp.GradScaler("phantom").is_enabled()


def test_saved_tensor_hooks_see_every_activation() -> None:
    seen = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        seen.append(t)
        return t

    with PhantomGPU() as gpu:
        model = LM(**GPT).to(gpu.device)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = model(torch.zeros(1, 4, dtype=torch.long, device=gpu.device)).sum()
        out.backward()
    assert len(seen) > 20


def test_more_of_the_same_blocks_are_replayed() -> None:
    """What is dispatched by torch, and so takes long, does not grow with the model's depth."""
    step = Step(dtype=torch.bfloat16, options={"fused": True}, accum=2)
    dispatched = []
    for layers in (3, 9):
        with PhantomGPU() as gpu, gpu.device:
            step.run(LM(layers=layers), gpu.device, gpu=gpu)
        dispatched.append(len(gpu.meter.entries))
    assert dispatched[0] == dispatched[1]


def test_an_in_place_kernel_without_shape_function_needs_none() -> None:
    """torch ships none for its fused SGD, whose result is the parameters themselves."""
    with PhantomGPU() as gpu:
        model = torch.nn.Linear(64, 64, device=gpu.device)
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, fused=True)
        for _ in range(2):
            model(torch.empty(8, 64, device=gpu.device)).sum().backward()
            optimizer.step()
    assert gpu.report().categories["optimizer_state"] == 64 * 64 * 4 + 512


def test_out_of_memory_inside_backward_is_raised_after_it() -> None:
    """torch's engine would end the process: the run goes on to the end of backward, then says so."""
    with PhantomGPU(capacity_bytes=64 * 2**20) as gpu:
        x = torch.zeros(4 * 2**20, device=gpu.device, requires_grad=True)
        y = x.sin().sin()
        with pytest.raises(OutOfMemoryError, match="Tried to allocate"):
            y.sum().backward()
        del y
        x.grad = None
        x[:1024].sin().sum().backward()  # and the capacity holds again
        with pytest.raises(OutOfMemoryError):
            torch.zeros(64 * 2**20, device=gpu.device)


@pytest.mark.parametrize("in_place", [True, False])
def test_compiled_code_is_measured_as_eager_code(in_place: bool) -> None:
    def peak(compiled: bool) -> int:
        with PhantomGPU() as gpu:
            model: Any = nn.Sequential(nn.Linear(64, 64), nn.GELU()).to(gpu.device)
            if compiled and in_place:
                model.compile()
            elif compiled:
                model = torch.compile(model)
            model(torch.empty(8, 64, device=gpu.device)).sum().backward()
        return gpu.report().peak_allocated_bytes

    assert peak(compiled=True) == peak(compiled=False) > 0
