"""The kit itself: its comparison, its accounting, its report, its pytest plugin."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import opkiln
import pytest
import torch
from opkiln.conformance import Outcome, cases_of, check, compare, conform, cuda_checks
from opkiln.conformance.compare import tolerance_of
from opkiln.conformance.rows import BATCHED
from opkiln.conformance.rows.large import TILED
from opkiln.conformance.run import OpReport, Part, conform_part, parts_of
from opkiln.conformance.tensors import LAYOUTS, storage_of, t, to_device
from opkiln.errors import ArgumentError
from opkiln.ops import CATALOGUE
from opkiln.registry import REGISTRY, Implementation, Refusal
from opkiln.spec import Call

pytest_plugins = ["pytester"]
NAN, INF = math.nan, math.inf


def noisy(expected: torch.Tensor, relative: float) -> torch.Tensor:
    """Off by `relative`, alternately up and down."""
    sign = torch.ones_like(expected)
    sign.view(-1)[::2] = -1
    return expected * (1 + relative * sign)


@pytest.fixture
def expected() -> torch.Tensor:
    return torch.randn(8, 50, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_correct_rounding_passes(expected: torch.Tensor, dtype: torch.dtype) -> None:
    result = compare("out", expected.to(dtype), expected)
    assert result.ok and result.ratio <= 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_one_more_unit_in_the_last_place_fails(expected: torch.Tensor, dtype: torch.dtype) -> None:
    out = expected.to(dtype)
    for _ in range(12 if dtype.itemsize >= 4 else 1):  # float32 work may cost a few units
        out = torch.nextafter(out, torch.full_like(out, INF))
    assert not compare("out", out, expected).ok


def test_an_error_everywhere_fails_by_its_rms(expected: torch.Tensor) -> None:
    limit = tolerance_of(torch.float32)
    everywhere = noisy(expected, 0.85 * (limit.output + limit.work)).float()
    assert "RMS" in compare("out", everywhere, expected, condition=0.0).message


def test_the_worst_element_is_named(expected: torch.Tensor) -> None:
    out = expected.float()
    out[3, 5] += 1
    message = compare("out", out, expected).message
    assert message.startswith("out[3, 5] is ") and "1 of 400 elements wrong" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("got", "want", "ok"),
    [
        ([NAN, 1.0], [NAN, 1.0], True),
        ([1.0, 1.0], [NAN, 1.0], False),
        ([NAN, 1.0], [1.0, 1.0], False),
        ([INF, 1.0], [INF, 1.0], True),
        ([-INF, 1.0], [INF, 1.0], False),
        ([INF, 1.0], [65000.0, 1.0], False),
        ([INF, 1.0], [70000.0, 1.0], True),  # float16 ends at 65,504
        ([65504.0, 1.0], [70000.0, 1.0], False),
        ([NAN, 1.0], [INF, 1.0], False),
    ],
)
def test_nan_and_infinity_stand_where_they_should(
    got: list[float], want: list[float], ok: bool
) -> None:
    out = torch.tensor(got, dtype=torch.float16)
    assert compare("out", out, torch.tensor(want, dtype=torch.float64)).ok is ok


def test_integers_are_exact() -> None:
    want = torch.arange(10)
    assert compare("indices", want.clone(), want).ok
    assert not compare("indices", want + 1, want).ok


def test_exact_floats_are_exact(expected: torch.Tensor) -> None:
    near = torch.nextafter(expected, expected + 1)
    assert compare("out", near, expected).ok
    assert not compare("out", near, expected, exact=True).ok


def test_tolerance_grows_with_terms_and_condition(expected: torch.Tensor) -> None:
    out = expected.float() + 1e-5
    assert not compare("out", out, expected).ok
    assert compare("out", out, expected, terms=10_000).ok
    assert compare("out", out, expected, condition=100.0).ok


def test_only_the_interpreter_may_truncate_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert tolerance_of(torch.bfloat16, "opkiln", "cpu").output == 2**-7
    assert tolerance_of(torch.bfloat16, "torch", "cpu").output == 2**-8
    assert tolerance_of(torch.bfloat16, "opkiln", "cuda").output == 2**-8
    monkeypatch.delenv("TRITON_INTERPRET")
    assert tolerance_of(torch.bfloat16, "opkiln", "cpu").output == 2**-8


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_keep_shape_and_survive_the_copy(layout: str) -> None:
    x = t(3, 4, 5, 6, layout=layout).build(torch.Generator().manual_seed(1), torch.float16)
    assert x.shape == (3, 4, 5, 6)
    moved = to_device(x, torch.device("cpu", 0))
    assert moved.stride() == x.stride() and moved.storage_offset() == x.storage_offset()
    assert torch.equal(moved, x)
    assert storage_of(x).numel() * 2 == x.untyped_storage().nbytes()


def test_a_case_is_the_same_every_time() -> None:
    case = cases_of("rms_norm")[0]
    first, second = (case.build(torch.device("cpu")) for _ in range(2))
    assert torch.equal(first.tensors[0], second.tensors[0])


@pytest.mark.parametrize("op", CATALOGUE)
def test_ids_are_unique_and_plain(op: str) -> None:
    ids = [case.id for case in cases_of(op)]
    assert len(set(ids)) == len(ids)
    assert all(i.replace("-", "").replace("_", "").isalnum() for i in ids)


@pytest.mark.parametrize("op", BATCHED)
@pytest.mark.parametrize("body", [cuda_checks.with_many_rows, cuda_checks.above_32_bits])
def test_large_batches_repeat_a_small_one(
    op: str, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks meant for a GPU, on a CPU with few rows."""
    case = cuda_checks.grown(cases_of(op)[0])
    monkeypatch.setattr(cuda_checks, "MANY_ROWS", 3 * cuda_checks.ROWS)
    monkeypatch.setattr(cuda_checks, "MANY_ELEMENTS", 1)
    outcome = cuda_checks.judged(case, "torch-ref", torch.device("cpu"), "rows", body)
    assert outcome.status == "passed", outcome.message


