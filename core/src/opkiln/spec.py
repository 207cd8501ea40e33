"""What an op means: its tensors, parameters, outputs, reference and cost.

An `OpSpec` is the only description of an op. Validation, the torch operator and its fake, the
conformance cases, the bench rows and the docs are all derived from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch._prims_common import make_channels_last_strides_for, make_contiguous_strides_for

from opkiln.check import check_call
from opkiln.errors import ArgumentError
from opkiln.meta import (
    COMPLEX,
    FLOAT,
    INDEX,
    SAME,
    WIDE,
    Shape,
    TensorMeta,
    dtype_name,
    is_channels_last,
    wide_dtype,
)
from opkiln.policy import DEFAULT, Policy

__all__ = [
    "COMPLEX",
    "FLOAT",
    "INDEX",
    "SAME",
    "WIDE",
    "Backward",
    "Call",
    "Cost",
    "DataSize",
    "OpSpec",
    "OutputSpec",
    "ParamSpec",
    "Shape",
    "TensorMeta",
    "TensorSpec",
    "dtype_name",
    "is_channels_last",
    "like",
    "no_mutation",
    "unit_reduction",
    "wide_dtype",
]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input tensor.

    dims: named sizes separated by spaces; a name means the same size wherever it stands, a
        parameter's name means its value, `*name` any number of sizes. "*B *normalized_shape".
    dtypes: allowed dtypes; SAME: the first tensor's.
    """

    name: str
    dims: str
    dtypes: tuple[torch.dtype, ...] = SAME
    optional: bool = False
    doc: str = ""


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One canonical parameter. kind: its type in the operator's schema (int, int?, int[], ...)."""

    name: str
    kind: str
    doc: str = ""


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """One output. meta(call): shape, dtype and strides, or None where this call has no such output.

    saved: written for the backward only, when the call needs a gradient.
    differentiable: False for indices.
    """

    name: str
    meta: Callable[[Call], TensorMeta | None]
    saved: bool = False
    differentiable: bool = True
    doc: str = ""


@dataclass(frozen=True, slots=True)
class Cost:
    """The least work of a call: floating-point operations, and bytes each read or written once."""

    flops: int
    bytes_read: int
    bytes_written: int


@dataclass(frozen=True, slots=True)
class DataSize:
    """A size that only the data knows; reading it costs one sync on a GPU.

    `param` = compute(*tensors, **params) where `tensor` is given and `param` is None.
    """

    param: str
    tensor: str
    compute: Callable[..., int]

    def missing(self, spec: OpSpec, tensors: Sequence[Any], params: dict[str, Any]) -> bool:
        given = tensors[spec.tensor_names.index(self.tensor)] is not None
        return given and params[self.param] is None


@dataclass(frozen=True, slots=True)
class Backward:
    """How a forward's gradient is computed.

    spec: tensors are the gradients of the differentiable outputs, then `needs`, then what the
        forward saved; parameters are the forward's of the same name, `<tensor>_shape` of a forward
        tensor, and `output_mask`, one bool for each of `wrt`.
    wrt: the forward's differentiable tensors. needs: the forward's tensors, or outputs, that the
        formula reads; an output costs no memory that its user does not hold anyway.
    alike: a differentiable tensor outside `wrt`, and the one of `wrt` whose gradient is also its
        own (a sum's operands): made once, and handed to both.
    double: which torch formula a second derivative goes through: the forward's ("forward"), or the
        backward's own where what it saved does not depend smoothly on the input ("backward").
    """

    spec: OpSpec
    wrt: tuple[str, ...]
    needs: tuple[str, ...]
    double: str = "forward"
    alike: Mapping[str, str] = field(default_factory=dict)


def no_mutation(call: Call) -> tuple[str, ...]:
    return ()


def unit_reduction(call: Call) -> int:
    return 1


