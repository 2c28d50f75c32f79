"""The bill of materials: valid CycloneDX 1.6, the same bytes every time, and nothing left out."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

from trainyard import sbom
from trainyard.model import StepFailed

DATA = Path(__file__).parent / "data"
#: Measured in an image; trimmed to a dozen packages of each kind.
MANIFEST: dict[str, Any] = json.loads((DATA / "manifest-cpu-pt213.json").read_text())
LOCK = (DATA / "manifest-cpu-pt213.lock").read_text()
DIGEST = "sha256:" + "5" * 64


def document(digest: str | None = DIGEST, **changed: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(sbom.document(MANIFEST | changed, LOCK, digest))
    return found


def component(name: str) -> dict[str, Any]:
    (found,) = [one for one in document()["components"] if one["name"] == name]
    return dict(found)


def properties(one: dict[str, Any]) -> dict[str, str]:
    return {p["name"].removeprefix("dev.trainyard:"): p["value"] for p in one["properties"]}


@pytest.mark.parametrize("digest", [None, DIGEST])
def test_valid_by_the_schema(digest: str | None) -> None:
    body = sbom.document(MANIFEST, LOCK, digest).decode()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(body) is None


def test_the_validator_sees_a_wrong_one() -> None:
    wrong = document()
    wrong["components"][0]["hashes"] = [{"alg": "SHA-256", "content": "no hash"}]
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(wrong)) is not None


def test_the_same_bytes_for_the_same_image() -> None:
    again = copy.deepcopy(MANIFEST)
    again["measured"]["packages"]["pip"].reverse()
    assert sbom.document(again, LOCK, DIGEST) == sbom.document(MANIFEST, LOCK, DIGEST)


def test_serial_number_and_time_are_the_images() -> None:
    found, other = document(), document(image_id="sha256:" + "1" * 64)
    assert found["serialNumber"] != other["serialNumber"]
    assert found["serialNumber"] != document(digest=None)["serialNumber"]
    assert found["metadata"]["timestamp"] == MANIFEST["built_at"]


def test_every_measured_package_is_there() -> None:
    measured = MANIFEST["measured"]
    expected = {("pip", *one) for one in measured["pip"].items()} | {
        ("apt", *one) for one in measured["apt"].items()
    }
    described = sbom.read(sbom.document(MANIFEST, LOCK, DIGEST))
    assert described.packages == expected
    assert (described.id, described.image_id, described.digest) == (
        "cpu-pt213",
        MANIFEST["image_id"],
        DIGEST,
    )


def test_the_image_is_what_the_document_is_about() -> None:
    found = document()
    image = found["metadata"]["component"]
    assert image["type"] == "container"
    assert PackageURL.from_string(image["purl"]) == PackageURL("oci", name="cpu-pt213", version=DIGEST)
    assert image["hashes"] == [{"alg": "SHA-256", "content": "5" * 64}]
    assert properties(image)["base"].startswith("debian:bookworm-slim@sha256:")
    (edges,) = [one for one in found["dependencies"] if one["ref"] == image["bom-ref"]]
    assert len(edges["dependsOn"]) == len(found["components"])


def test_debian_packages_name_their_source() -> None:
    found = component("bsdutils")
    purl = PackageURL.from_string(found["purl"])
    assert (purl.type, purl.namespace, purl.name) == ("deb", "debian", "bsdutils")
    assert purl.version == MANIFEST["measured"]["apt"]["bsdutils"]
    assert purl.qualifiers == {
        "arch": "amd64",
        "distro": "debian-12",
        "upstream": "util-linux@2.38.1-5+deb12u3",
    }
    assert {"license": {"acknowledgement": "declared", "name": "GPL-2+"}} in found["licenses"]
    assert {"license": {"acknowledgement": "declared", "id": "MIT"}} in found["licenses"]
    assert properties(found)["hash-of"] == "md5sums"


def test_python_packages_have_both_kinds_of_hash() -> None:
    found = component("Jinja2")
    assert found["purl"] == "pkg:pypi/jinja2@3.1.6"
    (measured,) = [one for one in MANIFEST["measured"]["packages"]["pip"] if one["name"] == "Jinja2"]
    assert found["hashes"] == [{"alg": "SHA-256", "content": measured["record_sha256"]}]
    (reference,) = found["externalReferences"]
    assert reference["type"] == "distribution"
    assert {one["content"] for one in reference["hashes"]} == set(sbom.locked(LOCK)["jinja2"].hashes)


@pytest.mark.parametrize(
    ("name", "licence"),
    [
        ("packaging", {"expression": "Apache-2.0 OR BSD-2-Clause", "acknowledgement": "declared"}),
        ("PyYAML", {"license": {"id": "MIT", "acknowledgement": "declared"}}),
        ("Jinja2", {"license": {"name": "BSD License", "acknowledgement": "declared"}}),
    ],
)
def test_licences_are_spdx_where_the_package_says_so(name: str, licence: dict[str, Any]) -> None:
    assert component(name)["licenses"] == [licence]


def test_a_lock_of_another_version_gives_no_hashes() -> None:
    moved = LOCK.replace("jinja2==3.1.6", "jinja2==3.1.7")
    found = json.loads(sbom.document(MANIFEST, moved, DIGEST))
    (jinja,) = [one for one in found["components"] if one["name"] == "Jinja2"]
    assert "externalReferences" not in jinja


def test_the_kernels_wheel_says_where_it_comes_from() -> None:
    found = component("deepspeed")
    (reference,) = found["externalReferences"]
    assert reference["type"] == "source-distribution"
    assert [one["content"] for one in reference["hashes"]] == list(sbom.locked(LOCK)["deepspeed"].hashes)
    facts = properties(found)
    assert facts["kernels:built-against"] == "torch 2.13"
    assert facts["kernel:cpu_adam"] == "host"
    (edges,) = [one for one in document()["dependencies"] if one["ref"] == found["bom-ref"]]
    assert edges["dependsOn"] == [component("torch")["bom-ref"]]


def test_an_image_without_deepspeed_has_no_kernels() -> None:
    base = copy.deepcopy(MANIFEST)
    base["measured"]["deepspeed"] = None
    packages = base["measured"]["packages"]
    packages["pip"] = [one for one in packages["pip"] if one["name"] != "deepspeed"]
    body = sbom.document(base, LOCK, DIGEST).decode()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(body) is None
    assert "kernels" not in body


def test_an_old_manifest_is_refused_with_the_remedy() -> None:
    old = copy.deepcopy(MANIFEST)
    del old["measured"]["packages"]
    with pytest.raises(StepFailed, match=r"python build\.py build cpu-pt213 --force"):
        sbom.document(old, LOCK)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"bomFormat": "CycloneDX", "specVersion": "1.6"}', b'{"spdxVersion": 1}']
)
def test_reading_something_else_is_a_value_error(body: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        sbom.read(body)
