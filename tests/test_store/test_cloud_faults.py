# SPDX-License-Identifier: Apache-2.0
"""Object stores that fail in each way of the fault table: a typed error in time, no secret in it,
and nothing half restored.
"""

import time
import warnings

import oracle
import pytest

pytest.importorskip("obstore", reason="obstore is not installed: pip install '.[cloud]'")
import bundler
from bundler.errors import BundlerWarning, StoreUnavailable
from tools.cluster.cloud_faults import (
    CASES,
    CREDENTIALS,
    STORE_URL,
    failing,
    listing,
    with_table,
)
from tools.shared.object_server import ObjectServer

TIMEOUT_S = 0.5
# A restore, a push and a verify are a few calls each.
CALLS = 4
SLACK_S = 3.0
URL = f"{STORE_URL}?timeout_s={TIMEOUT_S}"
SECRETS = [CREDENTIALS["AWS_SECRET_ACCESS_KEY"], CREDENTIALS["AWS_SESSION_TOKEN"]]
# Those that take a moment each, and show each kind of error; the others run with the slow tests.
QUICK = {
    "nobody",
    "500",
    "wrong",
    "an expired",
    "no such",
    "307 to",
    "the catalog has",
    "packs come",
    "packs have",
    "each answer has",
}


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    """Credentials that no message may hold."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def objects():
    """What lies in a bucket after a push."""
    with pytest.MonkeyPatch.context() as patch, ObjectServer().serving() as server:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": server.endpoint}.items():
            patch.setenv(name, value)
        with bundler.open_store(STORE_URL) as store:
            store.push(oracle.restorable(*range(20), each=2000), "t")
        return dict(server.objects)


def restored(cache):
    """Restore the tag; returns how many kernels came, and the error."""
    with warnings.catch_warnings(), bundler.open_store(URL) as store:
        warnings.simplefilter("ignore", BundlerWarning)
        try:
            return len(store.restore("t", cache_dir=cache, only="all").restored), None
        except bundler.BundlerError as error:
            return 0, error


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=case.name, marks=[] if case.name.startswith(tuple(QUICK)) else pytest.mark.slow
        )
        for case in CASES
    ],
)
def test_a_restore_ends_in_time_and_says_what_is_wrong(case, objects, monkeypatch, tmp_path):
    """The error is the one of the table, holds no secret, and what is in the cache directory is
    whole.
    """
    if case.place == "tls":
        pytest.importorskip(
            "cryptography", reason="cryptography is not installed: pip install '.[test]'"
        )
    cache = tmp_path / "cache"
    with failing(case, objects, tmp_path) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        started = time.monotonic()
        count, error = restored(cache)
        assert time.monotonic() - started < case.seconds * TIMEOUT_S * CALLS + SLACK_S
    assert (type(error).__name__ if error else "", count) == (case.says, 0 if case.says else 20)
    assert not any(secret in str(error) for secret in SECRETS)
    whole = oracle.contents(oracle.restorable(*range(20), each=2000))
    found = {
        path.relative_to(cache).as_posix(): path.read_bytes() for path in cache.rglob("*.cubin")
    }
    assert found.items() <= whole.items()


@pytest.mark.slow
@pytest.mark.parametrize("after", range(8))
def test_a_server_that_dies_in_a_push_loses_nothing(after, objects, monkeypatch, tmp_path):
    """Whichever request it dies at: a typed error, what the tag named stays whole, and the next
    push completes.
    """
    from tools.cluster.cloud_faults import _dies_after

    more = oracle.restorable(*range(20, 25), each=2000)
    with ObjectServer().serving() as server:
        server.objects = dict(objects)
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        server.fault = _dies_after(after)(server)
        try:
            with bundler.open_store(URL) as store:
                store.push(more, "t")
        except StoreUnavailable:
            pass
        else:
            assert after > 3
        server.fault = lambda *_: None
        assert restored(tmp_path / "before")[0] in {20, 25}
        with bundler.open_store(STORE_URL) as store:
            store.push(more, "t")
            assert store.verify().sound
        assert restored(tmp_path / "after")[0] == 25


def test_a_redirect_takes_nothing_to_another_host(objects, monkeypatch, tmp_path):
    """No request reaches the other host: neither a signature nor the session token leaves the
    store's.
    """
    with ObjectServer().serving() as server, ObjectServer().serving() as other:
        from tools.shared.object_server import Answer

        place = other.endpoint.replace("127.0.0.1", "localhost")
        server.fault = lambda asked, _: Answer(307, {"Location": place + asked.path})
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        count, error = restored(tmp_path / "cache")
        assert (count, type(error)) == (0, StoreUnavailable)
        with bundler.open_store(URL) as store, pytest.raises(StoreUnavailable):
            store.push(oracle.bundle("A"), "t")
        assert other.requests == []


@pytest.mark.slow
def test_a_hundred_thousand_files_of_others_are_listed_in_bounded_memory():
    """A prune looks at all of them, in seconds and some megabytes."""
    found = listing(STORE_URL)
    assert found["files"] == 100_000
    assert found["seconds"] < 15
    assert found["peak_mb"] < 60


def test_the_table_in_the_docs_is_what_was_measured():
    """docs/stores.md has the table of docs/results/cloud-faults.json, with every case, and each as
    it is to be.
    """
    import json
    from pathlib import Path

    root = Path(__file__).resolve().parents[2]
    result = json.loads((root / "docs" / "results" / "cloud-faults.json").read_text())
    page = (root / "docs" / "stores.md").read_text()
    assert with_table(page, result) == page
    assert [(row["case"], row["error"]) for row in result["rows"]] == [
        (case.name, case.says) for case in CASES
    ]
    assert all(row["ok"] and len(row["warnings"]) <= 1 for row in result["rows"])
