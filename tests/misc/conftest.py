"""Lets the CUDA kernels of this family run on the CPU."""

import pytest
from misc.on_cpu import Kernel
from opkiln.device import cuda


@pytest.fixture
def emulated(monkeypatch):
    """opkiln.device.cuda without a GPU."""
    monkeypatch.setattr(cuda, "load", Kernel)
    monkeypatch.setattr(cuda, "multiprocessors", lambda device: 2)
