"""Which implementation serves a call, and the plans that remember the answer.

`backend=` is strict: it works or raises with the reason. Preferences (`opkiln.use`,
OPKILN_BACKEND) fall through to the automatic choice among the implementations whose `supports`
agrees: the fastest by the measured tables (opkiln.measured), the largest priority where they are
silent.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

import torch

from opkiln import measured
from opkiln.errors import ArgumentError, BackendError
from opkiln.overlap import share_memory, span_bytes
from opkiln.policy import Policy
from opkiln.registry import REGISTRY, Implementation, Launch, Refusal
from opkiln.spec import Call, OpSpec
from opkiln.watch import watched

MAX_PLANS = 4096
FAMILY_DISTRIBUTION = {f: f"opkiln-{f}" for f in ("norm", "conv", "pool", "rope", "misc")}

_warned: set[tuple[str, str]] = set()


@dataclass(frozen=True, slots=True)
class Candidate:
    """One implementation as dispatch saw it. status: chosen, possible, refused, absent.

    time_us, sol (share of the roofline), host_us: measured on calls like this one; source: where,
    when and on what commit, or "rule" where nothing was measured.
    """

    backend: str
    status: str
    reason: str
    version: str = ""
    priority: int = 0
    time_us: float | None = None
    source: str = "rule"
    sol: float | None = None
    host_us: float | None = None

    def predicted(self) -> str:
        """`12.3 us, 84 % of the roofline, host 9.1 us`; empty where nothing was measured."""
        if self.time_us is None:
            return ""
        parts = [f"{self.time_us:g} us"]
        if self.sol is not None:
            parts.append(f"{self.sol:.0%} of the roofline".replace("%", " %"))
        if self.host_us is not None:
            parts.append(f"host {self.host_us:g} us")
        return ", ".join(parts)


def refusal(impl: Implementation, call: Call) -> Refusal | None:
    """Why `impl` cannot serve `call`, or None."""
    for trait in ("deterministic", "batch_invariant"):
        if getattr(call.policy, trait) and trait not in impl.traits:
            return Refusal(f"does not promise {trait}, which the policy asks for")
    try:
        return impl.supports(call)
    except Exception as error:  # a plugin's bug must not hide the backends that work
        _warn_once(impl, f"supports() raised {type(error).__name__}: {error}")
        return Refusal(f"its supports() raised {type(error).__name__}: {error}")


def _warn_once(impl: Implementation, what: str) -> None:
    if (impl.op, impl.backend) not in _warned:
        _warned.add((impl.op, impl.backend))
        warnings.warn(f"opkiln: backend {impl.backend!r} of {impl.op}: {what}", stacklevel=4)


def ranked(call: Call) -> list[tuple[Implementation, str]]:
    """The implementations to try for a call, best first, each with why it stands there.

    Raises BackendError when a strictly named backend is unknown or refuses.
    """
    impls = REGISTRY.of(call.spec.name)
    wanted = call.policy.backends_for(call.spec.name)
    named = [impls[b] for b in wanted if b in impls]
    fit = [(i, "preferred by the policy") for i in named if refusal(i, call) is None]
    if not (call.policy.strict and wanted):
        auto = sorted((i for i in impls.values() if i.auto), key=lambda i: (-i.priority, i.backend))
        others = [i for i in auto if i.backend not in wanted and refusal(i, call) is None]
        fit += measured.choose(others, call)
    if not fit:
        raise BackendError(_nothing_fits(call, wanted))
    return fit


def _nothing_fits(call: Call, wanted: Sequence[str]) -> str:
    rows = consider(call, wanted or sorted(REGISTRY.of(call.spec.name)))
    reasons = "; ".join(f"{row.backend}: {row.reason}" for row in rows)
    broken = "; ".join(
        f"plugin {p.name} {p.version} failed: {p.error}" for p in REGISTRY.failures()
    )
    why = "; ".join(filter(None, (reasons, broken)))
    return f"{call.spec.name}: no backend takes this call ({why})"


def consider(call: Call, backends: Sequence[str]) -> list[Candidate]:
    """Each named backend's answer to the call."""
    impls = REGISTRY.of(call.spec.name)
    rows = []
    for name in backends:
        impl = impls.get(name)
        if impl is None:
            rows.append(Candidate(name, "absent", missing_reason(call.spec, name)))
            continue
        no = refusal(impl, call)
        status, reason = ("refused", no.reason) if no else ("possible", f"priority {impl.priority}")
        rows.append(Candidate(name, status, reason, impl.version, impl.priority))
    return rows


