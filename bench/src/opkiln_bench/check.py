"""Is an output right? Compared with the spec's reference in float64 before anything is timed.

Rows of gigabytes are checked in slices along a dimension that the op treats independently.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from opkiln.conformance.compare import compare

from opkiln_bench.analysis import OURS
from opkiln_bench.contestants import Subject
from opkiln_bench.peers import fault_of

# Ours must meet the conformance tolerance (half a unit in the last place, and float32's rounding).
# A peer that is off by two units is less accurate, not wrong: without it our ratio would flatter.
PEER_ALLOWANCE = 4.0

SLICE_ELEMENTS = 1 << 27  # 1 GiB in float64; the reference holds about six such tensors at once


@dataclass(frozen=True)
class Sliced:
    """An op whose slices along `dim` are independent, and the tensors that are cut."""

    dim: int
    tensors: tuple[str, ...]


SLICED = {
    "layer_norm": Sliced(0, ("input",)),
    "rms_norm": Sliced(0, ("input",)),
    "fused_add_layer_norm": Sliced(0, ("input", "residual")),
    "fused_add_rms_norm": Sliced(0, ("input", "residual")),
    "topk_selector": Sliced(1, ("scores", "starts", "ends")),
}


def widened(t: torch.Tensor | None) -> torch.Tensor | None:
    """Floating-point tensors in double precision; the others as they are."""
    if t is None:
        return None
    if t.is_complex():
        return t.to(torch.complex128)
    return t.to(torch.float64) if t.is_floating_point() else t


@dataclass(frozen=True)
class Verdict:
    """Whether a backend's result is right, its largest error over the tolerance, what is wrong."""

    ok: bool
    ratio: float
    reason: str = ""


def poison(subject: Subject) -> None:
    """Fill memory that the outputs will likely get with NaN: an unwritten element then shows."""
    for meta in subject.call.outputs:
        if meta.dtype.is_floating_point:
            torch.full(meta.shape, float("nan"), dtype=meta.dtype, device=meta.device)


def against_reference(
    subject: Subject, outputs: dict[str, list[torch.Tensor]]
) -> dict[str, Verdict]:
    """Each backend's outputs (and written inputs) against the reference, slice by slice."""
    tallies = {b: Tally(b, 1.0 if b == OURS else PEER_ALLOWANCE) for b in outputs}
    pairs = zip(subject.spec.outputs, subject.call.present, strict=True)
    names = [o.name for o, here in pairs if here] + list(subject.spec.mutates(subject.call))
    expected_metas = [(m.shape, m.dtype) for m in subject.call.outputs]
    for backend, found in outputs.items():
        metas = [(tuple(t.shape), t.dtype) for t in found[: len(expected_metas)]]
        if metas != expected_metas:
            tallies[backend].reason = f"shapes and dtypes {metas}, expected {expected_metas}"
    first = subject.tensors[0]
    assert first is not None
    for cut in slices(subject):
        expected = reference_of(subject, cut)
        for backend, found in outputs.items():
            if not tallies[backend].reason:
                for name, out, ref in zip(names, found, expected, strict=False):
                    tallies[backend].add(name, cut(out), ref, subject, cut(first))
    return {backend: tally.verdict() for backend, tally in tallies.items()}


class Cut:
    """One slice of the tensors that are cut; the identity where nothing is."""

    def __init__(self, dim: int = 0, start: int = 0, length: int | None = None) -> None:
        self.dim, self.start, self.length = dim, start, length

    def __call__(self, t: torch.Tensor) -> torch.Tensor:
        return t if self.length is None else t.narrow(self.dim, self.start, self.length)


def slices(subject: Subject) -> Iterator[Cut]:
    """The whole call, or slices of a row too large for float64 at once."""
    how = SLICED.get(subject.spec.name)
    first = subject.tensors[0]
    assert first is not None
    if how is None or first.numel() <= SLICE_ELEMENTS:
        yield Cut()
        return
    extent = first.shape[how.dim]
    length = max(1, SLICE_ELEMENTS * extent // first.numel())
    for start in range(0, extent, length):
        yield Cut(how.dim, start, min(length, extent - start))


def reference_of(subject: Subject, cut: Cut) -> list[torch.Tensor]:
    """The reference's outputs that the call has, then the inputs that it writes, in float64."""
    how = SLICED.get(subject.spec.name)
    names = subject.spec.tensor_names
    cut_names = how.tensors if how else ()
    tensors = [
        widened(cut(t) if t is not None and n in cut_names else t)
        for n, t in zip(names, subject.tensors, strict=True)
    ]
    outs = subject.spec.reference(*tensors, **subject.params)
    outs = outs if isinstance(outs, tuple) else (outs,)
    here = [o for o, present in zip(outs, subject.call.present, strict=False) if present]
    written = subject.spec.mutates(subject.call)
    return [
        *here,
        *(t for n, t in zip(names, tensors, strict=True) if n in written and t is not None),
    ]


def gathered(scores: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Scores [B, S, KV, G] at positions [B, S, G, k], in order; unused slots count as -inf."""
    kv = scores.shape[2]
    found = scores.transpose(2, 3).gather(-1, positions.clamp(0, kv - 1).long())
    return found.masked_fill(positions < 0, float("-inf")).sort(-1).values


@dataclass
class Tally:
    """One backend's outputs so far: the largest error over its tolerance, and the first fault."""

    backend: str
    allowance: float
    ratio: float = 0.0
    reason: str = ""

    def add(
        self,
        name: str,
        out: torch.Tensor,
        ref: torch.Tensor,
        subject: Subject,
        scores: torch.Tensor,
    ) -> None:
        """scores: the first tensor of the call, of this slice."""
        spec, row = subject.spec, subject.row
        if row.name == "topk_selector":
            out, ref = self.as_sets(out, ref, scores)
        terms = spec.reduction(subject.call)
        exact = row.name.startswith("max_pool") and row.forward is None
        result = compare(
            name,
            out,
            ref,
            terms,
            row.condition,
            exact=exact,
            backend=self.backend,
            rounds_at_scale=spec.rounds_at_scale,
        )
        self.ratio = max(self.ratio, result.ratio)
        if result.ratio > self.allowance and not self.reason:
            fault = fault_of(self.backend, spec.name)
            self.reason = f"{result.message}: {fault}" if fault else result.message

    def as_sets(
        self, out: torch.Tensor, ref: torch.Tensor, scores: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Top-k positions in ascending order: the order within a row is free.

        A peer may also keep another of several equal scores at the threshold than our rule does: of
        its rows with no position twice the scores count instead.
        """
        out, ref = out.sort(-1).values, ref.sort(-1).values
        if self.backend == OURS:
            return out, ref
        distinct = ((out.diff(dim=-1) > 0) | (out[..., 1:] < 0)).all(-1, keepdim=True)
        same_scores = gathered(scores, out) == gathered(scores, ref)
        return torch.where(distinct & same_scores.all(-1, keepdim=True), ref, out), ref

    def verdict(self) -> Verdict:
        return Verdict(not self.reason, self.ratio, self.reason)
