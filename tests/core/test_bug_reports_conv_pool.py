"""Convolutions and pools that other libraries got wrong, as their users reported it.

Threads about precision, empty inputs and bad arguments are named at the tests of
test_conv_semantics.py and test_pool_semantics.py that hold them.
"""

from itertools import pairwise

import opkiln.functional as F
import pytest
import torch
from reports import BACKENDS, Report, check, check_refused
from samples import rand

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
INF, NAN = float("inf"), float("nan")
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")

CONVOLUTIONS = {
    "'same' padding of an uneven dilated kernel": Report(
        "tinygrad/tinygrad#17805",
        lambda: (rand(F32, 1, 2, 15, 11), rand(F32, 3, 2, 5, 3)),
        lambda N, x, w: N.conv2d(x, w, None, 1, "same", (3, 2)),
    ),
    "grouped weights with the channels of all groups": Report(
        "tile-ai/TileOPs#1521 tile-ai/TileOPs#1515",
        lambda: (rand(F32, 1, 8, 6, 5), rand(F32, 12, 2, 3, 3), rand(F32, 12)),
        lambda N, x, w, b: N.conv2d(x, w, b, 1, 1, 1, 4),
    ),
    "a channels_last input with a contiguous weight": Report(
        "pytorch/pytorch#77299",
        lambda: (
            rand(F32, 2, 4, 6, 5).contiguous(memory_format=torch.channels_last),
            rand(F32, 3, 4, 3, 2),
        ),
        lambda N, x, w: N.conv2d(x, w),
    ),
}

AVERAGES = {
    "a ceil window that would start in the right padding": Report(
        "pytorch/pytorch#36977 pytorch/pytorch#120335",
        lambda: (rand(F32, 2, 1, 6, 5),),
        lambda N, x: N.avg_pool2d(x, (1, 3), (3, 2), (0, 1), True),
    ),
    "divisor_override loses to count_include_pad=False": Report(
        "pytorch/executorch#18616",
        lambda: (rand(F32, 2, 1, 6, 7),),
        lambda N, x: N.avg_pool2d(x, 2, 1, 1, False, False, 3),
    ),
    "divisor_override is ignored in 3-D with ceil_mode": Report(
        "apple/coremltools#2748",
        lambda: (rand(F32, 1, 2, 4, 6, 5),),
        lambda N, x: N.avg_pool3d(x, (3, 2, 2), (2, 3, 2), (1, 1, 0), True, True, 11),
    ),
    "a stride larger than the window with ceil_mode": Report(
        "apple/coremltools#2844",
        lambda: (torch.arange(10.0).square().view(1, 1, 10),),
        lambda N, x: N.avg_pool1d(x, 3, 4, 0, True),
    ),
    "windows of an adaptive pool end too early": Report(
        "flagos-ai/FlagGems#4924",
        lambda: (rand(F32, 2, 1, 11, 14),),
        lambda N, x: N.adaptive_avg_pool2d(x, (4, 6)),
    ),
    "None in output_size": Report(
        "Lyken17/pytorch-OpCounter#91 tile-ai/TileOPs#1799",
        lambda: (rand(F32, 1, 3, 5, 7),),
        lambda N, x: N.adaptive_avg_pool2d(x, (None, 3)),
    ),
}


def special_planes():
    """All NaN, all -inf, and both among finite values."""
    mixed = rand(F32, 6, 6)
    mixed[1, 1], mixed[4, 0], mixed[4, 1] = NAN, -INF, NAN
    planes = [torch.full((6, 6), NAN), torch.full((6, 6), -INF), mixed]
    return (torch.stack(planes)[None],)


def spotted():
    x = rand(F32, 2, 3, 5, 4)
    x.view(-1)[::11] = NAN
    return (x,)


