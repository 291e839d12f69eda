# SPDX-License-Identifier: Apache-2.0
"""A proxy on loopback that is as bad as networks are: slow, trickling, resetting, silent, or
speaking TLS.
"""

import contextlib
import datetime as dt
import ipaddress
import selectors
import socket
import ssl
import struct
import threading
import time

CHUNK = 65536


class Proxy:
    """Passes bytes between clients and a server; its attributes may be changed at any time.

    Args:
        target: where the server is: a path, or host and port.
        latency_s: added to each turn, from question to answer.
        trickle_s: answers come byte by byte, so far apart.
        silent: take everything and pass on nothing, from now on.
        reset_after: bytes of answers after which a connection is reset; None for never.
        tls: an `ssl.SSLContext` to speak with.
    """

    def __init__(
        self, target, latency_s=0.0, trickle_s=0.0, silent=False, reset_after=None, tls=None
    ):
        self.target, self.latency_s, self.trickle_s, self.silent = (
            target,
            latency_s,
            trickle_s,
            silent,
        )
        self.reset_after, self.tls = reset_after, tls
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._ended, self._threads = threading.Event(), []
        self._start(self._accept)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._ended.set()
        # Closing a listener does not wake who waits for it.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        self._listener.close()

    def url(self, server, user="writer", scheme="redis", query=""):
        """Return the URL of a server through this proxy."""
        return server.url(user, scheme, query=query).replace(f":{server.port}", f":{self.port}", 1)

    def _start(self, target, *arguments):
        self._threads.append(threading.Thread(target=target, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self):
        while not self._ended.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._start(self._serve, client)

    def _serve(self, client):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            stack.callback(client.close)
            if self.tls is not None:
                client.settimeout(5)
                client = self.tls.wrap_socket(client, server_side=True)
                stack.callback(client.close)
            server = stack.enter_context(_connected(self.target))
            self._pass(client, server)

    def _pass(self, client, server):
        answered, sent = True, 0
        with selectors.DefaultSelector() as selector:
            selector.register(client, selectors.EVENT_READ, (client, server))
            selector.register(server, selectors.EVENT_READ, (server, client))
            while not self._ended.is_set():
                for ready, _ in selector.select(0.02):
                    source, sink = ready.data
                    data = source.recv(CHUNK)
                    while (
                        source is client and isinstance(client, ssl.SSLSocket) and client.pending()
                    ):
                        data += client.recv(CHUNK)
                    if not data:
                        return
                    if self.silent:
                        continue
                    if source is client and answered:
                        self._ended.wait(self.latency_s)
                    answered = source is server
                    if answered and self.trickle_s:
                        self._trickle(sink, data)
                    else:
                        sink.sendall(data)
                    sent += len(data) if answered else 0
                    if self.reset_after is not None and sent >= self.reset_after:
                        # With a linger of 0 s closing is a reset.
                        client.setsockopt(
                            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                        )
                        return

    def _trickle(self, sink, data):
        for byte in data:
            if self._ended.wait(self.trickle_s):
                return
            sink.sendall(bytes([byte]))


def _connected(target):
    if isinstance(target, tuple):
        return socket.create_connection(target, 5)
    made = socket.socket(socket.AF_UNIX)
    made.connect(str(target))
    return made


class Certificates:
    """A certificate authority made now, for a folder."""

    def __init__(self, folder, name="test"):
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        self._x509, self._hashes, self._forms, self._ec = x509, hashes, serialization, ec
        self.folder, self.name = folder, name
        self._key, self._certificate = self._make(f"{name} authority", None)
        self.ca = self._write("ca.crt", self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name, address="127.0.0.1"):
        """Return the paths of a certificate for an address, and of its key."""
        key, certificate = self._make(name, address)
        forms = self._forms
        secret = key.private_bytes(
            forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption()
        )
        return self._write(
            f"{name}.crt", certificate.public_bytes(forms.Encoding.PEM)
        ), self._write(f"{name}.key", secret)

    def context(self, name="server", address="127.0.0.1", clients=False):
        """Return what a server speaks TLS with; with `clients` it asks them for certificates of
        ours.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.issue(name, address))
        if clients:
            context.load_verify_locations(self.ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _make(self, name, address):
        x509 = self._x509
        key = self._ec.generate_private_key(self._ec.SECP256R1())
        subject = x509.Name(
            [x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, f"{self.name} {name}")]
        )
        now = dt.datetime.now(dt.UTC)
        authority = address is None
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject if authority else self._certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if not authority:
            names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
            builder = builder.add_extension(names, critical=False)
        return key, builder.sign(key if authority else self._key, self._hashes.SHA256())

    def _write(self, name, data):
        path = self.folder / f"{self.name}-{name}"
        path.write_bytes(data)
        return str(path)


def took_s(call):
    """Return how long a call took."""
    started = time.monotonic()
    call()
    return time.monotonic() - started
