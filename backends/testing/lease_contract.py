# SPDX-License-Identifier: Apache-2.0
"""`LeaseContract`: the contract of leases, for byte stores that have them; a part of
`BackendContract`.
"""

from __future__ import annotations

import os
import time
from functools import partial

from bundler.backends.port import Backend
from bundler.backends.testing.contract_hooks import (
    INVALID_KEYS,
    THREADS,
    ContractHooks,
    eventually,
    granted,
    in_threads,
    is_refused,
)


class LeaseContract(ContractHooks):
    """What a store does with leases."""

    def test_a_lease_is_exclusive(self, backend: Backend, leasing: Backend) -> None:
        """While a lease is held nobody gets it, on any handle; others are free, and it is when
        given back.
        """
        mine = granted(leasing.lease("k", 60))
        assert leasing.lease("k", 60) is None
        with self.reopen(backend) as other:
            assert other.lease("k", 60) is None
            assert granted(other.lease("k/other", 60)).release()
            assert mine.release()
            assert granted(other.lease("k", 60)).release()

    def test_a_lease_given_back_is_gone(self, leasing: Backend) -> None:
        """It is given back once, and not prolonged afterwards."""
        mine = granted(leasing.lease("k", 60))
        assert mine.renew(60)
        assert [mine.release(), mine.release(), mine.renew(60)] == [True, False, False]

    def test_a_lease_expires(self, leasing: Backend) -> None:
        """When its time is over, somebody else gets it."""
        assert leasing.lease("k", self.clock_step_s) is not None
        assert eventually(lambda: leasing.lease("k", 60)) is not None

    def test_a_late_holder_disturbs_nobody(self, leasing: Backend) -> None:
        """Who wakes after the expiry can neither prolong nor give back the next holder's lease."""
        late = granted(leasing.lease("k", self.clock_step_s))
        mine = granted(eventually(lambda: leasing.lease("k", 60)))
        assert [late.renew(60), late.release()] == [False, False]
        assert leasing.lease("k", 60) is None
        assert mine.release()

    def test_a_renewed_lease_lasts_longer(self, leasing: Backend) -> None:
        """Renewing counts from now, for longer or for shorter."""
        mine = granted(leasing.lease("k", self.lease_s))
        assert mine.renew(60)
        time.sleep(self.lease_s)
        assert leasing.lease("k", 60) is None
        assert mine.renew(self.clock_step_s)
        assert eventually(lambda: leasing.lease("k", 60)) is not None

    def test_one_of_many_gets_a_lease(self, leasing: Backend) -> None:
        """Of threads that ask for one lease at once exactly one gets it."""
        leases = in_threads([lambda: leasing.lease("k", 60)] * THREADS)
        assert sum(lease is not None for lease in leases) == 1

    def test_leases_have_keys_too(self, leasing: Backend) -> None:
        """A lease is called by a key."""
        assert [
            key for key in INVALID_KEYS if not is_refused(partial(leasing.lease, key, 60))
        ] == []

    def test_leases_that_are_held_are_listed(self, leasing: Backend) -> None:
        """Where a store knows its leases, each is listed with its key, holder and time left as long
        as it is held.
        """
        mine = granted(leasing.lease("v1/c/A", 60))
        held = list(leasing.leases())
        if type(leasing).leases is Backend.leases:
            assert held == []
            return
        ((key, holder, left_s),) = held
        assert (key, holder.rpartition(":")[2]) == ("v1/c/A", str(os.getpid()))
        assert left_s is not None
        assert left_s > 0
        assert mine.release()
        assert list(leasing.leases()) == []

    def test_leases_do_not_share_keys(self, backend: Backend, leasing: Backend) -> None:
        """A lease, an object and a ref of one key know nothing of each other."""
        mine = granted(leasing.lease("a", 60))
        assert (list(backend.list()), list(backend.list_refs())) == ([], [])
        assert backend.put({"a": b"1"}) == {"a"}
        assert backend.swap_ref("a", None, b"2")
        assert mine.release()
        assert (backend.get(["a"]), backend.read_ref("a")) == ({"a": b"1"}, b"2")
