"""Mutants whose values are right, or nearly, and whose manners are not: memory, layout, state."""

from __future__ import annotations

from typing import Any

import torch
from conformance.mutants import EXACT, VALUE, as_tuple, sound, wrong_call, wrong_result
from opkiln.conformance.tensors import storage_of
from opkiln.registry import Launch
from opkiln.spec import Call

DETERMINISTIC = frozenset({"deterministic"})
INVARIANT = frozenset({"batch_invariant"})


@wrong_result("output_times_one_and_a_half", "rms_norm", VALUE)
def _(call: Any, tensors: Any, outs: Any) -> Any:
    return (outs[0] * 1.5, *outs[1:])


@wrong_result("truncated_instead_of_rounded", "layer_norm", VALUE)
def _(call: Any, tensors: Any, outs: Any) -> Any:
    return (torch.nextafter(outs[0], torch.zeros_like(outs[0])), *outs[1:])


@wrong_call("one_unwritten_element", "rms_norm", "is nan")
def _(call: Call) -> Launch:
    right = sound(call)

    def launch(*tensors: Any) -> Any:
        outs = as_tuple(right(*tensors))
        out = call.outputs[0].empty()
        out.view(-1)[:-1] = outs[0].view(-1)[:-1]
        return (out, *outs[1:])

    return launch


@wrong_call("one_unwritten_index", "max_pool2d_indices", "indices")
def _(call: Call) -> Launch:
    right = sound(call)

    def launch(*tensors: Any) -> Any:
        outs = as_tuple(right(*tensors))
        indices = call.outputs[1].empty()
        indices[..., 1:] = outs[1][..., 1:]
        return (outs[0], indices, *outs[2:])

    return launch


@wrong_call("input_overwritten", "layer_norm", "input input was modified")
def _(call: Call) -> Launch:
    right = sound(call)

    def launch(*tensors: Any) -> Any:
        outs = right(*tensors)
        tensors[0].select(-1, 0).add_(1)
        return outs

    return launch


@wrong_call("writes_beside_an_inplace_input", "fused_add_rms_norm_inplace", "outside its elements")
def _(call: Call) -> Launch:
    right = sound(call)

    def launch(*tensors: Any) -> Any:
        right(*tensors)
        storage_of(tensors[0])[-1:] = 0
        return ()

    return launch


@wrong_call("cached_output", "rms_norm", "earlier call")
def _(call: Call) -> Launch:
    right = sound(call)
    kept: list[Any] = []

    def launch(*tensors: Any) -> Any:
        outs = as_tuple(right(*tensors))
        if not kept:
            kept.extend(outs)
        for old, new in zip(kept, outs, strict=True):
            old.copy_(new)
        return tuple(kept)

    return launch


@wrong_call("copy_of_an_earlier_output", "layer_norm", "after its input changed in place")
def _(call: Call) -> Launch:
    """Keeps what it returned for tensors at these addresses, and hands out copies."""
    right = sound(call)
    kept: dict[Any, Any] = {}

    def launch(*tensors: Any) -> Any:
        key = tuple(None if t is None else t.data_ptr() for t in tensors)
        if key not in kept:
            kept[key] = as_tuple(right(*tensors))
        return tuple(out.clone() for out in kept[key])

    return launch


@wrong_result("result_is_the_input", "fused_add_rms_norm", "shares memory with an input")
def _(call: Any, tensors: Any, outs: Any) -> Any:
    return (outs[0], tensors[1].copy_(outs[1]), *outs[2:]) if tensors[1].is_contiguous() else outs


@wrong_result("contiguous_for_channels_last", "max_pool2d", "has stride")
def _(call: Any, tensors: Any, outs: Any) -> Any:
    return tuple(o.contiguous() for o in outs)


@wrong_result("float32_result", "rms_norm", "has dtype")
def _(call: Any, tensors: Any, outs: Any) -> Any:
    return (outs[0].float(), *outs[1:])


@wrong_result("saved_tensors_left_out", "rms_norm", "returned 1 outputs")
def _(call: Any, tensors: Any, outs: Any) -> Any:
    return outs[0]


@wrong_result("saved_variance", "layer_norm", "rstd")
def _(call: Any, tensors: Any, outs: Any) -> Any:
    return (*outs[:2], outs[2] ** -2) if call.needs_grad else outs


@wrong_result("saved_offset_of_the_neighbour", "max_pool2d", "offset")
def _(call: Any, tensors: Any, outs: Any) -> Any:
    return (outs[0], outs[1] + 1) if call.needs_grad else outs


@wrong_call("running_statistics_not_updated", "batch_norm", "running_mean")
def _(call: Call) -> Launch:
    right = sound(call)

    def launch(*tensors: Any) -> Any:
        x, mean, var, *rest = tensors
        return right(x, *[None if t is None else t.clone() for t in (mean, var)], *rest)

    return launch


@wrong_call("biased_running_variance", "batch_norm", "running_var")
def _(call: Call) -> Launch:
    right = sound(call)

    def launch(*tensors: Any) -> Any:
        var = tensors[2]
        before = None if var is None else var.clone()
        outs = right(*tensors)
        if call.params.training and var is not None:
            count = tensors[0].numel() // tensors[0].shape[1]
            keep = 1 - call.params.momentum
            var.copy_(keep * before + (var - keep * before) * (count - 1) / count)
        return outs

    return launch


@wrong_call("momentum_the_other_way", "batch_norm", "running_mean")
def _(call: Call) -> Launch:
    right = sound(call)

    def launch(*tensors: Any) -> Any:
        mean = tensors[1]
        before = None if mean is None else mean.clone()
        outs = right(*tensors)
        if call.params.training and mean is not None:
            m = call.params.momentum
            mean.copy_(m * before + (1 - m) * (mean - (1 - m) * before) / m)
        return outs

    return launch


@wrong_call("other_bits_every_time", "mean_pooling", "differs between two runs")
def _(call: Call) -> Launch:
    right = sound(call)
    count = 0

    def launch(*tensors: Any) -> Any:
        nonlocal count
        count += 1
        out = right(*tensors)
        return torch.nextafter(out, out + count % 2) if out.dtype.itemsize >= 4 else out

    return launch


@wrong_call("rows_unsorted", "topk_selector", EXACT, DETERMINISTIC)
def _(call: Call) -> Launch:
    right = sound(call)
    return lambda *tensors: right(*tensors).flip(-1)


@wrong_call("bits_depend_on_the_batch", "rms_norm", "how many rows", INVARIANT)
def _(call: Call) -> Launch:
    right = sound(call)

    def launch(*tensors: Any) -> Any:
        outs = as_tuple(right(*tensors))
        one_row = tensors[0].ndim == 2 and tensors[0].shape[0] == 1
        return (torch.nextafter(outs[0], outs[0] + 1), *outs[1:]) if one_row else outs

    return launch


@wrong_result("every_gradient_whatever_the_mask", "layer_norm_backward", "returned 4 outputs")
def _(call: Any, tensors: Any, outs: Any) -> Any:
    return (*outs, outs[0].clone())
