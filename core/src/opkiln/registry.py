"""Who implements what: implementations, the plugins they come from, and what went wrong.

Plugins are entry points of the group `opkiln.backends`. Each is loaded all or nothing: one that
raises, names an unknown hook, or claims what another plugin already provides is rolled back,
remembered, and named in `opkiln doctor` and in later errors.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pluggy

from opkiln import hookspecs
from opkiln.errors import PluginError
from opkiln.ops import CATALOGUE
from opkiln.spec import Call

ENTRY_POINT_GROUP = "opkiln.backends"

Launch = Callable[..., Any]
Prepare = Callable[[Call], Launch]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an implementation does not take a call, in one line."""

    reason: str


@dataclass(frozen=True, slots=True)
class Implementation:
    """One backend's way of computing one op.

    op: python name of the op ("rms_norm"). spec_version: the OpSpec.version it was written for.
    supports(call): None, or a Refusal; sees metadata only.
    loader(): imports what is needed and returns prepare; prepare(call) plans and returns launch;
    launch(*tensors): tensors in the spec's order, absent ones None; returns the call's outputs,
        allocated inside with exactly their shape, dtype and strides: one tensor, or a tuple.
    priority: the largest that supports a call is chosen where nothing was measured.
    auto: False: reachable by name only. traits: "deterministic", "batch_invariant".
    tilings(call): launch parameters to try, the present ones first, then some that differ from them
        in little (opkiln.tilings); JSON. None: nothing can be tuned.
    """

    op: str
    backend: str
    version: str
    spec_version: int
    supports: Callable[[Call], Refusal | None]
    loader: Callable[[], Prepare]
    priority: int = 0
    auto: bool = True
    traits: frozenset[str] = frozenset()
    tilings: Callable[[Call], Sequence[Mapping[str, Any]]] | None = None


def accepts_everything(call: Call) -> Refusal | None:
    return None


def simple(fn: Callable[..., Any]) -> Callable[[], Prepare]:
    """The loader of a plain function `fn(*tensors, **params)` that returns the outputs.

    Saved tensors: a function that returns only the caller's outputs serves calls without
    gradients; pair it with `supports=opkiln.inference_only`.
    """

    def prepare(call: Call) -> Launch:
        params = vars(call.params)
        return lambda *tensors: fn(*tensors, **params)

    return lambda: prepare


def inference_only(call: Call) -> Refusal | None:
    """`supports` of an implementation that cannot write the tensors saved for the backward."""
    if call.needs_grad and any(o.saved for o in call.spec.outputs):
        return Refusal("does not write the tensors that the backward needs")
    return None


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """A plugin that was loaded, or one that was not and why."""

    name: str
    version: str
    backends: tuple[str, ...] = ()
    ops: int = 0
    error: str = ""
    trace: str = field(default="", repr=False)

    @property
    def ok(self) -> bool:
        return not self.error


