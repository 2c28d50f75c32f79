"""Signatures by key: what cosign's specification asks for, checked by openssl and not by ourselves.

The registry is outside: here it is :class:`Memory`, a dictionary with the same methods.  Against a
real one the same functions run in tests/registry.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from nacl.exceptions import CryptoError

from trainyard import keys, signing
from trainyard.model import InputError
from trainyard.registry import (
    EMPTY,
    EMPTY_TYPE,
    OCI_MANIFEST,
    Descriptor,
    Fetched,
    NotFound,
    canonical,
    sha256,
)

KEY = ec.generate_private_key(ec.SECP256R1())
OTHER = ec.generate_private_key(ec.SECP256R1())
DIGEST = "sha256:" + "5" * 64


class Memory:
    """One repository, in memory."""

    def __init__(self) -> None:
        self.name = "registry.example/acme/trainyard"
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, Fetched] = {}
        self.attached: dict[str, list[Descriptor]] = {}
        self.writes = 0

    def find(self, ref: str) -> Fetched | None:
        return self.manifests.get(ref)

    def manifest(self, ref: str) -> Fetched:
        if ref not in self.manifests:
            raise NotFound(f"{self.name}: {ref}: not found", 404)
        return self.manifests[ref]

    def put_manifest(self, ref: str, body: bytes, media_type: str) -> str:
        self.writes += 1
        fetched = Fetched(body, sha256(body), media_type)
        self.manifests[ref] = self.manifests[fetched.digest] = fetched
        return fetched.digest

    def put_bytes(self, data: bytes) -> str:
        self.writes += 1
        self.blobs[sha256(data)] = data
        return sha256(data)

    def blob(self, digest: str) -> bytes:
        if digest not in self.blobs:
            raise NotFound(f"{self.name}: blob {digest}: not found", 404)
        return self.blobs[digest]

    def referrers(self, digest: str) -> list[Descriptor]:
        return self.attached.get(digest, [])

    def attach(
        self, subject: Descriptor, artifact_type: str, layers: Sequence[tuple[str, bytes, Mapping[str, str]]]
    ) -> Descriptor:
        manifest = {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "artifactType": artifact_type,
            "config": {"mediaType": EMPTY_TYPE, "digest": self.put_bytes(EMPTY), "size": len(EMPTY)},
            "layers": [
                {
                    "mediaType": kind,
                    "digest": self.put_bytes(body),
                    "size": len(body),
                    "annotations": dict(notes),
                }
                for kind, body, notes in layers
            ],
            "subject": subject,
        }
        body = canonical(manifest)
        one = {
            "mediaType": OCI_MANIFEST,
            "digest": self.put_manifest(sha256(body), body, OCI_MANIFEST),
            "size": len(body),
            "artifactType": artifact_type,
        }
        listed = self.attached.setdefault(subject["digest"], [])
        if one not in listed:
            listed.append(one)
        return one


def stored(memory: Memory) -> dict[str, Any]:
    return memory.manifests[signing.tag(DIGEST)].json


def public_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def openssl(folder: Path, public: bytes, signature: bytes, payload: bytes) -> bool:
    """Whether openssl takes the signature for one of these bytes; it knows nothing of Trainyard."""
    for name, data in {"key.pub": public, "signature": signature, "payload": payload}.items():
        (folder / name).write_bytes(data)
    command = ["openssl", "dgst", "-sha256", "-verify", "key.pub", "-signature", "signature", "payload"]
    return subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode == 0


# -- what lies in the registry -------------------------------------------------------------


def test_the_tag_is_the_digests() -> None:
    assert signing.tag(DIGEST) == "sha256-" + "5" * 64 + ".sig"


def test_the_payload_is_cosigns() -> None:
    # Field for field: https://github.com/sigstore/cosign/blob/main/specs/SIGNATURE_SPEC.md#simple-signing
    assert signing.payload("registry.example/acme/trainyard", DIGEST) == (
        b'{"critical":{"identity":{"docker-reference":"registry.example/acme/trainyard"},'
        b'"image":{"docker-manifest-digest":"' + DIGEST.encode() + b'"},'
        b'"type":"cosign container image signature"},"optional":null}'
    )


def test_openssl_takes_the_signature(tmp_path: Path) -> None:
    memory = Memory()
    signing.sign(memory, DIGEST, KEY)
    (layer,) = stored(memory)["layers"]
    signature = base64.b64decode(layer["annotations"]["dev.cosignproject.cosign/signature"])
    payload = memory.blobs[layer["digest"]]
    assert openssl(tmp_path, public_pem(KEY), signature, payload)
    assert not openssl(tmp_path, public_pem(OTHER), signature, payload)
    assert not openssl(tmp_path, public_pem(KEY), signature, payload + b" ")


def test_a_signature_by_openssl_is_taken(tmp_path: Path) -> None:
    memory = Memory()
    payload = signing.payload(memory.name, DIGEST)
    (tmp_path / "payload").write_bytes(payload)
    make = ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "own.key"]
    subprocess.run(make, cwd=tmp_path, check=True, capture_output=True)
    sign = ["openssl", "dgst", "-sha256", "-sign", "own.key", "payload"]
    signature = subprocess.run(sign, cwd=tmp_path, check=True, capture_output=True).stdout
    key = keys.private_key(str(tmp_path / "own.key"), {})
    assert signing.checks(signing.Signature(payload, signature), DIGEST, key.public_key())


def test_the_manifest_is_an_oci_image_as_the_specification_asks() -> None:
    memory = Memory()
    digest = signing.sign(memory, DIGEST, KEY)
    manifest = stored(memory)
    assert digest == memory.manifests[signing.tag(DIGEST)].digest
    assert memory.manifests[signing.tag(DIGEST)].media_type == OCI_MANIFEST
    assert manifest["config"]["mediaType"] == "application/vnd.oci.image.config.v1+json"
    (layer,) = manifest["layers"]
    assert layer["mediaType"] == "application/vnd.dev.cosign.simplesigning.v1+json"
    assert layer["size"] == len(memory.blobs[layer["digest"]])
    config = json.loads(memory.blobs[manifest["config"]["digest"]])
    assert config["rootfs"] == {"type": "layers", "diff_ids": [layer["digest"]]}


def test_signing_again_writes_nothing() -> None:
    memory = Memory()
    first = signing.sign(memory, DIGEST, KEY)
    writes = memory.writes
    assert signing.sign(memory, DIGEST, KEY) == first
    assert memory.writes == writes


def test_a_second_key_is_added_to_the_first() -> None:
    memory = Memory()
    signing.sign(memory, DIGEST, KEY)
    signing.sign(memory, DIGEST, OTHER)
    assert len(stored(memory)["layers"]) == 2
    for key in (KEY, OTHER):
        assert signing.is_signed(memory, DIGEST, key.public_key())


# -- what is no signature ------------------------------------------------------------------


def put(memory: Memory, payload: bytes, signature: str, media_type: str = signing.PAYLOAD_TYPE) -> None:
    layer = {
        "mediaType": media_type,
        "digest": memory.put_bytes(payload),
        "size": len(payload),
        "annotations": {signing.ANNOTATION: signature},
    }
    memory.put_manifest(signing.tag(DIGEST), canonical({"layers": [layer]}), OCI_MANIFEST)


def signed(payload: bytes) -> str:
    return base64.b64encode(KEY.sign(payload, signing.P256)).decode()


GOOD = signing.payload("registry.example/acme/trainyard", DIGEST)
ANOTHER = signing.payload("registry.example/acme/trainyard", "sha256:" + "6" * 64)


@pytest.mark.parametrize(
    ("payload", "signature"),
    [
        pytest.param(GOOD, signed(ANOTHER), id="of another payload"),
        pytest.param(ANOTHER, signed(ANOTHER), id="for another image"),
        pytest.param(
            GOOD.replace(b"cosign c", b"c"), signed(GOOD.replace(b"cosign c", b"c")), id="other claim"
        ),
        pytest.param(b"[]", signed(b"[]"), id="no claim"),
        pytest.param(b"\xff", signed(b"\xff"), id="no JSON"),
        pytest.param(GOOD, "!!", id="not base64"),
        pytest.param(GOOD, "AAAA", id="not DER"),
    ],
)
def test_what_is_no_signature_of_this_image(payload: bytes, signature: str) -> None:
    memory = Memory()
    put(memory, payload, signature)
    assert not signing.is_signed(memory, DIGEST, KEY.public_key())


def test_the_same_parts_right_are_a_signature() -> None:
    memory = Memory()
    put(memory, GOOD, signed(GOOD))
    assert signing.is_signed(memory, DIGEST, KEY.public_key())
    assert not signing.is_signed(memory, DIGEST, OTHER.public_key())


def test_other_media_types_are_not_looked_at() -> None:
    memory = Memory()
    put(memory, GOOD, signed(GOOD), "application/vnd.dsse.envelope.v1+json")
    assert signing.signatures(memory, DIGEST) == []


def test_no_signature_tag_no_signature() -> None:
    assert not signing.is_signed(Memory(), DIGEST, KEY.public_key())


# -- keys ----------------------------------------------------------------------------------

#: Made by go-securesystemslib, which cosign encrypts keys with; its own test vectors:
#: https://github.com/secure-systems-lab/go-securesystemslib/blob/main/encrypted/encrypted_test.go
SEALED = {
    2**15: (
        "WO3mVvyTwJ9vwT5/Tk5OW5WPIBUofMjcpEfrLnfY4uA=",
        "tCy7HcTFr4uxv4Nrg/DWmncuZ148U1MX",
        "08n43p5G5yviPEZpO7tPPF4aZQkWiWjkv4taFdhDBA0tamKH4nw=",
    ),
    2**16: (
        "FhzPOt9/bJG4PTq6lQ6ecG6GzaOuOy/ynG5+yRiFlNs=",
        "aw1ng1jHaDz/tQ7V2gR9O2+IGQ8xJEuE",
        "HycvuLZL4sYH0BrYTh4E/H20VtAW6u5zL5Pr+IBjYLYnCPzDkq8=",
    ),
    2**17: (
        "m38E3kouJTtiheLQN22NQ8DTito5hrjpUIskqcd375k=",
        "Y6PM13yA+o44pE/W1ZBwczeGnTV/m9Zc",
        "6H8sqj1K6B6yDjtH5AQ6lbFigg/C2yDDJc4rYJ79w9aVPImFIPI=",
    ),
}


def sealed(cost: int, **params: int) -> bytes:
    salt, nonce, ciphertext = SEALED[cost]
    return json.dumps(
        {
            "kdf": {"name": "scrypt", "params": {"N": cost, "r": 8, "p": 1} | params, "salt": salt},
            "cipher": {"name": "nacl/secretbox", "nonce": nonce},
            "ciphertext": ciphertext,
        }
    ).encode()


@pytest.mark.parametrize("cost", SEALED)
def test_what_cosigns_library_encrypted_is_decrypted(cost: int) -> None:
    # Its vectors hold the JSON of the bytes "reallyimportant".
    assert (
        json.loads(keys.decrypt(sealed(cost), b"supersecret"))
        == base64.b64encode(b"reallyimportant").decode()
    )
    with pytest.raises(CryptoError):
        keys.decrypt(sealed(cost), b"wrong")


@pytest.mark.parametrize("params", [{"N": 2**26}, {"r": 64}, {"p": 9}])
def test_a_key_file_does_not_choose_the_cost(params: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="scrypt parameters"):
        keys.decrypt(sealed(2**15, **params), b"supersecret")


def test_a_new_pair_is_in_cosigns_form(tmp_path: Path) -> None:
    private, public = keys.generate("pass word")
    assert private.startswith(b"-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----\n")
    assert max(len(line) for line in private.splitlines()[1:-1]) == 64
    (tmp_path / "cosign.key").write_bytes(private)
    (tmp_path / "cosign.pub").write_bytes(public)
    environ = {"COSIGN_PASSWORD": "pass word"}
    key = keys.private_key(str(tmp_path / "cosign.key"), environ)
    assert key.public_key() == keys.public_key(str(tmp_path / "cosign.pub"), environ)
    assert openssl(tmp_path, public, key.sign(b"x", signing.P256), b"x")


def pem(key: Any, password: str | None = None, form: str = "PKCS8") -> bytes:
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password:
        encryption = serialization.BestAvailableEncryption(password.encode())
    encoded: bytes = key.private_bytes(
        serialization.Encoding.PEM, getattr(serialization.PrivateFormat, form), encryption
    )
    return encoded


@pytest.mark.parametrize("form", ["PKCS8", "TraditionalOpenSSL"])
@pytest.mark.parametrize("password", [None, "s3cret"])
def test_plain_pem_keys_are_read(form: str, password: str | None) -> None:
    found = keys.read_private(pem(KEY, password, form), "s3cret")
    assert found.private_numbers() == KEY.private_numbers()


def test_keys_come_from_variables_too() -> None:
    environ = {"SIGNING_KEY": pem(KEY).decode(), "PUBLIC": public_pem(KEY).decode()}
    assert keys.private_key("env://SIGNING_KEY", environ).public_key() == keys.public_key(
        "env://PUBLIC", environ
    )


COSIGNS, _ = keys.generate("s3cret")


@pytest.mark.parametrize(
    ("text", "environ", "message"),
    [
        pytest.param(COSIGNS, {}, "encrypted; set COSIGN_PASSWORD", id="no password"),
        pytest.param(COSIGNS, {"COSIGN_PASSWORD": "wr0ng"}, "does not open", id="wrong password"),
        pytest.param(pem(KEY, "s3cret"), {}, "encrypted; set COSIGN_PASSWORD", id="PEM, no password"),
        pytest.param(pem(KEY, "s3cret"), {"COSIGN_PASSWORD": "wr0ng"}, "cannot be read", id="PEM, wrong one"),
        pytest.param(b"words", {}, "not a private key in PEM", id="no PEM"),
        pytest.param(pem(KEY)[:60] + pem(KEY)[90:], {}, "cannot be read", id="damaged"),
        pytest.param(COSIGNS[:90] + COSIGNS[130:], {}, "cannot be read", id="cosign's, damaged"),
        pytest.param(
            pem(rsa.generate_private_key(public_exponent=65537, key_size=2048)), {}, "P-256", id="RSA"
        ),
        pytest.param(pem(ec.generate_private_key(ec.SECP384R1())), {}, "P-256", id="another curve"),
        pytest.param(public_pem(KEY), {}, "cannot be read", id="a public key"),
    ],
)
def test_a_key_that_cannot_be_used_says_why_and_tells_nothing(
    tmp_path: Path, text: bytes, environ: dict[str, str], message: str
) -> None:
    file = tmp_path / "my.key"
    file.write_bytes(text)
    with pytest.raises(InputError, match=message) as raised:
        keys.private_key(str(file), environ)
    said = str(raised.value)
    assert str(file) in said
    assert "wr0ng" not in said
    assert not any(line in said for line in text.decode().splitlines()[1:-1] if line)


@pytest.mark.parametrize(
    ("where", "message"),
    [("/nowhere/cosign.key", "No such file"), ("env://UNSET", "the variable UNSET is not set")],
)
def test_a_key_that_is_not_there(where: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        keys.private_key(where, {})
    with pytest.raises(InputError, match=message):
        keys.public_key(where, {})


@pytest.mark.parametrize("text", [b"words", pem(KEY)])
def test_a_public_key_is_a_public_key(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "key").write_bytes(text)
    with pytest.raises(InputError, match="not a public key"):
        keys.public_key(str(tmp_path / "key"), {})


def test_openssl_is_there() -> None:
    """The independent check above must never be skipped."""
    assert any(os.access(Path(folder, "openssl"), os.X_OK) for folder in os.environ["PATH"].split(":"))
