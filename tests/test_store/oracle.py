# SPDX-License-Identifier: Apache-2.0
"""Bundles to store, a look behind the store, and byte stores that count, order or fail; the oracles
share no code with ours.
"""

import base64
import contextlib
import hashlib
import os
import random
import threading
import time
from pathlib import Path

import msgpack
import store_builders as build
import zstandard

from bundler.backends.backend_errors import BackendDenied, BackendFull, BackendUnavailable
from bundler.backends.memory import MemoryBackend
from bundler.backends.port import Backend
from bundler.lifecycle.machine_store import Store

DAY_S = 24 * 3600


# ------------------------------------------------------------------------------------------ Bundles


def bundle(*seeds, name="k", source="a.py", **kernel):
    """Return a bundle of kernels with these keys; one seed gives one kernel, always the same."""
    files = build.Files()
    return files.bundle(
        *(files.kernel(seed, name, source=f"{source} {seed}", **kernel) for seed in seeds)
    )


def real_keys(*seeds):
    """Return the keys of kernels of `restorable`."""
    return {
        base64.b32encode(hashlib.sha256(str(seed).encode()).digest()).decode().rstrip("=")
        for seed in seeds
    }


def restorable(*seeds, each=40, extra=None):
    """Return a bundle of kernels that can be restored, with binaries of so many bytes that nothing
    compresses.
    """
    files, made = build.Files(), []
    for seed in seeds:
        target = {"backend": "cuda", "arch": 90, "warp_size": 32}
        document = {"target": target, "hash": hashlib.sha256(str(seed).encode()).hexdigest()}
        contents = {"k.cubin": b"\x7fELF\0" + random.Random(seed).randbytes(each), **(extra or {})}
        (key,) = real_keys(seed)
        made.append(files.kernel(source=f"a.py {seed}", metadata=document, extra=contents, key=key))
    return files.bundle(*made)


def kernels(found):
    """Return the keys of a bundle's kernels."""
    return {kernel.key for kernel in found.kernels}


def keys(*seeds):
    """Return the keys of these kernels."""
    return {build.key(seed) for seed in seeds}


def contents(found):
    """Return {path: bytes} of everything in a bundle, each file checked against the digest that the
    bundle gives it.
    """
    files = build.read_all(found)
    digests = {f"{k.key}/{a.filename}": a.digest for k in found.kernels for a in k.artifacts}
    for entry in (*found.tuning_files, *found.helpers, *found.opaque):
        digests[entry.path] = entry.artifact.digest
    assert {
        path: f"sha256:{hashlib.sha256(data).hexdigest()}" for path, data in files.items()
    } == digests
    return files


def newer():
    """Return a bundle that a newer minor version wrote, with a field that this one does not
    know.
    """
    import bundler

    parts = build.Parts.of(bundle("A").to_bytes())
    parts.minor = 9
    parts.put([*parts.document(), "new"])
    return bundler.Bundle.from_bytes(parts.join())


# --------------------------------------------------------------------------------- Behind the store


def raw(store):
    """Return {key: stored bytes} of every object, read behind the store's back."""
    backend = innermost(store)
    if isinstance(backend, MemoryBackend):
        return {key: data for key, (data, _) in backend._objects.items()}
    return {key: path.read_bytes() for key, path in files(backend.root).items()}


def innermost(store):
    """Return the byte store below all wrappers."""
    backend = store._backend
    while hasattr(backend, "inner"):
        backend = backend.inner
    return backend


def files(root):
    """Return {key: path} of every object of a local store."""
    found = {}
    for path in Path(root, "data").rglob("*"):
        if path.is_file():
            parts = path.relative_to(Path(root, "data")).parts
            found["/".join((*parts[:-2], parts[-1]))] = path
    return found


def entry_of(kernel):
    """Return the key under which a store says which bundle has a kernel."""
    return f"v1/b/{kernel.key}"


