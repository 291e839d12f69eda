# SPDX-License-Identifier: Apache-2.0
"""`RegistryLogin`: answers a registry's question who we are, by HTTP's basic scheme or by a token.

A registry that wants a token names the server that gives one (`WWW-Authenticate: Bearer
realm="https://…"`).  Credentials go to the registry and to that server, never without TLS where the
registry has it, and nowhere that a redirect leads to.  `registry.py` is the caller.
"""

from __future__ import annotations

import re
from urllib.parse import urlencode

import msgspec

from bundler.backends.backend_errors import BackendDenied, BackendUnavailable
from bundler.backends.oci.docker_credentials import Credentials
from bundler.backends.oci.http_exchange import (
    HttpExchange,
    InsecureAnswer,
    RegistryAnswer,
    origin_of,
)

TOKEN_BYTES = 1 << 20
_FIELD = re.compile(r'([a-zA-Z]+)="([^"]*)"')
_OK = 200
_TOO_MANY, _SERVERS = 429, 500


class _Token(msgspec.Struct):
    token: str = ""
    access_token: str = ""


class RegistryLogin:
    """What is sent as `Authorization`.

    Args:
        name: of the registry, for messages.
        host: of the registry, for messages.
        secure: whether the registry is asked by TLS.
        exchange: which asks the server of tokens.
        credentials: who we are; None for anybody.
    """

    def __init__(
        self,
        name: str,
        host: str,
        exchange: HttpExchange,
        credentials: Credentials | None,
        *,
        secure: bool,
    ) -> None:
        self._name, self._host, self._secure = name, host, secure
        self._exchange, self._credentials = exchange, credentials
        self.header = ""

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must not be printed."""
        token = self.header.partition(" ")[2]
        known = self._credentials.secrets if self._credentials else ()
        return (*known, token) if token else known

    @property
    def how_to(self) -> str:
        """What to do when the registry does not let us in."""
        if self._credentials is None:
            return f"log in: docker login {self._host}"
        return f"check user, password and rights there, and log in again: docker login {self._host}"

    def respond(self, challenge: str, until: float) -> None:
        """Get ready to ask again.

        Args:
            challenge: the registry's header `WWW-Authenticate`.
            until: when it has to be over.

        Raises:
            BackendDenied: there are no credentials, or they are refused.
            BackendUnavailable: the server of tokens cannot be asked.
        """
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic":
            if self._credentials is None or not self._credentials.user:
                raise BackendDenied(f"{self._name}: wants user and password; {self.how_to}")
            self.header = self._credentials.basic
        elif scheme.lower() == "bearer":
            self.header = f"Bearer {self._token(dict(_FIELD.findall(rest)), until)}"
        else:
            raise BackendDenied(
                f"{self._name}: wants to be asked by the scheme {scheme!r:.40}, expected Basic or"
                " Bearer"
            )

    def _token(self, fields: dict[str, str], until: float) -> str:
        realm = fields.get("realm", "")
        if origin_of(realm).scheme != "https" and self._secure:
            raise InsecureAnswer(
                f"{self._name}: names a server of tokens without TLS, {realm!r:.100}; nothing was"
                " sent there"
            )
        asked = {name: fields[name] for name in ("service", "scope") if fields.get(name)}
        answer = self._asked(realm, asked, until)
        if answer.status != _OK:
            answer.close()
            if answer.status == _TOO_MANY or answer.status >= _SERVERS:
                raise BackendUnavailable(
                    f"{self._name}: its server of tokens answered {answer.status}"
                )
            raise BackendDenied(
                f"{self._name}: its server of tokens answered {answer.status}; {self.how_to}"
            )
        try:
            found = msgspec.json.decode(answer.read(TOKEN_BYTES), type=_Token)
        except msgspec.DecodeError:
            raise BackendUnavailable(
                f"{self._name}: its server of tokens answered something other than a token"
            ) from None
        token = found.token or found.access_token
        if not token.isascii() or not token.isprintable() or not token:
            raise BackendUnavailable(f"{self._name}: its server of tokens answered without a token")
        return token

    def _asked(self, realm: str, asked: dict[str, str], until: float) -> RegistryAnswer:
        known = self._credentials
        if known is not None and known.identity_token:
            form = asked | {
                "grant_type": "refresh_token",
                "refresh_token": known.identity_token,
                "client_id": "triton-bundler",
            }
            body = urlencode(form).encode()
            headers = {
                "Content-Type": "application/x-www-form-urlencoded",
                "Content-Length": str(len(body)),
            }
            return self._exchange.send("POST", realm, headers, until, body)
        headers = {"Authorization": known.basic} if known is not None else {}
        mark = "&" if "?" in realm else "?"
        return self._exchange.send("GET", f"{realm}{mark}{urlencode(asked)}", headers, until)
