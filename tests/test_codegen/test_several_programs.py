# SPDX-License-Identifier: Apache-2.0
"""Several programs in one bundle: each launches kernels of its own, and they share weights."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from dataclasses import replace  # noqa: E402

from bundler.codegen.emit import _holding  # noqa: E402
from bundler.codegen.program import GenerateOptions, build_programs, generate  # noqa: E402
from bundler.errors import CannotLaunchStatically, ConfigError, NotFound  # noqa: E402
from bundler.format.bundle_union import merge  # noqa: E402
from bundler.runtime import DeviceMemory, DryDriver  # noqa: E402
from bundler.runtime.program.bundle_programs import load_program, load_programs  # noqa: E402
from bundler.runtime.program.graph_replay import GraphRunner  # noqa: E402

CONSTANTS = {"constant0": np.ones(48, "float32")}


class Net(torch.nn.Module):
    """Two functions of one weight, whose kernels have one name and take the same arguments."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((48,), 2.0), requires_grad=False)


class More(Net):
    def forward(self, x):
        return x * self.scale + 3.0


class Less(Net):
    def forward(self, x):
        return x * self.scale + 5.0


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    sources = str(tmp_path_factory.mktemp("sources"))
    return [
        generate(net(), [torch.ones(4, 48)], options=GenerateOptions(name, sources))
        for net, name in ((More, "more"), (Less, "less"))
    ]


@pytest.fixture(scope="module")
def bundle(made):
    return build_programs(made, ["cuda:90", "hip:gfx942"])


def images(driver):
    return {module.image for module in driver.modules}


def test_a_bundle_lists_its_programs_and_each_launches_its_own_kernels(made, bundle):
    """Kernels of one name and signature are those of the text that the plan was made with."""
    assert list(made[0].kernels) == list(made[1].kernels)
    assert bundle.programs == ("less", "more")
    for name, program in zip(("more", "less"), made, strict=True):
        alone, among = DryDriver(), DryDriver()
        for driver, where in ((alone, program.build(["cuda:90"])), (among, bundle)):
            loaded = load_program(where, name=name, driver=driver, constants=CONSTANTS)
            loaded(np.ones((4, 48), "float32"))
        assert images(alone) == images(among)
        assert len(images(among)) == 1


def test_programs_that_are_loaded_together_copy_weights_once(bundle, tmp_path):
    """And run on one memory; each has all of its weights."""
    safetensors = pytest.importorskip("safetensors.numpy")
    safetensors.save_file({"scale": np.ones(48, "float32")}, tmp_path / "w.safetensors")
    driver = DryDriver()
    memory = DeviceMemory(driver=driver)
    loaded = load_programs(bundle, memory=memory, weights=tmp_path / "w.safetensors")
    assert list(loaded) == ["less", "more"]
    assert memory.pool.allocations == 1
    (address,) = memory.pool.live
    x = memory.put(np.ones((4, 48), "float32"))
    results = [loaded[name](x)[0] for name in ("more", "less")]
    assert len({result.address for result in results}) == 2
    assert all(address.to_bytes(8, "little") in one.parameters for one in driver.launches)
    assert len(images(driver)) == 2
    with pytest.raises(NotFound, match="no program 'most' in the bundle; there are less, more"):
        load_programs(bundle, ["most"], memory=memory)
    with pytest.raises(NotFound, match="no program ''"):
        load_program(bundle, memory=memory)


def test_programs_are_graphs_and_have_constants_by_their_names(bundle):
    """One that is not loaded is refused."""
    driver, constants = DryDriver(), dict.fromkeys(("more", "less"), CONSTANTS)
    loaded = load_programs(bundle, driver=driver, constants=constants, graphs="more")
    kinds = {name: isinstance(one, GraphRunner) for name, one in loaded.items()}
    assert kinds == {"less": False, "more": True}
    both = load_programs(bundle, driver=driver, constants=constants, graphs=True)
    assert all(isinstance(one, GraphRunner) for one in both.values())
    for wrong in ({"graphs": ["most"]}, {"constants": {"most": CONSTANTS}}):
        with pytest.raises(
            NotFound, match="'most': expected one of those that are loaded, less, m"
        ):
            load_programs(bundle, driver=driver, **wrong)


def test_a_plan_that_does_not_say_which_kernel_is_its_own_is_refused(made, bundle):
    """One of an earlier version, beside another program's kernels of that name."""
    plan = load_program(bundle, name="more", driver=DryDriver(), constants=CONSTANTS).plan
    kernels = {name: replace(entry, functions="") for name, entry in plan.kernels.items()}
    old = _holding("old", replace(plan, kernels=kernels))
    with pytest.raises(CannotLaunchStatically, match="several programs of the bundle"):
        load_program(merge([bundle, old]), name="old", driver=DryDriver(), constants=CONSTANTS)
    alone = merge([made[0].build(["cuda:90"]), old])
    load_program(alone, name="old", driver=DryDriver(), constants=CONSTANTS)


def test_programs_of_one_name_are_refused(made):
    for wrong in ([made[0], made[0]], []):
        with pytest.raises(ConfigError, match="names of their own"):
            build_programs(wrong, ["cuda:90"])
