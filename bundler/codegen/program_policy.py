# SPDX-License-Identifier: Apache-2.0
"""`ProgramPolicy`: how the kernels of a program get their configurations.

`GenerateOptions` has one, and torch.compile's modes and options make one.  It stands in the
metadata of each kernel, by torch's names of its settings, so that it travels with the text; what
decides which kernels there are does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from bundler.errors import ConfigError
from bundler.runtime.heuristics.facts import Policy
from bundler.runtime.tuning.descent import Descent

#: Which operators of torch become kernels of a template.
TEMPLATES = ("none", "all", "where faster", "by rule")
NONE, ALL, WHERE_FASTER, BY_RULE = TEMPLATES
_UNMEASURED = frozenset({"deterministic", "use_tensor_descriptor", "cooperative_reductions"})


@dataclass(frozen=True)
class ProgramPolicy:
    """What is measured to choose a kernel's configuration; by default, the candidates that its
    sizes suggest.

    Attributes:
        max_autotune: every candidate of a kernel's kind, whatever its sizes suggest.
        coordinate_descent_tuning: from the fastest candidate on, one field after the other is
            changed as long as it gets faster.
        multi_kernel: of a reduction whose row may be held whole or looped over, both are written,
            and the first call measures which one runs.
        use_tensor_descriptor: tiles of at least two dimensions are addressed by tensor descriptors,
            with equal bits, where these reach them. With `max_autotune` alone both forms are
            written, and the first call measures which one runs.
        cooperative_reductions: a reduction of few long rows is one launch, in which several
            programs share a row and wait for each other, on devices where all of them run at once;
            with `max_autotune`, which tries that by itself, only where it is measured to be faster
            than launches that do not wait.
        measured_fusion: loops share a kernel, and kernels a launch, only where both forms were
            measured and the shared one is faster; where there is no such device, a record of
            another process decides, else what saves memory traffic.
        deterministic: nothing is measured: each kernel has one configuration, which every process
            takes on such a device, and no sum depends on an order that is open.

    Raises:
        ConfigError: a value that is neither True nor False, or one that asks for a measurement
            beside `deterministic`.
    """

    max_autotune: bool = False
    coordinate_descent_tuning: bool = False
    multi_kernel: bool = False
    use_tensor_descriptor: bool = False
    cooperative_reductions: bool = False
    measured_fusion: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        wrong = [
            f"{name}={value!r}" for name, value in vars(self).items() if type(value) is not bool
        ]
        if wrong:
            raise ConfigError(f"policy: expected True or False, got {', '.join(wrong)}", got=wrong)
        measured = [name for name, on in vars(self).items() if on and name not in _UNMEASURED]
        if self.deterministic and measured:
            raise ConfigError(
                f"policy: deterministic has no measurement decide, and {measured[0]} asks for one;"
                " leave one of them out",
                got=measured,
            )

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> ProgramPolicy:
        """Return the policy that a kernel's metadata has."""
        return cls(**{one.name: metadata.get(one.name, one.default) for one in fields(cls)})

    @property
    def metadata(self) -> dict[str, bool]:
        """What a kernel's metadata says of it: the settings that are on, but for what is decided
        before there are kernels.
        """
        found = asdict(self)
        del found["measured_fusion"]
        return {name: value for name, value in found.items() if value}

    @property
    def candidates(self) -> Policy:
        """What the heuristics are told."""
        return Policy(
            max_autotune=self.max_autotune,
            # Other tiles give equal numbers, but for what a compiler contracts in one and not in
            # the other.
            autotune_pointwise=not self.deterministic,
            deterministic=self.deterministic,
        )

    @property
    def descent(self) -> Descent | None:
        """How the tuner goes on from the fastest candidate."""
        return Descent() if self.coordinate_descent_tuning else None