class Registry:
    """All implementations, by op and backend. `generation` changes whenever they do."""

    def __init__(self) -> None:
        self.generation = 0
        self.plugins: list[PluginInfo] = []
        self._by_op: dict[str, dict[str, Implementation]] = {name: {} for name in CATALOGUE}
        self._owner: dict[tuple[str, str], str] = {}
        self._loaded = False
        self._lock = threading.RLock()
        self._manager = pluggy.PluginManager("opkiln")
        self._manager.add_hookspecs(hookspecs)

    def of(self, op: str) -> dict[str, Implementation]:
        """Implementations of `op` by backend name."""
        self.load()
        return self._by_op[op]

    def backends(self) -> tuple[str, ...]:
        """Every backend name that some implementation carries."""
        self.load()
        return tuple(sorted({b for impls in self._by_op.values() for b in impls}))

    def owner(self, op: str, backend: str) -> str | None:
        """The plugin that provides an implementation, "dist:name"; None: nobody does."""
        self.load()
        return self._owner.get((op, backend))

    def failures(self) -> list[PluginInfo]:
        self.load()
        return [p for p in self.plugins if not p.ok]

    def load(self) -> None:
        """Load core's own backends and every installed plugin, once."""
        if self._loaded:
            return
        with self._lock:
            if self._loaded:
                return
            from opkiln import torch_backend

            self.register(torch_backend, "opkiln:torch", importlib.metadata.version("opkiln"))
            points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
            for point in sorted(points, key=lambda p: (p.dist.name if p.dist else "", p.name)):
                dist = point.dist.name if point.dist else "unknown"
                if self.allows(dist):
                    self._load_entry_point(point, dist)
            self._loaded = True

    def allows(self, dist: str) -> bool:
        """Whether OPKILN_PLUGINS, the allow list, is absent or lists the distribution."""
        allowed = os.environ.get("OPKILN_PLUGINS")
        return allowed is None or dist in allowed.replace(",", " ").split()

    def _load_entry_point(self, point: importlib.metadata.EntryPoint, dist: str) -> None:
        name = f"{dist}:{point.name}"
        version = point.dist.version if point.dist else "0"
        try:
            self.register(point.load(), name, version)
        except Exception as error:  # a plugin may fail in any way; it is kept and reported
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            trace = traceback.format_exc()
            self.plugins.append(PluginInfo(name, version, error=text, trace=trace))

    def register(self, plugin: Any, name: str, version: str = "0") -> PluginInfo:
        """Add a plugin's implementations, all or none.

        Raises PluginError for another API level, an unknown op or spec version, or an (op, backend)
        that another plugin provides; pluggy's error for an unknown hook.
        """
        with self._lock:
            level = getattr(plugin, "OPKILN_API", None)
            if level != hookspecs.API:
                raise PluginError(
                    f"{name} was written for opkiln API level {level}, this opkiln has level "
                    f"{hookspecs.API}: install a matching version"
                )
            self._manager.register(plugin, name)
            try:
                found = self._collect(plugin, name)
            except BaseException:
                self._manager.unregister(name=name)
                raise
            for impl in found:
                self._by_op[impl.op][impl.backend] = impl
                self._owner[impl.op, impl.backend] = name
            backends = tuple(sorted({i.backend for i in found}))
            info = PluginInfo(name, version, backends, len(found))
            self.plugins.append(info)
            self.generation += 1
            return info

    def _collect(self, plugin: Any, name: str) -> list[Implementation]:
        self._manager.check_pending()
        others = [p for p in self._manager.get_plugins() if p is not plugin]
        hook = self._manager.subset_hook_caller("opkiln_implementations", others)
        found = [impl for group in hook() for impl in group]
        seen: set[tuple[str, str]] = set()
        for impl in found:
            key = (impl.op, impl.backend)
            if impl.op not in CATALOGUE:
                raise PluginError(f"{name} implements {impl.op!r}, which is no op of this opkiln")
            if impl.spec_version != CATALOGUE[impl.op].version:
                raise PluginError(
                    f"{name} implements version {impl.spec_version} of {impl.op}, this opkiln has "
                    f"version {CATALOGUE[impl.op].version}: install a matching version"
                )
            owner = name if key in seen else self._owner.get(key)
            if owner is not None:
                raise PluginError(
                    f"both {owner} and {name} provide backend {impl.backend!r} of {impl.op}: "
                    f"uninstall one, or list the wanted one in OPKILN_PLUGINS"
                )
            seen.add(key)
        return found

    def unregister(self, name: str) -> None:
        """Remove a plugin and its implementations."""
        with self._lock:
            self._manager.unregister(name=name)
            for key in [k for k, owner in self._owner.items() if owner == name]:
                del self._owner[key]
                del self._by_op[key[0]][key[1]]
            self.plugins = [p for p in self.plugins if p.name != name]
            self.generation += 1

    @contextlib.contextmanager
    def temporarily(self, plugin: Any, name: str) -> Iterator[PluginInfo]:
        """Have a plugin inside the block only."""
        self.load()
        info = self.register(plugin, name)
        try:
            yield info
        finally:
            self.unregister(name)


REGISTRY = Registry()
