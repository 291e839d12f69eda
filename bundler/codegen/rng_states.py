# SPDX-License-Identifier: Apache-2.0
"""`rng_state`, `set_rng_state`: torch's generators of random numbers as operators, which a program calls.  Imports torch.

torch draws random numbers of a checkpointed part twice: `run_and_save_rng_state` keeps the generator's state before an operator of the forward graph,
and `run_with_rng_state` calls the operator of the backward graph in that state.  `lower` makes calls of these operators of either, and of the operator
itself as it is, so that one of the two graphs may run as torch has it.
"""

from __future__ import annotations

from typing import Any

import torch

RNG_STATE, SET_RNG_STATE = (
    "triton_bundler.rng_state.default",
    "triton_bundler.set_rng_state.default",
)
_LIBRARY = torch.library.Library("triton_bundler", "DEF")
_LIBRARY.define("rng_state(str device) -> Tensor")
_LIBRARY.define("set_rng_state(Tensor state, str device) -> ()")


def _rng_state(device: str) -> torch.Tensor:
    return torch.get_rng_state() if device == "cpu" else _module(device).get_rng_state()


def _set_rng_state(state: torch.Tensor, device: str) -> None:
    if device == "cpu":
        torch.set_rng_state(state.cpu())
    else:
        _module(device).set_rng_state(state.cpu())


def _module(device: str) -> Any:
    return torch.get_device_module(device)


_LIBRARY.impl("rng_state", _rng_state, "CompositeImplicitAutograd")
_LIBRARY.impl("set_rng_state", _set_rng_state, "CompositeImplicitAutograd")


def state_elements(device: str) -> int:
    """Return how many bytes the state of a device's generator has."""
    return int(_rng_state(device).numel())
