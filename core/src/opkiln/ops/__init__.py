"""The catalogue: every op by its python name. A new op is one file and one line here."""

from __future__ import annotations

from opkiln.ops.conv import conv
from opkiln.ops.misc import fft, mhc, topk
from opkiln.ops.norm import (
    ada_layer_norm,
    batch_norm,
    fused_add,
    group_norm,
    instance_norm,
    layer_norm,
    rms_norm,
)
from opkiln.ops.pool import (
    adaptive_avg_pool,
    adaptive_max_pool,
    avg_pool,
    max_pool,
    mean_pooling,
)
from opkiln.ops.rope import position_ids, rotation
from opkiln.spec import OpSpec

MODULES = (
    rms_norm,
    layer_norm,
    fused_add,
    ada_layer_norm,
    batch_norm,
    group_norm,
    instance_norm,
    conv,
    max_pool,
    mean_pooling,
    avg_pool,
    adaptive_avg_pool,
    adaptive_max_pool,
    rotation,
    position_ids,
    fft,
    mhc,
    topk,
)
CATALOGUE: dict[str, OpSpec] = {spec.name: spec for module in MODULES for spec in module.SPECS}
