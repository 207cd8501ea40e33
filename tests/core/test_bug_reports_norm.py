"""Normalizations that other libraries got wrong, as their users reported it.

Threads about statistics, empty inputs and bad arguments are named at the tests of
test_norm_semantics.py that hold them.
"""

import opkiln.functional as F
import pytest
import torch
from reports import BACKENDS, Report, check, check_refused
from samples import rand

N = torch.nn.functional
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def cancelling():
    """LN of +-1 is +-1: weight and bias cancel to a few sixty-fourths, below bfloat16's step."""
    x = torch.tensor([1.0, -1.0], dtype=BF16).repeat(3, 40)
    steps = torch.arange(80.0)
    return x, 100 + steps / 64, -100 - steps.flip(0) / 64


def modulation():
    x = rand(BF16, 2, 7, 20)
    return x, *(rand(BF16, 2, 1, 20, seed=i).expand(2, 7, 20) for i in (1, 2))


ROW_NORMS = {
    "more rows than 16 bits count": Report(
        "NVIDIA/apex#411",
        lambda: (rand(F32, 65_539, 6), rand(F32, 6, seed=1), rand(F32, 6, seed=2)),
        lambda N, x, w, b: N.layer_norm(x, (6,), w, b),
        long=True,
    ),
    "neither weight nor bias": Report(
        "NVIDIA/apex#403",
        lambda: (rand(F32, 5, 2, 61),),
        lambda N, x: N.layer_norm(x, (61,)),
    ),
    "a row longer than 65,536": Report(
        "xlite-dev/LeetCUDA#390 facebookresearch/xformers#785",
        lambda: (rand(F32, 2, 66_003), rand(F32, 66_003, seed=1), rand(F32, 66_003, seed=2)),
        lambda N, x, w, b: N.layer_norm(x, (66_003,), w, b),
    ),
    "float32 weight and bias rounded to the input's bfloat16": Report(
        "flashinfer-ai/flashinfer#1914 pytorch/pytorch#195638",
        cancelling,
        lambda N, x, w, b: N.layer_norm(x, (80,), w, b),
    ),
    "the second pass over a transposed input ignores its stride": Report(
        "ModelTC/LightLLM#1467",
        lambda: (rand(F16, 36, 14).t(), rand(F16, 36, seed=1)),
        lambda N, x, w: N.rms_norm(x, (36,), w, 1e-6),
    ),
    "squares that overflow float16": Report(
        "microsoft/onnxruntime#29034",
        lambda: ((rand(F32, 2, 3000) * 12_000).clamp(-6e4, 6e4).half(),),
        lambda N, x: N.rms_norm(x, (3000,), None, 1e-6),
    ),
    "eps=None is not float16's epsilon": Report(
        "pytorch/pytorch#153666",
        lambda: (torch.full((3, 48), 2e-3, dtype=F16),),
        lambda N, x: N.rms_norm(x, (48,)),
        lambda x: N.rms_norm(x, (48,), None, torch.finfo(F32).eps),
    ),
    "lanes past a row that is no power of two are counted": Report(
        "tile-ai/TileOPs#1715",
        lambda: (rand(BF16, 5, 1100), rand(BF16, 1100, seed=1)),
        lambda N, x, w: N.rms_norm(x, (1100,), w, 1e-6),
    ),
    "eps is added outside the root": Report(
        "",
        lambda: (rand(F32, 3, 60) * 2e-3,),
        lambda N, x: N.rms_norm(x, (60,), None, 1e-5),
    ),
    "input and residual with different row strides": Report(
        "vllm-project/vllm#49750 vllm-project/vllm#34842",
        lambda: (rand(F16, 4, 56), rand(F16, 4, 150)[:, 30:86], rand(F16, 56, seed=1)),
        lambda F, x, r, w: F.fused_add_rms_norm(x, r, (56,), w),
        lambda x, r, w: (N.rms_norm(x + r, (56,), w, 1e-6), x + r),
    ),
    "an addition with rows of 1,128": Report(
        "Dao-AILab/quack#10",
        lambda: tuple(
            rand(F16, *s, seed=i) for i, s in enumerate([(3, 2, 1128)] * 2 + [(1128,)] * 2)
        ),
        lambda F, x, r, w, b: F.fused_add_layer_norm(x, r, (1128,), w, b),
        lambda x, r, w, b: (N.layer_norm(x + r, (1128,), w, b), x + r),
    ),
    "modulation of a sample read as that of a token": Report(
        "NVIDIA/TensorRT-LLM#15762 vllm-project/vllm-omni#3270",
        modulation,
        lambda F, x, scale, shift: F.ada_layer_norm(x, scale, shift),
        lambda x, scale, shift: scale * N.layer_norm(x, (20,)) + shift,
    ),
    "the gate leaves out the shift": Report(
        "ROCm/aiter#4268",
        lambda: tuple(rand(F32, 3, 36, seed=i) for i in range(4)),
        lambda F, x, scale, shift, gate: F.ada_layer_norm_zero(x, scale, shift, gate),
        lambda x, scale, shift, gate: gate * (scale * N.layer_norm(x, (36,)) + shift),
    ),
}


