# SPDX-License-Identifier: Apache-2.0
"""Registries of containers for tests: a small one in this process, which lists referrers and can be
spoilt; and Debian's, as a process on the loopback.
"""

import base64
import contextlib
import hashlib
import http.server
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

PATIENCE_S = 20
INDEX = "application/vnd.oci.image.index.v1+json"
_BINARIES = ("docker-registry", "registry")
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "triton-bundler-tests"


def digest_of(data):
    """Return the digest of bytes."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class SmallRegistry(http.server.ThreadingHTTPServer):
    """Blobs and manifests in memory.

    Attributes:
        lists_referrers: whether it has the referrers API.
        user, password: who may do anything; empty for everybody.
        token: what is asked for in place of them, once `realm` is set, as a server of tokens gives
            it.
        realm: the address of a server of tokens.
        requests: method, path and `Authorization` of each, in order.
        spoil: called with a handler before it answers; True when it has answered itself.
    """

    daemon_threads = (
        False  # closing waits for them, so that no test leaves a connection to the next one
    )

    def __init__(self, tls=None):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.blobs, self.manifests, self.tags = {}, {}, {}
        self.lists_referrers, self.user, self.password, self.token, self.realm = (
            True,
            "",
            "",
            "",
            "",
        )
        self.requests, self.spoil = [], lambda handler: False
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls)
            self.socket = context.wrap_socket(self.socket, server_side=True)

    @property
    def host(self):
        return f"127.0.0.1:{self.server_address[1]}"

    def url(self, tag="demo", settings="plain_http=1&timeout_s=5"):
        return f"oci://{self.host}/team/kernels{tag if tag.startswith('@') or not tag else f':{tag}'}?{settings}"

    @contextlib.contextmanager
    def serving(self):
        thread = threading.Thread(target=self.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            thread.join()
            self.server_close()

    def handle_error(self, request, client_address):
        """A client that hung up is what some tests want."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 10
    disable_nagle_algorithm = True  # else each answer waits for 40 ms

    def reply(self, status, data=b"", headers=None, cut=0):
        """Answer; of the body the last bytes may be left out, and the connection is closed then."""
        self.send_response_only(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) - cut])
        self.close_connection = self.close_connection or cut > 0

    def _serve(self):
        server = self.server
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        who = self.headers.get("Authorization", "")
        server.requests.append((self.command, self.path, who))
        if server.spoil(self):
            return
        if not self._is_allowed(who):
            return
        parts = urlsplit(self.path)
        for pattern, act in _ROUTES:
            match = re.fullmatch(pattern, f"{self.command} {parts.path}")
            if match:
                act(self, server, *match.groups())
                return
        self.reply(404)

    def _is_allowed(self, who):
        server = self.server
        if urlsplit(self.path).path == "/token":
            form = parse_qs(self.body.decode())
            good = (
                not server.user
                or who == _basic(server)
                or form.get("refresh_token") == [server.password]
            )
            self.reply(
                200 if good else 401,
                json.dumps({"token": server.token}).encode() if good else b"{}",
            )
            return False
        wanted = f"Bearer {server.token}" if server.realm else _basic(server) if server.user else ""
        if not wanted or who == wanted:
            return True
        challenge = (
            f'Bearer realm="{server.realm}",service="s",scope="repository:team/kernels:pull,push"'
            if server.realm
            else 'Basic realm="r"'
        )
        error = {"errors": [{"code": "UNAUTHORIZED", "message": f"you are not {who}"}]}
        self.reply(401, json.dumps(error).encode(), {"WWW-Authenticate": challenge})
        return False

    def _put_manifest(self, server, reference):
        kept = {"Docker-Content-Digest": digest_of(self.body)}
        server.manifests[digest_of(self.body)] = (self.body, self.headers["Content-Type"])
        if not reference.startswith("sha256:"):
            server.tags[reference] = digest_of(self.body)
        subject = json.loads(self.body).get("subject")
        if server.lists_referrers and subject:
            kept["OCI-Subject"] = subject["digest"]
        self.reply(201, headers=kept)

    def _get_manifest(self, server, reference):
        found = server.manifests.get(server.tags.get(reference, reference))
        if found is None:
            self.reply(404)
        else:
            self.reply(
                200,
                found[0],
                {"Content-Type": found[1], "Docker-Content-Digest": digest_of(found[0])},
            )

    def _get_blob(self, server, digest):
        self.reply(200 if digest in server.blobs else 404, server.blobs.get(digest, b""))

    def _start_upload(self, server):
        self.reply(202, headers={"Location": f"{self.path}1?state=x"})

    def _put_blob(self, server):
        digest = parse_qs(urlsplit(self.path).query)["digest"][0]
        assert digest_of(self.body) == digest
        server.blobs[digest] = self.body
        self.reply(201)

    def _list_referrers(self, server, digest):
        if not server.lists_referrers:
            self.reply(404)
            return
        found = [
            {
                "mediaType": kind,
                "digest": name,
                "size": len(data),
                "artifactType": json.loads(data)["artifactType"],
            }
            for name, (data, kind) in server.manifests.items()
            if (json.loads(data).get("subject") or {}).get("digest") == digest
        ]
        self.reply(
            200,
            json.dumps({"schemaVersion": 2, "manifests": found}).encode(),
            {"Content-Type": INDEX},
        )

    def _list_tags(self, server):
        asked = parse_qs(urlsplit(self.path).query)
        after, number = asked.get("last", [""])[0], int(asked["n"][0])
        tags = [tag for tag in sorted(server.tags) if tag > after]
        following = (
            f'</v2/team/kernels/tags/list?n={number}&last={tags[number - 1]}>; rel="next"'
            if len(tags) > number
            else ""
        )
        self.reply(
            200,
            json.dumps({"tags": tags[:number]}).encode(),
            {"Link": following} if following else {},
        )

    def log_message(self, *_):
        """Tests read `requests`."""

    do_GET = do_PUT = do_POST = do_HEAD = _serve


