# SPDX-License-Identifier: Apache-2.0
"""Splitting what is sent: nothing is lost, the order stays, and no batch is over a bound."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from bundler.backends.batches import batches

ITEMS = st.lists(st.integers(0, 50), max_size=60)


@given(ITEMS, st.integers(1, 10), st.integers(1, 120), st.integers(1, 300))
def test_batches_hold_all_within_their_bounds(items, most, most_bytes, most_if_alike):
    """Every item comes once, in order; a batch of more than one item keeps each bound, and the next
    item would break one.
    """

    def size(item):
        return item

    def fits(batch):
        return (
            len(batch) <= most
            and sum(map(size, batch)) <= most_bytes
            and len(batch) * max(map(size, batch)) <= most_if_alike
        )

    found = list(batches(items, most, most_bytes, size, most_if_alike=most_if_alike))
    assert [item for batch in found for item in batch] == items
    assert all(batch and (len(batch) == 1 or fits(batch)) for batch in found)
    assert not any(fits([*batch, after[0]]) for batch, after in itertools.pairwise(found))


def test_a_batch_is_made_when_it_is_wanted():
    """Items are taken from their source only as far as the batch that is asked for needs them."""
    taken = []
    found = batches((taken.append(item) or item for item in range(100)), 3)
    assert (next(found), taken) == ([0, 1, 2], [0, 1, 2])
