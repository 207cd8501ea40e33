"""Measured times: which backend was faster on calls like this one.

A family's distribution may hold `measured/<arch>.json` (`sm90.json`), which `opkiln-bench table`
writes from records: for each bucket of calls the median time of `opkiln` and of `torch`.

The user's own table (opkiln.own_table) goes before these where it is as near.

A bucket is an op, a kind and size numbers. Kind: what must be equal (dtype, number of dims, flags
such as `training`, whether memory is strided). Sizes: the dims of the first tensor and of every
other with two dims or more, then operations and bytes written, which tell of windows and strides.
A call takes the times of the nearest bucket of its op and kind: the one whose largest ratio of two
numbers, |log2(a / b)|, is smallest. Beyond a factor of 4 nothing is known.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.metadata import entry_points
from importlib.resources import files
from typing import Any

import torch

from opkiln import own_table
from opkiln.meta import dtype_name
from opkiln.registry import ENTRY_POINT_GROUP, REGISTRY, Implementation
from opkiln.spec import Call

SCHEMA = own_table.SCHEMA
FOLDER = "measured"
REACH = 2.0  # octaves: a factor of 4
NOISE = 0.03  # what two sweeps of the same code may differ by; less is no reason to choose


@dataclass(frozen=True, slots=True)
class Bucket:
    """Calls that take about as long. See the module docstring."""

    op: str
    kind: str
    sizes: tuple[int, ...]

    def distance(self, other: Bucket) -> float:
        """Octaves between the two; infinite where they are no calls of one kind."""
        alike = self.op == other.op and self.kind == other.kind
        if not alike or len(self.sizes) != len(other.sizes):
            return math.inf
        pairs = zip(self.sizes, other.sizes, strict=True)
        return max(abs(math.log2(max(a, 1) / max(b, 1))) for a, b in pairs)


@dataclass(frozen=True, slots=True)
class Entry:
    """The device times of a bucket by backend, in us, and where they come from.

    host_us: of a call from Python. roofline_us: the least time that the device's calibrated limits
    allow.
    """

    bucket: Bucket
    us: Mapping[str, float]
    source: str
    host_us: Mapping[str, float] = field(default_factory=dict)
    roofline_us: float | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a backend took on calls like this one. sol: share of the roofline, at most 1."""

    time_us: float
    source: str
    sol: float | None = None
    host_us: float | None = None


def bucket_of(call: Call) -> Bucket:
    """The bucket that a call falls into."""
    metas = [m for m in vars(call.tensors).values() if m is not None]
    first = metas[0]
    flags = sorted(name for name, value in vars(call.params).items() if value is True)
    strided = [] if all(m.is_contiguous for m in metas) else ["strided"]
    dims = [size for m in metas if m is first or m.ndim > 1 for size in m.shape]
    cost = call.spec.cost(call)
    return Bucket(
        call.spec.name,
        " ".join([dtype_name(first.dtype), f"{first.ndim}d", *flags, *strided]),
        (*dims, cost.flops, cost.bytes_written),
    )


def parse(document: Mapping[str, Any], where: str) -> list[Entry]:
    """The entries of a table. ValueError, one line, where it cannot be read."""
    if document.get("schema") != SCHEMA:
        raise ValueError(f"{where} has schema {document.get('schema')}, this opkiln reads {SCHEMA}")
    try:
        return [
            Entry(
                Bucket(row["op"], row["kind"], tuple(row["sizes"])),
                dict(row["us"]),
                f"{document['gpu']}, {row['date'][:10]}, commit {row['commit'][:12]}, "
                f"run {row['run']}",
                dict(row.get("host_us", {})),
                row.get("roofline_us"),
            )
            for row in document["times"]
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{where} cannot be read: {type(error).__name__}: {error}") from error


Table = dict[tuple[str, str], list[Entry]]
Source = tuple[str, Callable[[], list[Entry]]]


@cache
def tables(arch: str) -> Table:
    """(op, kind) -> entries for this architecture, the user's own before the shipped; read once."""
    return joined([("your own table", partial(read_own, arch)), *shipped_files(arch)])


def shipped(arch: str) -> Table:
    """The same of the installed plugins' files alone."""
    return joined(shipped_files(arch))


def shipped_files(arch: str) -> list[Source]:
    packages = [
        point.module.partition(".")[0]
        for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda p: (p.value, p.name))
        if point.dist is not None and REGISTRY.allows(point.dist.name)
    ]
    return [(package, partial(read, package, arch)) for package in packages]


