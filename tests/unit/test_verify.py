"""Verification: ours passes, and every way to pass off something else is seen and named.

The registry is :class:`test_signing.Memory`; what lies in it is made by the same functions that
publish: a real (trimmed) manifest, its bill of materials, its provenance, signatures by key.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from test_signing import KEY, OTHER, Memory

from trainyard import attest, provenance, sbom, signing, verify
from trainyard.model import StepFailed
from trainyard.plan import CONTENTS_LABEL
from trainyard.publish import ID_LABEL, IMAGE_PROPERTY
from trainyard.registry import OCI_INDEX, OCI_MANIFEST, Fetched, Registry, canonical, sha256
from trainyard.verify import Check

DATA = Path(__file__).parent / "data"
LOCK = (DATA / "manifest-cpu-pt213.lock").read_bytes()
CONTENTS = "5ca5906e4c99d6ed"
IMMUTABLE = f"cpu-pt213-20261130-{CONTENTS}"
TESTS = (
    b'<testsuites><testsuite tests="3"><testcase name="test_a[cpu-pt213]"/>'
    b'<testcase name="test_b[cpu-pt213-twin]"/>'
    b'<testcase name="test_c[cpu-pt213]"><skipped/></testcase></testsuite></testsuites>'
)

TRUST = signing.KeyTrust(KEY.public_key())


def signer(key: ec.EllipticCurvePrivateKey | None) -> signing.Signer | None:
    return signing.KeySigner(key) if key else None


class Published:
    """An image in a registry, with everything attached and signed."""

    def __init__(self, key: ec.EllipticCurvePrivateKey | None = KEY) -> None:
        self.memory = Memory()
        self.key = key
        self.config = {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Labels": {ID_LABEL: "cpu-pt213", CONTENTS_LABEL: CONTENTS}},
            "rootfs": {"type": "layers", "diff_ids": ["sha256:" + "1" * 64, "sha256:" + "2" * 64]},
        }
        self.digest = self.push_image()
        self.measured: dict[str, Any] = json.loads((DATA / "manifest-cpu-pt213.json").read_text())
        self.measured["image_id"] = sha256(canonical(self.config))
        attest.attach(self.memory, self.digest, self.files(), signer(key))
        for tag in ("cpu-pt213", IMMUTABLE, "latest"):
            self.tag(tag)

    def push_image(self) -> str:
        config = canonical(self.config)
        layers = [{"mediaType": "l", "digest": "sha256:" + n * 64, "size": 1} for n in "34"]
        body = canonical(
            {
                "schemaVersion": 2,
                "mediaType": OCI_MANIFEST,
                "config": {"mediaType": "c", "digest": self.memory.put_bytes(config), "size": len(config)},
                "layers": layers,
            }
        )
        return self.memory.put_manifest(sha256(body), body, OCI_MANIFEST)

    def tag(self, tag: str) -> None:
        self.memory.manifests[tag] = self.memory.manifests[self.digest]

    def files(self) -> dict[str, bytes]:
        return {
            attest.MANIFEST_TYPE: json.dumps(self.measured).encode(),
            sbom.MEDIA_TYPE: sbom.document(self.measured, LOCK.decode(), self.digest),
            provenance.MEDIA_TYPE: self.provenance(self.digest),
            attest.TESTS_TYPE: TESTS,
        }

    def provenance(self, digest: str) -> bytes:
        return provenance.statement(
            self.measured,
            {},
            {"requirements.lock": LOCK},
            (self.memory.name, digest),
            provenance.Source("git+https://git.example/t", "c" * 40, modified=False),
            provenance.Run("https://ci.example/builder", "https://ci.example/1"),
        )

    def detach(self, kind: str) -> None:
        kept = [one for one in self.memory.referrers(self.digest) if one["artifactType"] != kind]
        self.memory.attached[self.digest] = kept

    def replace(self, kind: str, body: bytes) -> None:
        """What a bug of ours could publish."""
        self.detach(kind)
        attest.attach(self.memory, self.digest, {kind: body}, signer(self.key))

    def checks(self, ref: str = "cpu-pt213") -> dict[str, Check]:
        return {one.name: one for one in verify.verify(self.memory, ref, TRUST)}


def failed(checks: dict[str, Check]) -> dict[str, str]:
    return {one.name: one.detail for one in checks.values() if not one.ok}


# -- ours ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ref", ["cpu-pt213", IMMUTABLE, "latest", "digest"])
def test_ours_passes_and_says_what_was_checked(ref: str) -> None:
    published = Published()
    checks = published.checks(published.digest if ref == "digest" else ref)
    assert failed(checks) == {}
    assert list(checks) == [
        "manifest",
        "signature",
        "config",
        "tag",
        "trainyard manifest",
        "sbom",
        "provenance",
        "tests",
    ]
    assert verify.ok(tuple(checks.values()))
    assert checks["manifest"].detail == published.digest
    assert checks["sbom"].detail == "CycloneDX, 24 packages, as measured"
    assert checks["provenance"].detail == "built by https://ci.example/builder from commit cccccccccccc"
    assert checks["tests"].detail == "2 passed, 1 skipped"


def test_checks_as_json() -> None:
    found = verify.as_json((Check("signature", True, "by key 12"),))
    assert found == [{"name": "signature", "ok": True, "detail": "by key 12"}]


def test_no_checks_are_not_ok() -> None:
    assert not verify.ok(())


def test_a_name_that_does_not_exist_is_the_registrys_error() -> None:
    with pytest.raises(StepFailed, match="nope: not found"):
        verify.verify(Memory(), "nope", TRUST)


# -- re-tagged -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tag", "detail"),
    [
        ("cu121-pt29", "the tag says cu121-pt29, the image is cpu-pt213"),
        ("cpu-pt213-devel", "the tag says cpu-pt213-devel, the image is cpu-pt213"),
        (
            "cpu-pt213-20261130-0123456789abcdef",
            f"the tag says contents 0123456789abcdef, the image has {CONTENTS}",
        ),
        (f"cu121-pt29-20261130-{CONTENTS}", "the image is cpu-pt213"),
    ],
)
def test_a_retagged_image_fails(tag: str, detail: str) -> None:
    published = Published()
    published.tag(tag)
    found = failed(published.checks(tag))
    assert list(found) == ["tag"]
    assert detail in found["tag"]


# -- unsigned ------------------------------------------------------------------------------


def test_an_unsigned_image_fails() -> None:
    published = Published(key=None)
    found = failed(published.checks())
    assert found["signature"].startswith("not signed")
    assert found["trainyard manifest"] == f"1 attached, none of them signed by {TRUST.who}"


def test_an_image_signed_by_another_key_fails() -> None:
    found = failed(Published(key=OTHER).checks())
    assert "none of 1 signatures is by key" in found["signature"]
    assert "trainyard manifest" in found


def test_a_signature_copied_from_another_image_fails() -> None:
    published = Published()
    memory = published.memory
    genuine = memory.manifests[signing.tag(published.digest)]
    published.config["author"] = "somebody else"
    published.digest = published.push_image()
    published.tag("cpu-pt213")
    memory.manifests[signing.tag(published.digest)] = genuine
    found = failed(published.checks())
    assert "none of 1 signatures" in found["signature"]
    assert found["trainyard manifest"] == "not attached"


# -- tampered ------------------------------------------------------------------------------


def test_a_registry_that_gives_another_manifest_for_a_digest_fails() -> None:
    published = Published()
    body = published.memory.manifests[published.digest].body.replace(b'"size":1', b'"size":2')
    published.memory.manifests[published.digest] = Fetched(body, published.digest, OCI_MANIFEST)
    assert "manifest" in failed(published.checks(published.digest))


def test_a_changed_config_fails() -> None:
    published = Published()
    name = published.measured["image_id"]
    published.memory.blobs[name] = published.memory.blobs[name].replace(b"linux", b"linuX")
    assert "other bytes" in failed(published.checks())["config"]


def test_a_config_that_is_gone_fails() -> None:
    published = Published()
    del published.memory.blobs[published.measured["image_id"]]
    assert "not found" in failed(published.checks())["config"]


def test_a_changed_attachment_fails() -> None:
    published = Published()
    (one,) = [d for d in published.memory.referrers(published.digest) if d["artifactType"] == sbom.MEDIA_TYPE]
    layer = published.memory.manifest(one["digest"]).json["layers"][0]["digest"]
    published.memory.blobs[layer] = published.memory.blobs[layer].replace(b"2.13.0", b"2.13.1")
    assert "other bytes" in failed(published.checks())["sbom"]


KINDS = {
    attest.MANIFEST_TYPE: "trainyard manifest",
    sbom.MEDIA_TYPE: "sbom",
    provenance.MEDIA_TYPE: "provenance",
    attest.TESTS_TYPE: "tests",
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_attached_is_missed(kind: str) -> None:
    published = Published()
    published.detach(kind)
    assert failed(published.checks())[KINDS[kind]] == "not attached"


@pytest.mark.parametrize("kind", KINDS)
def test_what_somebody_else_attached_does_not_count(kind: str) -> None:
    published = Published()
    attest.attach(published.memory, published.digest, {kind: b"not ours"}, None)
    assert failed(published.checks()) == {}
    published.detach(kind)
    attest.attach(published.memory, published.digest, {kind: b"not ours"}, signer(OTHER))
    assert failed(published.checks())[KINDS[kind]] == f"1 attached, none of them signed by {TRUST.who}"


@pytest.mark.parametrize("kind", KINDS)
def test_something_else_of_the_right_type_fails(kind: str) -> None:
    published = Published()
    published.replace(kind, b"<not what it says")
    assert KINDS[kind] in failed(published.checks())


def test_an_attachment_of_another_image_fails() -> None:
    published = Published()
    other = {"mediaType": OCI_MANIFEST, "digest": "sha256:" + "9" * 64, "size": 1}
    stray = published.memory.attach(other, attest.TESTS_TYPE, [(attest.TESTS_TYPE, TESTS, {})])
    signing.sign(published.memory, stray["digest"], KEY)
    published.detach(attest.TESTS_TYPE)
    published.memory.attached[published.digest].append(stray)
    assert "attached to another image" in failed(published.checks())["tests"]


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(document: dict[str, Any]) -> None:
        *folders, last = path.split("/")
        for name in folders:
            document = document[name]
        document[last] = value

    return apply


@pytest.mark.parametrize(
    ("apply", "detail"),
    [
        (change("image_id", "sha256:" + "0" * 64), "measured in sha256:000"),
        (change("id", "cu121-pt29"), "the image's labels say otherwise"),
        (change("contents_id", "0" * 16), "the image's labels say otherwise"),
    ],
)
def test_a_manifest_of_another_image_fails(apply: Callable[[dict[str, Any]], None], detail: str) -> None:
    published = Published()
    wrong = copy.deepcopy(published.measured)
    apply(wrong)
    published.replace(attest.MANIFEST_TYPE, json.dumps(wrong).encode())
    assert detail in failed(published.checks())["trainyard manifest"]


def test_a_bill_of_other_packages_fails() -> None:
    published = Published()
    wrong = copy.deepcopy(published.measured)
    for one in wrong["measured"]["packages"]["pip"]:
        if one["name"] == "torch":
            one["version"] = "2.14.0"
    published.replace(sbom.MEDIA_TYPE, sbom.document(wrong, LOCK.decode(), published.digest))
    assert "torch 2.13.0+cpu, torch 2.14.0" in failed(published.checks())["sbom"]


def test_a_bill_that_hides_many_packages_fails() -> None:
    published = Published()
    wrong = copy.deepcopy(published.measured)
    wrong["measured"]["packages"]["apt"] = []
    published.replace(sbom.MEDIA_TYPE, sbom.document(wrong, LOCK.decode(), published.digest))
    assert "and 8 more" in failed(published.checks())["sbom"]


@pytest.mark.parametrize("what", ["image_id", "digest"])
def test_a_bill_of_another_image_fails(what: str) -> None:
    published = Published()
    other = "sha256:" + "7" * 64
    measured = published.measured | ({"image_id": other} if what == "image_id" else {})
    digest = other if what == "digest" else published.digest
    published.replace(sbom.MEDIA_TYPE, sbom.document(measured, LOCK.decode(), digest))
    assert "of another image" in failed(published.checks())["sbom"]


def test_a_provenance_of_another_image_fails() -> None:
    published = Published()
    published.replace(provenance.MEDIA_TYPE, published.provenance("sha256:" + "7" * 64))
    assert failed(published.checks())["provenance"] == f"its subject is sha256:{'7' * 64}"


def test_a_provenance_of_other_contents_fails() -> None:
    published = Published()
    published.measured["contents_id"] = "0" * 16
    published.replace(provenance.MEDIA_TYPE, published.provenance(published.digest))
    assert "contents 0000" in failed(published.checks())["provenance"]


@pytest.mark.parametrize(
    ("report", "detail"),
    [
        (TESTS.replace(b"<skipped/>", b"<failure/>"), "1 of 3 failed: test_c[cpu-pt213]"),
        (TESTS.replace(b"<skipped/>", b"<error/>"), "1 of 3 failed"),
        (TESTS.replace(b"cpu-pt213", b"cpu-pt213-base"), "no test of cpu-pt213 ran"),
        (TESTS.replace(b"/><testcase name=\"test_b", b"><skipped/></testcase><testcase name=\"test_b")
         .replace(b"twin]\"/>", b"twin]\"><skipped/></testcase>"), "no test of cpu-pt213 ran"),
        (b"<testsuites/>", "no test of cpu-pt213 ran"),
        (TESTS.replace(b"tests=\"3\">", b"tests=\"3\"><properties><property name=\""
         + IMAGE_PROPERTY.encode() + b"\" value=\"sha256:77\"/></properties>"), "another image: sha256:77"),
    ],
)  # fmt: skip
def test_a_report_that_proves_nothing_fails(report: bytes, detail: str) -> None:
    published = Published()
    published.replace(attest.TESTS_TYPE, report)
    assert detail in failed(published.checks())["tests"]


# -- not an image of ours ------------------------------------------------------------------


def index(published: Published, *digests: str) -> str:
    """Several platforms under the image's tag."""
    entries = [
        {"digest": digest, "platform": {"os": "linux", "architecture": name}}
        for digest, name in zip(digests, ("amd64", "arm64"), strict=False)
    ]
    return published.memory.put_manifest("cpu-pt213", canonical({"manifests": entries}), OCI_INDEX)


