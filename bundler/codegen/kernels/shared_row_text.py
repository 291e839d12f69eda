# SPDX-License-Identifier: Apache-2.0
"""`SharedRow`: the text by which the programs that share a row hand each other what their parts
come to.

Each program stores what its part of the row comes to in a workspace, waits for the others, and
loads what all parts come to, in the order of the row, as one block with a lane for each.  Every
program combines these in the same way, so all have the same bits, in each call.

`reduction_text` asks for lines, `kernel_arguments` has the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bundler.codegen.kernels.kernel_arguments import KernelArguments
from bundler.codegen.loops.data_types import data_type, loaded_text, stored_text

#: How many programs share a row; the constexpr parameter.
SHARES = "RSPLIT"
#: The program's place among them.
SHARE = "tl.program_id(0)"


class SharedRow:
    """Writes the exchange of one kernel, whose blocks are rows times elements of a row.

    Args:
        arguments: of the kernel.
        mask: of rows; None where every block is full of them, or there is one row.
        single: whether there is one row, which all lanes then have.
        name: returns the name of a new value.
    """

    def __init__(
        self,
        arguments: KernelArguments,
        mask: str | None,
        name: Callable[[], str],
        *,
        single: bool,
    ) -> None:
        self._arguments, self._mask, self._name = arguments, mask, name
        self._row = "0 * xindex" if single else "xindex"
        self._stores: list[str] = []
        self._loads: list[str] = []

    def exchange(self, parts: Sequence[tuple[str, str]]) -> list[str]:
        """Have values exchanged; returns the names of blocks with those of all programs.

        Args:
            parts: name and dtype of each value, one for each row, without an axis for the row.
        """
        found = []
        for name, dtype in parts:
            # Registers have more than 16 bits of a sum, and so do parts of it.
            kept = "float32" if data_type(dtype).is_half else dtype
            pointer, place = self._arguments.workspace(kept)
            start = f"{pointer} + ({place} * xnumel + {self._row}) * {SHARES}"
            value = stored_text(f"{name}[:, None]", kept)
            self._stores.append(f"tl.store({start} + {SHARE}, {value}, {self._mask})")
            block = self._name()
            other = "" if self._mask is None else ", other=0"
            load = f"tl.load({start} + tl.arange(0, {SHARES})[None, :], {self._mask}{other})"
            self._loads.append(f"{block} = {loaded_text(load, kept)}")
            found.append(block)
        return found

    def take(self) -> list[str]:
        """Return the lines of what was exchanged since the last call, and forget them."""
        if not self._stores:
            return []
        counter = f"{self._arguments.counters} + tl.program_id(1)"
        barrier = f"lib.grid_barrier({counter}, {SHARES})"
        found = [*self._stores, barrier, *self._loads]
        self._stores, self._loads = [], []
        return found
