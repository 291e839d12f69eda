# SPDX-License-Identifier: Apache-2.0
"""What is restored, where it goes, and what the report says of the rest."""

import os
import warnings
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import support

import bundler
from bundler.errors import BundlerWarning, ConfigError
from bundler.format.bundle import MemoryBlobs
from bundler.format.entries import Target, Toolchain
from bundler.format.manifest import Content, Observation, Observed
from bundler.toolchain import identity, ptxas, targets

SUFFIX = identity.extension_suffix()


@pytest.fixture
def rich(compiled, key, tmp_path):
    """A plain cache with a kernel, helper libraries of this and another Python, and a tuning
    result.
    """
    cache = support.plant(compiled.cache, tmp_path / "rich", [key])
    for folder, name in (
        ("B", f"launcher{SUFFIX}"),
        ("C", "launcher.cpython-27-vax.so"),
        ("D", "gelu_kernel.autotune.json"),
    ):
        (cache / (folder * 52)).mkdir()
        (cache / (folder * 52) / name).write_text(f"{folder}")
    with bundler.pack(cache) as packed:
        yield packed


@pytest.fixture
def inductor(compiled, tmp_path):
    """A bundle of an Inductor cache: one kernel for device 0, one for device 0 and 2, and files of
    torch's.
    """
    root = tmp_path / "inductor"
    gelu, softmax = compiled.keys_of("gelu_kernel"), compiled.keys_of("softmax_kernel")
    support.plant(compiled.cache, root / "triton" / "0", gelu + softmax)
    support.plant(compiled.cache, root / "triton" / "2", softmax)
    for path in ("ab/code.py", "ab/cabc.best_config"):
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text("{}")
    with bundler.pack(root) as packed:
        yield packed


@pytest.fixture
def where(monkeypatch, tmp_path):
    """Where Triton and Inductor look."""
    monkeypatch.setenv("TRITON_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    return tmp_path


def test_code_is_restored_only_when_trusted(rich, tmp_path):
    """Helper libraries are left out, with the reason, unless trust='code'; tuning results always
    go.
    """
    report = bundler.restore(rich, tmp_path / "there", only="all")
    assert report.companions == (f"{'D' * 52}/gelu_kernel.autotune.json",)
    assert [why for _, why in report.skipped] == [
        "it would be executed or unpickled; pass trust='code' if you trust who made the bundle"
    ] * 2
    assert not list((tmp_path / "there").glob("*/*.so"))
    trusting = bundler.restore(rich, tmp_path / "there", only="all", trust="code")
    assert (len(trusting.companions), trusting.skipped) == (3, ())
    assert (tmp_path / "there" / ("B" * 52) / f"launcher{SUFFIX}").read_text() == "B"


def test_a_helper_for_another_python_is_left_out(rich, tmp_path):
    """Even trusted, a library that this Python cannot load is skipped, unless everything is asked
    for.
    """
    report = bundler.restore(rich, tmp_path / "there", trust="code")
    ((name, why),) = report.skipped
    assert name == f"{'C' * 52}/launcher.cpython-27-vax.so"
    assert (
        why
        == f"built for another Python or platform; this one loads *{SUFFIX} on {identity.machine()}"
    )


def test_torchs_files_are_restored_only_when_trusted(inductor, tmp_path):
    """What torch executes or unpickles needs trust='code'; Inductor's tuning results do not."""
    report = bundler.restore(inductor, tmp_path / "there", only="all")
    assert report.companions == ("ab/cabc.best_config",)
    assert [name for name, _ in report.skipped] == ["ab/code.py"]
    bundler.restore(inductor, tmp_path / "there", only="all", trust="code")
    assert (tmp_path / "there" / "ab" / "code.py").read_text() == "{}"


def test_the_launch_set_needs_no_code_of_torch(inductor, tmp_path):
    """keep='launch' leaves out torch's files even when trusted, and the IR of the kernels."""
    report = bundler.restore(inductor, tmp_path / "there", only="all", trust="code", keep="launch")
    assert report.skipped == (("ab/code.py", "not needed to launch (keep='launch')"),)
    assert {Path(name).suffix for name in support.tree(tmp_path / "there" / "triton")} == {
        ".cubin",
        ".json",
    }


def placed(there):
    """Device -> names of kernels in an Inductor cache."""
    return {
        folder.name: sorted(support.one(path, ".cubin").stem for path in folder.iterdir())
        for folder in sorted((there / "triton").iterdir())
    }


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (None, {"0": ["gelu_kernel", "softmax_kernel"], "2": ["softmax_kernel"]}),
        ([1], {"1": ["gelu_kernel", "softmax_kernel"]}),
        (
            (3, 0, 3),
            {"0": ["gelu_kernel", "softmax_kernel"], "3": ["gelu_kernel", "softmax_kernel"]},
        ),
    ],
)
def test_inductors_kernels_go_to_the_devices_asked_for(inductor, tmp_path, devices, expected):
    """Kernels go to the devices they were seen on, or to those that are named; each counts once in
    the report.
    """
    report = bundler.restore(inductor, tmp_path / "there", devices=devices, only="all")
    assert placed(tmp_path / "there") == expected
    assert (len(report.restored), report.usable) == (2, 2)
    kernel_places = {str(tmp_path / "there" / "triton" / device) for device in expected}
    assert set(report.directories) == kernel_places | {str(tmp_path / "there")}
    assert all(support.is_whole(path) for path in (tmp_path / "there").glob("triton/*/*"))