@dataclass(frozen=True, eq=False)
class OpSpec:
    """An op. See the module docstring; `reference` is the meaning, everything else serves it.

    reference(*tensors, **params): plain torch, returns the outputs, then the saved tensors.
        Statistics and sums in `wide_dtype`; differentiable; no device sync; accepts float64.
    native: torch's own fast call for the outputs alone; None: the reference serves.
    native_train: the same with the saved tensors; None: the reference serves.
    flops(call): operations as the benchmark pages count them.
    check(call): what dims and dtypes cannot say; raises ArgumentError.
    check_values(*tensors, **params): checks that read the data (a sync on a GPU).
    data_size: a parameter that is read from a tensor when the caller leaves it out.
    mutates(call): input tensors that this call writes. may_mutate: those that some call writes.
    reduction(call): how many terms an output element sums (scales the tolerance).
    rounds_at_scale: an implementation may round a sum to the output's dtype before it adds the
        last term (a bias), so rounding errors are relative to the output's RMS, not to the element.
    autocast: "fp32" or "lower": what torch.autocast does to this op; None: it leaves it alone.
    """

    op: str
    name: str
    family: str
    tensors: tuple[TensorSpec, ...]
    params: tuple[ParamSpec, ...]
    outputs: tuple[OutputSpec, ...]
    reference: Callable[..., Any]
    doc: str
    native: Callable[..., Any] | None = None
    native_train: Callable[..., Any] | None = None
    flops: Callable[[Call], int] = unit_reduction
    check: Callable[[Call], None] | None = None
    check_values: Callable[..., None] | None = None
    data_size: DataSize | None = None
    mutates: Callable[[Call], tuple[str, ...]] = no_mutation
    may_mutate: tuple[str, ...] = ()
    reduction: Callable[[Call], int] = unit_reduction
    rounds_at_scale: bool = False
    autocast: str | None = None
    backward: Backward | None = None
    forward_op: str | None = None
    version: int = 1

    @property
    def tensor_names(self) -> tuple[str, ...]:
        return tuple(t.name for t in self.tensors)

    @property
    def param_names(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.params)

    @property
    def returns(self) -> tuple[OutputSpec, ...]:
        """The outputs that a caller sees."""
        return tuple(o for o in self.outputs if not o.saved)

    def cost(self, call: Call) -> Cost:
        """Each input read once, each output written once; a mutated input is both."""
        present = {n: m for n, m in vars(call.tensors).items() if m is not None}
        written = sum(m.nbytes for m in call.outputs)
        written += sum(present[n].nbytes for n in self.mutates(call) if n in present)
        return Cost(self.flops(call), sum(m.nbytes for m in present.values()), written)


@dataclass(eq=False)
class Call:
    """One concrete call of an op: metadata only. Raises ArgumentError for arguments not allowed."""

    spec: OpSpec
    tensors: SimpleNamespace
    params: SimpleNamespace
    policy: Policy = DEFAULT
    needs_grad: bool = False
    device: torch.device = field(init=False)
    outputs: tuple[TensorMeta, ...] = field(init=False)
    present: tuple[bool, ...] = field(init=False)

    def __post_init__(self) -> None:
        first = next(m for m in vars(self.tensors).values() if m is not None)
        self.device = first.device
        check_call(self)
        metas = [
            o.meta(self) if self.needs_grad or not o.saved else None for o in self.spec.outputs
        ]
        self.present = tuple(m is not None for m in metas)
        self.outputs = tuple(m for m in metas if m is not None)

    @staticmethod
    def of(
        spec: OpSpec,
        tensors: Sequence[torch.Tensor | None],
        params: dict[str, Any],
        policy: Policy = DEFAULT,
        needs_grad: bool = False,
        real: bool = True,
    ) -> Call:
        """The call of `spec` on these tensors (in the spec's order) and canonical parameters."""
        metas = {}
        for t_spec, t in zip(spec.tensors, tensors, strict=True):
            if t is None and not t_spec.optional:
                raise ArgumentError(f"{spec.name}: {t_spec.name} is required, got None")
            if t is not None and not isinstance(t, torch.Tensor):
                raise TypeError(
                    f"{spec.name}: {t_spec.name} must be a Tensor, got {type(t).__name__}"
                )
            metas[t_spec.name] = None if t is None else TensorMeta.of(t, real)
        return Call(spec, SimpleNamespace(**metas), SimpleNamespace(**params), policy, needs_grad)

    def new(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        channels_last: bool = False,
    ) -> TensorMeta:
        """A fresh tensor of this call's device: contiguous, or channels_last."""
        shape = tuple(shape)
        make = make_channels_last_strides_for if channels_last else make_contiguous_strides_for
        return TensorMeta(shape, dtype, tuple(make(shape)), self.device, True, channels_last)

    def like(self, name: str, keep_channels_last: bool = False) -> TensorMeta:
        """A fresh tensor of that input's shape and dtype."""
        meta = getattr(self.tensors, name)
        return self.new(meta.shape, meta.dtype, keep_channels_last and meta.channels_last)


def like(name: str, keep_channels_last: bool = False) -> Callable[[Call], TensorMeta]:
    """Output rule: shape and dtype of input `name`, contiguous or channels_last as the input is."""
    return lambda call: call.like(name, keep_channels_last)
