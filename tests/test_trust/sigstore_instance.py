# SPDX-License-Identifier: Apache-2.0
"""An instance of Sigstore in memory, for tests: an authority that issues certificates, a log of
certificates, and a log of signatures.

Made with `cryptography` alone, by the standards: RFC 6962 for the logs, Sigstore's profile for the
certificates.
"""

import base64
import datetime as dt
import hashlib
import json
import struct

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

ISSUER = "https://issuer.example"
IDENTITY = "release@example.com"
_OIDC_ISSUER = x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.1")
_SCT_LIST = x509.ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")
_NOW = dt.datetime.now(dt.UTC).replace(microsecond=0)
_DAY = dt.timedelta(days=1)


def text(data):
    """Return base64, as in JSON."""
    return base64.b64encode(data).decode()


def spki(key):
    """Return a public key as DER."""
    return key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def canonical(value):
    """Return JSON of short texts and numbers as RFC 8785 writes it."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


class Instance:
    """Authority and logs, each with a key of its own."""

    def __init__(self):
        self.authority, self.certificates, self.log = (
            ec.generate_private_key(ec.SECP256R1()) for _ in range(3)
        )
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
        key_id = x509.SubjectKeyIdentifier.from_public_key(self.authority.public_key())
        self.root = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(self.authority.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(_NOW - _DAY)
            .not_valid_after(_NOW + _DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=1), critical=True)
            .add_extension(_usage(certificates=True), critical=True)
            .add_extension(key_id, critical=False)
            .sign(self.authority, hashes.SHA256())
        )

    def trust_root(self):
        """Return the JSON of a trust root."""
        valid = {"start": (_NOW - _DAY).strftime("%Y-%m-%dT%H:%M:%SZ")}

        def log(key, url):
            public = {
                "rawBytes": text(spki(key)),
                "keyDetails": "PKIX_ECDSA_P256_SHA_256",
                "validFor": valid,
            }
            return {
                "baseUrl": url,
                "hashAlgorithm": "SHA2_256",
                "publicKey": public,
                "logId": {"keyId": text(_digest(spki(key)))},
            }

        der = self.root.public_bytes(serialization.Encoding.DER)
        authority = {
            "subject": {"organization": "test", "commonName": "test authority"},
            "uri": "https://authority.invalid",
            "certChain": {"certificates": [{"rawBytes": text(der)}]},
            "validFor": valid,
        }
        return json.dumps(
            {
                "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
                "tlogs": [log(self.log, "https://log.invalid")],
                "ctlogs": [log(self.certificates, "https://ct.invalid")],
                "certificateAuthorities": [authority],
                "timestampAuthorities": [],
            }
        )

    def sign(self, data, identity=IDENTITY, issuer=ISSUER):
        """Return the bundle of a signature as an object of JSON."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._certificate(key, identity, issuer)
        signature = key.sign(data, ec.ECDSA(hashes.SHA256()))
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        body = canonical(
            {
                "apiVersion": "0.0.1",
                "kind": "hashedrekord",
                "spec": {
                    "data": {"hash": {"algorithm": "sha256", "value": _digest(data).hex()}},
                    "signature": {"content": text(signature), "publicKey": {"content": text(pem)}},
                },
            }
        )
        return {
            "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
            "verificationMaterial": {
                "certificate": {
                    "rawBytes": text(certificate.public_bytes(serialization.Encoding.DER))
                },
                "tlogEntries": [self._entry(body)],
            },
            "messageSignature": {
                "messageDigest": {"algorithm": "SHA2_256", "digest": text(_digest(data))},
                "signature": text(signature),
            },
        }

    def _certificate(self, key, identity, issuer):
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self.root.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(_NOW - dt.timedelta(minutes=5))
            .not_valid_after(_NOW + dt.timedelta(minutes=5))
            .add_extension(_usage(certificates=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False
            )
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.authority.public_key()),
                critical=False,
            )
            .add_extension(x509.SubjectAlternativeName([x509.RFC822Name(identity)]), critical=True)
            .add_extension(
                x509.UnrecognizedExtension(_OIDC_ISSUER, issuer.encode()), critical=False
            )
        )
        # The log signs the certificate as it is without the log's word in it.
        before = builder.sign(self.authority, hashes.SHA256()).tbs_certificate_bytes
        stamped = builder.add_extension(
            x509.UnrecognizedExtension(_SCT_LIST, self._scts(before)), critical=False
        )
        return stamped.sign(self.authority, hashes.SHA256())

    def _scts(self, certificate):
        stamp = struct.pack(">BBQH", 0, 0, int(_NOW.timestamp() * 1000), 1) + _digest(
            spki(self.authority)
        )
        length = len(certificate).to_bytes(3, "big")
        signature = self.certificates.sign(
            stamp + length + certificate + bytes(2), ec.ECDSA(hashes.SHA256())
        )
        sct = struct.pack(
            ">B32sQH", 0, _digest(spki(self.certificates)), int(_NOW.timestamp() * 1000), 0
        )
        sct += struct.pack(">BBH", 4, 3, len(signature)) + signature  # SHA-256, ECDSA
        entries = struct.pack(">H", len(sct)) + sct
        whole = struct.pack(">H", len(entries)) + entries
        return b"\x04" + _der_length(len(whole)) + whole

    def _entry(self, body):
        """Return the entry of a log that has nothing else in it."""
        root, log_id = _digest(b"\0" + body), _digest(spki(self.log))
        note = f"log.invalid - 1\n1\n{text(root)}\n"
        signed_note = text(log_id[:4] + self.log.sign(note.encode(), ec.ECDSA(hashes.SHA256())))
        time = int(_NOW.timestamp())
        promise = canonical(
            {"body": text(body), "integratedTime": time, "logID": log_id.hex(), "logIndex": 0}
        )
        return {
            "logIndex": "0",
            "logId": {"keyId": text(log_id)},
            "kindVersion": {"kind": "hashedrekord", "version": "0.0.1"},
            "integratedTime": str(time),
            "inclusionPromise": {
                "signedEntryTimestamp": text(self.log.sign(promise, ec.ECDSA(hashes.SHA256())))
            },
            "inclusionProof": {
                "logIndex": "0",
                "rootHash": text(root),
                "treeSize": "1",
                "hashes": [],
                "checkpoint": {"envelope": f"{note}\n\u2014 log.invalid {signed_note}\n"},
            },
            "canonicalizedBody": text(body),
        }


def _usage(*, certificates):
    return x509.KeyUsage(
        digital_signature=not certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=certificates,
        crl_sign=certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _der_length(length):
    short = 128
    if length < short:
        return bytes([length])
    data = length.to_bytes((length.bit_length() + 7) // 8, "big")
    return bytes([short | len(data)]) + data


def _digest(data):
    return hashlib.sha256(data).digest()
