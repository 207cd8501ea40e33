"""A call of rms_norm as its metadata would be on an H200, for tests of measured tables."""

from __future__ import annotations

from typing import Any

import torch
from opkiln.policy import Policy
from opkiln.spec import Call
from opkiln_bench.contestants import canonical

H200 = torch.device("cuda", 0)


def call_of(rows: int = 2048, n: int = 4096, policy: Policy | None = None, **more: Any) -> Call:
    """A call of rms_norm, as its metadata would be on a GPU."""
    x = torch.empty(rows, n, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(n, dtype=torch.bfloat16, device="meta")
    arguments = {"input": x, "weight": weight, "normalized_shape": [n], **more}
    bound = canonical("rms_norm", arguments)
    call = Call.of(*bound, real=False, **({"policy": policy} if policy else {}))
    call.device = H200
    return call
