"""Every pooling kernel and branch against the spec's reference in float64, indices exactly.

Runs in Triton's interpreter on a machine without a GPU, on the GPU elsewhere.
"""

import math
from typing import Any

import pytest
import torch
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_pool import pool_plan
from opkiln_pool.plugin import supports
from opkiln_pool.pool_plan import PoolPlan, Tiling, plan_for
from opkiln_pool.variants import KERNELS, prepare

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
NAN, INF = math.nan, math.inf
# The interpreter truncates f32 to bf16 (one ulp) where the GPU rounds (half an ulp).
RTOL = {F16: 2**-11, BF16: 2**-7 if DEVICE == "cpu" else 2**-8, F32: 2**-21}


@pytest.fixture(autouse=True)
def nan_filled_memory():
    """Outputs start as NaN, or the largest integer, so that an element left unwritten fails."""
    torch.manual_seed(0)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)


def random(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def window(op: str, kernel: Any, stride: Any = None, padding: Any = 0, **more: Any) -> dict:
    """Canonical parameters; numbers count for every dim."""
    n = int(op.split("pool")[1][0])
    dims = {"kernel_size": kernel, "stride": stride or kernel, "padding": padding}
    options = {"ceil_mode": False}
    if op.startswith("max"):
        dims["dilation"] = 1
    else:
        options["count_include_pad"] = True
        options |= {"divisor_override": None} if n > 1 else {}
    found = dims | options | more
    return {k: (v,) * n if k in dims and isinstance(v, int) else v for k, v in found.items()}


def run(op: str, x: torch.Tensor, params: dict[str, Any], needs_grad: bool = False) -> PoolPlan:
    """Launch, compare outputs and saved offsets with float64, return the plan that ran."""
    spec = CATALOGUE[op]
    call = Call.of(spec, [x], params, needs_grad=needs_grad)
    assert supports(call) is None
    before = x.clone()
    results = prepare(call)(x)
    results = results if isinstance(results, tuple) else (results,)
    expected = spec.reference(x.double().cpu(), **params)
    expected = expected if isinstance(expected, tuple) else (expected,)
    kept = [e for e, here in zip(expected, call.present, strict=True) if here]
    for got, want, meta in zip(results, kept, call.outputs, strict=True):
        assert (got.shape, got.dtype, got.stride()) == (meta.shape, meta.dtype, meta.stride)
        if "avg" in op:
            torch.testing.assert_close(
                got.cpu().double(), want, rtol=RTOL[got.dtype], atol=2**-20, equal_nan=True
            )
        else:
            assert torch.equal(got.cpu().double().nan_to_num(7e7), want.double().nan_to_num(7e7))
    assert torch.equal(x.nan_to_num(7.0), before.nan_to_num(7.0))
    return plan_for(call)


@pytest.fixture
def use_tiling(monkeypatch):
    """Make every plan use a tiling."""

    def put(tiling: Tiling) -> None:
        monkeypatch.setattr(pool_plan, "tuned", lambda op, g: (tiling, "test"))

    return put


PATCH = {  # id: (op, shape, dtype, window, (HEAD, VECTORS, TAIL, V))
    "stem": ("max_pool2d", (1, 2, 8, 16), F16, dict(kernel=3, stride=2, padding=1), (1, 1, 0, 4)),
    "stem-f32": ("max_pool2d", (1, 2, 4, 8), F32, dict(kernel=3, stride=2, padding=1),
                 (1, 1, 0, 2)),
    "stem-indices": ("max_pool2d_indices", (1, 2, 6, 16), F16,
                     dict(kernel=3, stride=2, padding=1), (1, 1, 0, 4)),
    "uneven-rows": ("max_pool2d_indices", (1, 2, 4, 24), F16,
                    dict(kernel=2, stride=2, padding=1, ceil_mode=True), (1, 1, 0, 4)),
    "8-byte-rows": ("avg_pool2d", (1, 2, 4, 12), F16, dict(kernel=2), (0, 1, 0, 2)),
    "stride-1": ("avg_pool2d", (1, 1, 4, 16), F16, dict(kernel=3, stride=1, padding=1),
                 (1, 1, 1, 8)),
    "stride-3": ("max_pool1d_indices", (2, 2, 48), F16, dict(kernel=3), (0, 3, 0, 8)),
    "stride-4": ("avg_pool1d", (2, 2, 48), F16, dict(kernel=5, stride=4, padding=2), (2, 1, 0, 2)),
    "dilated": ("max_pool1d", (2, 3, 48), BF16,
                dict(kernel=5, stride=2, padding=2, dilation=2, ceil_mode=True), (2, 2, 0, 4)),
    "dilated-indices": ("max_pool1d_indices", (2, 3, 48), BF16,
                        dict(kernel=5, stride=2, padding=2, dilation=2), (2, 2, 0, 4)),
    "dilated-pairs": ("max_pool2d_indices", (1, 2, 9, 16), F16,
                      dict(kernel=3, stride=2, padding=1, dilation=2), (1, 1, 2, 4)),
    "tail-pairs": ("max_pool2d_indices", (1, 2, 5, 16), BF16,
                   dict(kernel=3, stride=1, padding=1), (1, 1, 1, 8)),
    "head-is-a-vector": ("avg_pool1d", (1, 2, 32), F32, dict(kernel=7, stride=2, padding=3),
                         (0, 2, 2, 2)),
    "inside": ("avg_pool2d", (1, 2, 6, 16), F16,
               dict(kernel=3, stride=2, padding=1, count_include_pad=False), (1, 1, 0, 4)),
    "ceil-padded": ("avg_pool2d", (1, 2, 6, 16), F16,
                    dict(kernel=3, stride=2, padding=1, ceil_mode=True), (1, 1, 0, 4)),
    "divisor": ("avg_pool3d", (1, 2, 2, 4, 8), F32,
                dict(kernel=2, stride=2, divisor_override=-3), (0, 1, 0, 2)),
    "volume": ("max_pool3d", (1, 1, 4, 4, 16), F16, dict(kernel=3, stride=2, padding=1),
               (1, 1, 0, 4)),
    "volume-indices": ("max_pool3d_indices", (1, 1, 4, 4, 16), F16,
                       dict(kernel=(2, 3, 2), stride=2, padding=(0, 1, 1)), (1, 1, 0, 4)),
    "unbatched": ("max_pool2d_indices", (3, 4, 8), F32, dict(kernel=2), (0, 1, 0, 2)),
}  # fmt: skip


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("case", PATCH.values(), ids=PATCH)
def test_patch(case, static, use_tiling):
    op, shape, dtype, how, layout = case
    v = layout[-1]
    if static:
        use_tiling(Tiling("patch", 16, 1, v=v, static=True, evict="evict_first", cache=".cs"))
    plan = run(op, random(*shape, dtype=dtype), window(op, **how), needs_grad=static)
    assert plan.tiling.variant == "patch"
    assert tuple(plan.constexprs[k] for k in ("HEAD", "VECTORS", "TAIL", "V")) == layout


@pytest.mark.parametrize("v", [2, 4, 8])
def test_patch_wider_than_the_least(v, use_tiling):
    use_tiling(Tiling("patch", 8, 1, v=v))
    params = window("max_pool2d_indices", 3, 2, 1)
    run("max_pool2d_indices", random(2, 2, 6, 16), params, needs_grad=True)


def test_patches_cover_their_windows():
    """What a thread loads holds every tap, and `past_the_end` is exact."""
    call = Call.of(CATALOGUE["max_pool1d"], [random(1, 1, 64)], window("max_pool1d", 2))
    plain = pool_plan.geometry_of(call)
    for kernel, stride, padding, dilation, out in (
        (k, s, p, d, o)
        for k in range(1, 8)
        for s in range(1, 6)
        for p in range(k // 2 + 1)
        for d in (1, 2, 3)
        for o in (1, 2, 7, 16)
    ):
        g = pool_plan.replace(
            plain, kernel=(1, 1, kernel), stride=(1, 1, stride), padding=(0, 0, padding),
            dilation=(1, 1, dilation), outs=(1, 1, out),
        )  # fmt: skip
        for v in (4, 8):
            head, first, vectors, tail = pool_plan.pieces(g, v)
            low, high = first * 4 - head, (first + vectors) * 4 + tail
            assert low <= -padding
            assert (v - 1) * stride - padding + (kernel - 1) * dilation < high
            last = (-(-out // v) - 1) * v * stride + high
            assert pool_plan.past_the_end(g, v) == (last > 64)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.ndim])


TAPS = {  # id: (op, input, window, constexprs that the plan must have)
    "odd-rows": ("max_pool2d", lambda: random(2, 3, 7, 7, dtype=F16), dict(kernel=3, stride=2),
                 {"VEC": 1, "UNROLL": True, "CHECK": (False, False, False)}),
    "odd-rows-padded": ("avg_pool2d", lambda: random(2, 3, 7, 7, dtype=BF16),
                        dict(kernel=(3, 5), stride=2, padding=(1, 2), count_include_pad=False),
                        {"CHECK": (False, True, True), "DIVISOR": "inside"}),
    "loop": ("max_pool2d_indices", lambda: random(1, 1, 9, 11), dict(kernel=(8, 9), stride=1,
             padding=(2, 4)), {"UNROLL": False}),
    "loop-avg": ("avg_pool1d", lambda: random(1, 2, 70, dtype=F16), dict(kernel=65, stride=3),
                 {"UNROLL": False}),
    "channels-last": ("max_pool2d_indices", lambda: channels_last(random(2, 16, 5, 6, dtype=F16)),
                      dict(kernel=3, stride=2, padding=1), {"VEC": 8, "CHANNELS_LAST": True}),
    "channels-last-odd": ("avg_pool2d", lambda: channels_last(random(2, 3, 5, 6)),
                          dict(kernel=2), {"VEC": 1, "CHANNELS_LAST": True}),
    "channels-last-3d": ("max_pool3d", lambda: channels_last(random(1, 4, 3, 4, 5)),
                         dict(kernel=2), {"VEC": 4, "CHANNELS_LAST": True}),
    "strided": ("max_pool2d", lambda: random(2, 3, 5, 16)[..., ::2], dict(kernel=2), {"VEC": 1}),
    "channel-slice": ("max_pool2d", lambda: random(2, 6, 5, 7)[:, ::2], dict(kernel=2), {}),
    "expanded": ("avg_pool2d", lambda: random(1, 3, 5, 7).expand(2, 3, 5, 7), dict(kernel=2), {}),
    "misses": ("max_pool2d_indices", lambda: random(1, 2, 2, 2),
               dict(kernel=2, stride=1, padding=1, dilation=3, ceil_mode=True),
               {"CAN_MISS": True}),
}  # fmt: skip


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("case", TAPS.values(), ids=TAPS)
def test_taps(case, static, use_tiling):
    op, make, how, expected = case
    use_tiling(Tiling("taps", 64, 1, static=static))
    plan = run(op, make(), window(op, **how), needs_grad=static)
    assert expected.items() <= plan.constexprs.items()


WHOLE = {  # id: (op, input, params, variant)
    "global": ("adaptive_max_pool2d", lambda d: random(2, 5, 7, 7, dtype=d), (1, 1), "plane"),
    "global-avg": ("adaptive_avg_pool2d", lambda d: random(2, 5, 7, 7, dtype=d), (1, 1), "plane"),
    "global-indices": ("adaptive_max_pool2d_indices", lambda d: random(2, 5, 7, 7, dtype=d),
                       (1, 1), "plane"),
    "global-slice": ("adaptive_max_pool2d_indices", lambda d: random(2, 5, 4, 4, dtype=d)[:, ::2],
                     (1, 1), "plane"),
    "strips": ("adaptive_max_pool2d", lambda d: random(2, 2, 9, 11, dtype=d), (4, 3), "strip"),
    "strips-avg": ("adaptive_avg_pool2d", lambda d: random(2, 2, 9, 11, dtype=d), (4, 3), "strip"),
    "strips-indices": ("adaptive_max_pool2d_indices", lambda d: random(2, 2, 9, 11, dtype=d),
                       (4, 3), "strip"),
    "strips-aligned": ("adaptive_max_pool2d_indices", lambda d: random(1, 3, 8, 16, dtype=d),
                       (3, 3), "strip"),
    "columns": ("adaptive_max_pool2d_indices", lambda d: random(1, 2, 9, 6, dtype=d), (4, 6),
                "taps"),
    "wider": ("adaptive_avg_pool2d", lambda d: random(1, 2, 3, 4, dtype=d), (5, 7), "strip"),
    "strided": ("adaptive_avg_pool2d", lambda d: random(1, 2, 6, 10, dtype=d)[..., ::2], (4, 3),
                "taps"),
    "channels-last": ("adaptive_max_pool2d_indices",
                      lambda d: channels_last(random(2, 8, 7, 9, dtype=d)), (3, 2), "taps"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("case", WHOLE.values(), ids=WHOLE)
def test_adaptive(case, dtype):
    op, make, size, variant = case
    plan = run(op, make(dtype), {"output_size": size}, needs_grad="avg" not in op)
    assert plan.tiling.variant == variant


def test_window_as_large_as_the_plane():
    for op in ("max_pool1d_indices", "max_pool1d"):
        plan = run(op, random(5, 3, 20, dtype=F16), window(op, 20, 1), needs_grad=True)
        assert plan.tiling.variant == "plane"
    params = window("avg_pool2d", (4, 6), divisor_override=5)
    assert run("avg_pool2d", random(5, 3, 4, 6), params).tiling.variant == "plane"


def special(kind: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Values where maxima need care."""
    x = torch.randint(-1, 2, shape, device=DEVICE).to(dtype)
    if kind == "zeros":
        return torch.where(torch.rand(shape, device=DEVICE) < 0.5, -0.0, 0.0).to(dtype)
    if kind == "nan":
        negative = torch.full((), NAN, dtype=dtype, device=DEVICE).neg()
        x = torch.where(torch.rand(shape, device=DEVICE) < 0.2, NAN, x)
        return torch.where(torch.rand(shape, device=DEVICE) < 0.1, negative, x)
    return torch.full(shape, -INF, dtype=dtype, device=DEVICE) if kind == "-inf" else x


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("kind", ["ties", "zeros", "nan", "-inf"])
@pytest.mark.parametrize("variant", ["patch", "taps", "plane", "strip"])
def test_special_values(variant, kind, dtype):
    """Ties, zeros of both signs, several NaN of both signs, nothing but -inf."""
    op, size, params = {
        "patch": ("max_pool2d_indices", (6, 16), window("max_pool2d_indices", 3, 2, 1)),
        "taps": ("max_pool2d_indices", (7, 7), window("max_pool2d_indices", 3, 2, 1)),
        "plane": ("adaptive_max_pool2d_indices", (5, 7), {"output_size": (1, 1)}),
        "strip": ("adaptive_max_pool2d_indices", (7, 9), {"output_size": (3, 2)}),
    }[variant]
    x = special(kind, dtype, 1, 2, *size)
    assert run(op, x, params, needs_grad=True).tiling.variant == variant
    without = op.removesuffix("_indices")
    assert run(without, x, params).tiling.variant == variant


TILINGS = {  # id: (op, size, params, tiling)
    "patch": ("max_pool2d_indices", (6, 16), window("max_pool2d_indices", 3, 2, 1),
              Tiling("patch", 16, 1, v=4)),
    "plane": ("adaptive_max_pool2d_indices", (5, 7), {"output_size": (1, 1)},
              Tiling("plane", 4, 1)),
    "plane-steps": ("adaptive_max_pool2d_indices", (5, 7), {"output_size": (1, 1)},
                    Tiling("plane", 4, 1, step=8)),
    "strip": ("adaptive_max_pool2d_indices", (7, 9), {"output_size": (3, 2)},
              Tiling("strip", 1, 1)),
    "strip-steps": ("adaptive_max_pool2d_indices", (7, 9), {"output_size": (2, 2)},
                    Tiling("strip", 1, 1, step=2)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("kind", ["random", "ties", "zeros", "nan", "-inf"])
@pytest.mark.parametrize("case", TILINGS.values(), ids=TILINGS)
def test_special_values_with_other_tilings(case, kind, dtype, use_tiling):
    op, size, params, tiling = case
    use_tiling(tiling)
    x = random(1, 2, *size, dtype=dtype) if kind == "random" else special(kind, dtype, 1, 2, *size)
    assert run(op, x, params, needs_grad=True).tiling == tiling
    run(op.removesuffix("_indices"), x, params)


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize(("variant", "size"), [("plane", (1, 1)), ("strip", (2, 2))])
def test_averages_in_steps(variant, size, dtype, use_tiling):
    use_tiling(Tiling(variant, 4 if variant == "plane" else 1, 1, step=2))
    run("adaptive_avg_pool2d", random(1, 3, 7, 9, dtype=dtype), {"output_size": size})


@pytest.mark.parametrize("step", [0, 4])
def test_places_past_the_largest_keyed_plane(step, use_tiling):
    """Rows past the last one have places past 2^16, which must not win over -inf."""
    use_tiling(Tiling("strip", 1, 1, step=step))
    x = special("-inf", F16, 1, 1, 256, 256)
    run("adaptive_max_pool2d_indices", x, {"output_size": (9, 2)})


@pytest.mark.parametrize("op", ["max_pool2d_indices", "adaptive_max_pool2d_indices"])
@pytest.mark.parametrize("width", [16, 15])
def test_planes_beyond_2_31_elements(op, width, monkeypatch):
    """Plane 2 starts 2^31 elements in. The 4 GiB are reserved; only three planes are touched."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    room = torch.empty(2**31 + 256, dtype=F16, device=DEVICE)
    x = room.as_strided((3, 1, 8, width), (2**30, 2**30, width, 1))
    x.copy_(random(3, 1, 8, width))
    monkeypatch.undo()
    adaptive = op.startswith("adaptive")
    for params in (
        [{"output_size": (3, 2)}, {"output_size": (1, 1)}] if adaptive else [window(op, 3, 2, 1)]
    ):
        call = Call.of(CATALOGUE[op], [x], params)
        assert plan_for(call).constexprs["WIDE"]
        dense = x.contiguous()
        for got, want in zip(
            prepare(call)(x), prepare(Call.of(CATALOGUE[op], [dense], params))(dense), strict=True
        ):
            assert torch.equal(got, want)


REFUSED = {  # id: (op, input, params, words of the refusal)
    "f64": ("avg_pool1d", lambda: random(2, 3, 8).double(), window("avg_pool1d", 2), "float64"),
    "meta-device": ("avg_pool1d", lambda: torch.empty(2, 3, 8, device="meta"),
                    window("avg_pool1d", 2), "meta"),
    "unbatched-volume": ("max_pool3d", lambda: channels_last(random(2, 3, 4, 5)),
                         window("max_pool3d", 2), "unbatched volume"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refused(case):
    op, make, params, words = case
    refusal = supports(Call.of(CATALOGUE[op], [make()], params))
    assert words in refusal.reason
    assert "\n" not in refusal.reason


def test_constexprs_are_in_the_kernels_order():
    """They are passed by position."""
    for op, shape, params in (
        ("max_pool2d", (1, 1, 8, 16), window("max_pool2d", 2)),
        ("max_pool2d", (1, 1, 7, 7), window("max_pool2d", 2)),
        ("adaptive_max_pool2d", (1, 1, 7, 7), {"output_size": (1, 1)}),
        ("adaptive_max_pool2d", (1, 1, 7, 7), {"output_size": (3, 3)}),
    ):
        plan = plan_for(Call.of(CATALOGUE[op], [random(*shape)], params))
        names = list(KERNELS[plan.tiling.variant].arg_names)
        assert names[-len(plan.constexprs) :] == list(plan.constexprs)
        assert len(names) == 4 + len(plan.arguments) + len(plan.constexprs)
