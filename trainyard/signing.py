"""Signatures that cosign can check, and checking those that cosign made.

A signature is over a small JSON payload that names the digest of a manifest.  Payload and signature
lie in the registry beside it, under the tag ``sha256-<hex>.sig``:
https://github.com/sigstore/cosign/blob/main/specs/SIGNATURE_SPEC.md.  With cosign, ours are checked by::

    cosign verify --key cosign.pub --insecure-ignore-tlog=true HOST/ORG/NAME@sha256:...

``--insecure-ignore-tlog``, since a signature by key is written to no transparency log: that would tell
the world about every image of a private registry.

Keys are ECDSA P-256: in PEM, or as ``cosign generate-key-pair`` writes them (see :mod:`trainyard.keys`).

Signing without a key is cosign's own: :mod:`trainyard.keyless`.  Both are a :class:`Signer`, and a
:class:`Trust` to who verifies; their signatures stand side by side under one tag.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from trainyard.registry import OCI_MANIFEST, Fetched, canonical, sha256

PAYLOAD_TYPE = "application/vnd.dev.cosign.simplesigning.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
ANNOTATION = "dev.cosignproject.cosign/signature"
CLAIM = "cosign container image signature"
#: Signatures of one manifest that are looked at; anyone who may push can add one.
MOST = 50

P256 = ec.ECDSA(hashes.SHA256())


class Store(Protocol):
    """What signing needs of :class:`trainyard.registry.Registry`: one repository."""

    @property
    def name(self) -> str:
        """``host/org/name``."""

    def find(self, ref: str) -> Fetched | None:
        """The manifest under a tag or digest; None where there is none."""

    def put_manifest(self, ref: str, body: bytes, media_type: str) -> str:
        """Put a manifest under a tag; return its digest."""

    def put_bytes(self, data: bytes) -> str:
        """Upload a small blob; return its digest."""

    def blob(self, digest: str) -> bytes:
        """A small blob, compared with its digest."""


class Signer(Protocol):
    """Signs manifests of a repository."""

    def sign(self, store: Store, digests: Sequence[str]) -> None:
        """Sign manifests, in this order.  Raises StepFailed where it fails; the rest is then not signed."""


@dataclass(frozen=True)
class Finding:
    """Whether a manifest is signed; ``detail`` says by whom, or why not."""

    signed: bool
    detail: str


class Trust(Protocol):
    """Whose signatures count."""

    @property
    def who(self) -> str:
        """For messages."""

    def look(self, store: Store, digest: str) -> Finding:
        """Look at a manifest's signatures.  Raises StepFailed where they cannot be looked at."""


@dataclass(frozen=True)
class KeySigner:
    """Signs with a key; what it signed before is left as it is."""

    key: ec.EllipticCurvePrivateKey

    def sign(self, store: Store, digests: Sequence[str]) -> None:
        for digest in digests:
            sign(store, digest, self.key)


@dataclass(frozen=True)
class KeyTrust:
    """Trusts signatures by a key."""

    key: ec.EllipticCurvePublicKey

    @property
    def who(self) -> str:
        return f"key {fingerprint(self.key)}"

    def look(self, store: Store, digest: str) -> Finding:
        found = signatures(store, digest)
        if not found:
            return Finding(False, f"not signed: there is no usable signature under {tag(digest)}")
        if not any(checks(one, digest, self.key) for one in found):
            return Finding(False, f"none of {len(found)} signatures is by {self.who} and for this manifest")
        return Finding(True, f"by {self.who}")


@dataclass(frozen=True)
class Signature:
    """A signature that is there, before anybody has checked it."""

    payload: bytes
    value: bytes  # DER


def tag(digest: str) -> str:
    """The tag that has the signatures of this manifest."""
    return digest.replace(":", "-") + ".sig"


def payload(repository: str, digest: str) -> bytes:
    """What is signed: the "simple signing" document, in the spelling of cosign."""
    document = {
        "critical": {
            "identity": {"docker-reference": repository},
            "image": {"docker-manifest-digest": digest},
            "type": CLAIM,
        },
        "optional": None,
    }
    return json.dumps(document, separators=(",", ":")).encode()


def sign(store: Store, digest: str, key: ec.EllipticCurvePrivateKey) -> str:
    """Sign a manifest of the repository; return the digest of the manifest that has the signature.

    Other signatures of it stay.  Where one by this key is already there, nothing is written.
    """
    found = store.find(tag(digest))
    if found and is_signed(store, digest, key.public_key()):
        return found.digest
    body = payload(store.name, digest)
    layer = {
        "mediaType": PAYLOAD_TYPE,
        "digest": store.put_bytes(body),
        "size": len(body),
        "annotations": {ANNOTATION: base64.b64encode(key.sign(body, P256)).decode()},
    }
    layers = [*(found.json.get("layers") or () if found else ()), layer]
    config = _config(layers)
    manifest = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": {"mediaType": CONFIG_TYPE, "digest": store.put_bytes(config), "size": len(config)},
        "layers": layers,
    }
    return store.put_manifest(tag(digest), canonical(manifest), OCI_MANIFEST)


def _config(layers: list[dict[str, Any]]) -> bytes:
    """An image config that lists the layers; readers of images ask for one, nobody runs it."""
    return canonical(
        {
            "architecture": "",
            "os": "",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": [layer["digest"] for layer in layers]},
        }
    )


def signatures(store: Store, digest: str) -> list[Signature]:
    """The signatures of a manifest, as they are in the registry; nothing is checked yet."""
    found = store.find(tag(digest))
    result = []
    for layer in (found.json.get("layers") or ())[:MOST] if found else ():
        value = (layer.get("annotations") or {}).get(ANNOTATION)
        if layer.get("mediaType") != PAYLOAD_TYPE or not value:
            continue
        try:
            result.append(Signature(store.blob(layer["digest"]), base64.b64decode(value, validate=True)))
        except binascii.Error:
            continue
    return result


def is_signed(store: Store, digest: str, key: ec.EllipticCurvePublicKey) -> bool:
    """Whether one of the manifest's signatures is by this key and names just this manifest."""
    return any(checks(one, digest, key) for one in signatures(store, digest))


def checks(signature: Signature, digest: str, key: ec.EllipticCurvePublicKey) -> bool:
    """Whether the signature is by the key, and its payload a claim about this digest.

    The key is asked first: bytes that it did not sign are not even parsed.
    """
    try:
        key.verify(signature.value, signature.payload, P256)
        critical = json.loads(signature.payload)["critical"]
        return bool(critical["type"] == CLAIM and critical["image"]["docker-manifest-digest"] == digest)
    except (InvalidSignature, ValueError, KeyError, TypeError):
        return False


def fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """A short name for a key, for messages: the start of the sha256 of its DER."""
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return sha256(der).removeprefix("sha256:")[:16]