@pytest.mark.parametrize("devices", [[], [-1], ["0"], "0", [True], [1.0], 1])
def test_devices_that_are_none_are_an_error(inductor, tmp_path, devices):
    """devices takes one or more device indices; anything else is a ConfigError and writes
    nothing.
    """
    with pytest.raises(ConfigError, match="devices"):
        bundler.restore(inductor, tmp_path / "there", devices=devices, only="all")
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(
    "argument", [{"keep": "ir"}, {"only": "some"}, {"trust": "everyone"}, {"cache_dir": ""}]
)
def test_wrong_arguments_are_errors(small, tmp_path, monkeypatch, argument):
    """A value that is not listed is a ConfigError that names the argument, and nothing is
    written.
    """
    monkeypatch.chdir(tmp_path)
    before = os.listdir(tmp_path)
    with pytest.raises(ConfigError, match=next(iter(argument))):
        bundler.restore(small, **{"cache_dir": tmp_path / "there", **argument})
    assert os.listdir(tmp_path) == before


def test_without_a_directory_plain_kernels_go_where_triton_looks_now(
    small, where, monkeypatch, key
):
    """cache_dir=None is Triton's directory at the moment of the call."""
    assert bundler.restore(small, only="all").directories == (
        str(where / "home" / ".triton" / "cache"),
    )
    monkeypatch.setenv("TRITON_CACHE_DIR", str(where / "later"))
    assert bundler.restore(small, only="all").directories == (str(where / "later"),)
    assert support.is_whole(where / "later" / key)


def test_without_a_directory_inductors_kernels_go_where_inductor_looks_now(
    inductor, where, monkeypatch
):
    """cache_dir=None is Inductor's directory for each device; TRITON_CACHE_DIR overrides it as it
    does for torch.
    """
    report = bundler.restore(inductor, only="all")
    assert placed(where / "torch") == {
        "0": ["gelu_kernel", "softmax_kernel"],
        "2": ["softmax_kernel"],
    }
    assert (where / "torch" / "ab" / "cabc.best_config").exists()
    assert report.directories == tuple(
        str(where / "torch" / name) if name else str(where / "torch")
        for name in ("", "triton/0", "triton/2")
    )
    monkeypatch.setenv("TRITON_CACHE_DIR", str(where / "pinned"))
    bundler.restore(inductor, only="all")
    assert len(list((where / "pinned").iterdir())) == 2


def test_a_kernel_seen_in_both_caches_goes_to_both(bundle, where, key):
    """A kernel that was seen in Triton's and in Inductor's cache is put in both; it counts once."""
    seen = Observation((1,), ("inductor", "triton"))
    both = bundler.Bundle(
        Content.of([k for k in bundle.kernels if k.key == key]), Observed({key: seen}), bundle.blobs
    )
    report = bundler.restore(both, only="all")
    assert report.directories == (
        str(where / "home" / ".triton" / "cache"),
        str(where / "torch" / "triton" / "1"),
    )
    assert report.restored == (key,)


