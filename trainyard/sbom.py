"""The bill of materials: CycloneDX 1.6 JSON, made from what was measured inside an image.

One component for each Debian and each Python package, with its package URL, licences as the package
declares them, and hashes.  There are two kinds of hash, and they answer different questions:

- ``hashes`` of a component is of the package *as it lies in the image*: of its RECORD (Python) or of
  its list of md5 sums (Debian).  A property beside it says which.
- the distribution reference of a Python package has the hashes of the files that its lock allowed
  the installer to take.

The same manifest and lock give the same bytes: https://cyclonedx.org/docs/1.6/json/
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cyclonedx.contrib.license.exceptions import InvalidSpdxLicenseException
from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, Property, XsUri
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.dependency import Dependency
from cyclonedx.model.license import License, LicenseAcknowledgement
from cyclonedx.model.tool import ToolRepository
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.utils import canonicalize_name

from trainyard.diff import op_code
from trainyard.model import StepFailed

MEDIA_TYPE = "application/vnd.cyclonedx+json"
PREFIX = "dev.trainyard:"
#: Serial numbers are made from image ids, and must be UUIDs of some namespace.
NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "trainyard.dev")
PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^]]*\])?==(\S+)")
#: Without a version: the same image gets the same bytes from every release.
TOOL = Component(type=ComponentType.APPLICATION, name="trainyard", bom_ref="tool:trainyard")
DECLARED = LicenseAcknowledgement.DECLARED
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


@dataclass(frozen=True)
class Locked:
    """One package of a lock file, and the sha256 of each file that may be installed for it."""

    version: str
    hashes: tuple[str, ...]


def locked(lock: str) -> dict[str, Locked]:
    """The packages of a ``requirements.lock`` by normalized name."""
    found: dict[str, Locked] = {}
    for entry in re.sub(r"\\\n", "", lock).splitlines():
        if pin := PIN.match(entry):
            found[canonicalize_name(pin[1])] = Locked(pin[2], tuple(HASH.findall(entry)))
    return found


def document(manifest: Mapping[str, Any], lock: str, digest: str | None = None) -> bytes:
    """The bill of materials of an image as CycloneDX 1.6 JSON.

    ``lock`` is the text of its ``requirements.lock``; ``digest`` is that of the published manifest,
    where there is one.  Raises StepFailed for a manifest that was measured without package details.
    """
    packages = manifest["measured"].get("packages")
    if not packages:
        raise StepFailed(
            f"{manifest['id']}: its manifest has no package details, an older Trainyard measured it\n"
            f"Run: python build.py build {manifest['id']} --force"
        )
    image = _image(manifest, digest)
    system = _system(manifest)
    pins = locked(lock)
    python: dict[str, Component] = {
        canonicalize_name(one["name"]): _python(one, pins) for one in packages["pip"]
    }
    debian = [_debian(one, manifest["measured"]["os"]) for one in packages["apt"]]
    edges = [
        Dependency(image.bom_ref, [Dependency(one.bom_ref) for one in (system, *debian, *python.values())])
    ]
    if kernels := python.get("deepspeed"):
        _describe_kernels(kernels, manifest["measured"]["deepspeed"], pins)
        edges += [Dependency(kernels.bom_ref, [Dependency(python["torch"].bom_ref)])]
    bom = Bom(
        serial_number=uuid.uuid5(NAMESPACE, manifest["image_id"] + (digest or "")),
        metadata=BomMetaData(
            timestamp=datetime.fromisoformat(manifest["built_at"]),
            component=image,
            tools=ToolRepository(components=[TOOL]),
        ),
        components=[system, *debian, *python.values()],
        dependencies=edges,
    )
    return (JsonV1Dot6(bom).output_as_string(indent=2) + "\n").encode()


def _image(manifest: Mapping[str, Any], digest: str | None) -> Component:
    built = datetime.fromisoformat(manifest["built_at"])
    facts = {
        "image-id": manifest["image_id"],
        "contents-id": manifest["contents_id"],
        "base": f"{manifest['base']['name']}@{manifest['base']['digest']}",
        "base-origin": manifest["base"]["origin"],
    }
    return Component(
        type=ComponentType.CONTAINER,
        name=manifest["id"],
        version=f"{built:%Y%m%d}-{manifest['contents_id']}",
        bom_ref=f"image:{manifest['image_id']}",
        purl=PackageURL("oci", name=manifest["id"], version=digest) if digest else None,
        hashes=[_sha256(digest)] if digest else [],
        properties=_properties(facts | ({"manifest-digest": digest} if digest else {})),
    )


def _system(manifest: Mapping[str, Any]) -> Component:
    name, _, version = manifest["measured"]["os"].partition("-")
    return Component(
        type=ComponentType.OPERATING_SYSTEM, name=name, version=version, bom_ref=f"os:{name}-{version}"
    )


def _python(package: Mapping[str, Any], pins: Mapping[str, Locked]) -> Component:
    name, version = package["name"], package["version"]
    purl = PackageURL("pypi", name=canonicalize_name(name), version=version)
    pin = pins.get(canonicalize_name(name))
    allowed = [_sha256(one) for one in pin.hashes] if pin and pin.version == version else []
    return Component(
        name=name,
        version=version,
        bom_ref=purl.to_string(),
        purl=purl,
        licenses=[LicenseFactory().make_from_string(package["licence"], license_acknowledgement=DECLARED)]
        if package["licence"]
        else [],
        hashes=[_sha256(package["record_sha256"])] if package["record_sha256"] else [],
        external_references=[
            ExternalReference(
                type=ExternalReferenceType.DISTRIBUTION,
                url=XsUri(f"https://pypi.org/project/{canonicalize_name(name)}/{version.partition('+')[0]}/"),
                comment="any one of the files that the lock allows",
                hashes=allowed,
            )
        ]
        if allowed
        else [],
        properties=_properties({"hash-of": "RECORD", "bytes": package["bytes"]}),
    )


def _debian(package: Mapping[str, Any], system: str) -> Component:
    qualifiers = {"arch": package["architecture"], "distro": system}
    if package["source"] != package["name"] or package["source_version"] != package["version"]:
        qualifiers["upstream"] = f"{package['source']}@{package['source_version']}"
    purl = PackageURL("deb", system.partition("-")[0], package["name"], package["version"], qualifiers)
    return Component(
        name=package["name"],
        version=package["version"],
        bom_ref=purl.to_string(),
        purl=purl,
        licenses=[_debian_licence(name) for name in package["licences"]],
        hashes=[_sha256(package["md5sums_sha256"])] if package["md5sums_sha256"] else [],
        properties=_properties({"hash-of": "md5sums", "bytes": package["bytes"]}),
    )


def _debian_licence(name: str) -> License:
    """By SPDX id where Debian's short name is one, else by Debian's name.

    A component has one expression or many licences, never both, so this makes no expression:
    https://cyclonedx.org/docs/1.6/json/#components_items_licenses
    """
    try:
        return LicenseFactory().make_with_id(name, acknowledgement=DECLARED)
    except InvalidSpdxLicenseException:
        return LicenseFactory().make_with_name(name, acknowledgement=DECLARED)


def _describe_kernels(component: Component, measured: Mapping[str, Any], pins: Mapping[str, Locked]) -> None:
    """DeepSpeed is no published wheel: it is compiled here, from the locked source, for one torch."""
    facts = {
        "kernels:built-against": f"torch {measured['torch']}",
        "kernels:accelerator": measured["accelerator"],
    }
    facts |= {f"kernel:{op}": op_code(found) for op, found in measured["ops"].items()}
    component.properties.update(_properties(facts))
    pin = pins.get("deepspeed")
    component.external_references.clear()
    if pin:
        component.external_references.add(
            ExternalReference(
                type=ExternalReferenceType.SOURCE_DISTRIBUTION,
                url=XsUri(f"https://pypi.org/project/deepspeed/{pin.version}/"),
                comment="compiled into a wheel together with its kernels",
                hashes=[_sha256(one) for one in pin.hashes],
            )
        )


def _sha256(value: str) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=value.removeprefix("sha256:"))


def _properties(facts: Mapping[str, object]) -> list[Property]:
    return [Property(name=PREFIX + name, value=str(value)) for name, value in facts.items()]


@dataclass(frozen=True)
class Described:
    """What a bill of materials says that it describes."""

    id: str
    image_id: str
    digest: str | None
    packages: frozenset[tuple[str, str, str]]  # kind (pip or apt), name as measured, version


def read(body: bytes) -> Described:
    """Read a document that :func:`document` wrote; raises ValueError for anything else."""
    try:
        bom = json.loads(body)
        if (bom["bomFormat"], bom["specVersion"]) != ("CycloneDX", "1.6"):
            raise ValueError(f"{bom['bomFormat']} {bom['specVersion']} instead of CycloneDX 1.6")
        image = bom["metadata"]["component"]
        facts = {one["name"].removeprefix(PREFIX): one["value"] for one in image["properties"]}
        return Described(
            id=image["name"],
            image_id=facts["image-id"],
            digest=facts.get("manifest-digest"),
            packages=frozenset(_packages(bom["components"])),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a bill of materials of Trainyard: {error!r}") from error


def _packages(components: list[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    kinds = {"pkg:pypi/": "pip", "pkg:deb/": "apt"}
    for one in components:
        for prefix, kind in kinds.items():
            if one.get("purl", "").startswith(prefix):
                yield kind, one["name"], one["version"]
