"""opkiln.nn: torch.nn's modules, computed by opkiln.functional.

Each is a subclass of torch.nn's class of that name: constructor, parameters, buffers, state_dict
and repr are torch's, and code that asks `isinstance(m, torch.nn.Conv2d)` keeps working.
Keyword-only `backend=None` as in opkiln.functional. FusedAddLayerNorm and FusedAddRMSNorm, which
torch.nn lacks, have the constructors and state_dicts of LayerNorm and RMSNorm.
"""

from opkiln.nn.conv import Conv1d, Conv2d, Conv3d
from opkiln.nn.norm import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    FusedAddLayerNorm,
    FusedAddRMSNorm,
    GroupNorm,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    LayerNorm,
    RMSNorm,
)
from opkiln.nn.pool import (
    AdaptiveAvgPool2d,
    AdaptiveMaxPool2d,
    AvgPool1d,
    AvgPool2d,
    AvgPool3d,
    MaxPool1d,
    MaxPool2d,
    MaxPool3d,
)

__all__ = [
    "AdaptiveAvgPool2d",
    "AdaptiveMaxPool2d",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "FusedAddLayerNorm",
    "FusedAddRMSNorm",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "RMSNorm",
]