def cut(value: Any, most: int = 16) -> Any:
    """A tensor argument with no dim above `most`."""
    return replace(value, shape=tuple(min(n, most) for n in value.shape))


@pytest.mark.parametrize("op", TILED)
def test_calls_grow_along_any_dim(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiled = TILED[op]
    if op in ("avg_pool2d", "conv3d"):  # tens of millions of elements
        small = tiled.row.having(input=cut(tiled.row.arguments["input"]))
        monkeypatch.setitem(TILED, op, replace(tiled, row=small))
    case = list(cuda_checks.big_cases(cases_of(op)[0]))[-1]
    first = case.build(torch.device("cpu")).tensors[0]
    assert first is not None
    monkeypatch.setattr(cuda_checks, "MANY_ELEMENTS", 2 * first.numel() + 1)
    body, sizes = cuda_checks.above_32_bits, []
    plain = cuda_checks.run
    monkeypatch.setattr(
        cuda_checks, "run", lambda launch, bound: sizes.append(bound) or plain(launch, bound)
    )
    outcome = cuda_checks.judged(case, "torch-ref", torch.device("cpu"), "big", body)
    assert outcome.status == "passed", outcome.message
    assert sizes[0].tensors[0].numel() == 3 * first.numel()


@pytest.mark.parametrize("op", ["group_norm", "max_pool1d", "mean_pooling", "rope_neox"])
def test_rows_of_many_channels_heads_and_tokens(op: str) -> None:
    """Meant for a GPU; the reference takes them on a CPU too."""
    cases = list(cuda_checks.many_cases(op))
    assert cases
    for case in cases:
        tensors = case.build(torch.device("cpu")).tensors
        assert max(n for x in tensors if x is not None for n in x.shape) > 65_535
        assert check(case, "torch-ref").status == "passed"


def test_big_calls_need_a_gpu() -> None:
    with pytest.raises(ArgumentError, match="big calls need a GPU, the device is cpu"):
        conform("torch", ["fft"], big=True)


class Plugin:
    """An implementation of rms_norm by the reference, with its own `supports`."""

    OPKILN_API = 1

    def __init__(self, supports: Any) -> None:
        self.supports = supports

    @opkiln.hookimpl
    def opkiln_implementations(self) -> list[Implementation]:
        def prepare(call: Call) -> Any:
            return REGISTRY.of("rms_norm")["torch-ref"].loader()(call)

        return [
            Implementation("rms_norm", "fussy", "3", 1, self.supports, lambda: prepare, auto=False)
        ]


def test_refusals_are_counted_with_their_reason() -> None:
    def supports(call: Call) -> Refusal | None:
        wide = call.tensors.input.dtype == torch.float64
        return Refusal("does not take float64") if wide else None

    with REGISTRY.temporarily(Plugin(supports), "test:fussy"):
        (report,) = conform("fussy").ops
    assert report.status == "passed" and report.refused > 2
    assert report.cases == report.passed + report.refused
    assert any("does not take float64" in line for line in report.refusals)
    assert any("does not promise deterministic" in line for line in report.refusals)


def test_refusing_everything_is_not_passing() -> None:
    with REGISTRY.temporarily(Plugin(lambda call: Refusal("not today")), "test:fussy"):
        report = conform("fussy")
    assert report.ops[0].status == "refused" and not report.ok


def test_a_supports_that_raises_fails() -> None:
    with REGISTRY.temporarily(Plugin(lambda call: call.nonsense), "test:fussy"):
        outcome = check(cases_of("rms_norm")[0], "fussy")
    assert outcome.status == "failed" and "AttributeError" in outcome.message


def test_json_and_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPKILN_COMMIT", "abc123")
    seen: list[Outcome] = []
    report = conform("torch-ref", ["rms_norm"], dtypes=[torch.float32], progress=seen.append)
    read = json.loads(json.dumps(report.to_json()))
    assert read["schema_version"] == 2 and read["ok"] is True
    assert read["environment"]["commit"] == "abc123"
    assert {"date", "torch", "triton", "python", "gpu", "opkiln", "plugins"} <= set(
        read["environment"]
    )
    (op,) = read["ops"]
    assert (op["op"], op["page_op"], op["status"]) == ("rms_norm", "RMSNormFwd", "passed")
    assert op["cases"] == len(seen) == op["passed"] + op["refused"]
    assert 0 < op["worst_ratio"] <= 1
    assert "rms_norm" in str(report)


def test_failures_are_listed_in_the_table() -> None:
    report = OpReport("rms_norm", "RMSNormFwd")
    report.add(Outcome("rms_norm", "odd-f16", "failed", "out[0] is 1, expected 2", 3.0))
    assert report.status == "failed" and report.failures == ["odd-f16: out[0] is 1, expected 2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(backend="nobody"), "no backend 'nobody', installed backends:"),
        (dict(backend="torch", ops=["nothing"]), "no op 'nothing'"),
        (dict(backend="torch", device="tpu9"), "cannot read the device 'tpu9'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(opkiln.ArgumentError, match=message):
        conform(**arguments)


def test_pytest_plugin(pytester: pytest.Pytester) -> None:
    path = Path(pytester.path) / "report.json"
    result = pytester.runpytest_subprocess(
        "-p", "opkiln.conformance.plugin", "--pyargs", "opkiln.conformance",
        "--opkiln-backend", "torch-ref", "--opkiln-op", "mean_pooling", "--opkiln-json", str(path),
    )  # fmt: skip
    count = len(cases_of("mean_pooling"))
    result.assert_outcomes(passed=count - 1, skipped=1)
    (report,) = json.loads(path.read_text())
    assert report["backend"] == "torch-ref" and report["ops"][0]["cases"] == count


def test_default_backends_are_those_that_dispatch_may_pick(monkeypatch: pytest.MonkeyPatch) -> None:
    from opkiln.conformance import plugin

    rows = {
        "a": SimpleNamespace(backend="mine", auto=True),
        "b": SimpleNamespace(backend="peer", auto=False),
    }
    registry = SimpleNamespace(of=lambda op: rows)
    monkeypatch.setattr(plugin, "REGISTRY", registry)
    assert plugin.default_backends() == ["mine"]
    rows.pop("a")
    assert plugin.default_backends() == ["torch"]


def test_parts_share_out_every_case_of_an_op_once() -> None:
    parts = parts_of("conv2d", None, jobs=4)
    assert len(parts) > 2 and [p.last for p in parts] == [False] * (len(parts) - 1) + [True]
    cases = cases_of("conv2d")
    shared = [c.id for p in parts for c in cases[p.index :: p.count]]
    assert sorted(shared) == sorted(c.id for c in cases)
    assert parts_of("conv2d", None, jobs=1) == [Part("conv2d", 0, 1)]


def test_the_cases_alone_show_nothing_of_compilers_and_row_counts() -> None:
    told = {
        alone: set(conform("torch", ["fft"], cases_only=alone).ops[0].cells)
        for alone in (False, True)
    }
    assert told[True] < told[False]
    assert told[False] - told[True] >= {"compile", "export", "autocast", "double_backward"}


def test_parts_join_to_the_report_of_the_whole() -> None:
    whole = conform("torch", ["mhc_post"])
    joined = OpReport("mhc_post", "MHCPostFwd")
    for part in parts_of("mhc_post", None, jobs=2):
        joined.join(conform_part(part, "torch", torch.device("cpu"), None, False))
    assert joined == whole.ops[0]