def joined(sources: Sequence[Source]) -> Table:
    """A file that cannot be read is told and passed over: priority decides without it."""
    found: Table = {}
    for what, entries in sources:
        try:
            taken = entries()
        except Exception as error:  # a faulty file must not hide the backends that work
            warnings.warn(f"opkiln: measured times of {what}: {error}", stacklevel=3)
            continue
        for entry in taken:
            found.setdefault((entry.bucket.op, entry.bucket.kind), []).append(entry)
    return found


def read(package: str, arch: str) -> list[Entry]:
    """The entries of a package's file for an architecture; none where it has no file."""
    path = files(package) / FOLDER / f"{arch}.json"
    if not path.is_file():
        return []
    document = json.loads(path.read_text(encoding="utf-8"))
    return parse(document, f"{package}/{FOLDER}/{arch}.json")


def read_own(arch: str) -> list[Entry]:
    """The entries of the user's table that serves this process; none where there is none."""
    document = own_table.document(arch)
    found = parse(document, "your table") if document else []
    return [replace(entry, source=f"your table, {entry.source}") for entry in found]


@cache
def arch_of(device: torch.device) -> str | None:
    """`sm90` for a GPU of compute capability 9.0; None for a CPU, or a GPU that is not here."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


def nearest(entries: Sequence[Entry], bucket: Bucket) -> Entry | None:
    """The entry whose bucket is nearest, within reach; the first of several as near."""
    if not entries:
        return None
    best = min(entries, key=lambda e: e.bucket.distance(bucket))
    return best if best.bucket.distance(bucket) <= REACH else None


def entry_of(call: Call) -> Entry | None:
    """What was measured nearest to a call on its device's architecture."""
    arch = arch_of(call.device)
    if arch is None:
        return None
    bucket = bucket_of(call)
    return nearest(tables(arch).get((bucket.op, bucket.kind), ()), bucket)


def predict(call: Call, backend: str) -> Prediction | None:
    """The measured figures of `backend` on calls like this one; None: not measured."""
    entry = entry_of(call)
    if entry is None or backend not in entry.us:
        return None
    us = entry.us[backend]
    sol = None if entry.roofline_us is None else entry.roofline_us / us
    return Prediction(us, entry.source, sol, entry.host_us.get(backend))


def choose(candidates: Sequence[Implementation], call: Call) -> list[tuple[Implementation, str]]:
    """The candidates, best first, each with why it stands there: `by_time`.

    candidates: those that take the call, by priority. Under `batch_invariant` priority alone
    decides, since the fastest changes with the number of rows.
    """
    invariant = len(candidates) < 2 or call.policy.batch_invariant
    return by_time(candidates, None if invariant else entry_of(call))


def by_time(
    candidates: Sequence[Implementation], entry: Entry | None
) -> list[tuple[Implementation, str]]:
    """The candidates, best first, each with why it stands there.

    The fastest measured one goes first if the one with the largest priority was measured too and is
    slower by more than noise: nothing is known of a candidate without a time.
    """
    ordered = [(impl, f"priority {impl.priority}") for impl in candidates]
    if len(ordered) < 2:
        return ordered
    first = ordered[0][0]
    if entry is None or first.backend not in entry.us:
        return ordered
    timed = [impl for impl in candidates if impl.backend in entry.us]
    if len(timed) < 2:
        return ordered
    best = min(timed, key=lambda impl: entry.us[impl.backend])
    if entry.us[best.backend] >= entry.us[first.backend] * (1 - NOISE):
        best = first
    times = ", ".join(f"{impl.backend} {entry.us[impl.backend]:g} us" for impl in timed)
    why = f"measured on calls like this one: {times} ({entry.source})"
    rest = [(impl, reason) for impl, reason in ordered if impl is not best]
    return [(best, why), *rest]
