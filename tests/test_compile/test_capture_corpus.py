# SPDX-License-Identifier: Apache-2.0
"""What a capture without a GPU makes of Liger's operators, beside what an H200 left in its
cache.
"""

import io
import re
import tarfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import bundler

pytestmark = pytest.mark.slow

ARCHIVE = Path(__file__).resolve().parents[3] / "shared" / "corpus" / "triton-liger-h200.tar.xz"
ROWS = (16, 64, 512, 1024, 2048, 4096)
WIDTH, VOCABULARIES = 512, (1000, 5003, 8001, 32000, 50257)


@pytest.fixture
def real():
    """Return the TTIR of each kernel that the H200 compiled, by name."""
    if not ARCHIVE.is_file():
        pytest.skip(
            f"the archive of real caches is not here: corpus/{ARCHIVE.name} beside the checkout's"
            " parent"
        )
    try:
        release = version("triton")
    except PackageNotFoundError:
        pytest.skip("triton is not installed")
    if release.rpartition(".")[0] != "3.6":
        pytest.skip(f"the corpus was made by Triton 3.6, and here is {release}")
    for library in ("torch", "liger_kernel"):
        pytest.importorskip(library)
    found = {}
    with tarfile.open(ARCHIVE) as tar:
        for member in tar:
            if member.name.endswith(".ttir"):
                found[Path(member.name).stem] = io.TextIOWrapper(tar.extractfile(member)).read()
    return found


def without_places(text):
    """Return the lines of TTIR without what says where in the source they come from."""
    text = re.sub(r"^#loc.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r" loc\((?:[^()]|\([^()]*\))*\)", "", text)
    return [line.strip() for line in text.splitlines() if line.strip()]


def call_liger(torch):
    """Call the operators of the corpus with many numbers of rows and sizes of vocabularies, of
    which it has one each.
    """
    import liger_kernel.ops as liger

    def made(*shape, dtype=torch.float32):
        return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_()

    for rows in ROWS:
        x, weight, bias = made(rows, WIDTH), made(WIDTH), made(WIDTH)
        liger.LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "llama", True).sum().backward()
        liger.LigerLayerNormFunction.apply(x, weight, bias, 1e-6).sum().backward()
    half = [made(64, WIDTH, dtype=torch.bfloat16) for _ in range(2)]
    liger.LigerSiLUMulFunction.apply(*half).sum().backward()
    liger.LigerGELUMulFunction.apply(*half).sum().backward()
    for size in VOCABULARIES:
        labels = torch.randint(0, size, (512,), device="cuda")
        options = (None, -100, 0.0, 0.0, "mean", None, False)
        liger.LigerCrossEntropyFunction.apply(made(512, size), labels, *options)[0].backward()


def test_captured_kernels_are_those_of_the_gpu(real, tmp_path, monkeypatch):
    """Each kernel that the H200 compiled is captured too: the same TTIR, line for line, but for the
    places in the source.
    """
    import torch

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with bundler.capturing("cuda:90") as capture:
        call_liger(torch)
    bundle = capture.build()
    assert capture.report.failures == ()
    captured = {}
    for kernel in bundle.kernels:
        [text] = [bundle.read(artifact) for artifact in kernel.artifacts if artifact.kind == "ttir"]
        captured.setdefault(kernel.name, []).append(without_places(text.decode()))
    assert len(real) == 9
    assert [
        name for name, text in real.items() if without_places(text) not in captured.get(name, [])
    ] == []