def missing_reason(spec: OpSpec, backend: str) -> str:
    """Why no implementation of that name exists for the op."""
    if backend != "opkiln":
        known = ", ".join(REGISTRY.backends())
        return f"no backend of that name implements {spec.name}; installed backends: {known}"
    dist = FAMILY_DISTRIBUTION[spec.family]
    for info in REGISTRY.plugins:
        if info.name.startswith(f"{dist}:"):
            failed = f"plugin {info.name} {info.version} failed: {info.error}"
            return (
                failed if info.error else f"{dist} is installed and has no kernel for {spec.name}"
            )
    if not REGISTRY.allows(dist):
        return f"OPKILN_PLUGINS does not list {dist}"
    return f"not installed: pip install {dist}"


@dataclass(frozen=True, slots=True)
class Plan:
    """A chosen implementation, ready to run on tensors like those it was made for."""

    call: Call
    implementation: Implementation
    launch: Launch
    reason: str


def plan(
    spec: OpSpec,
    tensors: Sequence[torch.Tensor | None],
    params: dict[str, Any],
    policy: Policy,
    needs_grad: bool = False,
) -> Plan:
    """Validate, choose and prepare. Raises ArgumentError or BackendError."""
    call = Call.of(spec, tensors, params, policy, needs_grad)
    strict = policy.strict and policy.backends_for(spec.name)
    options = ranked(call)
    for impl, why in options:
        try:
            launch = _empty_launch(call) or impl.loader()(call)
        except Exception as error:
            if strict or impl is options[-1][0]:
                raise
            _warn_once(impl, f"could not prepare a call, {type(error).__name__}: {error}")
            continue
        return Plan(call, impl, watched(call, _guard(call, launch)), why)
    raise AssertionError("ranked() returns at least one implementation")


def _empty_launch(call: Call) -> Launch | None:
    """Nothing to compute: allocate the outputs, so that no kernel ever sees an empty grid.

    Nothing to read, but outputs of some size (the gradient of a weight, the statistics of an empty
    batch): the reference, for the same reason.
    """
    metas = call.outputs
    nothing_to_read = not next(m for m in vars(call.tensors).values() if m is not None).numel
    if metas and nothing_to_read and (call.spec.mutates(call) or any(m.numel for m in metas)):
        return REGISTRY.of(call.spec.name)["torch-ref"].loader()(call)
    if call.spec.mutates(call) or not metas or any(m.numel for m in metas):
        return None

    def launch(*tensors: torch.Tensor | None) -> Any:
        outs = tuple(m.empty() for m in metas)
        return outs[0] if len(outs) == 1 else outs

    return launch


