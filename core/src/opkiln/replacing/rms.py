"""RMSNorm classes of other libraries, recognised by what they compute.

transformers writes the normalization out in over a hundred classes. One is served if it is
x * rsqrt(mean(x^2) + eps), times its weight, or times 1 + weight (Gemma's), or without a weight: on
random inputs, for each dtype alone, in training and in evaluation, with its gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from opkiln import functional as F
from opkiln.meta import dtype_name
from opkiln.replacing.served import Way

EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps", "rms_norm_eps")
OFFSETS = (0.0, 1.0)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
COLUMNS = 48  # of the probes of a class without a weight, which serves any number
BATCH = (2, 3)
FLOAT32_TOLERANCE = 1e-5
ROUNDINGS = 2.0  # in epsilons of a 16-bit dtype: before and after the weight, with room for one

Formula = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True)
class RMSWay:
    """weight, eps: names of the module's attributes. dtypes: of the input and the weight, both."""

    argument: str
    weight: str | None
    eps: str
    offset: float
    dtypes: tuple[torch.dtype, ...]

    op = "rms_norm"

    def takes(self, module: Any, x: torch.Tensor) -> bool:
        """The input and the weight of one dtype: else classes differ in the dtype they return."""
        same = self.weight is None or getattr(module, self.weight).dtype == x.dtype
        return same and x.dtype in self.dtypes

    def serve(self, module: Any, x: torch.Tensor) -> Any:
        """Without autocast, which finds nothing to cast in such a class and everything in ours."""
        weight = None if self.weight is None else getattr(module, self.weight)
        shape, eps = x.shape[-1:], getattr(module, self.eps)
        if torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                return F.rms_norm(x, shape, self.scale(weight), eps)
        return F.rms_norm(x, shape, self.scale(weight), eps)

    def scale(self, weight: torch.Tensor | None) -> torch.Tensor | None:
        """offset + weight in float32, as Gemma adds them."""
        return weight if weight is None or not self.offset else self.offset + weight.float()


class Probes:
    """Tries modules, each kind of module once."""

    def __init__(self) -> None:
        self.found: dict[Any, Way | str] = {}

    def is_candidate(self, module: torch.nn.Module) -> bool:
        """A leaf with an epsilon and at most a weight vector that takes one tensor."""
        parameters = [p for p in module._parameters.values() if p is not None]
        tensors = [*module.children(), *[b for b in module._buffers.values() if b is not None]]
        alone = not tensors and len(parameters) <= 1 and all(p.ndim == 1 for p in parameters)
        return alone and eps_of(module) is not None and argument_of(module) is not None

    def way_of(self, module: torch.nn.Module) -> Way | str:
        key = kind_of(module)
        if key not in self.found:
            self.found[key] = probed(module)
        return self.found[key]


def eps_of(module: torch.nn.Module) -> str | None:
    names = [n for n in EPS_NAMES if isinstance(getattr(module, n, None), float)]
    return names[0] if len(names) == 1 else None


def argument_of(module: torch.nn.Module) -> str | None:
    """The name of the forward's only argument that has no default."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    wanted = [
        p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in several
    ]
    return wanted[1] if len(wanted) == 2 else None  # after self


def weight_of(module: torch.nn.Module) -> str | None:
    return next((name for name, p in module._parameters.items() if p is not None), None)


def kind_of(module: torch.nn.Module) -> Any:
    """What the result may depend on beside the weight's values."""
    plain = (int, float, str, type(None))
    own = {n: v for n, v in vars(module).items() if not n.startswith("_") and n != "training"}
    name = weight_of(module)
    weight = name and (name, module._parameters[name].shape, module._parameters[name].dtype)  # type: ignore[union-attr]
    attributes = tuple((n, v if isinstance(v, plain) else id(v)) for n, v in sorted(own.items()))
    return type(module), type(module).forward, weight, attributes


