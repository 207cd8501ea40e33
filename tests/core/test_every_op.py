"""What every op owes: an operator that passes opcheck, gradients of both orders, torch.compile."""

from __future__ import annotations

import inspect

import opkiln
import opkiln.functional as F
import pytest
import torch
from opkiln.conformance.rows import BATCHED
from opkiln.ops import CATALOGUE
from opkiln.schema import operator
from samples import SAMPLES
from torch.utils._python_dispatch import TorchDispatchMode

PAGE_OPS = 36
DIFFERENTIABLE = (
    sorted(n for n, s in SAMPLES.items() if s.function not in NO_GRADIENT)
    if (NO_GRADIENT := {"topk_selector", "batch_norm_backward"})
    else []
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Inductor compiles C++ for about 20 s an op on a CPU: three there, all where there is a GPU.
INDUCTOR = SAMPLES if DEVICE == "cuda" else ("rms_norm", "max_pool2d-indices", "mean_pooling-dense")
DTYPE = torch.float32


def forward_specs():
    return [s for s in CATALOGUE.values() if s.forward_op is None]


def leaf(t, grad):
    """A copy with the same strides that requires a gradient where one can."""
    if not isinstance(t, torch.Tensor) or not (t.is_floating_point() or t.is_complex()):
        return t
    return t.detach().clone(memory_format=torch.preserve_format).requires_grad_(grad)


def differentiable_names(spec):
    return (*spec.backward.wrt, *spec.backward.alike) if spec.backward else ()


def bound_with_gradients(sample, dtype, grad):
    bound = sample.bound(dtype)
    wrt = differentiable_names(bound.spec)
    tensors = [
        leaf(t, grad and name in wrt)
        for name, t in zip(bound.spec.tensor_names, bound.tensors, strict=True)
    ]
    return bound.spec, tensors, bound.params


def floats(outs):
    outs = outs if isinstance(outs, tuple) else (outs,)
    return tuple(o for o in outs if o.is_floating_point() or o.is_complex())


def test_all_page_ops_are_specified():
    pages = {s.op for s in forward_specs()} | {"BatchNormBwd"}
    assert len(pages) == PAGE_OPS, sorted(pages)


def test_every_public_function_has_a_sample():
    assert {s.function for s in SAMPLES.values()} == set(F.__all__)


def test_every_forward_spec_has_a_sample():
    covered = {s.bound(DTYPE).spec.name for s in SAMPLES.values()}
    assert {s.name for s in forward_specs()} <= covered


def test_every_differentiable_forward_has_a_backward():
    without = {s.name for s in forward_specs() if s.backward is None}
    assert without == {"topk_selector"}


@pytest.mark.parametrize(
    ("name", "grad"), [*[(n, False) for n in SAMPLES], *[(n, True) for n in DIFFERENTIABLE]]
)
def test_opcheck(name, grad):
    spec, tensors, params = bound_with_gradients(SAMPLES[name], DTYPE, grad)
    torch.library.opcheck(operator(spec), (*tensors, *params.values()))


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_opcheck_where_the_size_is_read_from_the_data(grad):
    """The public function reads it itself on the direct road; a trace leaves it to the operator."""
    (x, chunk_size, offsets), _ = SAMPLES["mean_pooling-varlen"].build(DTYPE)
    arguments = (x.requires_grad_(grad), offsets, chunk_size, None)
    torch.library.opcheck(operator(CATALOGUE["mean_pooling"]), arguments)


class CallsOf(TorchDispatchMode):
    """Keeps the arguments of every call of one operator."""

    def __init__(self, wanted):
        super().__init__()
        self.wanted, self.seen = wanted, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is self.wanted:
            self.seen.append(args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_opcheck_of_the_backward(name):
    """The backward operator on the arguments that a real backward pass hands it."""
    spec, tensors, params = bound_with_gradients(SAMPLES[name], DTYPE, True)
    back = operator(spec.backward.spec)
    outs = operator(spec)(*tensors, *params.values())
    outs = [o for o in (outs if isinstance(outs, tuple) else (outs,)) if o.requires_grad]
    with CallsOf(back) as calls:
        torch.autograd.backward(outs, [torch.randn_like(o) for o in outs])
    (args,) = calls.seen
    torch.library.opcheck(back, [a.detach() if isinstance(a, torch.Tensor) else a for a in args])


def test_an_operator_without_a_derivative_says_so():
    spec, tensors, params = bound_with_gradients(SAMPLES["batch_norm_backward"], DTYPE, False)
    out = operator(spec)(tensors[0].requires_grad_(), *tensors[1:], *params.values())[0]
    with pytest.raises(opkiln.ArgumentError, match="batch_norm_backward has no derivative"):
        out.sum().backward()


def test_a_public_function_without_a_derivative_goes_through_the_formula():
    args, kwargs = SAMPLES["batch_norm_backward"].build(torch.float64)
    grad_out = args[0].requires_grad_()
    first = lambda g: F.batch_norm_backward(g, *args[1:], **kwargs)[0]  # noqa: E731
    assert torch.autograd.gradcheck(first, grad_out)


@pytest.mark.parametrize("name", [n for n in SAMPLES if f"{n}_inplace" in CATALOGUE])
def test_in_place_operators_pass_opcheck(name):
    spec, tensors, params = bound_with_gradients(SAMPLES[name], DTYPE, False)
    inplace = CATALOGUE[f"{spec.name}_inplace"]
    torch.library.opcheck(operator(inplace), (*tensors, *params.values()))


def gradient_case(name):
    spec, tensors, params = bound_with_gradients(SAMPLES[name], torch.float64, True)
    free = [i for i, t in enumerate(tensors) if t is not None and t.requires_grad]

    def fn(*leaves):
        full = list(tensors)
        for i, t in zip(free, leaves, strict=True):
            full[i] = t
        full = [
            t.clone() if spec.tensor_names[i] in spec.may_mutate and t is not None else t
            for i, t in enumerate(full)
        ]
        return floats(
            operator(spec)(*full, *params.values())[: len(spec.returns)]
            if len(spec.outputs) > 1
            else operator(spec)(*full, *params.values())
        )

    return fn, [tensors[i] for i in free]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradcheck(name):
    fn, leaves = gradient_case(name)
    assert torch.autograd.gradcheck(fn, leaves, fast_mode=False)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradgradcheck(name):
    fn, leaves = gradient_case(name)
    assert torch.autograd.gradgradcheck(fn, leaves, fast_mode=True)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", SAMPLES)
def test_compile_fullgraph(name, dynamic):
    check_compiled(name, dynamic, "aot_eager")


@pytest.mark.parametrize("name", INDUCTOR)
def test_compile_inductor(name):
    check_compiled(name, False, "inductor")


def on_device(value):
    return value.to(DEVICE) if isinstance(value, torch.Tensor) else value


# Tensors whose first dim is the batch, where rows of the result depend on each other.
DEPENDENT = {
    "batch_norm": ("input",),
    "batch_norm_backward": ("grad_out", "input"),
    "topk_selector": ("scores", "starts", "ends"),
    "rope_neox_position_ids": ("x", "position_ids"),
}


def repeated(sample, times):
    """The sample's arguments by name, with a batch `times` as large."""
    args, kwargs = sample.build(DTYPE)
    given = inspect.signature(getattr(F, sample.function)).bind(*args, **kwargs).arguments
    spec = sample.bound(DTYPE).spec
    for name in (BATCHED | DEPENDENT)[spec.name]:
        batched = given[name]
        if given.get("cu_seqlens") is not None:  # one batch, more tokens in its last sequence
            given[name] = batched.repeat(1, times, 1, 1)
            last = given[name].shape[1]
            given["cu_seqlens"] = torch.cat([given["cu_seqlens"][:-1], torch.tensor([last])]).int()
            given["num_chunks"] = 1 + -(-(last - 3) // given["chunk_size"])
        else:
            given[name] = batched.repeat(times, *[1] * (batched.ndim - 1))
    return given


def check_compiled(name, dynamic, backend):
    """Compiled and eager give the same values, strides, gradients and in-place effects; with
    dynamic shapes one compilation serves two sizes of the batch.
    """
    sample = SAMPLES[name]
    fn = getattr(F, sample.function)
    torch._dynamo.reset()
    compiled = torch.compile(fn, fullgraph=True, backend=backend, dynamic=dynamic)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for times in (7, 11) if dynamic else (1,):  # 14: unlike any other size
            outs, written, grads = results_of(fn, sample, times)
            outs_c, written_c, grads_c = results_of(compiled, sample, times)
            assert [o.stride() for o in outs] == [o.stride() for o in outs_c]
            for a, b in zip(
                (*outs, *written, *grads), (*outs_c, *written_c, *grads_c), strict=True
            ):
                torch.testing.assert_close(a, b)


def results_of(call, sample, times):
    """Outputs of a call, its tensors after it, and their gradients."""
    torch.manual_seed(0)
    wrt = differentiable_names(sample.bound(DTYPE).spec)
    grad = bool(wrt) and sample.function != "batch_norm"
    given = {name: leaf(on_device(a), grad) for name, a in repeated(sample, times).items()}
    outs = call(**given)
    outs = outs if isinstance(outs, tuple) else (outs,)
    if grad:
        scored = floats(outs)
        torch.autograd.backward(scored, [torch.randn_like(o) for o in scored])
    tensors = [a for a in given.values() if isinstance(a, torch.Tensor)]
    return outs, tensors, [t.grad for t in tensors if t.grad is not None]


def test_compile_takes_a_new_length_without_a_graph_break():
    torch._dynamo.reset()
    compiled = torch.compile(F.rms_norm, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 5, 9):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(compiled(x, (16,)), F.rms_norm(x, (16,)))


def test_compile_reads_the_number_of_chunks_from_the_data():
    torch._dynamo.reset()
    compiled = torch.compile(F.mean_pooling, fullgraph=True, backend="aot_eager")
    x, cu = torch.randn(1, 9, 2, 3), torch.tensor([0, 3, 3, 9])
    torch.testing.assert_close(compiled(x, 4, cu), F.mean_pooling(x, 4, cu))


def test_operators_are_in_one_namespace():
    assert all(str(operator(s)).startswith("opkiln.") for s in CATALOGUE.values())
    assert set(opkiln.ops()) == set(CATALOGUE)