def remade(bundle, **facts):
    """The bundle, made by another toolchain."""
    kernels = [
        replace(k, toolchain=msgspec.structs.replace(k.toolchain, **facts)) for k in bundle.kernels
    ]
    return bundler.Bundle(Content.of(kernels), bundle.observed, bundle.blobs)


def restore_nothing(bundle, there):
    """Restore a bundle of which nothing is usable; returns the report."""
    program = {"restore": bundler.restore, "bundle": bundle, "there": there}
    code = compile("report = restore(bundle, there)", "the_users_program.py", "exec")
    with pytest.warns(BundlerWarning, match="nothing in this bundle can be used here: ") as caught:
        exec(code, program)
    report = program["report"]
    assert len(caught) == 1
    assert caught[0].filename == "the_users_program.py"
    assert report.usable == 0
    # Which kernel comes first depends on its key, and on some releases that on where Triton is
    # installed.
    assert any(why in str(caught[0].message) for _, why in report.skipped)
    assert not there.exists() or os.listdir(there) == []
    return report


def test_kernels_of_another_release_are_left_out(small, tmp_path, key):
    """Kernels compiled by another Triton would never hit, so they are skipped, and one warning says
    why.
    """
    report = restore_nothing(remade(small, release="3.5.9"), tmp_path / "there")
    here = identity.installed_triton().release
    assert report.skipped == ((key, f"compiled by Triton 3.5.9; this machine has {here}"),)


def test_kernels_of_another_build_are_left_out(small, tmp_path, key):
    """The same release with another binary has other keys; the reason tells the two
    binaries apart.
    """
    report = restore_nothing(remade(small, binary="ab" * 32), tmp_path / "there")
    assert report.skipped[0][1].startswith("compiled by another build of Triton")
    assert "(binary abababababab…; this machine has" in report.skipped[0][1]


def test_kernels_of_another_ptxas_are_left_out(small, tmp_path, key):
    """ptxas is part of a CUDA kernel's key."""
    report = restore_nothing(remade(small, ptxas="1.0 V1.0.0"), tmp_path / "there")
    assert report.skipped[0][1].startswith("assembled by ptxas 1.0 V1.0.0; this machine has ")


def test_kernels_for_other_gpus_are_left_out(bundle, tmp_path, monkeypatch):
    """Where GPUs are visible, kernels for other targets are skipped, and those for a visible one
    are restored.
    """
    monkeypatch.setattr(targets, "listed_targets", lambda: (Target("cuda", "90"),))
    report = bundler.restore(bundle, tmp_path / "there")
    assert len(report.restored) == 11
    assert {why for _, why in report.skipped} == {
        "compiled for hip:gfx942; the GPUs here are cuda:90"
    }
    assert report.unchecked == ()
    monkeypatch.setattr(
        targets, "listed_targets", lambda: (Target("cuda", "80"), Target("cuda", "100"))
    )
    restore_nothing(bundle, tmp_path / "nothing")


def test_a_target_that_was_chosen_stands_for_the_gpus(bundle, tmp_path, monkeypatch):
    """The fact `target` decides without a GPU, and in place of those that are here; what is no
    target is refused.
    """
    for number, gpus in enumerate((None, (Target("hip", "gfx942"),))):
        monkeypatch.setattr(targets, "listed_targets", lambda gpus=gpus: gpus)
        trees = bundler.TreeOptions(facts={"target": "cuda:90"})
        report = bundler.restore(bundle, tmp_path / str(number), trees=trees)
        assert len(report.restored) == 11
        assert {why for _, why in report.skipped} == {
            "compiled for hip:gfx942; chosen by the fact target: cuda:90"
        }
        assert not any("target" in fact for fact in report.unchecked)
    both = bundler.TreeOptions(facts={"target": "cuda:90, hip:gfx942"})
    assert bundler.check(bundle, tmp_path / "0", trees=both).skipped == ()
    with pytest.raises(bundler.ConfigError, match="not a target: 'H100'"):
        bundler.restore(
            bundle, tmp_path / "no", trees=bundler.TreeOptions(facts={"target": "H100"})
        )
    assert not (tmp_path / "no").exists()


