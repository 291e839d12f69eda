# SPDX-License-Identifier: Apache-2.0
"""Bundles go to registries and come back, and commands read them there."""

import json
import subprocess

import pytest
import registry_server

import bundler
from bundler import Bundle, ConfigError, EmptyBundle, NotFound, Untrusted, pull_image, push_image

LAYOUTS = ("bundle", "mcv", pytest.param("mcv-docker", marks=pytest.mark.slow))
# A line for HTTP's basic scheme: the password is hush-hush, hashed by bcrypt, since Debian's
# registry takes nothing else.
ALICE = "alice:$2a$04$LfZnB0JJ6bVUTgTKTnt6ZuuPERTKzANu.eBxbzi9SiezA.spVfvre\n"


@pytest.fixture(
    params=[
        "referrers",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("no-referrers", "directory", "debian")
        ),
    ]
)
def url(request, tmp_path):
    """The URL of an image in an empty place, with the tag demo."""
    if request.param == "directory":
        yield f"oci-dir:{tmp_path}/images:demo"
    elif request.param == "debian":
        with registry_server.debian_registry(tmp_path) as host:
            yield f"oci://{host}/team/kernels:demo?plain_http=1"
    else:
        with registry_server.SmallRegistry().serving() as server:
            server.lists_referrers = request.param == "referrers"
            yield server.url()


def test_a_bundle_comes_back_byte_for_byte(url, bundle_path, tmp_path):
    """The file is the blob; the second push sends nothing, and makes the same image."""
    first, second = push_image(bundle_path, url), push_image(str(bundle_path), url)
    assert (first.sent_bytes, second.sent_bytes) == (bundle_path.stat().st_size, 0)
    assert first.manifest == second.manifest
    report = pull_image(url, tmp_path / "out.tbundle")
    assert (tmp_path / "out.tbundle").read_bytes() == bundle_path.read_bytes()
    assert (report.layout, report.kernels, report.manifest) == ("bundle", 4, first.manifest)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_signed_image_is_pulled_where_signatures_are_required(
    layout, url, bundle_path, setting, tmp_path
):
    """Tag and bundle are signed; the bundle's signatures lie in the file then."""
    push_image(bundle_path, url, layout=layout, key=setting.alice)
    setting.require()
    report = pull_image(url, tmp_path / "out.tbundle")
    assert report.signatures == "kernels signed by key 'alice'"
    assert (
        bundler.restore(tmp_path / "out.tbundle", tmp_path / "cache", only="all").signatures
        == report.signatures
    )


