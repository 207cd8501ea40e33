"""opkiln.functional: torch.nn.functional's names, argument order, defaults and error types.

Every function takes keyword-only `backend=None`: a backend's name, strictly (it serves the call, or
BackendError says why not). Outputs have the input's dtype unless said otherwise; inputs are never
written, but for running statistics and `inplace=True`.
"""

from opkiln.functional.channel_norm import (
    batch_norm,
    batch_norm_backward,
    group_norm,
    instance_norm,
)
from opkiln.functional.conv import conv1d, conv2d, conv3d
from opkiln.functional.misc import fft, mhc_post, mhc_pre, topk_selector
from opkiln.functional.pool import (
    adaptive_avg_pool2d,
    adaptive_max_pool2d,
    avg_pool1d,
    avg_pool2d,
    avg_pool3d,
    max_pool1d,
    max_pool2d,
    max_pool3d,
    mean_pooling,
)
from opkiln.functional.rope import (
    rope_llama31,
    rope_longrope,
    rope_neox,
    rope_neox_position_ids,
    rope_non_neox,
    rope_yarn,
)
from opkiln.functional.row_norm import (
    ada_layer_norm,
    ada_layer_norm_zero,
    fused_add_layer_norm,
    fused_add_rms_norm,
    layer_norm,
    rms_norm,
)

__all__ = [
    "ada_layer_norm",
    "ada_layer_norm_zero",
    "adaptive_avg_pool2d",
    "adaptive_max_pool2d",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "batch_norm",
    "batch_norm_backward",
    "conv1d",
    "conv2d",
    "conv3d",
    "fft",
    "fused_add_layer_norm",
    "fused_add_rms_norm",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "mean_pooling",
    "mhc_post",
    "mhc_pre",
    "rms_norm",
    "rope_llama31",
    "rope_longrope",
    "rope_neox",
    "rope_neox_position_ids",
    "rope_non_neox",
    "rope_yarn",
    "topk_selector",
]
