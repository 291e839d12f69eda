# SPDX-License-Identifier: Apache-2.0
"""Torch's compile service has methods for other languages than Triton; ours refuses each by
name.
"""

import inspect

import pytest

from bundler.compile.other_languages import LANGUAGES
from bundler.compile.service import CompileService
from bundler.errors import BundlerError, UnsupportedLanguage
from bundler.integrations.inductor_generated import load_generated


@pytest.mark.parametrize("method", LANGUAGES)
def test_a_kernel_in_another_language_is_refused_by_name(method):
    """Whatever the arguments; the error says what this package compiles."""
    refused = pytest.raises(UnsupportedLanguage, match="expected a Triton kernel")
    with CompileService(1) as service, refused as caught:
        with pytest.raises(AttributeError, match="no attribute 'fortran'"):
            service.fortran("source")
        getattr(service, method)("source", dst_file_ext="so")
    assert (caught.value.method, caught.value.language) == (method, LANGUAGES[method])
    assert isinstance(caught.value, NotImplementedError)


def test_torch_has_no_language_that_is_not_refused():
    """Each method of torch's service that is given source is Triton's, or is in the table."""
    service = pytest.importorskip("torch._inductor.async_compile").AsyncCompile
    takes_source = {
        name
        for name, method in inspect.getmembers(service, inspect.isfunction)
        if {"source_code", "source"} & {*inspect.signature(method).parameters}
    }
    assert takes_source - {"triton"} <= {*LANGUAGES}
    assert {"cpp", "cutedsl", "halide", "rocm"} <= takes_source


def test_a_wrapper_with_no_kernel_of_triton_is_refused_with_its_language(tmp_path):
    """It is parsed, and never run."""
    path = tmp_path / "wrapper.py"
    path.write_text("fused = async_compile.cpp_pybinding(['float*'], '''int main;''')\n")
    with pytest.raises(UnsupportedLanguage, match=r"wrapper\.py: cpp_pybinding compiles C\+\+"):
        load_generated(path)


def test_who_asks_for_a_kernel_in_another_language_is_told():
    """A name that the wrapper does not have is a `KeyError`, as in any dictionary."""
    from bundler.integrations.inductor_generated import GeneratedKernels

    kernels = GeneratedKernels(others={"fused": "cutedsl"})
    with pytest.raises(BundlerError, match="fused: cutedsl compiles CuTe DSL"):
        kernels["fused"]
    with pytest.raises(KeyError):
        kernels["other"]
    assert kernels.get("fused") is None
