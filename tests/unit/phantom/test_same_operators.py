"""The phantom runs the operators that CUDA runs, whatever torch's dispatcher decides for its key.

A CPU build cannot trace CUDA. But a program's operators on fake CPU tensors are those of its code and of autograd:
where the phantom's differ, `CAUSES` says why CUDA's differ in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchgen
import yaml
from torch import nn

from memtrain.cards import load_card
from memtrain.engine.build import build_dimensions
from memtrain.errors import UserError
from memtrain.phantom import PhantomCPU, PhantomGPU
from memtrain.planner.predict import predict, predict_cpu

CONF = Path(__file__).parents[3] / "conf/model"
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key

ROW, SEQUENCE, IMAGE, VOLUME = (4, 16), (2, 8, 16), (2, 16, 12, 12), (1, 4, 6, 6, 6)
Program = Callable[[Any], Any]


def of(names: str, shape: tuple[int, ...], **options: Any) -> dict[str, tuple[Program, Any]]:
    """Functions of torch.nn.functional, torch or Tensor of one tensor."""

    def calls(name: str) -> Program:
        owner = next(o for o in (F, torch.Tensor, torch.linalg) if hasattr(o, name))
        return lambda x: getattr(owner, name)(x, **options)

    return {name: (calls(name), shape) for name in names.split()}


def against_ones(names: str) -> dict[str, tuple[Program, Any]]:
    def calls(name: str) -> Program:
        return lambda x: getattr(F, name)(x, torch.ones_like(x))

    return {name: (calls(name), ROW) for name in names.split()}


def layer(make: Callable[[], Any], shape: tuple[int, ...], copies: int = 1) -> tuple[Program, Any]:
    return lambda x: make()(*[x] * copies), shape


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long)


def attention(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Program, Any]:
    def run(x: torch.Tensor) -> torch.Tensor:
        if "attn_mask" in options:
            options["attn_mask"] = torch.ones(8, 8, dtype=torch.bool)
        q = x.to(dtype).view(2, 8, 2, 8).transpose(1, 2)  # (B, H, T, D)
        return F.scaled_dot_product_attention(q, q, q, **options)

    return run, SEQUENCE


def recurrent(kind: Any, cudnn: bool) -> tuple[Program, Any]:
    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.backends.cudnn.flags(enabled=cudnn), torch.backends.mkldnn.flags(enabled=False):
            return kind(16, 8)(x)[0]

    return run, SEQUENCE


PROGRAMS: dict[str, tuple[Program, Any]] = {
    **of("relu relu6 elu selu celu leaky_relu rrelu gelu silu mish softplus softsign tanhshrink softshrink hardshrink "
         "hardtanh hardsigmoid hardswish logsigmoid sigmoid tanh glu", ROW),
    "gelu by tanh": (lambda x: F.gelu(x, approximate="tanh"), ROW),
    **of("softmax log_softmax softmin gumbel_softmax", ROW, dim=-1),
    **of("dropout alpha_dropout", ROW, training=True),
    "prelu": layer(lambda: nn.PReLU(), ROW),
    "linear": layer(lambda: nn.Linear(16, 8), SEQUENCE),
    "linear without bias": layer(lambda: nn.Linear(16, 8, bias=False), SEQUENCE),
    "bilinear": layer(lambda: nn.Bilinear(16, 16, 4), ROW, 2),
    "layer_norm": layer(lambda: nn.LayerNorm(16), SEQUENCE),
    "rms_norm": layer(lambda: nn.RMSNorm(16), SEQUENCE),
    "group_norm": layer(lambda: nn.GroupNorm(4, 16), IMAGE),
    "batch_norm": layer(lambda: nn.BatchNorm2d(16), IMAGE),
    "batch_norm in eval": layer(lambda: nn.BatchNorm2d(16).eval(), IMAGE),
    "instance_norm": layer(lambda: nn.InstanceNorm2d(16, affine=True), IMAGE),
    "local_response_norm": layer(lambda: nn.LocalResponseNorm(3), IMAGE),
    "weight_norm": layer(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 8)), ROW),
    "spectral_norm": layer(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(16, 8)), ROW),
    "conv1d": layer(lambda: nn.Conv1d(8, 4, 3), SEQUENCE),
    "conv2d": layer(lambda: nn.Conv2d(16, 8, 3, padding="same"), IMAGE),
    "conv2d by channel": layer(lambda: nn.Conv2d(16, 16, 3, groups=16), IMAGE),
    "conv3d": layer(lambda: nn.Conv3d(4, 4, 3), VOLUME),
    "conv_transpose2d": layer(lambda: nn.ConvTranspose2d(16, 8, 3, stride=2), IMAGE),
    "max_pool1d": layer(lambda: nn.MaxPool1d(2), SEQUENCE),
    "max_pool2d": layer(lambda: nn.MaxPool2d(2), IMAGE),
    "max_pool3d": layer(lambda: nn.MaxPool3d(2), VOLUME),
    "avg_pool1d": layer(lambda: nn.AvgPool1d(2), SEQUENCE),
    "avg_pool2d": layer(lambda: nn.AvgPool2d(2), IMAGE),
    "avg_pool3d": layer(lambda: nn.AvgPool3d(2), VOLUME),
    "lp_pool2d": layer(lambda: nn.LPPool2d(2, 2), IMAGE),
    "fractional_max_pool2d": layer(lambda: nn.FractionalMaxPool2d(2, output_size=4), IMAGE),
    "adaptive_avg_pool2d of all": layer(lambda: nn.AdaptiveAvgPool2d(1), IMAGE),
    "adaptive_avg_pool2d": layer(lambda: nn.AdaptiveAvgPool2d(5), IMAGE),
    "adaptive_avg_pool3d": layer(lambda: nn.AdaptiveAvgPool3d(2), VOLUME),
    "adaptive_max_pool2d": layer(lambda: nn.AdaptiveMaxPool2d(5), IMAGE),
    "pixel_shuffle": layer(lambda: nn.PixelShuffle(2), IMAGE),
    "channel_shuffle": layer(lambda: nn.ChannelShuffle(4), IMAGE),
    "upsample nearest": layer(lambda: nn.Upsample(scale_factor=2), IMAGE),
    "upsample bilinear": layer(lambda: nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE),
    "upsample bicubic": layer(lambda: nn.Upsample(scale_factor=2, mode="bicubic"), IMAGE),
    "upsample trilinear": layer(lambda: nn.Upsample(scale_factor=2, mode="trilinear"), VOLUME),
    "unfold, fold": layer(lambda: nn.Sequential(nn.Unfold(3), nn.Fold(12, 3)), IMAGE),
    "pad by reflection": layer(lambda: nn.ReflectionPad2d(1), IMAGE),
    "pad by replication": layer(lambda: nn.ReplicationPad2d(1), IMAGE),
    "pad in a circle": layer(lambda: nn.CircularPad2d(1), IMAGE),
    "embedding": (lambda x: nn.Embedding(10, 16)(zeros(4)), ROW),
    "embedding_bag": (lambda x: nn.EmbeddingBag(10, 16)(zeros(2, 4)), ROW),
    "embedding_bag max": (lambda x: nn.EmbeddingBag(10, 16, mode="max")(zeros(2, 4)), ROW),
    "lstm": recurrent(nn.LSTM, cudnn=False),
    "gru": recurrent(nn.GRU, cudnn=False),
    "rnn": recurrent(nn.RNN, cudnn=False),
    "lstm_cell": layer(lambda: nn.LSTMCell(16, 8), ROW),
    "gru_cell": layer(lambda: nn.GRUCell(16, 8), ROW),
    "rnn_cell": layer(lambda: nn.RNNCell(16, 8), ROW),
    "multi-head attention": layer(lambda: nn.MultiheadAttention(16, 2), SEQUENCE, 3),
    "encoder": layer(lambda: nn.TransformerEncoderLayer(16, 2, 32), SEQUENCE),
    "encoder in eval": layer(lambda: nn.TransformerEncoderLayer(16, 2, 32).eval(), SEQUENCE),
    "decoder": layer(lambda: nn.TransformerDecoderLayer(16, 2, 32), SEQUENCE, 2),
    "attention fp32": attention(),
    "attention bf16": attention(torch.bfloat16, is_causal=True),
    "attention fp64": attention(torch.float64),
    "attention dropout": attention(dropout_p=0.1),
    "attention mask": attention(attn_mask=True),
    **against_ones(
        "mse_loss l1_loss smooth_l1_loss huber_loss poisson_nll_loss kl_div soft_margin_loss cross_entropy "
        "binary_cross_entropy_with_logits multilabel_soft_margin_loss hinge_embedding_loss cosine_similarity "
        "pairwise_distance"
    ),
    "cross_entropy of classes": (lambda x: F.cross_entropy(x, zeros(4), label_smoothing=0.1), ROW),
    "cross_entropy of an image": (lambda x: F.cross_entropy(x, zeros(2, 12, 12)), IMAGE),
    "binary_cross_entropy": (lambda x: F.binary_cross_entropy(x.sigmoid(), torch.ones_like(x)), ROW),
    "gaussian_nll_loss": (lambda x: F.gaussian_nll_loss(x, x * 2, torch.ones_like(x)), ROW),
    "margin_ranking_loss": (lambda x: F.margin_ranking_loss(x, x * 2, torch.ones_like(x)), ROW),
    "cosine_embedding_loss": (lambda x: F.cosine_embedding_loss(x, x * 2, torch.ones(4)), ROW),
    "triplet_margin_loss": (lambda x: F.triplet_margin_loss(x, x * 2, x * 3), ROW),
    "grid_sample": (lambda x: F.grid_sample(x, torch.ones(2, 5, 5, 2), align_corners=True), IMAGE),
    "affine_grid": (lambda x: F.affine_grid(x[:, :2, :3, 0], [2, 16, 12, 12], False), IMAGE),
    "matmul": (lambda x: x @ x.transpose(1, 2) @ x[0], SEQUENCE),
    "einsum": (lambda x: torch.einsum("btc,bsc->bts", x, x), SEQUENCE),
    "mv, dot": (lambda x: (x @ x[0]).sum() + x[0] @ x[1], ROW),
    "addmm, addr": (lambda x: torch.addmm(x[:, :4], x, x.t()) + torch.addr(x[:4, :4], x[0, :4], x[1, :4]), ROW),
    "baddbmm": (lambda x: torch.baddbmm(x[:, :, :8], x, x.transpose(1, 2)), SEQUENCE),
    "cdist, pdist": (lambda x: torch.cdist(x, x * 2).sum() + F.pdist(x).sum(), ROW),
    **of("cumsum cumprod logcumsumexp prod var std logsumexp", ROW, dim=-1),
    "norm, renorm": (lambda x: x.norm() + x.norm(1, -1).sum() + x.renorm(2, 0, 1.0).sum(), ROW),
    "sort, topk, max": (lambda x: x.sort()[0] + x.topk(1)[0] + x.max(-1, True)[0], ROW),
    "gather, index": (lambda x: x.gather(1, zeros(4, 1)) + x[zeros(4)] + x.index_select(0, zeros(4)), ROW),
    "scatter_add": (lambda x: torch.zeros(4, 16).scatter_add(0, zeros(4, 16), x), ROW),
    "where, masked_fill": (lambda x: torch.where(x > 0, x, x.masked_fill(x > 1, 0)), ROW),
    "tril, roll, flip": (lambda x: x.tril() + x.roll(1, 0) + x.flip(0), ROW),
    "repeat, cat, stack": (lambda x: torch.stack([torch.cat(x.split(2)), x.repeat_interleave(2, 0)[:4]]), ROW),
    "fft, complex": (lambda x: (torch.fft.rfft(x) * torch.polar(torch.ones(9), torch.ones(9))).abs(), ROW),
    "linalg": (lambda x: torch.linalg.solve(x[:4, :4], x).sum() + torch.linalg.det(x[:4, :4]), ROW),
    "factorizations": (lambda x: torch.linalg.svdvals(x).sum() + torch.linalg.qr(x)[0].sum()
                       + torch.linalg.cholesky(x[:4, :4]).sum(), ROW),
}  # fmt: skip


@dataclass(frozen=True)
class Cause:
    """Why operators run more often on the phantom (`more`), or on fake CPU tensors (`less`), in `programs`."""

    reason: str
    programs: str
    more: str
    less: str


MODELS = {  # the presets of conf/model by what makes their operators differ
    "gpt2": "gpt2 gpt2_large gpt2_medium gpt2_xl nano small",
    "llama2_7b": "llama2_13b llama2_7b",
    "llama3_8b": "llama2_70b llama3_8b mistral_7b tinyllama",
    "qwen2_7b": "qwen2_7b",
}
FLASH = "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward"
EFFICIENT = (
    "_scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward"
)
ON_CPU = "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward"
IN_PARTS = "_safe_softmax _softmax_backward_data bmm mul.Scalar clone"
CELL = (
    "tanh_ tanh_backward sigmoid_ sigmoid_backward mul.Tensor add_.Tensor addmm cat sum.dim_IntList"
)
CAUSES = [
    Cause("dropout draws and scales in one kernel: native/Dropout.cpp, is_fused_kernel_acceptable",
          "dropout|encoder|decoder", "native_dropout native_dropout_backward",
          "bernoulli_.float div_.Scalar mul.Tensor empty_like"),
    Cause("CUDA has a fused kernel: native/cuda/layer_norm_kernel.cu, _fused_rms_norm_cuda",
          "rms_norm|llama2_7b|llama3_8b|qwen2_7b", "_fused_rms_norm _fused_rms_norm_backward",
          "add.Tensor add_.Scalar div.Scalar mean.dim mul.Scalar mul.Tensor pow.Tensor_Scalar rsqrt sum.dim_IntList"),
    Cause("each device has its attention: native/transformers/cuda/sdp_utils.cpp, select_sdp_backend",
          "attention bf16|gpt2|llama2_7b|llama3_8b|qwen2_7b", FLASH, ON_CPU),
    Cause("as above, without a 16-bit type", "attention fp32|encoder in eval", EFFICIENT, ON_CPU),
    Cause("as above, the mask of the input's type", "attention mask", f"{EFFICIENT} full", f"{ON_CPU} scalar_tensor"),
    Cause("as above, and no kernel of CUDA's takes fp64", "attention fp64", IN_PARTS, ON_CPU),
    Cause("as above, and the CPU's has no dropout", "attention dropout", EFFICIENT,
          f"{IN_PARTS} bernoulli_.float div_.Scalar empty_like mul.Tensor"),
    Cause("as above, in a layer", "encoder|decoder", EFFICIENT, IN_PARTS.replace(" clone", "")),
    Cause("the kernel's result is laid out (B, T, H, D) in another order than asked for",
          "encoder|encoder in eval|decoder", "clone", ""),
    Cause("a count made on the host is moved to the device", "batch_norm|batch_norm in eval", "_to_copy", ""),
    Cause("batches are moved to the device", "gpt2|llama2_7b|llama3_8b|qwen2_7b", "_to_copy", ""),
    Cause("cells are one kernel: native/RNN.cpp, LSTMCell", "lstm|lstm_cell",
          "_thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward_impl mm", f"{CELL} tanh"),
    Cause("cells are one kernel: native/RNN.cpp, GRUCell", "gru|gru_cell",
          "_thnn_fused_gru_cell _thnn_fused_gru_cell_backward mm",
          f"{CELL} add.Tensor clone mul_.Tensor neg sub.Tensor"),
    Cause("the gradient of both gates is one tensor: native/RNN.cpp, LSTMCell",
          "lstm_cell", "copy_ new_empty_strided", ""),
    Cause("only the CPU multiplies a whole sequence at once: native/RNN.cpp, FullLayer",
          "lstm|rnn", "add.Tensor mm", ""),
    Cause("as above", "rnn", "addmm sum.dim_IntList", ""),
]  # fmt: skip


def operators(phantom: PhantomGPU | PhantomCPU, program: Program, shape: Any) -> Counter[str]:
    with phantom, phantom.device:
        out = program(torch.empty(shape, requires_grad=True))
        (out[0] if isinstance(out, tuple) else out).sum().backward()
    return counted(phantom.report())


def counted(report: Any) -> Counter[str]:
    calls: Counter[str] = Counter()
    for op in report.ops:
        calls[op.name.removeprefix("aten.")] += op.calls
    return calls


def explained(name: str) -> tuple[set[str], set[str]]:
    causes = [cause for cause in CAUSES if name in cause.programs.split("|")]
    return {w for c in causes for w in c.more.split()}, {w for c in causes for w in c.less.split()}


def test_operators_differ_from_those_on_the_cpu_for_a_reason() -> None:
    found, known = {}, {}
    for name, (program, shape) in PROGRAMS.items():
        here, cpu = (operators(phantom, program, shape) for phantom in (PhantomGPU(), PhantomCPU()))
        found[name] = set(here - cpu), set(cpu - here)
        known[name] = explained(name)
    assert len(PROGRAMS) >= 100
    assert found == known


@pytest.mark.parametrize("name", MODELS)
def test_so_do_those_of_the_model_presets(config: Any, name: str) -> None:
    """Subsets here: what one cause adds another may take away."""
    preset = yaml.safe_load((CONF / f"{name}.yaml").read_text(encoding="utf-8"))
    small = {
        "vocab_size": 100,
        "dim": 64,
        "n_layers": 1,
        "n_heads": 4,
        "n_kv_heads": 2,
        "ffn_dim": 96,
    }
    sizes = [f"model.{key}={small[key]}" for key in small if preset.get(key)]
    tiny = config(f"model={name}", *sizes, "data=random", "data.vocab_size=100", "precision=bf16",
                  "seq_len=32", "micro_batch=2", "accum=1")  # fmt: skip
    dimensions = build_dimensions(tiny, 100)
    here = counted(predict(tiny, dimensions, load_card("a100_80gb")).report)
    cpu = counted(predict_cpu(tiny, dimensions).report)
    more, less = explained(name)
    assert (set(here - cpu) - more, set(cpu - here) - less) == (set(), set())


def test_every_model_preset_is_of_a_kind_that_is_compared() -> None:
    def kind(name: str) -> tuple[Any, ...]:
        preset = yaml.safe_load((CONF / f"{name}.yaml").read_text(encoding="utf-8"))
        names = ("norm", "activation", "positions", "tied", "bias", "qkv_bias")
        return *map(preset.get, names), bool(preset.get("n_kv_heads"))

    named = [name for names in MODELS.values() for name in names.split()]
    assert sorted([*named, "hf"]) == sorted(path.stem for path in CONF.glob("*.yaml"))
    for first, names in MODELS.items():
        assert {kind(name) for name in names.split()} == {kind(first)}


IN_PARTS_ON_CUDA_TOO = {
    "aten::native_channel_shuffle": "native_functions.yaml has a kernel for the CPU, none for CUDA",
}
"""Operators with a kernel beside a composite form that the phantom takes apart, and why that is right."""


def kernels_in_yaml() -> Iterator[tuple[str, set[str]]]:
    """Name and dispatch keys of each operator, those of a structured delegate with it.

    The dispatcher of a CPU build does not know the kernels of CUDA; the file that torch is built from does.
    """
    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    entries = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    by_name = {entry["func"].partition("(")[0]: entry for entry in entries}
    for name, entry in by_name.items():
        delegate = by_name.get(entry.get("structured_delegate"), {})
        words = [*entry.get("dispatch", {}), *delegate.get("dispatch", {})]
        yield f"aten::{name}", {key.strip() for word in words for key in word.split(",")}


def test_no_operator_with_a_kernel_is_taken_apart_unseen() -> None:
    """Autograd takes apart what has a composite form and no kernel for the device at hand."""
    composite = "CompositeImplicitAutograd"
    names = torch._C._dispatch_get_all_op_names()
    listed = {
        n
        for n in names
        if has_kernel(n, composite) and (has_kernel(n, "CPU") or has_kernel(n, "CUDA"))
    }
    listed |= {n for n, keys in kernels_in_yaml() if composite in keys and keys & {"CPU", "CUDA"}}
    assert {"aten::silu_backward", "aten::mish_backward", "aten::_fused_rms_norm"} <= listed
    with PhantomGPU():
        in_parts = {name for name in listed if not has_kernel(name, "PrivateUse1")}
    assert in_parts == set(IN_PARTS_ON_CUDA_TOO)


def test_silu_backward_allocates_its_result_alone() -> None:
    with PhantomGPU() as gpu:
        x = torch.empty(2**20, device=gpu.device, requires_grad=True)
        y = F.silu(x)
        grad = torch.empty_like(y)
        gpu.step_boundary()
        y.backward(grad)
    assert gpu.report().step_peak_bytes[-1] == 4 * 4 * 2**20  # x, y, grad and the gradient of x


def test_results_are_those_of_cuda_where_the_cpu_has_others() -> None:
    with PhantomGPU() as gpu:
        memory = torch.get_device_module("phantom").memory_allocated
        x = torch.empty(2**20, device=gpu.device, requires_grad=True)
        before = memory()
        y = F.logsigmoid(x)
        assert memory() - before == 4 * 2**20  # no buffer beside `y`: native/cuda/Activation.cpp
        y.sum().backward()
        image = torch.empty(2, 3, 8, 8, device=gpu.device).to(memory_format=torch.channels_last)
        assert F.pad(
            image, (1, 1, 1, 1), mode="reflect"
        ).is_contiguous()  # native/cuda/ReflectionPad.cu


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("inference", [False, True])
def test_a_layer_that_runs_in_cudnn_is_refused(kind: Any, inference: bool) -> None:
    with PhantomGPU() as gpu, torch.inference_mode(inference):
        layer, x = kind(16, 8, device=gpu.device), torch.empty(5, 2, 16, device=gpu.device)
        with pytest.raises(UserError, match=r"cuDNN.*torch\.backends\.cudnn\.flags") as caught:
            layer(x)
        assert "\n" not in str(caught.value)
        with torch.backends.cudnn.flags(enabled=False):
            layer(x)


def test_the_cells_of_a_gru_keep_five_rows_each() -> None:
    """native/cuda/RNN.cu: GRU_WORKSPACE_MULTIPLIER."""
    with PhantomGPU() as gpu:
        cell = nn.GRUCell(128, 128, device=gpu.device)
        x = torch.empty(64, 128, device=gpu.device)
        cell(x)
    made = [
        r
        for r, change in gpu.meter.ledger.events
        if r.op == "aten._thnn_fused_gru_cell" and change > 0
    ]
    assert sorted(record.size_bytes for record in made) == [64 * 128 * 4, 5 * 64 * 128 * 4]
