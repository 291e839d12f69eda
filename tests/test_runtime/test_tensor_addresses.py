# SPDX-License-Identifier: Apache-2.0
"""Where tensors lie is told alike by the extension and by Python, for torch's and others."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundler.runtime.launch.extension import EXTENSION
from bundler.runtime.program import tensor_addresses
from bundler.runtime.program.tensor_addresses import ALIGNED_BYTES
from bundler.toolchain.tensor_handles import find_handles

ADDRESSES = st.lists(st.sampled_from([0, 8, 16, 48, 0x7F00_0000_0000, 2**64 - 16]), min_size=1)


class Placed:
    """A tensor of no library."""

    def __init__(self, address):
        self.address = address

    def data_ptr(self):
        return self.address


@pytest.fixture(params=["python", "extension"])
def ways(request):
    """`misplaced` and `is_apart`, in Python or compiled."""
    if request.param == "python":
        made = tensor_addresses._misplaced, tensor_addresses._is_apart
    else:
        if EXTENSION is None:
            pytest.skip("the extension is not built")
        made = EXTENSION.misplaced, EXTENSION.is_apart
    return [partial(function, ALIGNED_BYTES) for function in made]


@given(addresses=ADDRESSES)
def test_both_ways_say_what_addresses_say(addresses):
    """Whether one is a multiple of 16 bytes, and whether another tensor is there, too."""
    if EXTENSION is None:
        pytest.skip("the extension is not built")
    values = list(map(Placed, addresses))
    places = tuple(range(len(values)))
    odd = [place for place in places if addresses[place] % ALIGNED_BYTES]
    assert EXTENSION.misplaced(ALIGNED_BYTES, values, places) == odd
    assert tensor_addresses._misplaced(ALIGNED_BYTES, values, places) == odd
    for address in (0, 16, 24, 48, 2**64 - 16):
        apart = address % ALIGNED_BYTES == 0 and (address == 0 or address not in addresses)
        for one in (EXTENSION.is_apart, tensor_addresses._is_apart):
            assert one(ALIGNED_BYTES, Placed(address), values, places) is apart


@pytest.mark.parametrize("told", [False, True])
def test_tensors_of_torch_are_read_where_they_lie(ways, told):
    """By their method, and by torch's functions of C once these were told."""
    torch = pytest.importorskip("torch")
    misplaced, is_apart = ways
    whole = torch.zeros(64)
    values = [whole, whole[1:], torch.nn.Parameter(whole[4:]), torch.empty(0), torch.zeros(64)]
    if told and EXTENSION is not None:
        EXTENSION.Launcher.tell_tensors(*find_handles())
    try:
        assert misplaced(values, (0, 1, 2, 3, 4)) == [1]
        assert misplaced(values, (4, 1)) == [1]
        assert not is_apart(whole.view(8, 8), values, (4, 0))
        assert not is_apart(whole[4:8], values, (2,))
        assert not is_apart(whole[1:], values, ())
        assert is_apart(torch.zeros(4), values, (0, 1, 2, 3, 4))
        assert is_apart(torch.empty(0), values, (3,))
        # The memory of another tensor, now.
        values[0].set_(torch.zeros(65)[1:])
        assert misplaced(values, (0, 2)) == [0]
        with pytest.raises(RuntimeError):
            misplaced([torch.eye(3).to_sparse()], (0,))
    finally:
        if EXTENSION is not None:
            EXTENSION.Launcher.tell_tensors((), None, 0, 0)


def test_what_is_no_tensor_and_no_place_is_an_error(ways):
    """Nothing is read behind a list, nor from what has no address."""
    misplaced, is_apart = ways
    for wrong in ((lambda: misplaced([], (0,))), (lambda: is_apart(Placed(16), [], (3,)))):
        with pytest.raises(IndexError):
            wrong()
    for wrong in ((lambda: misplaced([None], (0,))), (lambda: is_apart(object(), [], ()))):
        with pytest.raises(AttributeError):
            wrong()


def test_the_extension_refuses_what_it_cannot_read():
    """Other arguments than its own, and numbers that are no addresses."""
    if EXTENSION is None:
        pytest.skip("the extension is not built")
    one = Placed(16)
    for wrong in (
        lambda: EXTENSION.misplaced(16, [one]),
        lambda: EXTENSION.misplaced(16, (one,), (0,)),
        lambda: EXTENSION.misplaced(16, [one], [0]),
        lambda: EXTENSION.misplaced(16, [one], ("0",)),
        lambda: EXTENSION.misplaced("16", [one], (0,)),
        lambda: EXTENSION.is_apart(16, [one], (0,)),
        lambda: EXTENSION.misplaced(16, [Placed("16")], (0,)),
    ):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(ValueError, match="alignment from 1"):
        EXTENSION.misplaced(0, [one], (0,))
    with pytest.raises(IndexError):
        EXTENSION.misplaced(16, [one], (-1,))
    with pytest.raises(OverflowError):
        EXTENSION.misplaced(16, [Placed(2**64)], (0,))


def test_a_list_that_an_address_empties_is_still_read_safely():
    """A tensor whose method changes the values is kept while it is asked."""
    if EXTENSION is None:
        pytest.skip("the extension is not built")

    class Emptying(Placed):
        def data_ptr(self):
            values.clear()
            return self.address

    values = [Emptying(24), Placed(16)]
    with pytest.raises(IndexError):
        EXTENSION.misplaced(16, values, (0, 1))
