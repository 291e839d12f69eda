# SPDX-License-Identifier: Apache-2.0
"""The inputs of the rules: `Device`, `Facts` about a kernel, `Policy`, the three of them as a
`Setting`, and hints.

Every module of rules takes them; the decorators and Inductor's generated modules make them.  Rules
see nothing of the process, so that each machine gets the candidates of the declared device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

SizeHints = Mapping[str, int]
HeuristicKind = Literal[
    "pointwise",
    "reduction",
    "persistent_reduction",
    "product",
    "attention",
    "split_scan",
    "template",
    "user_autotune",
    "fixed",
]

DEFAULT_WARP_SIZE = 32
DEFAULT_SPLIT_SCAN_RBLOCK = 256


class ReductionHint(Enum):
    """How the reduced dimension lies in memory."""

    INNER = "inner"
    OUTER = "outer"
    OUTER_TINY = "outer_tiny"
    DEFAULT = "default"


class TileHint(Enum):
    """`SQUARE`: two dimensions, one input, one output."""

    SQUARE = "square"
    DEFAULT = "default"


@dataclass(frozen=True)
class Device:
    """The device that a kernel will run on, which need not be one of this machine.

    Attributes:
        type: `cuda`, `hip`, `xpu` or `cpu`.
        multiprocessors: how many it has.
        warp_size: threads of a warp.
        major: of the compute capability; None when unknown, as the three below.
        regs_per_multiprocessor: 32-bit registers; no rule looks at them, as at the next one.
        max_threads_per_multiprocessor, max_threads_per_block: threads.
    """

    type: str
    multiprocessors: int
    warp_size: int = DEFAULT_WARP_SIZE
    major: int | None = None
    regs_per_multiprocessor: int | None = None
    max_threads_per_multiprocessor: int | None = None
    max_threads_per_block: int | None = None

    @property
    def is_hip(self) -> bool:
        """Whether it is one of AMD's."""
        return self.type == "hip"

    @property
    def is_xpu(self) -> bool:
        """Whether it is one of Intel's."""
        return self.type == "xpu"


@dataclass(frozen=True)
class Facts:
    """What the author of a kernel knows of it; each fact may be left out.

    Attributes:
        num_load, num_store, num_reduction: how often the kernel does each.
        num_dynamic: size arguments that change from call to call.
        min_elem_per_thread: least elements of a thread, for conversions that need several at once.
        one_element_per_thread: try tiles with an element for each thread (searches in sorted
            boundaries gain by it).
        crossed: of a pointwise kernel over two axes, memory runs along one axis for some tensors
            and along the other one for others, so no tile that is short along an axis suits both.
        atomic_add: the kernel adds atomically.
        no_x_dim: the kernel handles one x at a time and has no block for it.
        contiguous_row: some load or store runs along the reduced dimension.
        add_persistent_rblock: also try a block that holds a whole row.
        column_tiles: a reduction across memory has the tiles that were measured, and not torch's.
        max_persistent_rblock: the largest row that a persistent kernel beside this one holds; 0 for
            none.
        tiling_scores: dimension -> how much memory access gains by a longer block along it, in
            order of dimensions.
        tma_min_blocks: block parameter -> least size that tensor descriptors need.
        min_xblock, min_rblock: floors of the two blocks of a reduction.
        max_xblock: no block along x is larger; None for the device's limit.  Masks that a kernel
            leaves out may count on it.
        max_blocks: axis -> largest block, where that is less than the device's limit, likewise.
        row_products: a reduction's sums are products of one row with matrices.
        unmeasured: a product so small that its first candidate will do.
        rsplit_size: rows of a program in a mix-order reduction; 0 for another kind of kernel.
        allow_multi_stages: whether a mix-order reduction may pipeline.
        min_split_scan_rblock: floor of the R block of a split scan.
        native_matmul: the kernel is a matrix product.
        native_matmul_rblock: the block of its inner dimension where it is persistent.
    """

    num_load: int = 0
    num_store: int = 0
    num_reduction: int = 0
    num_dynamic: int = 0
    min_elem_per_thread: int = 0
    one_element_per_thread: bool = False
    crossed: bool = False
    atomic_add: bool = False
    no_x_dim: bool = False
    contiguous_row: bool = True
    add_persistent_rblock: bool = False
    column_tiles: bool = False
    max_persistent_rblock: int = 0
    tiling_scores: Mapping[str, float] = field(default_factory=dict)
    tma_min_blocks: Mapping[str, int] = field(default_factory=dict)
    min_xblock: int | None = None
    min_rblock: int | None = None
    max_xblock: int | None = None
    max_blocks: Mapping[str, int] = field(default_factory=dict)
    row_products: bool = False
    unmeasured: bool = False
    rsplit_size: int = 0
    allow_multi_stages: bool = True
    min_split_scan_rblock: int = DEFAULT_SPLIT_SCAN_RBLOCK
    native_matmul: bool = False
    native_matmul_rblock: int | None = None


@dataclass(frozen=True)
class Policy:
    """What the user asked for.

    Attributes:
        max_autotune: offer every candidate, whatever the hint says.
        autotune_pointwise: False offers one candidate for a pointwise kernel.
        deterministic: the same numbers in each run, so one candidate for a reduction.
        batch_invariant: the same numbers for each batch size, so a persistent reduction does not
            look at small ones.
    """

    max_autotune: bool = False
    autotune_pointwise: bool = True
    deterministic: bool = False
    batch_invariant: bool = False


@dataclass(frozen=True)
class Setting:
    """Device, facts and policy together: all that a rule needs beside the sizes."""

    device: Device
    facts: Facts = field(default_factory=Facts)
    policy: Policy = field(default_factory=Policy)