def probed(module: torch.nn.Module) -> Way | str:
    """The way that gives the module's results; the first difference where none does."""
    weight, eps, argument = weight_of(module), eps_of(module), argument_of(module)
    assert eps is not None and argument is not None
    parameter = None if weight is None else module._parameters[weight]
    reasons = []
    for offset in OFFSETS if weight else OFFSETS[:1]:
        dtypes = []
        for dtype in DTYPES:
            way = RMSWay(argument, weight, eps, offset, (dtype,))
            why = difference(module, way)
            dtypes += [] if why else [dtype]
            if why and (parameter is None or dtype == parameter.dtype):
                reasons.append(why)
        if dtypes and (parameter is None or parameter.dtype in dtypes):
            return RMSWay(argument, weight, eps, offset, tuple(dtypes))
    return reasons[0] if reasons else f"has a weight of {parameter.dtype}"  # type: ignore[union-attr]


def difference(module: torch.nn.Module, way: RMSWay) -> str | None:
    """How the module differs from the formula in one dtype; None if it does not."""
    (dtype,) = way.dtypes
    where = f"on random {dtype_name(dtype)}"
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for training in (True, False):
            for x, weight in inputs(module, way, dtype):
                try:
                    why = compared(module, way, x, weight, training)
                except Exception as error:  # the class takes something else
                    text = str(error).splitlines() or [""]
                    return f"its forward raises {type(error).__name__} {where}: {text[0][:80]}"
                if why:
                    return f"{why} {where}"
    return None


def inputs(
    module: torch.nn.Module, way: RMSWay, dtype: torch.dtype
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Rows with a mean, at sizes where eps is all, some and none of the result."""
    generator = torch.Generator().manual_seed(0)
    parameter = None if way.weight is None else module._parameters[way.weight]
    columns = COLUMNS if parameter is None else parameter.numel()
    found = []
    for size in (1.0, float(getattr(module, way.eps)) ** 0.5, 300.0):  # 300^2: no float16
        x = 0.5 + torch.randn(*BATCH, columns, generator=generator, device="cpu")
        weight = torch.randn(columns, generator=generator, device="cpu").to(dtype)
        found.append(((size * x).to(dtype), None if parameter is None else weight))
    return found


def compared(
    module: torch.nn.Module,
    way: RMSWay,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    training: bool,
) -> str | None:
    """Result and gradients of the module and of the formula in float64."""
    eps = float(getattr(module, way.eps))
    theirs, own_grads = with_gradients(lambda x, w: run(module, way, x, w, training), x, weight)
    if not isinstance(theirs, torch.Tensor) or theirs.dtype != x.dtype or theirs.shape != x.shape:
        return "does not return a tensor of its input's shape and dtype"

    def formula(x: torch.Tensor, w: torch.Tensor | None) -> torch.Tensor:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return y if w is None else y * (way.offset + w)

    wide = None if weight is None else weight.double()
    ours, grads = with_gradients(formula, x.double(), wide)
    if not close(theirs, ours, elementwise=True):
        return "its result is not that of RMSNorm"
    if not all(close(a, b, elementwise=False) for a, b in zip(own_grads, grads, strict=True)):
        return "its gradients are not those of RMSNorm"
    return None


def run(
    module: torch.nn.Module,
    way: RMSWay,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    training: bool,
) -> Any:
    """The forward alone, on a copy of the module with this weight: no hooks, nothing changed."""
    copy = type(module).__new__(type(module))
    parameters = {} if way.weight is None else {way.weight: weight}
    vars(copy).update(vars(module) | {"_parameters": parameters, "training": training})
    before = x.detach().clone()
    out = copy.forward(x)
    if not torch.equal(before, x):
        raise ValueError("it writes its input")
    return out


def with_gradients(
    fn: Callable[..., Any], x: torch.Tensor, weight: torch.Tensor | None
) -> tuple[Any, list[torch.Tensor]]:
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight) if t is not None]
    out = fn(*leaves, *[None] * (2 - len(leaves)))
    if not isinstance(out, torch.Tensor):
        return out, []
    upstream = torch.linspace(-1, 2, out.numel(), device="cpu").view_as(out).to(out.dtype)
    return out.detach(), list(torch.autograd.grad(out, leaves, upstream))


def close(found: torch.Tensor, expected: torch.Tensor, elementwise: bool) -> bool:
    """Within what rounding explains; sums (gradients) relative to the largest element."""
    info = torch.finfo(found.dtype)
    rtol = FLOAT32_TOLERANCE if found.dtype == torch.float32 else ROUNDINGS * info.eps
    atol = info.smallest_normal if elementwise else 4 * rtol * float(expected.abs().max())
    return torch.allclose(found.double(), expected, rtol=rtol, atol=atol)
