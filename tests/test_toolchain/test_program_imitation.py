# SPDX-License-Identifier: Apache-2.0
"""A machine with a GPU, imitated: what torch, its tensors and Triton's driver say, and that all of
it is undone.
"""

import sys

import pytest

from bundler.errors import ConfigError
from bundler.format.entries import Target
from bundler.toolchain.program_imitation import Replacements
from bundler.toolchain.target_devices import device_of

H100, MI300 = Target("cuda", "90"), Target("hip", "gfx942", 64)


@pytest.fixture
def torch():
    pytest.importorskip("triton")
    return pytest.importorskip("torch")


@pytest.fixture
def imitate(torch):
    """Imitate a target's GPU; returns the imitation, to be entered."""
    from bundler.toolchain.program_imitation import ProgramImitation

    def make(target=H100, **properties):
        return ProgramImitation(target, properties, lambda *_: None, lambda *_: None)

    return make


@pytest.mark.toolchain
def test_libraries_see_the_device_of_the_target(torch, imitate):
    """What libraries ask when they are imported, torch and Triton answer for the target."""
    from triton.runtime.driver import driver

    with imitate() as imitation:
        properties = torch.cuda.get_device_properties(0)
        assert (
            torch.cuda.is_available(),
            torch.cuda.device_count(),
            torch.cuda.current_device(),
        ) == (True, 1, 0)
        assert torch.cuda.get_device_capability() == (9, 0) == (properties.major, properties.minor)
        assert torch.cuda.get_device_name().startswith("NVIDIA H")
        assert properties.multi_processor_count == 132
        assert driver.active.get_current_target().arch == 90
        assert driver.active.utils.get_device_properties(0)["max_shared_mem"] == 232448
        assert not hasattr(driver.active, "launcher_cls")
    assert imitation.asked_in_vain == ("launcher_cls",)


@pytest.mark.toolchain
def test_streams_and_events_do_nothing(torch, imitate):
    """Streams, events, graphs, devices and memory statistics work, and measure the same for
    everything.
    """
    with imitate(), torch.cuda.device(0), torch.cuda.stream(torch.cuda.Stream()):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
        end.record()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = torch.ones(3, device="cuda")
        graph.replay()
        assert begin.elapsed_time(end) == 1.0
        assert made.device == torch.device("cuda", 0)
        assert torch.cuda.mem_get_info()[0] == torch.cuda.get_device_properties(0).total_memory


@pytest.mark.toolchain
def test_an_amd_target_is_one_to_torch(torch, imitate):
    """For an AMD target torch says that it is built for HIP, on a device called cuda."""
    before = torch.version.hip
    with imitate(MI300):
        assert torch.version.hip
        assert torch.cuda.get_device_properties(0).gcnArchName == "gfx942"
        assert torch.cuda.get_device_properties(0).warp_size == 64
    assert torch.version.hip == before