def _guard(call: Call, launch: Launch) -> Launch:
    """Add what a call of this kind needs around the launch: its device made current, value checks,
    version counters.
    """
    spec = call.spec
    if call.device.type == "cuda" and torch.cuda.device_count() > 1:
        launch = _on_device(call.device, launch)
    check = spec.check_values
    if check is not None and (call.device.type == "cpu" or call.policy.checks):
        params = vars(call.params)
        unchecked = launch

        def launch(*tensors: torch.Tensor | None) -> Any:
            check(*tensors, **params)
            return unchecked(*tensors)

    written = [spec.tensor_names.index(n) for n in spec.mutates(call)]
    if not written:
        return launch
    metas = tuple(vars(call.tensors).values())
    pairs = [
        (i, j, span_bytes(metas[i]), span_bytes(metas[j])) for i, j in combinations(written, 2)
    ]

    def mutating(*tensors: Any) -> Any:
        for i, j, span_i, span_j in pairs:
            apart = tensors[j].data_ptr() - tensors[i].data_ptr()
            if -span_j < apart < span_i and share_memory(
                tensors[i], tensors[j], metas[i], metas[j]
            ):
                a, b = spec.tensor_names[i], spec.tensor_names[j]
                raise ArgumentError(f"{spec.name}: {a} and {b} are written and share memory")
        out = launch(*tensors)
        torch.autograd.graph.increment_version([tensors[i] for i in written])
        return out

    return mutating


def _on_device(device: torch.device, launch: Launch) -> Launch:
    """Kernels are launched on the current device, tensors may lie on another."""

    def on_device(*tensors: torch.Tensor | None) -> Any:
        if torch._C._cuda_getDevice() == device.index:
            return launch(*tensors)
        with torch.cuda.device(device):
            return launch(*tensors)

    return on_device


PLANS: dict[Any, Plan] = {}


def remember(key: Any, made: Plan) -> Plan:
    """Keep a plan; beyond MAX_PLANS the oldest goes."""
    while len(PLANS) >= MAX_PLANS:
        PLANS.pop(next(iter(PLANS)), None)
    PLANS[key] = made
    return made


def tensor_key(t: torch.Tensor | None) -> Any:
    """What a plan depends on in a tensor."""
    if t is None:
        return None
    return (t.dtype, t.shape, t.stride(), t.device, t.data_ptr() & 15)


@dataclass(frozen=True)
class Explanation:
    """Every candidate for one call and what became of it. `str()` is a table."""

    op: str
    page_op: str
    call: str
    candidates: tuple[Candidate, ...]

    @property
    def chosen(self) -> str:
        return next(c.backend for c in self.candidates if c.status == "chosen")

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "chosen": self.chosen}

    def __str__(self) -> str:
        width = max(len(c.backend) for c in self.candidates)
        lines = [f"{self.op} ({self.page_op}) {self.call}"]
        for c in self.candidates:
            what = "; ".join(filter(None, (c.reason, c.predicted())))
            lines.append(f"  {c.backend:<{width}}  {c.status:<8}  {what}")
        lines += sorted({f"  times: {c.source}" for c in self.candidates if c.time_us is not None})
        return "\n".join(lines)


def explain_call(call: Call) -> Explanation:
    """Every candidate for a call: chosen, possible, refused or absent, and why."""
    impls = REGISTRY.of(call.spec.name)
    best, why = ranked(call)[0]
    names = [*sorted(impls, key=lambda b: (-impls[b].priority, b))]
    if "opkiln" not in impls:
        names.insert(0, "opkiln")
    names += [b for b in call.policy.backends_for(call.spec.name) if b not in names]
    rows = []
    for row in consider(call, names):
        if row.backend == best.backend:
            row = replace(row, status="chosen", reason=why)
        elif row.status == "possible" and not impls[row.backend].auto:
            row = replace(row, reason="by name only")
        found = measured.predict(call, row.backend)
        if found is not None and row.status != "absent":
            row = replace(row, **asdict(found))
        rows.append(row)
    return Explanation(call.spec.name, call.spec.op, describe(call), tuple(rows))


def describe(call: Call) -> str:
    """`input float16[2048, 4096] cuda:0, weight ...; eps=1e-05`."""
    parts = []
    for name, meta in vars(call.tensors).items():
        if meta is not None:
            dtype = str(meta.dtype).removeprefix("torch.")
            parts.append(f"{name} {dtype}{list(meta.shape)}")
    params = ", ".join(f"{k}={v}" for k, v in vars(call.params).items())
    return f"{', '.join(parts)} on {call.device}; {params}"
