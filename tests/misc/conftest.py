"""Lets the CUDA kernels of this family run on the CPU."""

import pytest
from misc.on_cpu import Kernel
from opkiln.device import cuda
from opkiln_misc import mhc_pre


@pytest.fixture
def emulated(monkeypatch):
    """opkiln.device.cuda without a GPU."""
    monkeypatch.setattr(cuda, "load", Kernel)
    monkeypatch.setattr(mhc_pre, "configure_overlapping", Kernel.configure)
    monkeypatch.setattr(cuda, "multiprocessors", lambda device: 2)
