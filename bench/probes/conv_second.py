"""What the second run of conv.py tries: patches (csrc/patch.cu), and few tilings in Triton."""

import pathlib
import sys

import common

sys.path[:0] = [str(common.ROOT / "core/src"), str(common.ROOT / "packages/conv/src")]

from opkiln_conv.patch import PatchTiling  # noqa: E402
from opkiln_conv.tilings import Tiling  # noqa: E402

PATCHES = pathlib.Path(__file__).with_name("conv_patches.txt")  # fields of PatchTiling, in order
# 392 tiles: three to each SM at once, by 168 registers and 64 KB of shared memory.
HIGHRES = [
    Tiling("packed", 128, 128, 32, stages=4, static=True),
    Tiling("packed", 128, 128, 32, stages=3, static=True),
    Tiling("packed", 128, 128, 32, stages=5, static=True),
]
TRITON = {
    "bottleneck-reduce-1x1": [
        Tiling("pointwise", 64, 32, 64, stages=8, static=True),
        Tiling("pointwise", 64, 32, 128, stages=4, static=True),
        Tiling("pointwise", 64, 64, 128, stages=4, static=True),
        Tiling("pointwise", 32, 64, 128, stages=4, static=True),
        Tiling("pointwise", 64, 32, 64, stages=6, static=True),
    ],
    "late-stage-1x1": [Tiling("pointwise", 64, 32, 64, stages=5, static=True)],
    "stem-3x3-s2": [Tiling("gather", 32, 128, 32, stages=2, static=True)],
    # Tilings that ptxas miscompiled before their product numbers were hidden from it.
    "resnext-grouped-3x3": [
        Tiling("gather", 16, 64, 64, num_warps=4, stages=2, static=True),
        Tiling("gather", 16, 32, 64, num_warps=2, stages=2, static=True),
    ],
    "wav2vec2-layer1": [
        Tiling("gather", 64, 64, 16, stages=2, static=True),
        Tiling("gather", 64, 128, 16, stages=2, static=True),
        Tiling("gather", 128, 64, 16, num_warps=8, stages=2, static=True),
        Tiling("gather", 32, 64, 16, stages=2, static=True),
        Tiling("gather", 32, 128, 16, stages=2, static=True),
    ],
    "deeplabv3-aspp-3x3-rate12": [
        *(Tiling("packed", 64, 64, 64, stages=4, split=s, static=True) for s in (2, 4, 8)),
        *(Tiling("packed", 128, 128, 64, w, s, 8, static=True) for w in (4, 8) for s in (3, 4)),
        Tiling("packed", 64, 128, 64, 4, 4, 4, static=True),
        Tiling("packed", 64, 128, 64, 4, 3, 8, static=True),
        Tiling("packed", 128, 64, 64, 4, 4, 4, static=True),
        Tiling("packed", 128, 64, 64, 4, 4, 8, static=True),
        Tiling("packed", 64, 128, 128, 4, 3, 4, static=True),
        Tiling("packed", 128, 128, 128, 8, 3, 8, static=True),
    ],
    "highres-3x3-s1": HIGHRES,
    "highres-3x3-s1-bias": HIGHRES,
}


def second(label: str) -> list[Tiling | PatchTiling]:
    found: list[Tiling | PatchTiling] = list(TRITON.get(label, []))
    for line in PATCHES.read_text("utf-8").splitlines():
        name, *fields = line.replace("|", "").split()
        if name == label:
            numbers = list(map(int, fields))
            found += [PatchTiling(*numbers[i : i + 9]) for i in range(0, len(numbers), 9)]
    return found
