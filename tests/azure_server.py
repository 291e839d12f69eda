# SPDX-License-Identifier: Apache-2.0
"""A real server for Azure Blob Storage for tests: Azurite, Microsoft's emulator, where its program
is installed (npm install azurite).
"""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time

import pytest

# The account and key that every Azurite has, published by Microsoft.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
PROGRAM = "azurite-blob"
PATIENCE_S = 60


def program():
    """Return the path of the program, by AZURITE_BLOB or on the PATH; None where there is none."""
    return os.environ.get("AZURITE_BLOB") or shutil.which(PROGRAM)


@contextlib.contextmanager
def running():
    """Start a server and yield its endpoint; skips aloud where the program is missing."""
    pytest.importorskip("obstore", reason="obstore is not installed: pip install '.[cloud]'")
    found = program()
    if found is None:
        pytest.skip(f"{PROGRAM} is not on the PATH and not in AZURITE_BLOB: npm install azurite")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        line = [
            found,
            "--blobPort",
            str(port),
            "--location",
            folder,
            "--silent",
            "--skipApiVersionCheck",
            "--disableTelemetry",
        ]
        process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            until = time.monotonic() + PATIENCE_S
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                assert process.poll() is None, "Azurite ended"
                assert time.monotonic() < until, "Azurite does not listen"
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}/{ACCOUNT}"
        finally:
            process.terminate()
            process.wait(10)


def environment(endpoint):
    """Return the settings by which obstore finds the server."""
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        "AZURE_STORAGE_ENDPOINT": endpoint,
        "AZURE_ALLOW_HTTP": "true",
    }


def make_container(endpoint):
    """Make a container and return its name; obstore makes none, so the request is signed here."""
    import base64
    import email.utils
    import hashlib
    import hmac
    import urllib.request

    name = f"c{os.urandom(6).hex()}"
    date, version = email.utils.formatdate(usegmt=True), "2021-12-02"
    headers = f"x-ms-date:{date}\nx-ms-version:{version}\n"
    resource = f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    text = "PUT\n" + "\n" * 11 + headers + resource
    signature = base64.b64encode(
        hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    ).decode()
    request = urllib.request.Request(
        f"{endpoint}/{name}?restype=container",
        data=b"",
        method="PUT",
        headers={
            "x-ms-date": date,
            "x-ms-version": version,
            "Authorization": f"SharedKey {ACCOUNT}:{signature}",
            "Content-Type": "",
        },
    )
    urllib.request.urlopen(request, timeout=30).close()
    return name
