"""The tables: op -> (public function, rows). One module per family; a new op adds rows there."""

from __future__ import annotations

from opkiln.conformance.cases import Row
from opkiln.conformance.rows import conv, misc, norm, pool, rope

TABLES: dict[str, tuple[str, tuple[Row, ...]]] = {
    **norm.TABLES,
    **conv.TABLES,
    **pool.TABLES,
    **rope.TABLES,
    **misc.TABLES,
}

# op -> its tensors whose first dim is the batch: rows of the result do not depend on each other.
BATCHED: dict[str, tuple[str, ...]] = {
    "rms_norm": ("input",),
    "layer_norm": ("input",),
    "fused_add_rms_norm": ("input", "residual"),
    "fused_add_layer_norm": ("input", "residual"),
    "ada_layer_norm": ("input", "scale", "shift"),
    "ada_layer_norm_zero": ("input", "scale", "shift", "gate"),
    "group_norm": ("input",),
    "instance_norm": ("input",),
    "rope_neox": ("x",),
    "rope_non_neox": ("x",),
    "rope_llama31": ("x",),
    "rope_yarn": ("x",),
    "rope_longrope": ("x",),
    "fft": ("input",),
    "mhc_pre": ("x",),
    "mhc_post": ("x_layer_out", "h_post", "x_res"),
    "mean_pooling": ("input",),
    "conv1d": ("input",),
    "conv2d": ("input",),
    "conv3d": ("input",),
    "adaptive_avg_pool2d": ("input",),
    "adaptive_max_pool2d": ("input",),
    "adaptive_max_pool2d_indices": ("input",),
    **{f"avg_pool{n}d": ("input",) for n in (1, 2, 3)},
    **{f"max_pool{n}d{kind}": ("input",) for n in (1, 2, 3) for kind in ("", "_indices")},
}
