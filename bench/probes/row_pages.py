"""The rows of the benchmark pages that are row norms, and what there is to beat."""

import dataclasses
import sys
from typing import Any

import common
import torch
from common import DTYPES

sys.path[:0] = [str(common.ROOT / "core/src")]

from opkiln.ops import CATALOGUE  # noqa: E402

BEHIND = (
    ("rms_norm", "quack-throughput-512"),
    ("rms_norm", "quack-throughput-8192"),
    ("rms_norm", "quack-throughput-32768"),
    ("rms_norm", "quack-throughput-65536"),
    ("rms_norm", "quack-throughput-131072"),
    ("rms_norm", "quack-throughput-262144"),
    ("layer_norm", "llama-405b-prefill"),
    ("fused_add_rms_norm", "llama-405b-decode"),
)
SECOND = (
    *(("rms_norm", f"quack-throughput-{n}") for n in (512, 8192, 32768, 65536, 131072, 262144)),
    *(
        (op, f"llama-{size}-decode")
        for op in ("rms_norm", "layer_norm", "fused_add_rms_norm", "fused_add_layer_norm")
        for size in ("8b", "70b", "405b")
    ),
    ("ada_layer_norm", "llama-8b-decode"),
    ("ada_layer_norm_zero", "llama-8b-decode"),
    ("rms_norm", "llama-70b-prefill"),
    ("fused_add_rms_norm", "llama-70b-prefill"),
    ("fused_add_rms_norm", "llama-405b-prefill"),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the pages. affine: 1 is a weight, 2 a bias too; bar, page: us to be beaten."""

    op: str
    label: str
    dtype: str
    rows: int
    n: int
    affine: int
    bar: float
    page: float

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def warp(self) -> int:
        """Columns that a warp loads at once."""
        return 512 // self.itemsize

    @property
    def adds(self) -> bool:
        return self.op.startswith("fused_add")

    @property
    def params(self) -> dict[str, Any]:
        if self.op.startswith("ada"):
            return {"eps": 1e-5, "scale_offset": 0.0}
        return {"normalized_shape": (self.n,), "eps": 1e-5 if "layer" in self.op else 1e-6}

    def tensors(self, device: str) -> list[Any]:
        make: dict[str, Any] = {"dtype": DTYPES[self.dtype], "device": device}
        whole = {"ada_layer_norm": 3, "ada_layer_norm_zero": 4}.get(self.op, 1 + self.adds)
        found: list[Any] = [torch.randn(self.rows, self.n, **make) for _ in range(whole)]
        found += [torch.randn(self.n, **make) for _ in range(self.affine)]
        return found + [None] * (len(CATALOGUE[self.op].tensors) - len(found))


# op, label, dtype, rows, N, affine tensors, fastest alternative here, best of the pages (us)
ROWS = """
layer_norm llama-405b-decode       bf16     1  16384 2    4.448    3.94
layer_norm llama-405b-prefill      bf16  2048  16384 2   42.528      46
layer_norm llama-405b-prefill      f16   2048  16384 2   40.912    45.2
layer_norm llama-70b-decode        bf16     1   8192 2    3.104    3.01
layer_norm llama-70b-prefill       bf16  2048   8192 2   23.487    25.1
layer_norm llama-70b-prefill       f16   2048   8192 2   22.688    23.5
layer_norm llama-8b-decode         bf16     1   4096 2    2.513    2.35
layer_norm llama-8b-prefill        bf16  2048   4096 2   13.056    12.6
layer_norm llama-8b-prefill        f16   2048   4096 2    12.32    12.5
layer_norm llama-13b-prefill       f32   2048   5120 1   25.375      24
layer_norm dit-xl-2                bf16  1024   1152 0    4.608     3.1
rms_norm   llama-405b-decode       bf16     1  16384 1    2.976    2.94
rms_norm   llama-405b-prefill      bf16  2048  16384 1   35.744    36.9
rms_norm   llama-405b-prefill      f16   2048  16384 1   35.184    36.5
rms_norm   llama-70b-decode        bf16     1   8192 1      2.4    2.21
rms_norm   llama-70b-prefill       bf16  2048   8192 1   18.176      19
rms_norm   llama-70b-prefill       f16   2048   8192 1   18.111      19
rms_norm   llama-8b-decode         bf16     1   4096 1    1.744    1.92
rms_norm   llama-8b-prefill        bf16  2048   4096 1    10.96    10.8
rms_norm   llama-8b-prefill        f16   2048   4096 1    10.96    10.8
rms_norm   llama-13b-prefill       bf16  2048   5120 1   13.408    13.2
rms_norm   quack-throughput-256    f16  32768    256 1      9.6    9.82
rms_norm   quack-throughput-256    bf16 32768    256 1      9.6    9.82
rms_norm   quack-throughput-512    f16  32768    512 1   17.664    17.8
rms_norm   quack-throughput-512    bf16 32768    512 1   17.664    17.8
rms_norm   quack-throughput-1024   f16  32768   1024 1   33.728    33.9
rms_norm   quack-throughput-1024   bf16 32768   1024 1   33.728      34
rms_norm   quack-throughput-2048   f16  32768   2048 1   67.008    65.5
rms_norm   quack-throughput-2048   bf16 32768   2048 1   67.008    65.2
rms_norm   quack-throughput-4096   f16  32768   4096 1  131.505     132
rms_norm   quack-throughput-4096   bf16 32768   4096 1  131.505   132.1
rms_norm   quack-throughput-8192   f16  32768   8192 1  249.392   250.4
rms_norm   quack-throughput-8192   bf16 32768   8192 1  249.392   249.6
rms_norm   quack-throughput-16384  f16  32768  16384 1  513.281   514.1
rms_norm   quack-throughput-16384  bf16 32768  16384 1  513.281   512.9
rms_norm   quack-throughput-32768  f16  32768  32768 1 1013.665   994.8
rms_norm   quack-throughput-32768  bf16 32768  32768 1 1013.665   998.2
rms_norm   quack-throughput-65536  f16  32768  65536 1 2045.924    2100
rms_norm   quack-throughput-65536  bf16 32768  65536 1 2045.924    2171
rms_norm   quack-throughput-131072 f16  16384 131072 1 2089.524    2038
rms_norm   quack-throughput-131072 bf16 16384 131072 1 2089.524    2050
rms_norm   quack-throughput-262144 f16   8192 262144 1 2214.627    2166
rms_norm   quack-throughput-262144 bf16  8192 262144 1 2214.627    2195
rms_norm   qwen3-8b-qk-norm-decode bf16    32    128 1     1.36    1.44
rms_norm   qk-norm-head            bf16  8192    128 0    2.752    2.85
ada_layer_norm       dit-xl-2               bf16  1024   1152 0    4.832    5.31
ada_layer_norm       dit-xl-2               f16   1024   1152 0      4.8    5.22
ada_layer_norm       llama-8b-decode        bf16     1   4096 0    2.048    2.66
ada_layer_norm       llama-8b-prefill       bf16  2048   4096 0   19.072    19.7
ada_layer_norm       llama-8b-prefill       f16   2048   4096 0   19.424    19.7
ada_layer_norm       dit-xl-2               f32   1024   1152 0    6.847    7.33
ada_layer_norm_zero  dit-xl-2               bf16  1024   1152 0    5.728    6.24
ada_layer_norm_zero  dit-xl-2               f16   1024   1152 0    5.664    6.18
ada_layer_norm_zero  llama-8b-decode        bf16     1   4096 0     2.56    2.83
ada_layer_norm_zero  llama-8b-prefill       bf16  2048   4096 0   23.584    24.4
ada_layer_norm_zero  llama-8b-prefill       f16   2048   4096 0   23.456    24.6
ada_layer_norm_zero  dit-xl-2               f32   1024   1152 0    8.224    9.25
fused_add_layer_norm llama-70b-decode       bf16     1   8192 2     3.84    3.62
fused_add_layer_norm llama-70b-prefill      bf16  2048   8192 2    38.16    41.5
fused_add_layer_norm llama-70b-prefill      f16   2048   8192 2    37.52      39
fused_add_layer_norm llama-8b-decode        bf16     1   4096 2    2.831    2.63
fused_add_layer_norm llama-8b-prefill       bf16  2048   4096 2   20.449      21
fused_add_layer_norm llama-8b-prefill       f16   2048   4096 2   20.064    20.2
fused_add_layer_norm llama-13b-prefill      f32   2048   5120 2   44.063    44.2
fused_add_rms_norm   llama-405b-decode      bf16     1  16384 1    3.743    2.85
fused_add_rms_norm   llama-405b-prefill     bf16  2048  16384 1   66.592    68.3
fused_add_rms_norm   llama-405b-prefill     f16   2048  16384 1   66.368    68.3
fused_add_rms_norm   llama-70b-decode       bf16     1   8192 1      2.4    2.11
fused_add_rms_norm   llama-70b-prefill      bf16  2048   8192 1   34.368    35.3
fused_add_rms_norm   llama-70b-prefill      f16   2048   8192 1   34.128    34.9
fused_add_rms_norm   llama-8b-decode        bf16     1   4096 1    1.887    1.92
fused_add_rms_norm   llama-8b-prefill       bf16  2048   4096 1   18.272    18.5
fused_add_rms_norm   llama-8b-prefill       f16   2048   4096 1   18.176    18.5
fused_add_rms_norm   llama-13b-prefill      bf16  2048   5120 1   22.992    22.4
"""


def read_rows(only: str, dtypes: str = "bf16,f16,f32") -> list[Row]:
    kinds = (str, str, str, int, int, int, float, float)
    lines = [line.split() for line in ROWS.strip().splitlines()]
    rows = [Row(*(k(v) for k, v in zip(kinds, line, strict=True))) for line in lines]
    wanted = only.split(",")
    rows = [r for r in rows if r.dtype in dtypes.split(",")]
    return [r for r in rows if any(w in f"{r.op} {r.label}" for w in wanted)]
