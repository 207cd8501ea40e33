"""The user's own tables: what was measured and tuned on this machine, with this software.

`opkiln/measured/<arch>-<key>.json` in the configuration folder: a file for each GPU, driver and set
of versions, so that machines which share a home do not share figures. It holds times, as the tables
that the families ship, and launch parameters (opkiln.tilings), and states what it was made with.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

SCHEMA = 1
FAMILIES = ("opkiln-norm", "opkiln-conv", "opkiln-pool", "opkiln-rope", "opkiln-misc")
DISTRIBUTIONS = ("opkiln", *FAMILIES, "triton")
NVML_TEXT_BYTES = 96

Identity = dict[str, str]


def identity(
    gpu: str, driver: str | None, torch_version: str, versions: Mapping[str, str]
) -> Identity:
    """What figures depend on. versions: of distributions; those that matter are taken."""
    own = {name: versions[name] for name in DISTRIBUTIONS if name in versions}
    return {"gpu": gpu, "driver": driver or "unknown", "torch": str(torch_version), **own}


@cache
def here() -> Identity | None:
    """The identity of this process; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    found = {name: v for name in DISTRIBUTIONS if (v := installed(name)) is not None}
    return identity(torch.cuda.get_device_name(), driver_version(), torch.__version__, found)


def installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def driver_version() -> str | None:
    """Of the NVIDIA driver, from NVML; None where it cannot be asked."""
    text = ctypes.create_string_buffer(NVML_TEXT_BYTES)
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(text, NVML_TEXT_BYTES):
            return None
    except (OSError, AttributeError):
        return None
    return text.value.decode()


def folder() -> Path:
    """Where the user's tables lie."""
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "opkiln" / "measured"


def path_of(arch: str, made_with: Identity) -> Path:
    """The user's table for an architecture and an identity."""
    text = json.dumps(made_with, sort_keys=True)
    return folder() / f"{arch}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"


def document(arch: str) -> Mapping[str, Any]:
    """The table that serves this process, as it was at the first call; empty where there is none.

    One that is corrupt, or of another GPU, driver or version, is named in one warning and not used.
    """
    return _document(arch, folder())


@cache
def _document(arch: str, where: Path) -> Mapping[str, Any]:
    made_with = here()
    if made_with is None:
        return {}
    path = path_of(arch, made_with)
    others = sorted(where.glob(f"{arch}-*.json"))
    if path not in others:
        if not others:
            return {}
        path = others[-1]  # of another machine, or from before an update
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        check(found, made_with)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        warnings.warn(f"opkiln: your table {path} {error}; not used", stacklevel=4)
        return {}
    return dict(found)


def check(found: Any, made_with: Identity) -> None:
    """ValueError, one line, for a table that does not serve here."""
    if not isinstance(found, dict) or not isinstance(found.get("made_with"), dict):
        raise ValueError("does not say what it was made with")
    if found.get("schema") != SCHEMA:
        raise ValueError(f"has schema {found.get('schema')}, this opkiln reads {SCHEMA}")
    theirs = found["made_with"]
    for name in dict.fromkeys([*made_with, *theirs]):
        if theirs.get(name) != made_with.get(name):
            a, b = theirs.get(name, "none"), made_with.get(name, "none")
            raise ValueError(f"is of {name} {a}, here is {b}")