MAXIMA = {
    "NaN is skipped or becomes the lowest number": Report(
        "pytorch/pytorch#39846 pytorch/pytorch#7645",
        spotted,
        lambda N, x: N.max_pool3d(x, 2, 1),
    ),
    "the index of a window of -inf": Report(
        "pytorch/pytorch#1465",
        lambda: (torch.full((2, 1, 8), -INF),),
        lambda N, x: N.max_pool1d(x, 4, 4, return_indices=True),
    ),
    "the last of several equal elements is named": Report(
        "tile-ai/TileOPs#1809 tile-ai/TileOPs#832",
        lambda: (torch.full((1, 2, 7, 4), -2.5),),
        lambda N, x: N.max_pool2d(x, (2, 3), 1, 1, return_indices=True),
    ),
    "padding wins over negative elements": Report(
        "pytorch/pytorch#33382",
        lambda: (-rand(F32, 2, 1, 5, 7).abs() - 3,),
        lambda N, x: N.max_pool2d(x, 2, 2, 1),
    ),
    "dilation is left out of the indices": Report(
        "pytorch/pytorch#100531 pytorch/pytorch#176888",
        lambda: (rand(F32, 1, 3, 11, 10),),
        lambda N, x: N.max_pool2d(x, (2, 3), (1, 2), 1, (3, 2), return_indices=True),
    ),
    "indices of an unbatched input have a batch": Report(
        "pytorch/pytorch#38986 pytorch/pytorch#39326",
        lambda: (rand(F32, 2, 9, 7),),
        lambda N, x: N.max_pool2d(x, 3, 2, 1, return_indices=True),
    ),
    "indices of an empty batch are not int64": Report(
        "",
        lambda: (rand(F32, 0, 2, 6, 6),),
        lambda N, x: N.max_pool2d(x, 3, return_indices=True),
    ),
    "indices are flat over a plane, not the volume": Report(
        "pytorch/pytorch#52822",
        lambda: (rand(F32, 2, 1, 3, 7, 4),),
        lambda N, x: N.max_pool3d(x, (1, 3, 2), return_indices=True),
    ),
    "overlapping adaptive windows": Report(
        "pytorch/pytorch#190064 pytorch/pytorch#2722",
        lambda: (torch.arange(56.0).view(1, 1, 7, 8),),
        lambda N, x: N.adaptive_max_pool2d(x, (3, 5), return_indices=True),
    ),
    "adaptive windows of NaN and of -inf": Report(
        "pytorch/pytorch#40131",
        special_planes,
        lambda N, x: N.adaptive_max_pool2d(x, 3, return_indices=True),
    ),
    "an unbatched input and one output size": Report(
        "tile-ai/TileOPs#1799",
        lambda: (rand(F32, 2, 9, 8),),
        lambda N, x: N.adaptive_max_pool2d(x, 4),
    ),
}


def means(chunk, x, offsets=None):
    """Of the runs of `chunk` tokens of every sequence."""
    ends = [0, x.shape[1]] if offsets is None else offsets.tolist()
    runs = [(i, min(i + chunk, b)) for a, b in pairwise(ends) for i in range(a, b, chunk)]
    return torch.stack([x[:, a:b].mean(1) for a, b in runs], 1)


CHUNKS = {
    "chunks run from one sequence into the next": Report(
        "fla-org/native-sparse-attention#23",
        lambda: (rand(F32, 1, 1200, 1, 3), torch.tensor([0, 517, 1200], dtype=torch.int32)),
        lambda F, x, offsets: F.mean_pooling(x, 48, offsets),
        lambda x, offsets: means(48, x, offsets),
    ),
    "a short last chunk is divided by the full length": Report(
        "fla-org/flash-linear-attention#1142",
        lambda: (rand(BF16, 2, 53, 1, 6) + 3,),
        lambda F, x: F.mean_pooling(x, 16),
        lambda x: means(16, x),
    ),
    "the sum of a chunk overflows float16": Report(
        "pytorch/pytorch#52719",
        lambda: (rand(F16, 1, 192, 1, 3) * 4 + 900,),
        lambda F, x: F.mean_pooling(x, 96),
        lambda x: means(96, x),
    ),
}
REPORTS = CONVOLUTIONS | AVERAGES | MAXIMA | CHUNKS


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("what", REPORTS)
def test_reported(what, backend):
    check(REPORTS[what], backend)


def test_a_kernel_larger_than_the_input_is_refused():
    """pytorch/pytorch#95451"""
    check_refused(lambda: F.max_pool2d(rand(F32, 1, 1, 3, 2), 4), "no window of kernel_size")