@pytest.mark.parametrize(
    "layout",
    ["bundle", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mcv", "mcv-docker"))],
)
def test_an_unsigned_image_is_refused_where_signatures_are_required(
    layout, url, bundle_path, setting, tmp_path
):
    """Nothing is written; neither is what a key signs that nobody trusts."""
    setting.require()
    for key in (None, setting.mallory):
        push_image(bundle_path, url, layout=layout, key=key)
        with pytest.raises(Untrusted):
            pull_image(url, tmp_path / "out.tbundle")
    assert not (tmp_path / "out.tbundle").exists()


def test_a_signature_is_of_one_tag(url, bundle_path, setting, tmp_path):
    """The manifest under another tag has the signature of the bundle, and none of that tag; by its
    digest it is taken.
    """
    signed = push_image(bundle_path, url, key=setting.alice)
    push_image(bundle_path, url.replace("demo", "other"))
    setting.require()
    with pytest.raises(Untrusted, match="tag 'demo', not for 'other'"):
        pull_image(url.replace("demo", "other"), tmp_path / "out.tbundle")
    assert (
        pull_image(url.replace(":demo", f"@{signed.manifest}"), tmp_path / "out.tbundle").kernels
        == 4
    )


def test_a_tag_that_is_set_back_is_refused(url, bundle_path, setting, tmp_path):
    """Who has seen a newer statement of a tag refuses the image of before, though its signature is
    good.
    """
    with Bundle.load(bundle_path) as bundle:
        bundle.select(target="cuda:90").save(tmp_path / "new.tbundle")
    setting.require()
    old = push_image(bundle_path, url, key=setting.alice)
    push_image(tmp_path / "new.tbundle", url, key=setting.alice)
    pull_image(url, tmp_path / "out.tbundle")
    from bundler.images.image_manifests import image_url, open_place

    with open_place(image_url(url)) as place:
        found = place.manifest(old.manifest)
        place.put_manifest(found.data, found.media_type, "demo")
    with pytest.raises(Untrusted):
        pull_image(url, tmp_path / "out.tbundle")


def test_signatures_in_the_file_go_along(url, bundle_path, setting, tmp_path):
    """A bundle that was signed before the push is signed after the pull, for its stored
    bytes too.
    """
    bundler.sign(bundle_path, setting.alice)
    report = push_image(bundle_path, url)
    setting.require()
    pull_image(url.replace(":demo", f"@{report.manifest}"), tmp_path / "out.tbundle")
    assert (tmp_path / "out.tbundle").read_bytes() == bundle_path.read_bytes()


def test_a_missing_tag_names_those_that_are_there(url, bundle_path, tmp_path):
    """The message says which tags are like it."""
    push_image(bundle_path, url)
    with pytest.raises(NotFound, match="there is demo"):
        pull_image(url.replace("demo", "demp"), tmp_path / "out.tbundle")


def test_an_empty_bundle_is_not_pushed(url, bundle_path, tmp_path):
    """More likely a mistake than a wish."""
    with Bundle.load(bundle_path) as bundle, pytest.raises(EmptyBundle):
        push_image(bundle.select(target="cuda:70"), url)


def test_a_bundle_in_memory_is_pushed(url, bundle_path, tmp_path):
    """What was selected goes as a file of its own."""
    with Bundle.load(bundle_path) as bundle:
        report = push_image(bundle.select(target="cuda:90"), url)
    assert pull_image(url, tmp_path / "out.tbundle").digest == report.digest


@pytest.mark.parametrize(
    ("url_of", "options", "word"),
    [
        ("oci://registry.example/a@sha256:" + "0" * 64, {}, "digest"),
        ("oci://registry.example/a:b", {"layout": "tar"}, "layout"),
        ("oci://registry.example/a:b", {"layout": "mcv", "cache_root": "cache"}, "cache_root"),
        ("https://registry.example/a:b", {}, "expected oci"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_asked(url_of, options, word, bundle_path):
    """The message says which, and what is expected."""
    with pytest.raises(ConfigError, match=word):
        push_image(bundle_path, url_of, **options)


@pytest.mark.slow
def test_debians_registry_with_a_password(tmp_path, bundle_path, log_in):
    """The credentials are those of docker login; without them, or with wrong ones, the error says
    how to log in.
    """
    with registry_server.debian_registry(tmp_path, ALICE) as host:
        url = f"oci://{host}/team/kernels:demo?plain_http=1"
        for password in (None, "wrong-hush"):
            if password:
                log_in(host, "alice", password)
            with pytest.raises(bundler.AccessDenied, match=f"docker login {host}") as caught:
                push_image(bundle_path, url)
            assert "hush" not in str(caught.value)
        log_in(host, "alice", "hush-hush")
        push_image(bundle_path, url)
        assert pull_image(url, tmp_path / "out.tbundle").kernels == 4


@pytest.mark.slow
def test_skopeo_carries_an_exported_image(tmp_path, bundle_path):
    """A directory that we wrote is copied to a registry by skopeo, and read there."""
    import shutil

    if shutil.which("skopeo") is None:
        pytest.skip("skopeo is not installed")
    push_image(bundle_path, f"oci-dir:{tmp_path}/images:demo")
    with registry_server.debian_registry(tmp_path) as host:
        command = [
            "skopeo",
            "--insecure-policy",
            "copy",
            "--dest-tls-verify=false",
            f"oci:{tmp_path}/images:demo",
        ]
        subprocess.run([*command, f"docker://{host}/carried:demo"], check=True, capture_output=True)
        pull_image(f"oci://{host}/carried:demo?plain_http=1", tmp_path / "out.tbundle")
    assert (tmp_path / "out.tbundle").read_bytes() == bundle_path.read_bytes()


def test_one_image_in_a_list_is_meant(registry, bundle_path, tmp_path):
    """Docker's builder wraps an image into a list with an attestation; of two images none is
    chosen.
    """
    from bundler import FormatError

    report = push_image(bundle_path, registry.url())
    data, kind = registry.manifests[report.manifest]
    image = {"mediaType": kind, "digest": report.manifest, "size": len(data)}
    noise = {
        **image,
        "digest": "sha256:" + "1" * 64,
        "annotations": {"vnd.docker.reference.type": "attestation-manifest"},
    }
    for images, fine in (([image, noise], True), ([image, image], False)):
        index = json.dumps({"schemaVersion": 2, "manifests": images}).encode()
        registry.manifests["sha256:list"] = (index, registry_server.INDEX)
        registry.manifests[registry_server.digest_of(index)] = (index, registry_server.INDEX)
        registry.tags["demo"] = registry_server.digest_of(index)
        if fine:
            assert pull_image(registry.url(), tmp_path / "out.tbundle").manifest == report.manifest
        else:
            with pytest.raises(FormatError, match="2 images"):
                pull_image(registry.url(), tmp_path / "out.tbundle")


def test_a_pull_takes_four_requests(registry, bundle_path, setting, tmp_path):
    """Manifest, blob, what refers to the image, and the tag of registries that do not list that; a
    signed one two more, and no tag.
    """
    push_image(bundle_path, registry.url())
    registry.requests.clear()
    pull_image(registry.url(), tmp_path / "out.tbundle")
    assert [path.split("/")[4] for _, path, _ in registry.requests] == [
        "manifests",
        "blobs",
        "referrers",
        "manifests",
    ]
    push_image(bundle_path, registry.url(), key=setting.alice)
    registry.requests.clear()
    pull_image(registry.url(), tmp_path / "out.tbundle")
    assert [path.split("/")[4] for _, path, _ in registry.requests] == [
        "manifests",
        "blobs",
        "referrers",
        "manifests",
        "blobs",
        "blobs",
    ]


def test_a_damaged_signature_keeps_nobody_from_the_others(registry, bundle_path, setting, tmp_path):
    """Anybody who may push attaches what he likes: junk, and blobs that are gone."""
    report = push_image(bundle_path, registry.url(), key=setting.alice)
    signature = next(
        data for data, _ in registry.manifests.values() if json.loads(data).get("subject")
    )
    for number, change in enumerate(
        (b"", b'"note"', b"{", signature.replace(b"sha256:", b"sha256:0", 1))
    ):
        registry.manifests[f"sha256:{number}"] = (change, "application/json")
    listed = json.loads(signature)
    listed["layers"] = [listed["layers"][0] | {"digest": "sha256:" + "7" * 64}]
    registry.manifests[registry_server.digest_of(json.dumps(listed).encode())] = (
        json.dumps(listed).encode(),
        "application/json",
    )

    def referrers(handler):
        if "/referrers/" not in handler.path:
            return False
        found = [
            {
                "mediaType": "x",
                "digest": name,
                "size": 1,
                "artifactType": "application/vnd.triton-bundler.signature.v1",
            }
            for name, (data, _) in registry.manifests.items()
            if name != report.manifest
        ]
        handler.reply(
            200, json.dumps({"manifests": found}).encode(), {"Content-Type": registry_server.INDEX}
        )
        return True

    registry.spoil = referrers
    setting.require()
    assert (
        pull_image(registry.url(), tmp_path / "out.tbundle").signatures
        == "kernels signed by key 'alice'"
    )


def test_an_image_is_copied_from_one_place_to_another(registry, bundle_path, setting, tmp_path):
    """A command that pushes takes an image for its source; the bundle's signatures go along, in the
    file.
    """
    from click.testing import CliRunner

    from bundler.cli.app import app

    push_image(bundle_path, registry.url(), key=setting.alice)
    done = CliRunner().invoke(
        app, ["oci", "push", registry.url(), f"oci-dir:{tmp_path}/images:demo"]
    )
    assert done.exit_code == 0, done.output
    digest = json.loads((tmp_path / "images" / "index.json").read_text())["manifests"][0]["digest"]
    setting.require()
    assert pull_image(f"oci-dir:{tmp_path}/images@{digest}", tmp_path / "out.tbundle").kernels == 4


def test_a_full_disk_is_told(registry, bundle_path, monkeypatch, tmp_path):
    """The error is that of a full disk, and what was at the output stays."""
    import errno

    from bundler.backends.oci.registry import Registry

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    push_image(bundle_path, registry.url())
    (tmp_path / "out.tbundle").write_bytes(b"before")
    monkeypatch.setattr(Registry, "read_blob", full)
    with pytest.raises(bundler.StoreFull):
        pull_image(registry.url(), tmp_path / "out.tbundle")
    assert (tmp_path / "out.tbundle").read_bytes() == b"before"


def test_where_signatures_are_preferred_the_report_says_what_is_missing(
    registry, bundle_path, setting, tmp_path
):
    """An unsigned tag is followed, and the report tells."""
    push_image(bundle_path, registry.url())
    setting.monkeypatch.setenv("TRITON_BUNDLER_SIGNATURES", "prefer")
    report = pull_image(registry.url(), tmp_path / "out.tbundle")
    assert "kernels not signed: it is not signed" in report.signatures
    assert f"tag oci://{registry.host}/team/kernels:demo" in report.signatures