def overwrite(store, key, data):
    """Put bytes in the place of an object, or a new object, behind the store's back."""
    backend = innermost(store)
    if isinstance(backend, MemoryBackend):
        backend._objects[key] = (data, time.time())
        return
    path = files(backend.root).get(key)
    if path is None:
        *folders, last = key.split("/")
        path = Path(
            backend.root,
            "data",
            *folders,
            "+" + hashlib.sha256(last.encode()).hexdigest()[:2],
            last,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def drop(store, *gone):
    """Remove objects behind the store's back."""
    assert innermost(store).delete(gone) == set(gone)


def flip(store, key, position=None):
    """Flip a bit of an object, in the middle unless told where."""
    data = bytearray(raw(store)[key])
    data[len(data) // 2 if position is None else position] ^= 4
    overwrite(store, key, bytes(data))


def age(store, seconds, *only):
    """Set the times of objects back; of all unless some are named."""
    backend = innermost(store)
    then = time.time() - seconds
    if isinstance(backend, MemoryBackend):
        backend._objects = {
            k: (d, then if not only or k in only else t) for k, (d, t) in backend._objects.items()
        }
        return
    for key, path in files(backend.root).items():
        if not only or key in only:
            os.utime(path, (then, then))


def of_kind(store, letter):
    """Return the sorted keys of units (u) or manifests (m)."""
    return sorted(key for key in raw(store) if key.startswith(f"v1/{letter}/"))


def unit_of(store, found, kernel_number=0, kind="cubin"):
    """Return the key of the unit that holds a kernel's file of a kind."""
    kernel = found.kernels[kernel_number]
    launch = {"cubin", "hsaco", "json"}
    wanted = next(a for a in kernel.artifacts if a.kind == kind)
    same = [a for a in kernel.artifacts if (a.kind in launch) == (wanted.kind in launch)]
    digests = sorted({bytes.fromhex(a.digest[7:]) for a in same})
    key = f"v1/u/{hashlib.sha256(b''.join(digests)).hexdigest()}"
    assert key in raw(store)
    return key


def manifest_of(store, tag):
    """Return the key of the manifest that a tag names."""
    version, manifest = msgpack.unpackb(innermost(store).read_ref(f"v1/t/{tag}"))
    assert version == 1
    return manifest


def manifest_of_hinting(store, tag):
    """Return the key of the manifest that a tag names which also names dictionaries, or not."""
    return msgpack.unpackb(innermost(store).read_ref(f"v1/t/{tag}"))[1]


def packed(value):
    """Return the bytes of a ref's value."""
    return msgpack.packb(value)


def sealed(payload, **options):
    """Return a stored value with any payload; told a second time, as the store's documentation
    says.
    """
    data = zstandard.ZstdCompressor(
        **{"write_checksum": True, "write_content_size": True, **options}
    ).compress(payload)
    return sealed_as_it_is(data)


def sealed_as_it_is(data):
    """Return a stored value whose compressed bytes are these."""
    return b"TBV1" + hashlib.sha256(data).digest() + data


def set_tag(store, tag, value):
    """Set the raw value of a tag."""
    backend = innermost(store)
    assert backend.swap_ref(f"v1/t/{tag}", backend.read_ref(f"v1/t/{tag}"), value)


# ---------------------------------------------------------- Byte stores that are not what they seem


class Wrapped(Backend):
    """Does what another byte store does; `around` is told each call and may do anything
    about it.
    """

    def __init__(self, inner, cheap=None):
        self.inner = inner
        self.reads_are_cheap = inner.reads_are_cheap if cheap is None else cheap

    def around(self, name, call, argument):
        """Make a call: its name, a function of its argument, the argument."""
        return call(argument)

    def get(self, keys, **how):
        return self.around("get", lambda k: self.inner.get(k, **how), list(keys))

    def put(self, items):
        return self.around("put", self.inner.put, dict(items))

    def exists(self, keys):
        return self.around("exists", self.inner.exists, list(keys))

    def delete(self, keys, unmodified_since_s=None):
        return self.around("delete", lambda k: self.inner.delete(k, unmodified_since_s), list(keys))

    def touch(self, keys):
        return self.around("touch", self.inner.touch, list(keys))

    def list(self, prefix=""):
        return iter(self.around("list", lambda p: list(self.inner.list(p)), prefix))

    def read_ref(self, key):
        return self.around("read_ref", self.inner.read_ref, key)

    def swap_ref(self, key, expected, value):
        return self.around("swap_ref", lambda v: self.inner.swap_ref(key, expected, v), value)

    def list_refs(self, prefix=""):
        return iter(self.around("list_refs", lambda p: list(self.inner.list_refs(p)), prefix))

    def now_s(self):
        return self.inner.now_s()

    def flush(self):
        return self.around("flush", lambda _: self.inner.flush(), None)

    def close(self):
        self.inner.close()


class Noting(Wrapped):
    """Notes each call and its argument."""

    def __init__(self, inner, cheap=None):
        super().__init__(inner, cheap)
        self.calls = []

    def around(self, name, call, argument):
        self.calls.append((name, argument))
        return call(argument)

    def named(self, *names):
        """Return the arguments of the calls with one of these names."""
        return [argument for name, argument in self.calls if name in names]


ERRORS = (BackendUnavailable, BackendFull, BackendDenied)


class Faulty(Wrapped):
    """Has one fault at its n-th call: `fails` before doing anything, `loses` the reply, or `flips`
    a bit on the way.
    """

    def __init__(self, inner, fault, at, cheap=None):
        super().__init__(inner, cheap)
        self.fault, self.at, self.number, self.struck = fault, at, -1, None

    def around(self, name, call, argument):
        self.number += 1
        if self.number != self.at:
            return call(argument)
        self.struck = name
        error = ERRORS[self.at % len(ERRORS)](f"{name}: a fault of the test's")
        if self.fault == "fails":
            raise error
        if self.fault == "loses":
            call(argument)
            raise error
        if name == "put":
            argument = {
                key: flipped(data) if key == max(argument) else data
                for key, data in argument.items()
            }
        answer = call(argument)
        if name == "get" and answer:
            return {
                key: flipped(data) if key == max(answer) else data for key, data in answer.items()
            }
        return flipped(answer) if name == "read_ref" and answer else answer


def flipped(data):
    """Return bytes with one bit changed."""
    return data[:-3] + bytes([data[-3] ^ 16]) + data[-2:]


class Denying(Wrapped):
    """Reads, and denies every change, as a store does that we may only read."""

    def around(self, name, call, argument):
        if name in {"put", "delete", "swap_ref"}:
            raise BackendDenied(f"{name} is not permitted")
        return None if name == "touch" else call(argument)


class Pausing(Wrapped):
    """Stops before or after its first call of a name until it is told to go on."""

    def __init__(self, inner, name, when):
        super().__init__(inner)
        self.name, self.when = name, when
        self.reached, self.go_on = threading.Event(), threading.Event()

    def around(self, name, call, argument):
        stops = name == self.name and not self.reached.is_set()
        if stops and self.when == "before":
            self._stop()
        answer = call(argument)
        if stops and self.when == "after":
            self._stop()
        return answer

    def _stop(self):
        self.reached.set()
        assert self.go_on.wait(60)


def wrapped(store, kind, *arguments, **choices):
    """Return a second store on the same bytes, through a wrapper."""
    return Store(kind(innermost(store), *arguments, **choices), store.name)


def copied(store):
    """Return a store in memory with a copy of what another one in memory holds."""
    source, made = innermost(store), MemoryBackend()
    made._objects, made._refs = dict(source._objects), dict(source._refs)
    return Store(made, store.name)


@contextlib.contextmanager
def running(call):
    """Run a call in a thread while the block runs; joined, and its error raised, at the end."""
    errors = []

    def run():
        try:
            call()
        except BaseException as error:  # noqa: BLE001  # raised again below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
