"""Every convolution kernel and branch against the spec's reference in float64.

Runs in Triton's interpreter on a machine without a GPU, on the GPU elsewhere.
"""

from typing import Any

import pytest
import torch
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_conv import conv_plan, tilings
from opkiln_conv.conv_plan import ConvPlan, plan_for
from opkiln_conv.geometry import geometry_of
from opkiln_conv.launch import KERNELS, prepare
from opkiln_conv.plugin import supports
from opkiln_conv.tilings import Tiling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
# Of the output's scale. The interpreter truncates f32 to bf16 (one ulp) where the GPU rounds.
TOLERANCE = {F16: 2**-10, BF16: 2**-7, F32: 2**-20}


@pytest.fixture(autouse=True)
def nan_filled_memory():
    """Outputs and workspaces start as NaN, so that an element left unwritten fails."""
    torch.manual_seed(0)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def use_tiling(monkeypatch):
    """Make every plan use a tiling."""

    def put(tiling: Tiling) -> None:
        monkeypatch.setattr(conv_plan, "tuned", lambda *_: (tiling, "test"))

    return put


def random(*shape: int, dtype: torch.dtype = F16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def last(x: torch.Tensor) -> torch.Tensor:
    """Channels innermost in memory."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.ndim])


def window(n: int, s: Any = 1, p: Any = 0, d: Any = 1, g: int = 1, tf32: bool = False) -> dict:
    """Canonical parameters; a number counts for every dim, padding also as before/after pairs."""
    many = {"stride": s, "dilation": d}
    found = {k: (v,) * n if isinstance(v, int) else v for k, v in many.items()}
    padding = (p,) * (2 * n) if isinstance(p, int) else p
    return found | {"padding": padding, "groups": g, "allow_tf32": tf32}


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    scale = float(want.square().mean().sqrt())
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.cpu().double(), want, rtol=tolerance, atol=tolerance * scale)


def run(x: torch.Tensor, w: torch.Tensor, params: dict[str, Any], bias: bool = True) -> ConvPlan:
    """Launch twice, compare with float64 and bit by bit, return the plan that ran."""
    spec = CATALOGUE[f"conv{len(params['stride'])}d"]
    b = random(w.shape[0], dtype=x.dtype) if bias else None
    call = Call.of(spec, [x, w, b], params)
    assert supports(call) is None
    launch = prepare(call)
    got = launch(x, w, b)
    wide = [None if t is None else t.double().cpu() for t in (x, w, b)]
    (meta,) = call.outputs
    assert (got.shape, got.dtype, got.stride()) == (meta.shape, meta.dtype, meta.stride)
    close(got, spec.reference(*wide, **params))
    assert torch.equal(launch(x, w, b), got)  # counters are back at 0, no sum depends on the order
    return plan_for(call)


def tiling(variant: str, m: int, n: int, k: int = 0, **more: Any) -> Tiling:
    return Tiling(variant, m, n, k, num_warps=1, **more)


CASES = {  # id: (input, weight, window); 1-D to 3-D, each branch of the windows
    "1d": ((2, 5, 30), (7, 5, 4), dict(s=3, p=(1, 2), d=2)),
    "2d": ((2, 6, 7, 5), (9, 6, 3, 3), dict(p=1)),
    "2d-uneven": ((1, 3, 6, 9), (5, 3, 2, 3), dict(s=(2, 1), p=(1, 0, 0, 2), d=(1, 2))),
    "2d-groups": ((2, 6, 6, 6), (8, 3, 3, 3), dict(s=2, p=1, g=2)),
    "2d-whole": ((3, 4, 3, 3), (5, 4, 3, 3), dict()),
    "3d": ((1, 3, 4, 4, 5), (4, 3, 3, 2, 3), dict(p=1, s=(1, 2, 1))),
    "3d-wide": ((1, 2, 3, 4, 4), (3, 2, 3, 3, 3), dict(p=4, d=4)),
}  # fmt: skip


@pytest.mark.parametrize(("split", "static"), [(1, True), (2, False)])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gather(case, split, static, use_tiling):
    shape, weight, how = case
    use_tiling(tiling("gather", 16, 32, 16, split=split, static=static, ahead=split > 1))
    run(random(*shape), random(*weight), window(len(shape) - 2, **how), bias=static)


PACKED = {  # id: (input, weight, window)
    "1d": ((2, 20, 30), (7, 20, 4), dict(s=3, p=(1, 2), d=2)),
    "2d": ((2, 18, 7, 5), (20, 18, 3, 3), dict(p=1)),
    "2d-groups-of-one": ((1, 16, 6, 9), (5, 16, 2, 3), dict(s=(2, 1), p=(1, 0, 0, 2))),
    "2d-dead-taps": ((1, 16, 8, 8), (4, 16, 3, 3), dict(p=6, d=6)),
    "3d-dead-taps": ((2, 17, 4, 3, 4), (4, 17, 3, 3, 3), dict(p=3, d=3)),
    "all-dead": ((1, 16, 1, 3), (3, 16, 2, 1), dict(p=(3, 3, 0, 0), d=(4, 1))),
}  # fmt: skip


@pytest.mark.parametrize(("split", "static"), [(1, False), (2, True)])
@pytest.mark.parametrize("case", PACKED.values(), ids=PACKED)
def test_packed(case, split, static, use_tiling):
    shape, weight, how = case
    use_tiling(tiling("packed", 16, 16, 16, split=split, static=static))
    plan = run(random(*shape), random(*weight), window(len(shape) - 2, **how), bias=not static)
    assert plan.pack.x
    assert plan.pack.w


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("shape", [(2, 40, 9), (1, 33, 7, 7), (2, 16, 2, 4, 4)], ids=str)
def test_pointwise(shape, split, use_tiling):
    n = len(shape) - 2
    for static in (False, True):
        use_tiling(tiling("pointwise", 16, 16, 16, split=split, static=static))
        plan = run(random(*shape), random(20, shape[1], *[1] * n), window(n))
    assert plan.constexprs["EVEN_K"] == (shape[1] == 16)


CHANNELWISE = {  # id: (input, weight, window, unrolled)
    "depthwise": ((2, 5, 7, 6), (5, 1, 3, 3), dict(p=1, g=5), True),
    "multiplier": ((1, 3, 20), (6, 1, 4), dict(s=2, g=3), True),
    "one-channel": ((1, 1, 8, 8), (2, 1, 6, 6), dict(p=(0, 5, 2, 3)), False),
}  # fmt: skip


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("case", CHANNELWISE.values(), ids=CHANNELWISE)
def test_channelwise(case, static, use_tiling):
    shape, weight, how, unrolled = case
    use_tiling(tiling("channelwise", 2, 16, static=static))
    plan = run(random(*shape), random(*weight), window(len(shape) - 2, **how))
    assert plan.constexprs["UNROLL"] is unrolled


@pytest.mark.parametrize("shape", [(2, 3, 136), (2, 3, 4, 16), (3, 2, 5, 4)], ids=str)
def test_gather_in_one_image_or_several(shape, use_tiling):
    """Tiles of 16 pixels: 8 or more of them, whole ones of each image, or shared by images."""
    n = len(shape) - 2
    use_tiling(tiling("gather", 16, 16, 16, static=True))
    plan = run(random(*shape), random(4, shape[1], *[3] * n), window(n, p=1))
    assert plan.constexprs["EACH"] == (n == 1 or shape[-1] == 16)


@pytest.mark.parametrize("static", [False, True])
def test_one_dim_of_many_outputs(static, use_tiling):
    """An odd pitch and more than eight tiles an image: their places are known to be neighbours."""
    use_tiling(tiling("gather", 16, 16, 16, static=static))
    plan = run(random(2, 1, 400), random(4, 1, 5), window(1, s=3))
    assert plan.constexprs["EACH"]
    assert plan.constexprs["FLAT"]


@pytest.mark.parametrize(("m", "n", "warps", "split", "hidden"), [
    (16, 64, 4, 1, True), (16, 32, 2, 1, True), (16, 64, 2, 1, False), (16, 64, 4, 2, False),
])  # fmt: skip
def test_warps_along_the_products_hide_their_numbers(m, n, warps, split, hidden, use_tiling):
    """The first two were wrong on the H200: see tilings.opaque."""
    use_tiling(Tiling("gather", m, n, 64, num_warps=warps, stages=2, split=split, static=True))
    plan = run(random(1, 8, 9, 9), random(32, 4, 3, 3), window(2, p=1, g=2))
    assert plan.constexprs["OPAQUE"] == hidden


LAYOUTS = {  # id: (input, weight, groups, variant of the rule)
    "channels-last": (lambda: last(random(2, 32, 5, 5)), lambda: last(random(8, 32, 3, 3)), 1,
                      "packed"),
    "channels-last-odd": (lambda: last(random(2, 18, 5, 5)), lambda: last(random(8, 18, 3, 3)), 1,
                          "gather"),
    "channels-last-input": (lambda: last(random(1, 32, 5, 5)), lambda: random(8, 32, 3, 3), 1,
                            "packed"),
    "channels-last-weight": (lambda: random(1, 32, 5, 5), lambda: last(random(8, 32, 3, 3)), 1,
                             "packed"),
    "channels-last-groups": (lambda: last(random(1, 32, 5, 5)), lambda: last(random(8, 16, 3, 3)),
                             2, "gather"),
    "channels-last-depthwise": (lambda: last(random(1, 32, 5, 5)), lambda: random(32, 1, 3, 3), 32,
                                "channelwise"),
    "channels-last-1x1": (lambda: last(random(2, 64, 5, 5)), lambda: random(8, 64, 1, 1), 1,
                          "gather"),
    "sliced": (lambda: random(1, 8, 5, 10)[..., ::2], lambda: random(4, 8, 3, 6)[..., ::2], 1,
               "gather"),
    "expanded": (lambda: random(1, 4, 6, 6).expand(2, 4, 6, 6), lambda: random(4, 4, 3, 3), 1,
                 "gather"),
    "transposed-weight": (lambda: random(1, 32, 5, 5), lambda: random(32, 8, 3, 3).mT.transpose(
        0, 1), 1, "gather"),
    "unaligned": (lambda: random(1 + 32 * 36)[1:].view(1, 32, 6, 6), lambda: random(8, 32, 3, 3),
                  1, "packed"),
    "f32": (lambda: random(1, 5, 6, 6, dtype=F32), lambda: random(4, 5, 3, 3, dtype=F32), 1,
            "gather"),
    "bf16": (lambda: random(1, 32, 6, 6, dtype=BF16), lambda: random(4, 32, 3, 3, dtype=BF16), 1,
             "packed"),
    "unbatched": (lambda: random(4, 6, 6), lambda: random(4, 4, 3, 3), 1, "gather"),
    "unbatched-packed": (lambda: random(16, 6, 6), lambda: random(4, 16, 3, 3), 1, "packed"),
}  # fmt: skip


@pytest.mark.parametrize("case", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_and_dtypes(case):
    x, w, groups, variant = case
    plan = run(x(), w(), window(2, p=1, g=groups) if variant else {})
    assert (plan.tiling.variant, plan.source) == (variant, "rule")


def test_tf32_may_use_the_matrix_units():
    x, w = random(1, 32, 6, 6, dtype=F32), random(4, 32, 3, 3, dtype=F32)
    plan = run(x, w, window(2, p=1, tf32=True))
    assert plan.constexprs["PRECISION"] == "tf32"
    assert plan.tiling.variant == "packed"


def test_empty_batch():
    params = window(2)
    tensors = [random(0, 4, 6, 6), random(4, 4, 3, 3), None]
    call = Call.of(CATALOGUE["conv2d"], tensors, params)
    assert prepare(call)(*tensors).shape == (0, 4, 4, 4)


def test_strided_bias():
    x, w, b = random(1, 4, 6, 6), random(4, 4, 3, 3), random(8)[::2]
    spec, params = CATALOGUE["conv2d"], window(2)
    got = prepare(Call.of(spec, [x, w, b], params))(x, w, b)
    close(got, spec.reference(*(t.double().cpu() for t in (x, w, b)), **params))


@pytest.mark.parametrize("case", [
    (Tiling("gather", 16, 16, 16, 1, split=2), 3, 4),
    (Tiling("packed", 16, 16, 16, 1, split=2), 3, 16),
    (Tiling("pointwise", 16, 16, 16, 1, split=2), 1, 40),
], ids=["gather", "packed", "pointwise"])  # fmt: skip
def test_bits_do_not_depend_on_the_batch(case, use_tiling):
    t, k, channels = case
    use_tiling(t)
    x, w = random(3, channels, 5, 5), random(8, channels, k, k)
    spec, params = CATALOGUE["conv2d"], window(2, p=k // 2)
    whole = prepare(Call.of(spec, [x, w, None], params))(x, w, None)
    for i in range(3):
        one = x[i : i + 1]
        assert torch.equal(
            prepare(Call.of(spec, [one, w, None], params))(one, w, None)[0], whole[i]
        )


@pytest.mark.parametrize("variant", ["gather", "channelwise"])
def test_images_beyond_2_31_elements(variant, use_tiling, monkeypatch):
    """Image 2 starts 2^31 elements in. The 4 GiB are reserved; only three images are touched."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    room = torch.empty(2**31 + 256, dtype=F16, device=DEVICE)
    x = room.as_strided((3, 1, 4, 4), (2**30, 16, 4, 1))
    x.copy_(random(3, 1, 4, 4))
    monkeypatch.undo()
    use_tiling(tiling(variant, 16, 16, 16))
    assert run(x, random(2, 1, 3, 3), window(2)).constexprs["WIDE"]


RULES = {  # id: (op, input, weight, window, variant, source of the choice)
    "depthwise": ((1, 32, 56, 56), (32, 1, 3, 3), dict(p=1, g=32), "channelwise"),
    "grouped": ((1, 32, 56, 56), (32, 4, 3, 3), dict(p=1, g=8), "gather"),
    "few-channels": ((1, 3, 64, 64), (32, 3, 7, 7), dict(p=3, s=2), "gather"),
    "pointwise": ((1, 96, 20, 20), (64, 96, 1, 1), dict(), "pointwise"),
    "strided-pointwise": ((1, 96, 20, 20), (64, 96, 1, 1), dict(s=2), "gather"),
    "window": ((1, 96, 20, 20), (64, 96, 3, 3), dict(), "packed"),
    "large-window": ((1, 96, 20, 20), (64, 96, 12, 12), dict(), "gather"),
}  # fmt: skip


@pytest.mark.parametrize("case", RULES.values(), ids=RULES)
def test_rule(case):
    shape, weight, how, variant = case
    tensors = [torch.empty(s, dtype=F16, device="meta") for s in (shape, weight)]
    call = Call.of(CATALOGUE["conv2d"], [*tensors, None], window(2, **how), real=False)
    found = tilings.rule(geometry_of(call))
    assert found.variant == variant
    assert tilings.can_use(geometry_of(call), found)


def test_table_is_found_by_geometry_alone(monkeypatch):
    x, w = random(2, 4, 6, 6), random(4, 4, 3, 3)
    call = Call.of(CATALOGUE["conv2d"], [x, w, None], window(2))
    use = {"variant": "gather", "block_m": 16, "block_n": 16, "block_k": 32, "static": True}
    row = tilings.key_of(geometry_of(call)) | {"label": "row", "use": use}
    monkeypatch.setattr(tilings, "tuning_rows", lambda: (row,))
    assert plan_for(call).source == "row"
    one = Call.of(CATALOGUE["conv2d"], [x[:1], w, None], window(2))
    assert plan_for(one).source == "row"
    for other in (last(x), x[..., :5], x.float()):
        moved = Call.of(CATALOGUE["conv2d"], [other, w.to(other.dtype), None], window(2))
        assert plan_for(moved).source == "rule"


def test_a_bias_may_have_another_tiling(monkeypatch):
    x, w = random(2, 4, 6, 6), random(4, 4, 3, 3)
    use = {"variant": "gather", "block_m": 16, "block_n": 16, "block_k": 32}
    calls = [Call.of(CATALOGUE["conv2d"], [x, w, b], window(2)) for b in (None, random(4))]
    row = tilings.key_of(geometry_of(calls[0])) | {"label": "row", "use": use}
    for biased, blocks in ((None, [32, 32]), (use | {"block_k": 16}, [32, 16])):
        more = {"biased": biased} if biased else {}
        monkeypatch.setattr(tilings, "tuning_rows", lambda more=more: (row | more,))
        assert [plan_for(call).tiling.block_k for call in calls] == blocks


REFUSED = {  # id: (input, words of the refusal)
    "f64": (lambda: torch.empty(1, 4, 6, 6, dtype=torch.float64, device=DEVICE), "float64"),
    "meta-device": (lambda: torch.empty(1, 4, 6, 6, device="meta"), "meta"),
    "large-f32": (lambda: torch.empty(1, device=DEVICE).expand(1, 4, 1000, 1000), "cuDNN"),
    "pixels": (lambda: random(1).expand(2**20, 4, 64, 64), "32-bit index"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refused(case):
    make, words = case
    x = make()
    w = torch.empty(4, 4, 3, 3, dtype=x.dtype, device=x.device)
    refusal = supports(Call.of(CATALOGUE["conv2d"], [x, w, None], window(2)))
    assert words in refusal.reason
    assert "\n" not in refusal.reason


def test_arguments_are_in_the_kernels_order():
    """They are passed by position."""
    for shape, weight, how, variant in RULES.values():
        tensors = [torch.empty(s, dtype=F16, device="meta") for s in (shape, weight)]
        call = Call.of(CATALOGUE["conv2d"], [*tensors, None], window(2, **how), real=False)
        plan = plan_for(call)
        names = list(KERNELS[variant].arg_names)
        assert names[-len(plan.constexprs) :] == list(plan.constexprs)
        pointers = sum(name.endswith("_ptr") for name in names)
        assert len(names) == pointers + len(plan.arguments) + len(plan.constexprs)
