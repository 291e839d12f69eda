# SPDX-License-Identifier: Apache-2.0
"""A plan of listed operators needs a signature of kernels; one that calls others, one of code."""

from types import SimpleNamespace

import pytest

import bundler
from bundler.errors import Untrusted
from bundler.format.bundle import Bundle, MemoryBlobs
from bundler.format.digest import digest_text, sha256
from bundler.format.entries import Artifact, Opaque
from bundler.format.manifest import Content, Observed
from bundler.format.opaque_files import program_path
from bundler.runtime.program.program_plan import OperatorStep, Output, ProgramPlan, TensorSpec

MEMORY = SimpleNamespace(
    host=True,
    call=lambda operator, _arguments, _keywords: SimpleNamespace(
        shape=(), strides=(), dtype="float32", data_ptr=lambda: 0, name=operator
    ),
)


def saved(path, operator, *, code):
    """Save a bundle with a program that calls one operator."""
    step = OperatorStep(operator, (), {}, ("buf0",), True, (TensorSpec("float32", (), ()),))
    data = ProgramPlan((), {}, (step,), (Output("buf0"),), {}).to_json()
    raw, place = sha256(data), program_path("model", code=code)
    entry = Opaque(place, Artifact(place.rpartition("/")[2], digest_text(raw), len(data)))
    Bundle(Content.of([entry]), Observed(), MemoryBlobs({raw: data})).save(path)
    return path


def called(path, trust):
    (result,) = bundler.runtime.load_program(path, memory=MEMORY, trust=trust)()
    return result.name


def test_a_plan_of_listed_operators_needs_a_signature_of_kernels(signers, tmp_path, monkeypatch):
    """It is data: whatever trust is asked for, the level of its signature is that of kernels."""
    path = saved(tmp_path / "data.tbundle", "aten.rand.default", code=False)
    monkeypatch.setenv("TRITON_BUNDLER_SIGNATURES", "require")
    with pytest.raises(Untrusted, match="required for kernels"):
        called(path, "kernels")
    assert bundler.sign(path, signers.alice).trust == "kernels"
    for trust in ("kernels", "signed", "code"):
        assert called(path, trust) == "aten.rand.default"


def test_a_plan_of_other_operators_needs_a_signature_of_code(signers, tmp_path, monkeypatch):
    """One of kernels does not do, nor a key for kernels; `signed` runs what is vouched for."""
    path = saved(tmp_path / "code.tbundle", "mylib.run.default", code=True)
    with pytest.raises(Untrusted, match="trust='code'"):
        called(path, "kernels")
    assert called(path, "code") == "mylib.run.default"  # nobody requires signatures
    with pytest.raises(Untrusted, match="trust='code'"):
        called(path, "signed")
    monkeypatch.setenv("TRITON_BUNDLER_SIGNATURES", "require")
    bundler.sign(path, signers.alice, trust="kernels")
    with pytest.raises(Untrusted, match="for kernels alone"):
        called(path, "code")
    assert bundler.sign(path, signers.alice).trust == "code"
    with pytest.raises(Untrusted, match="may not vouch for trust level 'code'"):
        called(path, "code")
    signers.trust(trust=("kernels", "code"))
    for trust in ("code", "signed"):
        assert called(path, trust) == "mylib.run.default"
    with pytest.raises(Untrusted, match="trust='code'"):
        called(path, "kernels")


def test_a_plan_that_hides_what_it_calls_is_refused(signers, tmp_path, monkeypatch):
    """Under the name of data other operators are refused, however signed and trusted."""
    path = saved(tmp_path / "hidden.tbundle", "mylib.run.default", code=False)
    signers.trust(trust=("kernels", "code"))
    bundler.sign(path, signers.alice, trust="code")
    for demand in ("off", "require"):
        monkeypatch.setenv("TRITON_BUNDLER_SIGNATURES", demand)
        for trust in ("kernels", "signed", "code"):
            with pytest.raises(Untrusted, match=r"mylib\.run\.default"):
                called(path, trust)
