"""Signatures and keys, against cosign itself and a real registry."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import servers
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from servers import Server, Tls

from trainyard import attest, keys, signing, verify
from trainyard.plan import CONTENTS_LABEL
from trainyard.publish import ID_LABEL
from trainyard.registry import OCI_MANIFEST, Registry, canonical, sha256

PASSWORD = "pass word"
PRIVATE, PUBLIC = keys.generate(PASSWORD)


@dataclass
class Cosign:
    """The program, with its home, its login and its keys in one folder."""

    program: Path
    folder: Path
    ca: Path

    def __call__(self, *words: str, password: str = PASSWORD) -> subprocess.CompletedProcess[str]:
        environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "DOCKER_CONFIG": str(self.folder),
            "COSIGN_PASSWORD": password,
            "SSL_CERT_FILE": str(self.ca),
        }
        return subprocess.run(
            [self.program, *words],
            cwd=self.folder,
            env=environ,
            text=True,
            capture_output=True,
            check=False,
            timeout=120,
        )

    def verify(self, reference: str, key: str = "cosign.pub") -> subprocess.CompletedProcess[str]:
        return self("verify", "--key", key, "--insecure-ignore-tlog=true", reference)


@pytest.fixture
def cosign(cosign_program: Path, server: Server, tls: Tls, tmp_path: Path) -> Cosign:
    folder = tmp_path / "home"
    folder.mkdir()
    login = base64.b64encode(f"{servers.USER}:{servers.PASSWORD}".encode()).decode()
    (folder / "config.json").write_text(json.dumps({"auths": {server.host: {"auth": login}}}))
    (folder / "cosign.key").write_bytes(PRIVATE)
    (folder / "cosign.pub").write_bytes(PUBLIC)
    return Cosign(cosign_program, folder, tls.ca)


@pytest.fixture
def digest(registry: Registry) -> str:
    """A small image in the registry."""
    layer = b"a layer"
    config = canonical(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Labels": {ID_LABEL: "cpu-pt213", CONTENTS_LABEL: "0" * 16}},
            "rootfs": {"type": "layers", "diff_ids": [sha256(layer)]},
        }
    )
    body = canonical(
        {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": {
                "mediaType": signing.CONFIG_TYPE,
                "digest": registry.put_bytes(config),
                "size": len(config),
            },
            "layers": [
                {
                    "mediaType": "application/vnd.oci.image.layer.v1.tar",
                    "digest": registry.put_bytes(layer),
                    "size": len(layer),
                }
            ],
        }
    )
    return registry.put_manifest("cpu-pt213", body, OCI_MANIFEST)


def own_key() -> ec.EllipticCurvePrivateKey:
    return keys.read_private(PRIVATE, PASSWORD)


def test_cosign_takes_our_signature(registry: Registry, digest: str, cosign: Cosign) -> None:
    reference = f"{registry.name}@{digest}"
    assert cosign.verify(reference).returncode != 0
    signing.sign(registry, digest, own_key())
    done = cosign.verify(reference)
    assert done.returncode == 0, done.stderr
    (claim,) = json.loads(done.stdout)
    assert claim["critical"]["image"]["docker-manifest-digest"] == digest


def test_cosign_takes_the_signature_of_each_attached_file(
    registry: Registry, digest: str, cosign: Cosign
) -> None:
    files = {kind: f"the {name}".encode() for kind, name in attest.ATTACHED.items()}
    attached = attest.attach(registry, digest, files, signing.KeySigner(own_key()))
    assert len(attached) == 4
    for one in (*attached.values(), digest):
        done = cosign.verify(f"{registry.name}@{one}")
        assert done.returncode == 0, done.stderr
    before = sorted(registry.tags())
    assert attest.attach(registry, digest, files, signing.KeySigner(own_key())) == attached
    assert sorted(registry.tags()) == before
    assert {one["digest"] for one in registry.referrers(digest)} == set(attached.values())


def test_cosign_refuses_our_signature_by_another_key(registry: Registry, digest: str, cosign: Cosign) -> None:
    signing.sign(registry, digest, own_key())
    _, public = keys.generate("")
    (cosign.folder / "other.pub").write_bytes(public)
    assert cosign.verify(f"{registry.name}@{digest}", "other.pub").returncode != 0


def test_we_take_cosigns_signature_with_our_key(registry: Registry, digest: str, cosign: Cosign) -> None:
    reference = f"{registry.name}@{digest}"
    done = cosign("sign", "--yes", "--tlog-upload=false", "--key", "cosign.key", reference)
    assert done.returncode == 0, done.stderr
    assert signing.is_signed(registry, digest, own_key().public_key())
    checks = {
        one.name: one
        for one in verify.verify(registry, "cpu-pt213", signing.KeyTrust(own_key().public_key()))
    }
    assert checks["signature"].ok
    # And it is enough: signing again changes nothing.
    before = registry.digest(signing.tag(digest))
    assert signing.sign(registry, digest, own_key()) == before


def test_signatures_of_both_stand_side_by_side(registry: Registry, digest: str, cosign: Cosign) -> None:
    made = cosign("generate-key-pair", "--output-key-prefix", "theirs")
    assert made.returncode == 0, made.stderr
    reference = f"{registry.name}@{digest}"
    signing.sign(registry, digest, own_key())
    done = cosign("sign", "--yes", "--tlog-upload=false", "--key", "theirs.key", reference)
    assert done.returncode == 0, done.stderr
    for key in ("cosign.pub", "theirs.pub"):
        assert cosign.verify(reference, key).returncode == 0
        public = keys.public_key(str(cosign.folder / key), {})
        assert signing.is_signed(registry, digest, public)


@pytest.mark.parametrize("password", ["pass word", ""])
def test_cosigns_keys_are_read(cosign: Cosign, password: str) -> None:
    made = cosign("generate-key-pair", "--output-key-prefix", "theirs", password=password)
    assert made.returncode == 0, made.stderr
    environ = {"COSIGN_PASSWORD": password}
    private = keys.private_key(str(cosign.folder / "theirs.key"), environ)
    assert private.public_key() == keys.public_key(str(cosign.folder / "theirs.pub"), environ)


def test_our_keys_are_read_by_cosign(cosign: Cosign) -> None:
    done = cosign("public-key", "--key", "cosign.key")
    assert done.returncode == 0, done.stderr
    found = serialization.load_pem_public_key(done.stdout.encode())
    assert found == own_key().public_key()
    assert cosign("public-key", "--key", "cosign.key", password="wrong").returncode != 0