def near_the_limit_of_float16():
    x = (rand(F32, 3, 2, 8, 5) * 6000 + 38_000).clamp(-6e4, 6e4).half()
    return x, torch.zeros(2), torch.ones(2), rand(F32, 2, seed=1), rand(F32, 2, seed=2)


def normalized(grad, x, weight):
    """What batch_norm_backward needs: the statistics that normalized x."""
    dims = [d for d in range(x.ndim) if d != 1]
    variance, mean = torch.var_mean(x.double(), dims, correction=0)
    return grad, x, weight, mean.float(), (variance + 1e-5).rsqrt().float()


def gradients(grad, x, weight, mean, rstd):
    with torch.enable_grad():
        bias = torch.zeros_like(weight)
        leaves = [t.requires_grad_() for t in (x, weight, bias)]
        return torch.autograd.grad(N.batch_norm(x, None, None, weight, bias, True), leaves, grad)


def backward(F, *tensors):
    return F.batch_norm_backward(*tensors)


CHANNEL_NORMS = {
    "float16 statistics of values near its limit": Report(
        "pytorch/pytorch#115500",
        near_the_limit_of_float16,
        lambda N, x, mean, var, w, b: N.batch_norm(x, mean, var, w, b, True, 0.2),
        writes=(1, 2),
        condition=8.0,
    ),
    "the gradient of a sum has no strides": Report(
        "pytorch/pytorch#42588",
        lambda: normalized(torch.tensor(1.25).expand(4, 3, 7), rand(F32, 4, 3, 7), rand(F32, 3)),
        backward,
        gradients,
        magnitude=2.0,
    ),
    "a mean term of the input's gradient is lost": Report(
        "pulp-platform/Deeploy#212 tile-ai/TileOPs#324",
        lambda: normalized(rand(F32, 7, 4, seed=1), rand(F32, 7, 4), rand(F32, 4)),
        backward,
        gradients,
    ),
    "groups of five channels": Report(
        "flagos-ai/FlagGems#4984",
        lambda: (rand(F32, 2, 15, 3, 4), rand(F32, 15, seed=1), rand(F32, 15, seed=2)),
        lambda N, x, w, b: N.group_norm(x, 3, w, b),
    ),
    "weight and bias are taken per group": Report(
        "apache/mxnet#17139",
        lambda: (rand(F32, 3, 10, 3), rand(F32, 10, seed=1), rand(F32, 10, seed=2)),
        lambda N, x, w, b: N.group_norm(x, 5, w, b),
    ),
}
REPORTS = ROW_NORMS | CHANNEL_NORMS


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("what", REPORTS)
def test_reported(what, backend):
    check(REPORTS[what], backend)


def test_a_weight_per_group_is_refused():
    """apache/mxnet#17139"""
    x, weight = rand(F32, 3, 10, 3), rand(F32, 5)
    check_refused(lambda: F.group_norm(x, 5, weight), r"weight has shape \[5\]")
