# SPDX-License-Identifier: Apache-2.0
"""`read_metrics`: the metrics of an endpoint as numbers by name and labels; `total` adds some of them up.

`live_sources.py` calls it; nothing but the text format of Prometheus is understood, and no library of it is needed.
"""

from __future__ import annotations

import base64
import http.client
import math
import re
import urllib.request
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit, urlunsplit

from bundler.errors import StoreUnavailable

TIMEOUT_S = 2.0
# Thousands of samples; an address that sends more is none of ours.
MOST_BYTES = 4 * 1024 * 1024
_SAMPLE = re.compile(r"(?P<name>[A-Za-z_:][A-Za-z0-9_:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(?P<name>[A-Za-z_]\w*)="(?P<value>(?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")

Labels = tuple[tuple[str, str], ...]
Samples = dict[tuple[str, Labels], float]


def is_endpoint(url: str) -> bool:
    """Tell whether a URL is one of metrics: `http://host:port`, or one that ends in `/metrics`; others are stores."""
    parts = urlsplit(url)
    return parts.scheme in {"http", "https"} and (
        parts.path in {"", "/"} or parts.path.endswith("/metrics")
    )


def read_metrics(url: str) -> Samples:
    """Return what an endpoint shows; raises `StoreUnavailable`."""
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    path, query = (parts.path, parts.query) if parts.path.endswith("/metrics") else ("/metrics", "")
    asked = urllib.request.Request(urlunsplit((parts.scheme, host, path, query, "")))  # noqa: S310  # `is_endpoint` looked at the scheme
    if user:
        asked.add_header(
            "Authorization", f"Basic {base64.b64encode(unquote(user).encode()).decode()}"
        )
    # The endpoint is near: a proxy of the environment would be asked for an address that only this host knows.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(asked, timeout=TIMEOUT_S) as answer:
            data = answer.read(MOST_BYTES + 1)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise StoreUnavailable(f"{asked.full_url}: {error}") from error
    if len(data) > MOST_BYTES:
        raise StoreUnavailable(f"{asked.full_url}: more than {MOST_BYTES} bytes, expected metrics")
    return parsed(data.decode("utf-8", "replace"))


def parsed(text: str) -> Samples:
    """Return the samples of a text; what is none is left out."""
    found: Samples = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None:
            continue
        try:
            value = float(match["value"])
        except ValueError:
            continue
        if math.isfinite(value):
            labels = {
                one["name"]: _unescaped(one["value"])
                for one in _LABEL.finditer(match["labels"] or "")
            }
            found[match["name"], tuple(sorted(labels.items()))] = value
    return found


def total(samples: Mapping[tuple[str, Labels], float], name: str, **labels: str) -> float:
    """Return the sum of a metric, of all labels that agree with these; 0 where there is none."""
    wanted = labels.items()
    return sum(
        value
        for (of, held), value in samples.items()
        if of == name and wanted <= dict(held).items()
    )


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda match: "\n" if match[1] == "n" else match[1], text)
