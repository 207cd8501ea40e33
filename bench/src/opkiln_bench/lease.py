"""One GPU, one run: a GPU is leased by a lock on a file, so that timings never share it.

The lock belongs to an open file: it ends with the block, and with the process however that dies.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from opkiln_bench.catalogue import CatalogueError

RETRY_S = 1.0


def lock_path(uuid: str) -> Path:
    return Path(tempfile.gettempdir()) / f"opkiln-gpu-{uuid}.lock"


def gpu_uuids() -> list[str]:
    """The GPUs that torch sees, by index; CUDA_VISIBLE_DEVICES gives them other indices."""
    count = torch.cuda.device_count()
    return [str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]


def try_lock(path: Path) -> int | None:
    """A descriptor that holds the lock; None where another holds it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except PermissionError:  # another user's file: their run
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


@contextmanager
def leased_gpu(
    uuids: Sequence[str], index: int | None, say: Callable[[str], None]
) -> Iterator[int]:
    """The index of a GPU that is ours in the block: `index`, or the first that is free. Waits.

    CatalogueError where there is no such GPU: none of these would ever become free.
    """
    if not uuids:
        raise CatalogueError("torch sees no GPU here")
    if index is not None and not 0 <= index < len(uuids):
        raise CatalogueError(f"device.index must be 0 to {len(uuids) - 1}, got {index}")
    wanted = range(len(uuids)) if index is None else [index]
    waiting = False
    while True:
        for candidate in wanted:
            descriptor = try_lock(lock_path(uuids[candidate]))
            if descriptor is not None:
                try:
                    yield candidate
                finally:
                    os.close(descriptor)
                return
        if not waiting:
            say("every GPU is leased to another run: waiting for one")
            waiting = True
        time.sleep(RETRY_S)
