# SPDX-License-Identifier: Apache-2.0
"""`Settings`, `SignatureSettings`: what the user set, as values; `config.py` reads them, and
imports this module when somebody asks for them.

A module of its own, because structs need msgspec, and a process that imports the cache manager
alone has not imported it.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

# As in `config.py`, which has the words, and no msgspec.
Demand = Literal["require", "prefer", "off"]
Mode = Literal["read", "write", "readwrite"]
Strict = Literal["off", "warn", "error"]
Launcher = Literal["bundler", "triton"]


class SignatureSettings(Struct, frozen=True):
    """What the user set about signatures; `epochs` is the directory that remembers which statements
    about tags were seen.
    """

    kernels: Demand
    code: Demand
    keys: str
    epochs: str
    signing_key: str | None
    store_name: str | None
    passphrase_file: str | None


class Settings(Struct, frozen=True):
    """What the user set, in the environment or a file; see `SETTINGS` for what each means."""

    store: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    tag: str | None = None
    mode: Mode = "readwrite"
    trust: Literal["kernels", "code", "signed"] = "kernels"
    strict: Strict = "off"
    replay: bool = False
    moved: bool = False
    launcher: Launcher = "bundler"
    keep: Literal["all", "launch"] = "all"
    namespace: str | None = None
    timeout_s: float | None = None
    local: str | None = None
    report: str | None = None
    metrics_file: str | None = None
    password_file: str | None = None
    signatures: Demand = "off"
    code_signatures: Demand = "off"
    keys: str | None = None
    signing_key: str | None = None
    signing_passphrase_file: str | None = None
    store_name: str | None = None
    disable: bool = False

    @property
    def server(self) -> dict[str, Any]:
        """The settings that are for Redis stores only, by the names that `open_store` gives
        them.
        """
        return server_settings(self.namespace, self.password_file, self.timeout_s)


def server_settings(
    namespace: str | None, password_file: str | None, timeout_s: float | None
) -> dict[str, Any]:
    """Return what is set of these, by the names that `open_store` gives them."""
    chosen: dict[str, Any] = {"namespace": namespace, "password_file": password_file}
    chosen |= {"timeout_s": timeout_s, "connect_timeout_s": timeout_s}
    return {name: value for name, value in chosen.items() if value is not None}