def test_everything_is_restored_when_asked_for(small, tmp_path, key, monkeypatch):
    """only='all' asks for no reason."""
    monkeypatch.setattr(targets, "listed_targets", lambda: (Target("cuda", "80"),))
    report = bundler.restore(
        remade(small, release="3.5.9", binary="ab" * 32), tmp_path / "there", only="all"
    )
    assert (report.restored, report.skipped, report.unchecked) == ((key,), (), ())


def test_unknown_facts_exclude_nothing_and_are_named(small, tmp_path, key, monkeypatch):
    """What is not known here, or not in the bundle, does not exclude a kernel; the report lists
    what was not checked.
    """
    monkeypatch.setattr(targets, "listed_targets", lambda: None)
    monkeypatch.setattr(ptxas, "ptxas_version", lambda arch: None)
    report = bundler.restore(small, tmp_path / "1")
    assert report.restored == (key,)
    assert report.unchecked == ("ptxas: not found here", "target: no GPU is visible here")
    packed = remade(small, release=None, binary=None, ptxas=None)
    report = bundler.restore(packed, tmp_path / "2")
    assert report.restored == (key,)
    assert report.unchecked == (
        "Triton binary: the bundle does not say (kernels that came by pack)",
        "Triton release: the bundle does not say",
        "target: no GPU is visible here",
    )
    monkeypatch.setattr(identity, "installed_triton", lambda: None)
    report = bundler.restore(small, tmp_path / "3")
    assert report.restored == (key,)
    assert report.unchecked == (
        "target: no GPU is visible here",
        "toolchain: Triton is not installed here",
    )


def test_a_binary_that_is_unknown_here_is_said_to_be(small, tmp_path, key, monkeypatch):
    """When this machine's Triton binary is not known, the report says so, and does not blame the
    bundle.
    """
    here = identity.installed_triton()
    monkeypatch.setattr(identity, "installed_triton", lambda: Toolchain(release=here.release))
    report = bundler.restore(small, tmp_path / "there")
    assert report.restored == (key,)
    assert "Triton binary: not known here" in report.unchecked


def test_the_warning_names_a_reason_of_the_kernels(rich, tmp_path):
    """The one warning tells why the kernels cannot be used, not why a helper library was
    left out.
    """
    kernels = [replace(k, toolchain=Toolchain(release="3.5.9")) for k in rich.kernels]
    other = bundler.Bundle(Content.of([*kernels, *rich.helpers]), rich.observed, rich.blobs)
    with pytest.warns(BundlerWarning, match="here: compiled by Triton 3.5.9"):
        bundler.restore(other, tmp_path / "there")
    other = bundler.Bundle(
        Content.of([replace(k, target=Target("tpu", "5")) for k in kernels] + list(rich.helpers)),
        rich.observed,
        rich.blobs,
    )
    with pytest.warns(BundlerWarning, match="here: compiled by Triton"):
        bundler.restore(other, tmp_path / "there", trust="code")


def test_an_empty_bundle_warns_of_nothing(tmp_path):
    """A bundle without anything, where that is allowed, restores to nothing, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nothing = bundler.Bundle(Content(), Observed({}), MemoryBlobs({}))
        report = bundler.restore(nothing, tmp_path / "there", allow_empty=True)
    assert report.usable == 0


def test_the_report_adds_up(bundle, compiled, tmp_path):
    """The report's figures are those of the directory."""
    report = bundler.restore(bundle, tmp_path / "there", only="all")
    files = support.tree(tmp_path / "there")
    assert report.restored == tuple(compiled.keys)
    assert report.files == len(files)
    assert report.bytes == sum(
        len(data) for name, data in files.items() if support.GROUP not in name
    )
    assert report.directories == (str(tmp_path / "there"),)
    assert report.seconds > 0
    named = {f"{k.key}/{a.filename}" for k in bundle.kernels for a in k.artifacts if a.spans}
    assert set(report.rewritten) == named


def test_a_path_or_an_open_bundle_is_the_same(compiled, bundle, tmp_path):
    """A bundle can be given open, as a path, or as text; one that was given open stays open."""
    for number, given in enumerate((bundle, compiled.bundle, str(compiled.bundle))):
        assert bundler.restore(given, tmp_path / str(number), only="all").usable == 22
    assert bundle.read(bundle.kernels[0].binary)
    assert bundler.read_and_emit is bundler.restore