@pytest.mark.toolchain
def test_everything_is_as_before_afterwards(torch, imitate):
    """After the block, and after one that raised, torch and Triton are as they were."""
    import triton

    watched = [
        (torch.cuda, "is_available"),
        (torch.cuda, "Event"),
        (torch.Tensor, "to"),
        (torch.Tensor, "cpu"),
        (triton.JITFunction, "run"),
        (triton.runtime.autotuner.Autotuner, "do_bench"),
        (triton.testing, "do_bench"),
        (torch._subclasses.FakeTensor, "__torch_dispatch__"),
        (sys.modules["triton.runtime.driver"].driver, "_active"),
    ]
    before = [vars(owner).get(name, "inherited") for owner, name in watched]
    with imitate():
        assert [vars(owner).get(name, "inherited") for owner, name in watched] != before
    with pytest.raises(ZeroDivisionError), imitate():
        torch.zeros(1 // 0)
    assert [vars(owner).get(name, "inherited") for owner, name in watched] == before
    assert torch.zeros(2).tolist() == [0.0, 0.0]


@pytest.mark.toolchain
def test_tensors_move_as_on_a_machine_with_a_gpu(torch, imitate):
    """A tensor knows its device; moving it to where it is gives the tensor itself, and elsewhere a
    copy.
    """
    with imitate():
        here, there = torch.ones(4), torch.ones(4, device="cuda")
        assert (here.is_cuda, here.is_cpu, there.is_cuda, there.get_device()) == (
            False,
            True,
            True,
            0,
        )
        assert there.to("cuda") is there
        assert there.cuda() is there
        assert here.cpu() is here
        assert there.to(torch.float16).device == there.device
        assert (here.cuda().device.type, there.cpu().device.type, here.to(there).device.type) == (
            "cuda",
            "cpu",
            "cuda",
        )
        assert there.new_tensor([1]).device == there.device
        assert torch.nn.Linear(4, 4).to("cuda", torch.bfloat16).weight.dtype == torch.bfloat16


@pytest.mark.toolchain
def test_addresses_are_those_of_an_allocator(torch, imitate):
    """Storages begin at multiples of 512 bytes and differ; a view's address has its offset."""
    with imitate():
        x, other = torch.ones(8, 8, device="cuda"), torch.ones(8, 8, device="cuda")
        assert (x.data_ptr() % 512, other.data_ptr() % 512) == (0, 0)
        assert x.data_ptr() != other.data_ptr()
        assert x[1:, 3:].data_ptr() - x.data_ptr() == (8 + 3) * 4
        assert x.detach().data_ptr() == x.view(64).data_ptr() == x.data_ptr()


@pytest.mark.toolchain
def test_small_integers_are_known(torch, imitate):
    """Offsets and lengths that follow from a tensor with data are computed, through views and
    writes.
    """
    with imitate() as imitation:
        offsets = torch.tensor([0, 15, 100, 256], device="cuda", dtype=torch.int32)
        lengths = offsets.diff()
        assert lengths.tolist() == [15, 85, 156]
        assert ((lengths + 63) // 64).sum().item() == 6
        assert torch.cat([torch.arange(int(n)) for n in lengths[:1]]).shape == (15,)
        offsets[1:] = torch.full((3,), 7, device="cuda", dtype=torch.int32)
        assert offsets.numpy().tolist() == [0, 7, 7, 7]
        assert (offsets == 7).nonzero().flatten().tolist() == [1, 2, 3]
    assert imitation.guesses == {}


@pytest.mark.toolchain
def test_a_value_that_was_written_from_unknown_data_is_forgotten(torch, imitate):
    """Once unknown data is written to a known tensor, reading it is a guess, told with the line."""
    with imitate() as imitation:
        known = torch.zeros(2, device="cuda", dtype=torch.int64)
        view = known[:1]
        view.copy_(torch.randn(1, device="cuda").to(torch.int64))
        assert known[0].item() == 2
    [(place, what, taken)] = imitation.guesses
    assert (place.file, what, taken) == (__file__, "item", "2")


@pytest.mark.toolchain
def test_guesses_are_those_of_the_documentation(torch, imitate):
    """True for a truth, 2 for an integer, 1.0 for a float; masks select everything; all elements
    are unique.
    """
    with imitate() as imitation:
        x = torch.randn(6, device="cuda")
        whole = x.to(torch.int64)
        assert (bool(x[0] > 0), whole[0].item(), x[0].item()) == (True, 2, 1.0)
        assert (torch.equal(x, x + 1), torch.allclose(x, x + 1)) == (True, True)
        assert (x[x > 0].shape, x.masked_select(x > 0).shape, x.unique().shape) == (
            (6,),
            (6,),
            (6,),
        )
        assert torch.repeat_interleave(whole).shape == (6,)
        assert x.tolist() == [1.0] * 6
        assert f"{x.sum():.2f}" == "1.00"
    assert sum(imitation.guesses.values()) >= 10


@pytest.mark.toolchain
def test_autocast_casts(torch, imitate):
    """Within autocast a matrix product is in the lower type and a softmax in float32, and so is the
    backward.
    """
    with imitate():
        layer, x = torch.nn.Linear(8, 8).cuda(), torch.randn(4, 8, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = layer(x)
            assert (out.dtype, out.softmax(-1).dtype, (x @ x.T).dtype) == (
                torch.bfloat16,
                torch.float32,
                torch.bfloat16,
            )
            with torch.autocast("cuda", enabled=False):
                assert layer(x).dtype == torch.float32
        out.sum().backward()
        assert layer.weight.grad.dtype == torch.float32
        assert layer(x).dtype == torch.float32


@pytest.mark.toolchain
def test_torch_compile_leaves_the_code_as_it_is(torch, imitate):
    """`torch.compile`, of a function, as a decorator and of a module, gives the code itself, which
    is told.
    """
    with imitate() as imitation:
        function = torch.compile(lambda x: x + 1, mode="max-autotune")
        assert function(torch.ones(3, device="cuda")).shape == (3,)
        assert torch.compile(dynamic=True)(function) is function
        module = torch.nn.Linear(3, 3).cuda()
        module.compile()
        assert module(torch.ones(3, device="cuda")).shape == (3,)
    assert {what for _, what, _ in imitation.guesses} == {"torch.compile"}


@pytest.mark.toolchain
def test_what_was_real_before_can_be_used(torch, imitate):
    """A module and a tensor made before the block are taken into it, and moved to its device."""
    module, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    with imitate():
        assert module.cuda()(x.cuda()).device.type == "cuda"
        assert (x + torch.ones(4)).shape == (2, 4)
    assert x.tolist() == [[1.0] * 4] * 2


def test_a_device_that_no_table_has_is_assumed():
    """A target without a device in the table gets one, and that is said; what a caller gives
    counts.
    """
    device, assumed = device_of(Target("cuda", "101"))
    assert (device.name, "cuda:101 is in no table" in assumed) == ("cuda:101", True)
    device, assumed = device_of(H100, {"multi_processor_count": 114})
    assert (device.multi_processor_count, assumed) == (114, None)


@pytest.mark.parametrize(
    "properties", [{"sm_count": 1}, {"multi_processor_count": "132"}, {"name": 5}]
)
def test_properties_are_checked(properties):
    """A property that does not exist, or has another type, is refused by its name."""
    with pytest.raises(ConfigError, match=next(iter(properties))):
        device_of(H100, properties)


def test_replaced_attributes_are_put_back_in_order():
    """The first value comes back, whatever was put after it, and an attribute that was inherited is
    inherited again.
    """

    class Base:
        value = 1

    class Child(Base):
        pass

    with Replacements() as changes:
        changes.put_all(Child, {"value": 2})
        changes.put(Child, "value", 3)
        changes.put(Base, "value", 4)
        assert (Child.value, Base.value) == (3, 4)
    assert (Base.value, "value" in vars(Child)) == (1, False)
