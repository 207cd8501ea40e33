"""What the rule was measured to lose is refused; what the table names, or was not, is served."""

import pytest
import torch
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_conv.plugin import supports

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

SLOW = {  # id: (input, weight, window, words of the refusal; "": served)
    "odd-planes": ((1, 512, 9, 9), (2048, 512, 1, 1), dict(), "1x1 windows"),
    "odd-but-small": ((1, 64, 9, 9), (64, 64, 1, 1), dict(), ""),
    "even-planes": ((1, 512, 10, 10), (2048, 512, 1, 1), dict(), ""),
    "3d-few-channels": ((1, 3, 16, 96, 96), (64, 3, 3, 3, 3), dict(p=1), "3-D windows"),
    "3d-groups": ((1, 64, 8, 32, 32), (128, 2, 3, 3, 3), dict(p=1, g=32), "3-D windows"),
    "3d-packed": ((1, 32, 16, 64, 64), (64, 32, 3, 3, 3), dict(p=1), ""),
    "strided": ((1, 128, 64, 64), (256, 128, 5, 5), dict(s=2, p=2), "2-D windows"),
    "same-unstrided": ((1, 128, 32, 32), (256, 128, 5, 5), dict(p=2), ""),
    "many-products": ((1, 256, 96, 96), (512, 256, 3, 3), dict(p=1), "2-D windows"),
    "many-dilated": ((1, 256, 96, 96), (512, 256, 3, 3), dict(p=2, d=2), ""),
    "of-the-table": ((4, 256, 112, 112), (512, 256, 3, 3), dict(p=1), ""),
    "1d": ((1, 128, 4000), (1280, 128, 3), dict(s=2), ""),
}  # fmt: skip


@pytest.mark.parametrize("case", SLOW.values(), ids=SLOW)
def test_what_the_rule_loses_is_left_to_cudnn(case):
    shape, weight, how, words = case
    n = len(shape) - 2
    tensors = [torch.empty(s, dtype=torch.bfloat16, device=DEVICE) for s in (shape, weight)]
    params = dict(stride=(how.get("s", 1),) * n, padding=(how.get("p", 0),) * (2 * n))
    params |= dict(dilation=(how.get("d", 1),) * n, groups=how.get("g", 1), allow_tf32=False)
    refusal = supports(Call.of(CATALOGUE[f"conv{n}d"], [*tensors, None], params))
    assert (refusal is None) == (words == "")
    assert refusal is None or words in refusal.reason
