# SPDX-License-Identifier: Apache-2.0
"""`gate`: settings of obstore by which it speaks to the hosts of a store and to no others, wherever
an answer redirects it.

obstore follows redirects, and cannot be told not to.  It leaves the session token of S3 in a
request to another host, and tells that host the URL that it comes from, in which Azure's shared
access signature stands.  So every host but those of the store and of its credentials is to be
reached by a proxy that nobody is: such a request ends before anything of it is sent.

`object_exchange.connect` calls it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

# Nobody but root can listen there.
NOWHERE = "http://127.0.0.1:1"
# Whoever set one of these has a proxy, which every request goes through, and which decides where it
# may go.
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "AWS_PROXY_URL", "AZURE_PROXY_URL")
# Where machines and containers of both clouds ask for credentials.
_MACHINE = ("169.254.169.254", "169.254.170.2", "169.254.170.23", "fd00:ec2::254", "fd00:ec2::23")
_EXPRESS = re.compile(r".+--([a-z0-9-]+)--x-s3")
_MORE = ("IDENTITY_ENDPOINT", "MSI_ENDPOINT", "AZURITE_BLOB_STORAGE_URL")
_PREFIXES = {"s3": "AWS_", "az": "AZURE_"}


def gate(location: str, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return settings for obstore's client; none for a store whose requests hold nothing that
    another host could use.

    Args:
        location: the URL of the store.
        environment: where its settings are; None for that of the process.
    """
    told = os.environ if environment is None else environment
    parts = urlsplit(location)
    if parts.scheme not in _PREFIXES or any(
        told.get(name) or told.get(name.lower()) for name in _PROXIES
    ):
        return {}
    hosts = _of_s3(parts.netloc, told) if parts.scheme == "s3" else _of_azure(told)
    named = _named(told, _PREFIXES[parts.scheme])
    return {"proxy_url": NOWHERE, "proxy_excludes": ",".join([*hosts, *named, *_MACHINE])}


def _of_s3(bucket: str, told: Mapping[str, str]) -> Iterator[str]:
    region = told.get("AWS_REGION") or told.get("AWS_DEFAULT_REGION") or "us-east-1"
    express = _EXPRESS.fullmatch(bucket)
    for domain in ("amazonaws.com", "amazonaws.com.cn"):
        yield f"s3.{region}.{domain}"
        yield f"sts.{region}.{domain}"
        if express is not None:
            yield f"s3express-{express[1]}.{region}.{domain}"
    yield "sts.amazonaws.com"


def _of_azure(told: Mapping[str, str]) -> Iterator[str]:
    account = told.get("AZURE_STORAGE_ACCOUNT_NAME") or told.get("AZURE_ACCOUNT_NAME")
    if account:
        yield f"{account}.blob.core.windows.net"
        yield f"{account}.dfs.core.windows.net"
    yield from (
        "blob.fabric.microsoft.com",
        "dfs.fabric.microsoft.com",
        "login.microsoftonline.com",
    )
    if told.get("AZURE_STORAGE_USE_EMULATOR"):
        yield from ("127.0.0.1", "localhost")


def _named(told: Mapping[str, str], prefix: str) -> Iterator[str]:
    """Yield the hosts of all URLs that the settings of a cloud hold: endpoints, and places of
    credentials.
    """
    for name, value in told.items():
        if name.upper().startswith(prefix) or name.upper() in _MORE:
            for text in (value, f"//{value}") if name.upper().endswith("_HOST") else (value,):
                try:
                    host = urlsplit(text).hostname
                except ValueError:
                    continue
                if host:
                    yield host
