# SPDX-License-Identifier: Apache-2.0
"""`launch_facts`, `key_parts`, `toolchain_of`: from the live objects of one compile to data.

These functions only read; the one thing that they run of others' code is Triton's own computing of
the key.  They can be called later than the compile and from another thread, as long as the kernel's
source was not edited in between.

Recordings and spooled records are made with them; `jit_specialization`, `rekeyed_key` and the tuner
use single ones.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from typing import Any

from bundler.format.constant_values import Value
from bundler.format.entries import Toolchain
from bundler.format.keyparts import KeyParts
from bundler.format.launch_spec import Argument, LaunchFacts
from bundler.toolchain.identity import installed_triton
from bundler.toolchain.keys.encoding import encode_type, encode_value, portable_value
from bundler.toolchain.keys.keytext import named_parts, recompute, stages_key_now
from bundler.toolchain.ptxas import ptxas_version, short_version

__all__ = ["encode_value", "key_parts", "launch_facts", "toolchain_of"]

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def launch_facts(src: Any, options: Any) -> LaunchFacts:
    """Return what Triton's metadata lacks.

    Args:
        src: Triton's `ASTSource` (or Gluon's), or an `IRSource`, which has a signature only.
        options: the backend's options object, or None when they are not known; Triton's install
            directory inside them becomes a placeholder, so that two installations give equal facts.
    """
    fn = getattr(src, "fn", None)
    chosen = vars(options) if options is not None else {}
    return LaunchFacts(
        source_kind="ir" if fn is None else "ast",
        arguments=tuple(_argument(param) for param in getattr(fn, "params", ())),
        signature=tuple((str(name), encode_type(kind)) for name, kind in src.signature.items()),
        constants=_by_path(getattr(src, "constants", None)),
        attributes=_by_path(getattr(src, "attrs", None)),
        options=tuple(
            (name, encode_value(portable_value(value))) for name, value in sorted(chosen.items())
        ),
    )


def _argument(param: Any) -> Argument:
    default = param.default
    return Argument(
        name=param.name,
        annotation=_ADDRESS.sub("", str(param.annotation)),
        default=None if default is inspect.Parameter.empty else encode_value(default),
        constexpr=bool(param.is_constexpr),
        do_not_specialize=bool(param.do_not_specialize),
        do_not_specialize_on_alignment=bool(param.do_not_specialize_on_alignment),
    )


def _by_path(mapping: Mapping[Any, Any] | None) -> tuple[tuple[tuple[int, ...], Value], ...]:
    return tuple(
        (tuple(path), encode_value(value)) for path, value in sorted((mapping or {}).items())
    )


def key_parts(
    src: Any,
    backend: Any,
    options: Any,
    env_vars: Mapping[str, str],
    key_hash: str,
    stages_key: str | None = None,
) -> KeyParts:
    """Return the named parts of a kernel's key, in a fixed order.

    `proven` says that recomputing the key from the same objects gave `key_hash`.  The same compile
    in another process, with another installation of the same Triton or from another checkout gives
    the same parts.  A part that cannot be had is left out.

    Args:
        src, backend, options: Triton's objects of the compile.
        env_vars: the environment that is part of the key.
        key_hash: the kernel's hash, as hexadecimal text.
        stages_key: what a stage inspection hook added to the key; None asks the hook that is
            installed now, if any.
    """
    if stages_key is None:
        stages_key = stages_key_now()
    parts = named_parts(src, backend, options, env_vars, stages_key)
    return KeyParts(
        tuple(parts), recompute(src, backend, options, env_vars, stages_key) == key_hash
    )


def toolchain_of(backend_name: str, arch: int | str) -> Toolchain:
    """Return who compiles for a target in this process; for use after such a compile.

    Triton asks ptxas for its version once a process and keeps the answer; that answer, which its
    keys were made with, is the one returned here.
    """
    installed = installed_triton() or Toolchain()
    ptxas = None
    if backend_name == "cuda" and str(arch).isdecimal():
        ptxas = _ptxas_in_use(int(arch)) or ptxas_version(int(arch))
    return Toolchain(installed.release, installed.binary, ptxas)


def _ptxas_in_use(arch: int) -> str | None:
    answer = getattr(sys.modules.get("triton.backends.nvidia.compiler"), "get_ptxas_version", None)
    if answer is None:
        return None
    try:
        return short_version(answer(arch))
    except (RuntimeError, OSError, ValueError):
        return None
