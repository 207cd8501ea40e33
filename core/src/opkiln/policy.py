"""Policy: which backends a call prefers and which properties its result must have.

One immutable value per thread. The forward pass hands its policy to its backward (CUDA backwards
run on another thread) and, as a string, to the compiled operator.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache

from opkiln.errors import nearest

ANY_OP = "*"


@dataclass(frozen=True, slots=True)
class Policy:
    """Preferences of a call.

    prefer: pairs (op name or "*", backend names in order of preference).
    strict: a preference that cannot be met raises instead of going on to the automatic choice.
    deterministic: two runs give the same bits, in the same order.
    batch_invariant: a row's bits do not depend on how many rows there are.
    allow_tf32: float32 convolutions may use TF32.
    checks: validate tensor values too (position ids in range); costs a device sync.
    """

    prefer: tuple[tuple[str, tuple[str, ...]], ...] = ()
    strict: bool = False
    deterministic: bool = False
    batch_invariant: bool = False
    allow_tf32: bool = False
    checks: bool = False

    def backends_for(self, op: str) -> tuple[str, ...]:
        """Backends preferred for `op`: those named for it first, then those named for every op."""
        own = [b for name, backends in self.prefer if name == op for b in backends]
        general = [b for name, backends in self.prefer if name == ANY_OP for b in backends]
        return tuple(dict.fromkeys(own + general))

    def only(self, backend: str) -> Policy:
        """This policy with one backend, strictly."""
        return replace(self, prefer=((ANY_OP, (backend,)),), strict=True)

    def encode(self) -> str:
        """A string that `decode` reads back; empty for the default policy."""
        return _encode(self)

    @staticmethod
    def decode(text: str) -> Policy:
        return _decode(text)


FLAGS = tuple(f.name for f in fields(Policy) if f.name != "prefer")
DEFAULT = Policy()


@lru_cache(maxsize=256)
def _encode(policy: Policy) -> str:
    if policy == DEFAULT:
        return ""
    default = asdict(DEFAULT)
    return json.dumps({k: v for k, v in asdict(policy).items() if v != default[k]}, sort_keys=True)


@lru_cache(maxsize=256)
def _decode(text: str) -> Policy:
    if not text:
        return DEFAULT
    values = json.loads(text)
    prefer = tuple((op, tuple(names)) for op, names in values.pop("prefer", ()))
    return Policy(prefer=prefer, **values)


Preference = tuple[str, tuple[str, ...]]


def parse_preference(text: str) -> Preference:
    """`name`, `name,name` or `op:name,name` -> (op or "*", names). ValueError on anything else."""
    if not isinstance(text, str):
        raise TypeError(f"opkiln: a backend preference must be a string, got {text!r}")
    op, sep, names = text.partition(":")
    if not sep:
        op, names = ANY_OP, text
    backends = tuple(n.strip() for n in names.split(",") if n.strip())
    if not backends or not op.strip():
        raise ValueError(
            f"opkiln: cannot read the backend preference {text!r}: "
            "expected 'backend', 'backend,backend' or 'op:backend,backend'"
        )
    return op.strip(), backends


def _from_environment() -> tuple[Policy, tuple[str, ...]]:
    """OPKILN_BACKEND (preferences, separated by spaces or ';') and OPKILN_CHECKS=1, read once.

    Also what could not be read: a warning, and a problem that `opkiln doctor` reports.
    """
    prefer, unreadable = [], []
    for part in os.environ.get("OPKILN_BACKEND", "").replace(";", " ").split():
        try:
            prefer.append(parse_preference(part))
        except ValueError as error:
            unreadable.append(str(error).removeprefix("opkiln: "))
            warnings.warn(f"opkiln: OPKILN_BACKEND is ignored in part: {error}", stacklevel=2)
    checks = os.environ.get("OPKILN_CHECKS", "0") == "1"
    return Policy(prefer=tuple(prefer), checks=checks), tuple(unreadable)


BASE, UNREADABLE = _from_environment()


_NUMBERS: dict[Policy, int] = {}
_NEXT = itertools.count()


def number_of(policy: Policy) -> int:
    """Equal policies have one number, others another: a key that costs nothing to hash."""
    return _NUMBERS.setdefault(policy, next(_NEXT))


class _State(threading.local):
    policy: Policy = BASE
    number: int = number_of(BASE)


STATE = _State()


def current() -> Policy:
    """The policy of this thread."""
    return STATE.policy


@contextlib.contextmanager
def active(policy: Policy) -> Iterator[Policy]:
    """Make `policy` this thread's policy inside the block."""
    previous = STATE.policy, STATE.number
    STATE.policy, STATE.number = policy, number_of(policy)
    try:
        yield policy
    finally:
        STATE.policy, STATE.number = previous


@contextlib.contextmanager
def use(*backends: str, **flags: bool) -> Iterator[Policy]:
    """Prefer backends and require properties inside the block.

    backends: `"name"` for every op, or `"op:name,name"` for one; the newest preference wins.
    flags: strict, deterministic, batch_invariant, allow_tf32, checks.
    Raises ValueError for an unreadable preference or an unknown op, TypeError for an unknown flag
    or one that is no bool.

        with opkiln.use("torch", deterministic=True):
            y = opkiln.functional.rms_norm(x, (4096,))
    """
    for name, value in flags.items():
        if name not in FLAGS:
            raise TypeError(f"opkiln.use: unknown flag {name!r}, allowed are {', '.join(FLAGS)}")
        if not isinstance(value, bool):
            raise TypeError(f"opkiln.use: {name} must be a bool, got {value!r}")
    wanted = tuple(known_op(parse_preference(text)) for text in backends)
    before = current()
    with active(replace(before, prefer=wanted + before.prefer, **flags)) as policy:
        yield policy


def known_op(preference: Preference) -> Preference:
    """The preference, if its op exists; ValueError with the nearest names if not."""
    from opkiln.ops import CATALOGUE  # ops need policies

    op = preference[0]
    if op != ANY_OP and op not in CATALOGUE:
        raise ValueError(f"opkiln.use: no op {op!r}{nearest(op, CATALOGUE)}")
    return preference
