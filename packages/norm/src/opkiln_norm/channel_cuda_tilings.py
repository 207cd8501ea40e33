"""Tilings of the channel norms' CUDA kernels: what fits them, their macros, grids and arguments."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from opkiln.device import cuda

Launch = Callable[..., Any]
MAX_SHARED_BYTES = 227 << 10  # of an SM, for all its CTAs; each takes 1 KiB more than it asks for
WARP = 32
PLAIN = {"STREAM": 0, "THROUGH_L1": 0}
MOST_VECTORS = 2**32  # flat counts them in 32 bits
NAMED_BARRIERS = 16  # of a CTA; the first is __syncthreads'


@dataclass(frozen=True, slots=True)
class Sizes:
    """x as [samples, channels, cols]. pooled: a statistic runs over the samples too."""

    samples: int
    channels: int
    cols: int
    itemsize: int
    mode: str
    pooled: bool
    tensors: int


@dataclass(frozen=True, slots=True)
class Team:
    """What the table sets: see the macros of csrc/channel_team.cu."""

    vector_bytes: int
    team_warps: int
    teams: int
    vectors: int
    cluster: int = 1
    stream: bool = False
    grouped: bool = False
    through_l1: bool = False

    @property
    def threads(self) -> int:
        return WARP * self.teams * self.team_warps

    def fits(self, s: Sizes) -> bool:
        values = self.vector_bytes // s.itemsize
        most = self.cluster * self.team_warps * WARP * self.vectors
        planes = s.samples if s.pooled else 1
        return (
            s.cols % values == 0
            and s.cols // values * planes <= most
            and not (s.mode == "averaged" and s.samples > self.teams)
            and not (s.mode and self.cluster > 1)
            and not (self.grouped and (s.pooled or self.cluster > 1))
            and (self.team_warps == 1 or self.teams < NAMED_BARRIERS)
            and self.threads <= 1024
        )

    def macros(self, s: Sizes) -> dict[str, int]:
        return {
            "COLS": s.cols,
            "VECTOR_BYTES": self.vector_bytes,
            "TEAM_WARPS": self.team_warps,
            "TEAMS": self.teams,
            "VECTORS": self.vectors,
            "CLUSTER": self.cluster,
            "STREAM": int(self.stream),
            "POOLED": int(s.pooled),
            "GROUPED": int(self.grouped or s.mode == "averaged"),
            "THROUGH_L1": int(self.through_l1),
            "GIVEN": int(s.mode == "given"),
            "AVERAGED": int(s.mode == "averaged"),
        }

    def sets(self, s: Sizes) -> int:
        return s.channels if s.pooled else s.channels * s.samples

    def launch(self, kernel: cuda.Kernel, s: Sizes) -> Launch:
        grouped = self.grouped or s.mode == "averaged"
        ctas = -(-self.sets(s) // self.teams)
        if grouped:
            ctas = s.channels * -(-s.samples // self.teams)
        grid, block = (ctas * self.cluster, 1, 1), (self.threads, 1, 1)
        return kernel.configure(grid, block, cluster=self.cluster)

    def counts(self, s: Sizes) -> tuple[int, ...]:
        return self.sets(s), s.samples


@dataclass(frozen=True, slots=True)
class Flat:
    """What the table sets: see the macros of csrc/channel_flat.cu."""

    threads: int
    vector_bytes: int = 16
    through_l1: bool = True

    def vectors(self, s: Sizes) -> int:
        return self.sets(s) * (s.cols * s.itemsize // self.vector_bytes)

    def fits(self, s: Sizes) -> bool:
        whole = s.cols * s.itemsize % self.vector_bytes == 0
        return s.mode == "given" and whole and self.vectors(s) + self.threads <= MOST_VECTORS

    def macros(self, s: Sizes) -> dict[str, int]:
        return {
            "COLS": s.cols,
            "VECTOR_BYTES": self.vector_bytes,
            "THREADS": self.threads,
            "STREAM": 0,
            "THROUGH_L1": int(self.through_l1),
        }

    def sets(self, s: Sizes) -> int:
        return s.channels * s.samples

    def launch(self, kernel: cuda.Kernel, s: Sizes) -> Launch:
        return kernel.configure((-(-self.vectors(s) // self.threads), 1, 1), (self.threads, 1, 1))

    def counts(self, s: Sizes) -> tuple[int, ...]:
        return self.sets(s), s.samples


@dataclass(frozen=True, slots=True)
class Columns:
    """What the table sets: see the macros of csrc/channel_columns.cu."""

    warps: int
    rows: int
    lanes: int

    def fits(self, s: Sizes) -> bool:
        values = 4 // s.itemsize
        whole = s.cols == 1 and s.channels % values == 0
        return whole and s.pooled and s.samples <= self.warps * self.rows * WARP // self.lanes

    def macros(self, s: Sizes) -> dict[str, int]:
        return {"WARPS": self.warps, "ROWS": self.rows, "LANES": self.lanes, **PLAIN}

    def launch(self, kernel: cuda.Kernel, s: Sizes) -> Launch:
        channels = self.lanes * 4 // s.itemsize
        return kernel.configure((-(-s.channels // channels), 1, 1), (self.warps * WARP, 1, 1))

    def counts(self, s: Sizes) -> tuple[int, ...]:
        return (s.samples,)


@dataclass(frozen=True, slots=True)
class Ring:
    """What the table sets: see the macros of csrc/channel_ring.cu."""

    threads: int
    registers: int
    shared: int
    groups: int
    stream: bool = False

    def slices(self, s: Sizes) -> int:
        """CTAs of a channel."""
        slice_values = (self.registers + self.shared) * self.threads * 16 // s.itemsize
        return s.samples * (s.cols // slice_values)

    def shared_bytes(self, s: Sizes) -> int:
        return s.tensors * self.shared * self.threads * 16

    def fits(self, s: Sizes) -> bool:
        slice_values = (self.registers + self.shared) * self.threads * 16 // s.itemsize
        return (
            s.pooled
            and s.cols % slice_values == 0
            and self.slices(s) % WARP == 0
            and self.groups * (self.shared_bytes(s) + 1024) <= MAX_SHARED_BYTES
        )

    def macros(self, s: Sizes) -> dict[str, int]:
        return {
            "PLANE_VECTORS": s.cols * s.itemsize // 16,
            "THREADS": self.threads,
            "REGISTERS": self.registers,
            "SHARED": self.shared,
            "GROUPS": self.groups,
            "STREAM": int(self.stream),
            "BACKWARD": s.tensors - 1,
            "THROUGH_L1": 0,
        }

    def launch(self, kernel: cuda.Kernel, s: Sizes) -> Launch | None:
        """None where the CTAs, which wait for each other, would not all run at once."""
        ctas, shared = self.groups * self.slices(s), self.shared_bytes(s)
        send = kernel.configure((ctas, 1, 1), (self.threads, 1, 1), shared, cooperative=True)
        occupancy = kernel.handle.occupancy
        at_once = occupancy.max_active_blocks_per_multiprocessor(self.threads, shared)
        return send if at_once * cuda.multiprocessors(kernel.device) >= ctas else None

    def counts(self, s: Sizes) -> tuple[int, ...]:
        return (self.slices(s),)


Tiling = Team | Flat | Columns | Ring
KINDS: dict[str, type[Tiling]] = {"team": Team, "flat": Flat, "columns": Columns, "ring": Ring}