def test_each_platform_of_an_index_is_checked() -> None:
    published = Published()
    signing.sign(published.memory, index(published, published.digest, published.digest), KEY)
    checks = published.checks()
    assert failed(checks) == {}
    assert len(checks) == 2 + 2 * 8
    assert {"index", "signature", "linux/amd64 sbom", "linux/arm64 tests"} < set(checks)


def test_an_index_needs_a_signature_of_its_own() -> None:
    published = Published()
    index(published, published.digest)
    assert list(failed(published.checks())) == ["signature"]


def test_an_index_of_nothing_fails() -> None:
    published = Published()
    signing.sign(published.memory, index(published), KEY)
    assert failed(published.checks()) == {"platforms": "the index names no image"}


def test_a_platform_that_is_gone_fails() -> None:
    published = Published()
    gone = "sha256:" + "8" * 64
    signing.sign(published.memory, index(published, published.digest, gone), KEY)
    assert list(failed(published.checks())) == ["linux/arm64 manifest"]


def test_an_index_under_another_tag_fails() -> None:
    published = Published()
    index(published, published.digest)
    published.memory.manifests["cu121-pt29"] = published.memory.manifests["cpu-pt213"]
    assert "linux/amd64 tag" in failed(published.checks("cu121-pt29"))


def test_an_image_without_our_labels_fails() -> None:
    published = Published()
    published.config["config"] = {}
    published.digest = published.push_image()
    published.tag("cpu-pt213")
    assert "Trainyard did not build it" in failed(published.checks())["tag"]


# -- attaching -----------------------------------------------------------------------------


def test_attaching_again_writes_nothing_new() -> None:
    published = Published()
    before = dict(published.memory.manifests), dict(published.memory.blobs)
    attest.attach(published.memory, published.digest, published.files(), signer(KEY))
    assert (published.memory.manifests, published.memory.blobs) == before
    assert len(published.memory.referrers(published.digest)) == 4


def test_an_image_is_signed_after_what_is_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    signed: list[str] = []
    monkeypatch.setattr(signing, "sign", lambda _store, digest, _key: signed.append(digest))
    published = Published()
    assert signed[-1] == published.digest
    assert len(signed) == 5


def conforms(registry: Registry) -> tuple[verify.Source, attest.Target]:
    """For mypy: the real registry has what these modules ask for."""
    return registry, registry
