"""mhc_pre_backward against the reference in float64; in Triton's interpreter without a GPU."""

from dataclasses import replace

import pytest
import torch
from misc.test_mhc_post import BF16, DEVICE, F16, F32, random
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_misc.mhc_pre_backward import Tiling, plan_for, prepare, rule
from opkiln_misc.plugin import supports_triton_backward

SPEC = CATALOGUE["mhc_pre_backward"]
ALL = [True, True, True]
# Two splits; in GROUPED two groups of rows, a program for each stream.
FOLDED = Tiling(sum_columns=16, splits=2, gate_rows=4, fold=True, columns=16, own=0)
GROUPED = Tiling(sum_columns=16, splits=2, gate_rows=2, columns=32, groups=2)
# Of an output's own rounding; the interpreter truncates bfloat16.
UNIT = {F16: 2**-11, BF16: 2**-7 if DEVICE == "cpu" else 2**-8, F32: 2**-23}


def call_of(
    batch: int, n: int, c: int, dtype: torch.dtype = F32, repeat: int = 3, post: bool = True,
    mask: list[bool] = ALL, eps: float = 0.02,
) -> tuple[Call, list[torch.Tensor]]:  # fmt: skip
    torch.manual_seed(0)
    width, m = n * c, n * n + 2 * n
    tensors = [
        random(batch, width, dtype=dtype), random(batch, c, dtype=dtype),
        random(batch, n) if post else random(0),
        random(width, m) / width**0.5, random(batch, width, dtype=dtype), random(m),
    ]  # fmt: skip
    params = dict(
        alpha_pre=0.7, alpha_post=1.1, alpha_res=0.9, sinkhorn_repeat=repeat, sinkhorn_eps=eps,
        return_h_post=post, output_mask=mask,
    )  # fmt: skip
    return Call.of(SPEC, tensors, params), tensors


