# SPDX-License-Identifier: Apache-2.0
"""The three conditions that containers bring, as docs/servers.md describes them: read-only
directories, an unwritable home, a random UID.
"""

import json
import os
import shutil
import subprocess
import sys

import plugged
import pytest

import bundler

pytest.importorskip("triton")
pytestmark = [pytest.mark.toolchain, pytest.mark.slow]

UID = "12345"
MODEL = "torch_compile_cache/0123456789/rank_0_0/model"
# Where the interpreter is in a directory of root's alone, the random user may read everything, and
# still writes nowhere else.
_READS_ALL = [f"--{kind}-caps=-all,+dac_read_search" for kind in ("inh", "ambient")]
_RANDOM_UID = [
    "setpriv",
    f"--reuid={UID}",
    f"--regid={UID}",
    "--clear-groups",
    "--bounding-set=-all,+dac_read_search",
    *_READS_ALL,
]

# A server's process: it loads the plug-in, and its Triton asks for a kernel.
_SERVER = """
from bundler.integrations.server_plugins import vllm_plugin
vllm_plugin()
compile_one("gelu")
say({"uid": os.getuid(), "heard": heard})
"""
_RESTORE = """
import bundler
report = bundler.restore(sys.argv[2], trust="code", trees=bundler.TreeOptions(roots={"vllm": sys.argv[3]}))
say({"uid": os.getuid(), "usable": report.usable, "companions": report.companions, "skipped": report.skipped})
"""


def _needs(*programs):
    absent = [program for program in programs if shutil.which(program) is None]
    if absent or os.geteuid() != 0:
        pytest.skip(f"needs root and {', '.join(programs)}")


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """What an image holds: a store with one kernel in the tag `prod`, and a bundle of a server's
    cache with that kernel.
    """
    folder = tmp_path_factory.mktemp("image")
    root = folder / "vllm"
    (root / MODEL).parent.mkdir(parents=True)
    (root / MODEL).write_bytes(b"pickled")
    kernels = (root / MODEL).with_name("triton_cache")
    env = plugged.environment(
        f"file://{folder}/store",
        kernels,
        TRITON_BUNDLER_TAG="prod",
        TRITON_BUNDLER_LOCAL=folder / "local",
    )
    plugged.run("compile_one('gelu')\n", env)
    with bundler.pack_family("vllm", root) as bundle:
        assert len(bundle.kernels) == 1
        bundle.save(folder / "server.tbundle")
    subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)
    return folder


@pytest.fixture
def scratch(tmp_path):
    """The one place that a container may write to, by any user, as an emptyDir volume is."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def _run(prefix, code, env, *arguments):
    python = [
        sys.executable,
        "-P",
        "-W",
        "always::UserWarning",
        "-c",
        plugged.PRELUDE + code,
        str(plugged.KERNELS),
        *map(str, arguments),
    ]
    done = subprocess.run(
        [*prefix, "sh", "-c", 'exec "$@"', "sh", *python],
        env=env,
        capture_output=True,
        text=True,
        timeout=plugged.PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def _environment(image, scratch, cache=None, **more):
    """Return a container's environment; a value of None is a variable that is not set."""
    ours = {
        "TRITON_CACHE_MANAGER": None,
        "TRITON_CACHE_DIR": cache,
        "XDG_CACHE_HOME": None,
        "TMPDIR": scratch,
        "TRITON_BUNDLER_STORE": f"file://{image}/store?readonly=1",
        "TRITON_BUNDLER_TAG": "prod",
        "TRITON_BUNDLER_MODE": "read",
    }
    wanted = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **ours, **more}
    return {name: str(value) for name, value in wanted.items() if value is not None}


def test_a_random_user_without_a_home_finds_its_kernels(image, scratch):
    """OpenShift's condition: a UID that no password file knows, a home that is not there, one
    volume to write to.
    """
    _needs("setpriv")
    env = _environment(image, scratch, HOME="/nonexistent")
    told, err = _run(_RANDOM_UID, _SERVER, env)
    assert told == {"uid": int(UID), "heard": [["gelu_kernel", True]]}
    assert err.count("BundlerWarning") == err.count("cannot be written, kernels go to") == 1
    assert any(path.name.endswith(".cubin") for path in scratch.rglob("*"))


def test_an_unwritable_home_costs_no_compile(image, scratch):
    """Triton's usual directory cannot be made; kernels go to ours below the temporary directory,
    and are hits.
    """
    env = _environment(image, scratch, HOME="/proc/nobody")
    told, _ = _run([], _SERVER, env)
    assert told["heard"] == [["gelu_kernel", True]]


def test_a_read_only_image_costs_no_compile(image, scratch, tmp_path):
    """Triton's directory and the store are on a file system that is mounted read-only."""
    _needs("unshare", "mount")
    cache = tmp_path / "cache"
    cache.mkdir()
    mounted = [
        f"mount --bind {place} {place} && mount -o remount,bind,ro {place}"
        for place in (image, cache)
    ]
    prefix = ["unshare", "-m", "sh", "-c", f'{" && ".join(mounted)} && exec "$@"', "sh"]
    if subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    told, err = _run(
        prefix, _SERVER, _environment(image, scratch, cache, TRITON_BUNDLER_LOCAL=scratch / "local")
    )
    assert told["heard"] == [["gelu_kernel", True]]
    assert "cannot be written, kernels go to" in err
    assert os.listdir(cache) == []


def test_a_random_user_restores_a_servers_cache(image, scratch):
    """An init container fills a volume from the image; the files are the random user's."""
    _needs("setpriv")
    env = _environment(
        image, scratch, HOME="/nonexistent", TRITON_BUNDLER_STORE=None, TRITON_BUNDLER_TAG=None
    )
    told, _ = _run(_RANDOM_UID, _RESTORE, env, image / "server.tbundle", scratch / "vllm")
    assert told == {"uid": int(UID), "usable": 1, "companions": [f"vllm:{MODEL}"], "skipped": []}
    assert (scratch / "vllm" / MODEL).stat().st_uid == int(UID)


def test_a_restore_into_a_read_only_root_is_one_typed_error(image, tmp_path, scratch):
    """Nothing is half-written where nothing can be written, and what is there already is enough."""
    _needs("setpriv")
    code = """
import bundler
try:
    bundler.restore(sys.argv[2], trust="code", trees=bundler.TreeOptions(roots={"vllm": sys.argv[3]}))
    say("restored")
except bundler.AccessDenied as error:
    say(error.code)
"""
    env = _environment(
        image, scratch, HOME="/nonexistent", TRITON_BUNDLER_STORE=None, TRITON_BUNDLER_TAG=None
    )
    (tmp_path / "readonly").mkdir(mode=0o755)
    assert (
        _run(_RANDOM_UID, code, env, image / "server.tbundle", tmp_path / "readonly")[0]
        == "access-denied"
    )
    assert os.listdir(tmp_path / "readonly") == []
    # The image was built with the cache in place: there is nothing to write.
    assert _run(_RANDOM_UID, code, env, image / "server.tbundle", image / "vllm")[0] == "restored"
