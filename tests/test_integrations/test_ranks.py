# SPDX-License-Identifier: Apache-2.0
"""A job of many ranks: each has a session of its own, and together they compile once, push one tag,
and fetch once a host.
"""

import plugged
import pytest
import redis_server

pytestmark = pytest.mark.slow

RANKS = 4
OWN = ("softmax", "gelu", "row_sum", "histogram")

_RANK = """
import bundler
with bundler.open_store(*os.environ["URLS"].split()) as store:
    with bundler.session(store, tag="job") as session:
        for name in ("layer_norm", os.environ["OWN"]):
            compile_one(name)
    counters = session.counters
    say([dict(counters.found), counters.compiles, dict(counters.errors), store.tiers[-1].hits])
"""


def _ranks(run, tmp_path, url):
    """Run all ranks of a host at the same time, and return what each said."""
    common = {
        "URLS": f"file://{tmp_path}/near{run} {url}",
        "TRITON_BUNDLER_LOCAL": tmp_path / "local",
    }
    cases = [
        {
            **common,
            "OWN": name,
            "LOCAL_RANK": rank,
            "TRITON_CACHE_DIR": tmp_path / f"cache{run}-{rank}",
        }
        for rank, name in enumerate(OWN)
    ]
    return [
        answer for answer, _ in plugged.run_forks(_RANK, cases, tmp_path / f"f{run}", together=True)
    ]


def test_ranks_compile_once_and_share_one_tag(tmp_path):
    """Four ranks compile what they share once; the tag has all; on another host each finds
    everything, fetched about once.
    """
    with redis_server.running(redis_server.NAMES[0]) as server:
        url = server.url(query="timeout_s=20&connect_timeout_s=20")
        first = _ranks(1, tmp_path, url)
        assert sum(compiles for _, compiles, _, _ in first) == RANKS + 1
        assert [errors for _, _, errors, _ in first] == [{}] * RANKS
        with plugged.opened(url) as store, store.pull("job") as bundle:
            assert len(bundle.kernels) == RANKS + 1
        second = _ranks(2, tmp_path, url)
    assert [answer[:3] for answer in second] == [[{"tag": 2}, 0, {}]] * RANKS
    # Units of five kernels, and the manifest; each rank for itself would have fetched them four
    # times.
    assert sum(fetched for *_, fetched in second) < 2 * (2 * (RANKS + 1) + 1)