def check(call: Call, tensors: list[torch.Tensor], tiling: Tiling | None) -> tuple:
    """Launch; compare with float64, relative to each gradient's largest element."""
    assert supports_triton_backward(call) is None
    if tiling and tiling.fold:
        tiling = replace(tiling, own=tensors[0].shape[1] // tensors[1].shape[1])
    found = prepare(call, tiling)(*tensors)
    found = found if isinstance(found, tuple) else (found,)
    want = SPEC.reference(*(t.double() for t in tensors), **vars(call.params))
    want = [w for w in want if w is not None]
    for got, expected, meta in zip(found, want, call.outputs, strict=True):
        assert (tuple(got.shape), got.stride(), got.dtype) == (meta.shape, meta.stride, meta.dtype)
        scale = float(expected.abs().max())
        atol = 1e-5 * scale + 1e-7
        torch.testing.assert_close(got.double(), expected, rtol=UNIT[got.dtype], atol=atol)
    return found


@pytest.mark.parametrize("tiling", [FOLDED, GROUPED], ids=["folded", "grouped"])
@pytest.mark.parametrize(("n", "c"), [(4, 24), (2, 33), (3, 16), (1, 20)])
def test_sizes(n, c, tiling):
    check(*call_of(3, n, c), tiling)


@pytest.mark.parametrize("tiling", [FOLDED, None])
def test_eight_streams(tiling):
    """80 columns of phi, in chunks."""
    assert not rule(2, 16, 8, 4).fold
    check(*call_of(2, 8, 16, repeat=1), tiling)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_halves(dtype):
    check(*call_of(3, 4, 24, dtype), FOLDED)


@pytest.mark.parametrize("tiling", [None, GROUPED])
def test_several_tiles_and_groups_of_rows(tiling):
    call, tensors = call_of(37, 2, 20)
    plan = plan_for(call, tiling)
    assert plan.groups > 1 and not plan.tiling.fold
    check(call, tensors, tiling)


@pytest.mark.parametrize("repeat", [0, 1, 20])
@pytest.mark.parametrize("eps", [0.02, 0.5])
def test_rounds(repeat, eps):
    check(*call_of(2, 3, 8, repeat=repeat, eps=eps), FOLDED)


def test_without_h_post():
    check(*call_of(2, 4, 16, post=False), FOLDED)


@pytest.mark.parametrize("tiling", [FOLDED, GROUPED], ids=["folded", "grouped"])
@pytest.mark.parametrize("i", range(3))
def test_a_single_gradient(i, tiling):
    batch = 3 if tiling.fold else 20
    found = check(*call_of(batch, 2, 12, mask=[j == i for j in range(3)]), tiling)
    assert len(found) == 1


def test_ties_share_the_gradient_of_the_maximum():
    """Without iterations the shift by the maximum does not cancel."""
    call, tensors = call_of(2, 3, 8, repeat=0)
    tensors[3][:, 6:] = 0
    tensors[5][6:] = 0.25
    check(Call.of(SPEC, tensors, vars(call.params)), tensors, FOLDED)


def test_a_row_of_zeros_has_a_finite_gradient():
    call, tensors = call_of(2, 2, 8)
    tensors[4][0] = 0
    for g in check(call, tensors, FOLDED):
        assert g.isfinite().all()


def test_no_rows():
    call, tensors = call_of(0, 2, 8)
    d_x, d_phi, d_b = prepare(call)(*tensors)
    assert d_x.shape == (0, 16) and not d_phi.any() and not d_b.any()


STRIDES = {
    "padded": lambda t: torch.nn.functional.pad(t, (1, 2))[..., 1:-2],
    "transposed": lambda t: t.t().contiguous().t(),
    "strided": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda t: t[:1].expand(t.shape),
}


@pytest.mark.parametrize("change", STRIDES.values(), ids=STRIDES)
def test_strides(change):
    call, tensors = call_of(3, 2, 20)
    tensors = [change(t) if t.ndim == 2 else t for t in tensors]
    check(Call.of(SPEC, tensors, vars(call.params)), tensors, FOLDED)


def test_two_runs_give_the_same_bits():
    call, tensors = call_of(20, 2, 20)
    launch = prepare(call, GROUPED)
    for a, b in zip(launch(*tensors), launch(*tensors), strict=True):
        assert torch.equal(a, b)


def test_the_rule_folds_few_rows_and_fills_the_gpu_with_many():
    assert rule(4, 2560, 4, 2).fold and rule(4, 2560, 4, 2).groups == 1
    many = rule(8192, 2560, 4, 2)
    assert not many.fold and many.splits == 1 and many.groups > 1


@pytest.mark.parametrize(("streams", "own"), [(1, 1), (4, 4), (5, 1), (6, 3), (7, 1), (8, 1)])
def test_the_streams_of_a_program_divide_all(streams, own):
    assert rule(8192, 64, streams, 2).own == own


def test_through_autograd():
    """The gradient that loss.backward() takes is this kernel's."""
    import opkiln
    from opkiln.functional import mhc_pre

    call, (g_res, g_layer, _, phi, x, b) = call_of(2, 2, 12, post=False)
    inputs = [t.clone().requires_grad_() for t in (x, phi, b)]
    p = vars(call.params)
    names = ("alpha_pre", "alpha_post", "alpha_res", "sinkhorn_repeat", "sinkhorn_eps")
    with opkiln.use("opkiln"):
        outs = mhc_pre(inputs[1], inputs[0], inputs[2], *[p[name] for name in names])
    torch.autograd.backward(outs, (g_res, g_layer))
    empty = torch.empty(0, device=DEVICE)
    want = prepare(call)(g_res, g_layer, empty, phi, x, b)
    for t, w in zip(inputs, want, strict=True):
        assert torch.equal(t.grad, w)


@pytest.mark.parametrize(
    ("batch", "n", "c", "dtype", "words"),
    [(1, 9, 2, F32, "8 streams"), (1, 2, 2, torch.float64, "float64"), (1, 2, 0, F32, "column")],
)
def test_refuses_what_it_cannot_serve(batch, n, c, dtype, words):
    m = n * n + 2 * n
    wide = torch.float64 if dtype == torch.float64 else F32
    shapes = ((batch, n * c), (batch, c), (batch, n), (n * c, m), (batch, n * c), (m,))
    dtypes = (dtype, dtype, wide, wide, dtype, wide)
    tensors = [torch.empty(s, dtype=d, device="meta") for s, d in zip(shapes, dtypes, strict=True)]
    params = vars(call_of(1, 2, 2)[0].params)
    call = Call.of(SPEC, tensors, params, real=False)
    assert words in supports_triton_backward(call).reason
