# SPDX-License-Identifier: Apache-2.0
"""Winners go to the store of the session in force, and tuners of other machines look there;
Triton's hook for compiles hears of each candidate.
"""

import logging

import launch_calls as calls
import pytest

import bundler
from bundler.errors import BundlerWarning, StoreUnavailable
from bundler.lifecycle.tuning_directory import TuningFolder
from bundler.runtime import Config, DryDriver, TunerOptions
from bundler.store.file_records import FileRecords

pytestmark = pytest.mark.toolchain
X, Y, OUT = calls.X, calls.Y, calls.OUT


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def tune(launch_kernels, monkeypatch, compiled, tmp_path):
    """A function that tunes a vector add on a machine of that name; returns how its config was
    found, and how many were timed.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(compiled))

    def run(machine, *, blocks=(64, 128), **options):
        monkeypatch.setattr(
            "bundler.runtime.tuning.result_lookup.triton_cache_dir", lambda: str(tmp_path / machine)
        )
        driver, measured = DryDriver("cuda", handle=5), []

        def bench(fn, quantiles):
            fn()
            measured.append(driver.launches[-1].grid[0])
            return [1.0 + measured[-1]] * 3

        listed = [Config({"BLOCK": block}) for block in blocks]
        chosen = TunerOptions(driver=driver, **{"workers": 1, **options})
        kernel = bundler.autotune(listed, ["n"], do_bench=bench, options=chosen)(launch_kernels.add)
        kernel[lambda meta: (-(-meta["n"] // meta["BLOCK"]),)](X, Y, OUT, n=1024)
        (choice,) = kernel.choices.values()
        return choice.how, len(measured)

    return run


@pytest.fixture
def url(tmp_path):
    return f"file://{tmp_path}/store"


@pytest.fixture
def looked_up(monkeypatch):
    """What was looked up of single files, one item for each round trip."""
    asked, real = [], FileRecords.look_up_all

    def noting(self, known_by):
        asked.append(list(known_by))
        return real(self, known_by)

    monkeypatch.setattr(FileRecords, "look_up_all", noting)
    return asked


def test_a_winner_is_found_in_the_store_of_the_session(tune, url, tmp_path, looked_up):
    """One machine tunes; another measures nothing, for one round trip, and keeps the record for its
    next process, which asks nobody.
    """
    with bundler.session(url):
        assert tune("first") == ("autotune", 2)
    looked_up.clear()
    with bundler.session(url) as session:
        assert tune("second") == ("record", 0)
        assert session.counters.bytes_fetched > 0
    assert len(looked_up) == 1
    assert len(looked_up[0]) == 1
    assert len(list(TuningFolder(tmp_path / "second").records("add"))) == 1
    looked_up.clear()
    with bundler.session(url):
        assert tune("second") == ("record", 0)
    assert looked_up == []
    assert tune("third") == ("autotune", 2)  # without a session nobody asks a store


def test_options_and_modes_are_kept(tune, url):
    """A session that only reads publishes nothing, one that only writes looks nothing up; `reuse`
    and `record` hold for stores too.
    """
    with bundler.session(url, push=None):
        tune("a")
    with bundler.session(url):
        assert tune("b", record=False) == ("autotune", 2)
    with bundler.session(url):
        assert tune("c") == ("autotune", 2)
    with bundler.session(url):
        assert tune("d", reuse="bundle") == ("autotune", 2)
    with bundler.install(url, mode="write"):
        assert tune("e") == ("autotune", 2)
    with bundler.session(url):
        assert tune("f", blocks=(64, 256)) == ("autotune", 2)  # another list is another question
        assert tune("g") == ("record", 0)


def test_a_damaged_record_or_a_store_that_fails_costs_its_help_alone(
    tune, url, tmp_path, monkeypatch
):
    """The kernel is tuned, with one warning for the store."""
    with bundler.session(url):
        tune("first")
    for path in (tmp_path / "store" / "data" / "v1" / "s").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-3])
    with bundler.session(url):
        assert tune("second") == ("autotune", 2)

    def failing(self, known_by):
        raise StoreUnavailable("gone")

    monkeypatch.setattr(FileRecords, "look_up_all", failing)
    with bundler.session(url) as session, pytest.warns(BundlerWarning, match="tuning records"):
        assert tune("third") == ("autotune", 2)
    assert session.counters.errors == {"store-unavailable": 1}


def test_many_records_are_one_round_trip(tmp_path):
    """Those that are there and whole come back."""
    with bundler.open_store("memory:") as store:
        files = store.file_records()
        for name in ("a", "b", "c"):
            files.publish(f"tuning {name}", "x.tuning", name.encode())
        calls_made, real = [], store._backend.inner.get_within
        store._backend.inner.get_within = lambda asked: calls_made.append(asked) or real(asked)
        found = store.file_records().look_up_all([f"tuning {name}" for name in "abd"])
    assert found == {"tuning a": b"a", "tuning b": b"b"}
    assert len(calls_made) == 1


@pytest.mark.parametrize("workers", [1, 2], ids=["here", "in-workers"])
def test_the_hook_for_compiles_hears_of_each_candidate(tune, monkeypatch, workers):
    """As torch calls it for the configs that it compiles ahead; also of those that workers
    compiled.
    """
    from triton import knobs

    heard = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **told: heard.append(told))
    tune("hooked", blocks=(32, 64, 128, 256), workers=workers)
    assert len(heard) == 4
    for told in heard:
        kinds = (
            told["fn"].__name__,
            told["key"],
            told["is_manual_warmup"],
            told["already_compiled"],
        )
        assert kinds == ("add", told["fn"].cache_key, False, True)
        assert told["compile"].asm["cubin"][:4] == b"\x7fELF"
        assert told["repr"] == told["fn"].src
        assert "inductor_args" not in told


def test_a_hook_gets_what_torch_tells_it_and_may_fail(tune, monkeypatch, caplog):
    """`inductor_args` only where it takes them; what it raises is in the log, and the
    kernel runs.
    """
    from triton import knobs

    heard = []

    def hook(*, inductor_args=None, **_):
        heard.append(inductor_args)
        raise RuntimeError("not my kernel")

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", hook)
    with caplog.at_level(logging.ERROR, "bundler.toolchain"):
        assert tune("args", hook_args={"XBLOCK": 8}) == ("autotune", 2)
    assert heard == [{"XBLOCK": 8}] * 2
    assert "not my kernel" in caplog.text
