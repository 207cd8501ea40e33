"""torch-autograd: what torch runs in backward(), for the rows of gradients.

Straight to the ATen operator where autograd calls one on what the call hands over; else the graph
of torch's own forward is built once, outside the timing, and differentiated in each call. Batch
norm's backward, an op of the pages, stands in torch_direct.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from opkiln.ops import CATALOGUE
from opkiln.ops.common import wide
from opkiln.registry import Implementation, Launch, Prepare, Refusal
from opkiln.spec import Call

from opkiln_bench.peers.common import Once, Supports, on_gpu
from opkiln_bench.peers.pool_gradients import Plane, adaptive_indices, window_indices

BACKEND = "torch-autograd"
aten = torch.ops.aten

# Parameters of a forward that its backward does not have: those of the rows.
DROPPED = {"eps": 1e-5, "momentum": 0.1}

ROUNDED_TWICE = (
    "autograd rounds the norm's gradient to the input's dtype before it adds the residual's"
)
FAULTS = {
    (BACKEND, "fused_add_layer_norm_backward"): ROUNDED_TWICE,
    (BACKEND, "fused_add_rms_norm_backward"): ROUNDED_TWICE,
}


def implementations() -> list[Implementation]:
    return [
        Implementation(
            op=name,
            backend=BACKEND,
            version=torch.__version__,
            spec_version=CATALOGUE[name].version,
            supports=SUPPORTS.get(name, on_gpu),
            loader=partial(PREPARE.get, name, retained),
            auto=False,
        )
        for name in CATALOGUE
        if name.endswith("_backward") and name != "batch_norm_backward"
    ]


def wanted(call: Call, grads: Sequence[Any]) -> Any:
    """The gradients that the call asks for: one tensor, or a tuple."""
    found = tuple(g for g, here in zip(grads, call.present, strict=True) if here)
    return found[0] if len(found) == 1 else found


def with_weight(call: Call) -> Refusal | None:
    t = call.tensors
    x = getattr(t, "input", None) or t.residual_out
    if t.weight is None or t.weight.dtype != x.dtype:
        return Refusal("takes a weight of the input's dtype")
    return on_gpu(call)


def per_row(t: torch.Tensor, call: Call) -> torch.Tensor:
    """A statistic of each row, with a dim of one for each normalized dim."""
    return t.view(*t.shape, *[1] * len(call.params.normalized_shape))


def layer_norm(call: Call) -> Launch:
    shape, mask = call.params.normalized_shape, list(call.params.output_mask)

    def launch(grad: Any, x: Any, weight: Any, mean: Any, rstd: Any) -> Any:
        m, r = per_row(mean, call), per_row(rstd, call)
        args = (grad, x, shape, m, r, weight, weight, mask)  # of the bias only the shape counts
        return wanted(call, aten.native_layer_norm_backward(*args))

    return launch


def rms_norm(call: Call) -> Launch:
    shape, mask = call.params.normalized_shape, list(call.params.output_mask)

    def launch(grad: Any, x: Any, weight: Any, rstd: Any) -> Any:
        args = (grad, x, shape, per_row(rstd, call), weight, mask)
        return wanted(call, aten._fused_rms_norm_backward(*args))

    return launch


def fused_add(forward: Callable[..., Any], prepare: Callable[[Call], Launch]) -> Prepare:
    """After an addition of its own: the norm's gradient and the residual's, added.

    Autograd hands the sum to input and residual alike, and it has the statistics of its forward.
    """

    def prepare_both(call: Call) -> Launch:
        p = call.params
        # (grad_out, x, weight, statistics) -> (grad_input, *grads of the parameters)
        of_norm = prepare(call)
        statistics: list[torch.Tensor] = []

        def launch(grad: Any, grad_total: Any, total: Any, weight: Any) -> Any:
            if not statistics:
                statistics.extend(forward(total, weight, p))
            grads = of_norm(grad, total, weight, *statistics)
            to_both = grads[0].add_(grad_total)
            return wanted(call, (to_both, *grads[1:]))

        return launch

    return prepare_both


def layer_norm_statistics(x: torch.Tensor, weight: torch.Tensor, p: Any) -> Any:
    _, mean, rstd = torch.native_layer_norm(x, p.normalized_shape, weight, weight, p.eps)
    return mean, rstd


def rms_norm_statistics(x: torch.Tensor, weight: torch.Tensor, p: Any) -> Any:
    return (aten._fused_rms_norm(x, p.normalized_shape, weight, p.eps)[1],)


def norm_alone(name: str, parameters: int) -> Callable[[Call], Launch]:
    """The norm's gradients by an ATen operator, with statistics that have the dims of one already.

    parameters: 1 for a weight, 2 for a weight and a bias, of which only the shape counts.
    """

    def prepare(call: Call) -> Launch:
        shape, mask = call.params.normalized_shape, [True] * (1 + parameters)

        def launch(grad: Any, x: Any, weight: Any, *statistics: Any) -> Any:
            weights = [weight] * parameters
            return getattr(aten, name)(grad, x, shape, *statistics, *weights, mask)

        return launch

    return prepare


def group_norm(call: Call) -> Launch:
    """With statistics in the dtype in which torch's forward keeps them: 16 bits before 2.13."""
    x, p = call.tensors.input, call.params
    n, c = x.shape[:2]
    sizes = (n, c, x.numel // max(n * c, 1), p.num_groups)
    kept: list[Once] = []

    def launch(grad: Any, x: Any, weight: Any, mean: Any, rstd: Any) -> Any:
        if not kept:
            _, m, _ = torch.native_group_norm(x[:1], weight, None, 1, *sizes[1:], 1e-5)
            kept.extend((Once(m.dtype), Once(m.dtype)))
        m, r = kept[0](mean), kept[1](rstd)
        args = (grad, x, m, r, weight, *sizes, list(p.output_mask))
        return wanted(call, aten.native_group_norm_backward(*args))

    return launch


def convolution(call: Call) -> Launch:
    """cuDNN tries its algorithms on each new shape (`benchmark`), as the peer torch-cudnn does."""
    p = call.params
    padding = list(p.padding[::2])
    flags: Any = torch.backends.cudnn

    def launch(grad: Any, x: Any, weight: Any) -> Any:
        sizes = ([weight.shape[0]], p.stride, padding, p.dilation, False, [0] * len(padding))
        before, flags.benchmark = flags.benchmark, True
        try:
            grads = aten.convolution_backward(
                grad, x, weight, *sizes, p.groups, list(p.output_mask)
            )
        finally:
            flags.benchmark = before
        return wanted(call, grads)

    return launch


def even_padding(call: Call) -> Refusal | None:
    p = call.params
    if list(p.padding[::2]) != list(p.padding[1::2]):
        return Refusal("takes padding that is equal before and after")
    if len(call.tensors.input.shape) != len(p.stride) + 2:
        return Refusal("takes batched input")
    return on_gpu(call)


def max_pool(call: Call) -> Launch:
    """From flat indices, which torch's forward keeps: made of our offsets once."""
    p = call.params
    plane = Plane(p)
    window = (plane.kernel_size, plane.stride, plane.padding, plane.dilation)
    pool = aten.max_pool3d_with_indices_backward
    if len(p.kernel_size) < 3:
        pool = aten.max_pool2d_with_indices_backward
    kept: list[torch.Tensor] = []

    def launch(grad: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        if not kept:
            indices = plane.enter(window_indices(offset, p))
            kept.extend(
                (grad.new_empty(plane.shape), indices)
            )  # of the input only the shape counts
        like, indices = kept
        return plane.leave(pool(plane.enter(grad), like, *window, p.ceil_mode, indices))

    return launch


def adaptive_max_pool(call: Call) -> Launch:
    p = call.params
    kept: list[torch.Tensor] = []

    def launch(grad: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        if not kept:
            kept.extend((grad.new_empty(p.input_shape), adaptive_indices(offset, p)))
        return aten.adaptive_max_pool2d_backward(grad, *kept)

    return launch


def retained(call: Call) -> Launch:
    """The gradient through the graph of torch's own forward, built in the first call.

    A tensor that the backward does not read enters linearly: zeros stand for it.
    """
    forward = CATALOGUE[call.spec.forward_op or ""]
    back, p = forward.backward, vars(call.params)
    assert back is not None
    params = {name: p[name] if name in p else DROPPED[name] for name in forward.param_names}
    given = [o.name for o in forward.returns if o.differentiable]
    metas = dict(zip([n for n, w in zip(back.wrt, p["output_mask"], strict=True) if w],
                     call.outputs, strict=True))  # fmt: skip
    graph: list[Any] = []

    def build(upstream: Sequence[torch.Tensor], read: dict[str, Any]) -> None:
        leaves = {n: torch.zeros(m.shape, dtype=m.dtype, device=m.device) for n, m in metas.items()}
        leaves |= {n: read[n].detach() for n in metas if n in read}
        with torch.enable_grad():
            for leaf in leaves.values():
                leaf.requires_grad_()
            tensors = [leaves.get(n, read.get(n)) for n in forward.tensor_names]
            if forward.native is None:  # rounds the sum of a tensor's several gradients once
                tensors = [None if t is None else wide(t) for t in tensors]
            outs = (forward.native or forward.reference)(*tensors, **params)
            outs = outs if isinstance(outs, tuple) else (outs,)
            graph.append([o.to(g.dtype) for o, g in zip(outs, upstream, strict=False)])
        graph.append(list(leaves.values()))

    def launch(*tensors: Any) -> Any:
        upstream = [g for g in tensors[: len(given)] if g.numel()]  # empty: no such output
        if not graph:
            read = tensors[len(given) : len(given) + len(back.needs)]
            build(upstream, dict(zip(back.needs, read, strict=True)))
        outs, leaves = graph
        found = torch.autograd.grad(outs, leaves, upstream, retain_graph=True)
        return found[0] if len(found) == 1 else found

    return launch


PREPARE: dict[str, Prepare] = {
    "layer_norm_backward": layer_norm,
    "rms_norm_backward": rms_norm,
    "fused_add_layer_norm_backward": fused_add(
        layer_norm_statistics, norm_alone("native_layer_norm_backward", 2)
    ),
    "fused_add_rms_norm_backward": fused_add(
        rms_norm_statistics, norm_alone("_fused_rms_norm_backward", 1)
    ),
    "group_norm_backward": group_norm,
    **dict.fromkeys(("conv1d_backward", "conv2d_backward", "conv3d_backward"), convolution),
    **{f"max_pool{n}d{form}_backward": max_pool for n in (1, 2, 3) for form in ("", "_indices")},
    **{f"adaptive_max_pool2d{form}_backward": adaptive_max_pool for form in ("", "_indices")},
}
SUPPORTS: dict[str, Supports] = {
    **dict.fromkeys(
        (
            "layer_norm_backward",
            "rms_norm_backward",
            "fused_add_layer_norm_backward",
            "fused_add_rms_norm_backward",
            "group_norm_backward",
        ),
        with_weight,
    ),
    **dict.fromkeys(("conv1d_backward", "conv2d_backward", "conv3d_backward"), even_padding),
}
