"""Cosines and sines of a rotary embedding, for peers that take them as a tensor."""

from __future__ import annotations

import torch
from opkiln.ops import CATALOGUE
from opkiln.spec import Call

WITH_IDS = "rope_neox_position_ids"
INTERLEAVED = "rope_non_neox"
ROTATIONS = (INTERLEAVED, "rope_neox", "rope_llama31", "rope_yarn", "rope_longrope", WITH_IDS)


def cos_sin_table(call: Call, length: int) -> torch.Tensor:
    """[length, rotary_dim] in float32, cosines before sines: the op's own turn of (1, 0) pairs."""
    spec = CATALOGUE[call.spec.name.removesuffix("_backward")]
    params = {name: getattr(call.params, name) for name in spec.param_names}
    channels, device = call.params.rotary_dim, call.device
    pairs = torch.zeros(length, channels, dtype=torch.float64, device=device)
    interleaved = spec.name == INTERLEAVED
    (pairs[:, 0::2] if interleaved else pairs[:, : channels // 2]).fill_(1.0)
    if spec.name == WITH_IDS:
        positions = torch.arange(length, device=device)
        turned = spec.reference(pairs.unsqueeze(1), positions, **params).squeeze(1)
    else:
        turned = spec.reference(pairs, **{**params, "offset": 0})
    if interleaved:
        turned = torch.cat((turned[:, 0::2], turned[:, 1::2]), -1)
    return turned.float().contiguous()