def _basic(server):
    return "Basic " + base64.b64encode(f"{server.user}:{server.password}".encode()).decode()


_NAME = "/v2/team/kernels"
_ROUTES = (
    (rf"PUT {_NAME}/manifests/([^/]+)", _Handler._put_manifest),
    (rf"(?:GET|HEAD) {_NAME}/manifests/([^/]+)", _Handler._get_manifest),
    (rf"(?:GET|HEAD) {_NAME}/blobs/([^/]+)", _Handler._get_blob),
    (rf"POST {_NAME}/blobs/uploads/", _Handler._start_upload),
    (rf"PUT {_NAME}/blobs/uploads/1", _Handler._put_blob),
    (rf"GET {_NAME}/referrers/([^/]+)", _Handler._list_referrers),
    (rf"GET {_NAME}/tags/list", _Handler._list_tags),
)


def debian_binary():
    """Return the path of a registry: on PATH, or Debian's, unpacked into the user's cache; skips
    aloud where neither is to be had.
    """
    found = next(filter(None, map(shutil.which, _BINARIES)), None)
    kept = _CACHE / "docker-registry" / "usr" / "bin" / "docker-registry"
    if found or kept.is_file():
        return found or str(kept)
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        pytest.skip("no docker-registry here, and no apt-get to fetch Debian's")
    folder = _CACHE / f"download-{os.getpid()}"
    folder.mkdir(parents=True)
    try:
        done = subprocess.run(
            ["apt-get", "download", "docker-registry"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=90,
        )
        packages = sorted(folder.glob("*.deb"))
        if done.returncode or not packages:
            pytest.skip(
                "no docker-registry here, and Debian's cannot be fetched:"
                f" {done.stderr.strip()[-200:]}"
            )
        subprocess.run(["dpkg", "-x", str(packages[0]), str(folder / "tree")], check=True)
        with contextlib.suppress(OSError):  # another process was first
            (folder / "tree").rename(kept.parents[2])
    except subprocess.TimeoutExpired:
        pytest.skip("no docker-registry here, and apt-get does not end")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return str(kept)


def certificate(folder):
    """Make a key and a certificate for 127.0.0.1, in one file; they are in the files `k` and `c`,
    too.
    """
    path = folder / "server.pem"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=127.0.0.1",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-keyout",
            str(folder / "k"),
            "-out",
            str(folder / "c"),
        ],
        check=True,
        capture_output=True,
    )
    path.write_text((folder / "k").read_text() + (folder / "c").read_text())
    return path


@contextlib.contextmanager
def debian_registry(folder, htpasswd="", tls=None):
    """Start a registry that keeps its data in a folder, and yield its host and port; it is ended by
    its process.  `tls` is a file with a key and a certificate.
    """
    binary = debian_binary()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {
        "version": 0.1,
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
        "http": {"addr": f"127.0.0.1:{port}"},
    }
    if htpasswd:
        (folder / "htpasswd").write_text(htpasswd)
        settings["auth"] = {"htpasswd": {"realm": "tests", "path": str(folder / "htpasswd")}}
    if tls is not None:
        settings["http"]["tls"] = {"certificate": str(tls), "key": str(tls)}
    (folder / "config.yml").write_text(json.dumps(settings))  # JSON is YAML
    process = subprocess.Popen(
        [binary, "serve", str(folder / "config.yml")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert process.poll() is None, "the registry ended"
            assert time.monotonic() < until, "the registry does not listen"
            time.sleep(0.02)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)
