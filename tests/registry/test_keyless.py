"""Keyless signatures: the real cosign, a real registry, and a Sigstore of this machine's own."""

from __future__ import annotations

import base64
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from servers import LOGIN, Server, Tls
from sigstore import REQUEST_TOKEN, Sigstore, new_key, pem

from trainyard import attest, keyless, provenance, registry, sbom, signing, verify
from trainyard.model import StepFailed
from trainyard.plan import CONTENTS_LABEL
from trainyard.publish import ID_LABEL
from trainyard.registry import OCI_MANIFEST, Registry, canonical, sha256

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests/unit/data"
ID = "cpu-pt213"
TESTS = f'<testsuites><testsuite><testcase name="test_a[{ID}]"/></testsuite></testsuites>'.encode()
OTHER = "https://git.example/somebody/else/.github/workflows/x.yml@refs/heads/main"
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def sigstore(tmp_path: Path) -> Iterator[Sigstore]:
    one = Sigstore(tmp_path / "sigstore")
    yield one
    one.close()


@dataclass
class Spy:
    """A cosign that first writes down how it was called."""

    folder: Path

    @property
    def argv(self) -> str:
        return (self.folder / "argv").read_text()

    @property
    def environ(self) -> str:
        return (self.folder / "environ").read_text()

    @property
    def logins(self) -> list[tuple[str, Path]]:
        """Mode and name of each Docker config that it was given."""
        lines = (self.folder / "logins").read_text().splitlines()
        return [(mode, Path(name)) for mode, _, name in (line.partition(" ") for line in lines)]


@pytest.fixture
def spy(cosign_program: Path, tmp_path: Path) -> Spy:
    folder = tmp_path / "spy"
    folder.mkdir()
    for name in ("argv", "environ", "logins"):
        (folder / name).touch()
    at, program = shlex.quote(str(folder)), shlex.quote(str(cosign_program))
    script = folder / "cosign"
    script.write_text(
        "#!/bin/sh\n"
        f"tr '\\0' '\\n' < /proc/$$/cmdline >> {at}/argv\n"
        f"env >> {at}/environ\n"
        f'[ -z "$DOCKER_CONFIG" ] || stat -c "%a %n" "$DOCKER_CONFIG" >> {at}/logins\n'
        f'exec {program} "$@"\n'
    )
    script.chmod(0o755)
    return Spy(folder)


@pytest.fixture
def job(
    sigstore: Sigstore, spy: Spy, server: Server, tls: Tls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Registry:
    """This process as a CI job with ``id-token: write``, and the repository as its commands open it."""
    for name in [one for one in os.environ if one.startswith(("COSIGN_", "SIGSTORE_", "ACTIONS_"))]:
        monkeypatch.delenv(name)
    environ = sigstore.environ | sigstore.job
    environ |= {"GITHUB_ACTIONS": "true", "HOME": str(tmp_path), "REGISTRY_CA": str(tls.ca)}
    environ |= {registry.USER_VARIABLE: LOGIN.user, registry.PASSWORD_VARIABLE: LOGIN.password}
    environ |= {"PATH": f"{spy.folder}:{os.environ['PATH']}"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return registry.connect(f"{server.host}/acme/trainyard")


@dataclass
class Image:
    """A small image in the registry, and what is to be attached to it."""

    digest: str
    files: dict[str, bytes]


@pytest.fixture
def image(job: Registry) -> Image:
    return make_image(job, b"a layer")


def make_image(where: Registry, layer: bytes) -> Image:
    measured: dict[str, Any] = json.loads((DATA / "manifest-cpu-pt213.json").read_text())
    labels = {ID_LABEL: ID, CONTENTS_LABEL: measured["contents_id"]}
    config = canonical(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Labels": labels},
            "rootfs": {"type": "layers", "diff_ids": [sha256(layer)]},
        }
    )
    parts = {signing.CONFIG_TYPE: config, "application/vnd.oci.image.layer.v1.tar": layer}
    about, content = (
        {"mediaType": kind, "digest": where.put_bytes(body), "size": len(body)}
        for kind, body in parts.items()
    )
    manifest = {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": about, "layers": [content]}
    digest = where.put_manifest(ID, canonical(manifest), OCI_MANIFEST)
    measured["image_id"] = sha256(config)
    lock = (DATA / "manifest-cpu-pt213.lock").read_bytes()
    stated = provenance.statement(
        measured,
        {},
        {"requirements.lock": lock},
        (where.name, digest),
        provenance.Source("git+https://git.example/t", "c" * 40, modified=False),
        provenance.Run("https://ci.example/builder", "https://ci.example/1"),
    )
    files = {
        attest.MANIFEST_TYPE: json.dumps(measured).encode(),
        sbom.MEDIA_TYPE: sbom.document(measured, lock.decode(), digest),
        provenance.MEDIA_TYPE: stated,
        attest.TESTS_TYPE: TESTS,
    }
    return Image(digest, files)


def sign(where: Registry, image: Image) -> dict[str, str]:
    return attest.attach(where, image.digest, image.files, keyless.signer(where))


def build(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "build.py", *words]
    done = subprocess.run(argv, cwd=ROOT, text=True, capture_output=True, timeout=120)
    assert "Traceback" not in done.stderr
    return done


def look(where: Registry, sigstore: Sigstore, ref: str = ID) -> dict[str, str]:
    """What is wrong, by check, to one who trusts this Sigstore's job."""
    trust = keyless.trust(where, sigstore.url, sigstore.identity, "")
    return {one.name: one.detail for one in verify.verify(where, ref, trust) if not one.ok}


def subject(entry: dict[str, Any]) -> str:
    return str(entry["spec"]["data"]["hash"]["value"])


def test_what_a_job_signs_is_verified(job: Registry, image: Image, sigstore: Sigstore) -> None:
    attached = sign(job, image)
    # The image is the last one.
    order = [
        sha256(job.blob(job.manifest(signing.tag(one)).json["layers"][0]["digest"]))
        for one in (*attached.values(), image.digest)
    ]
    assert order == [f"sha256:{subject(entry)}" for entry in sigstore.rekor.entries]

    who = ("--identity", sigstore.identity, "--issuer", sigstore.url)
    done = build("verify", f"{job.name}:{ID}", *who)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("  ok  ") == 8
    assert f"signature: by {sigstore.identity}, issued by {sigstore.url}" in done.stdout

    like = ("--identity-regexp", "^https://git.example/acme/", "--issuer", sigstore.url, "--json")
    done = build("verify", f"{job.name}@{image.digest}", *like)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = [one["detail"] for one in json.loads(done.stdout) if one["name"] == "signature"]
    assert found == f"by {sigstore.identity}, issued by {sigstore.url}"  # who it was, not only the pattern


def test_another_identity_or_issuer_or_no_signature_fails(
    job: Registry, image: Image, sigstore: Sigstore
) -> None:
    attest.attach(job, image.digest, image.files, None)
    found = look(job, sigstore)
    assert found["signature"].startswith(f"not signed by {sigstore.identity}")
    assert "no signatures found" in found["signature"]
    assert "none of them signed by" in found["trainyard manifest"]

    sign(job, image)
    assert look(job, sigstore) == {}
    cases = (
        ("--identity", OTHER, "--issuer", sigstore.url),
        ("--identity", sigstore.identity, "--issuer", "https://token.actions.githubusercontent.com"),
        ("--identity-regexp", "^https://git.example/somebody/", "--issuer", sigstore.url),
    )
    for who in cases:
        done = build("verify", f"{job.name}:{ID}", *who)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "FAIL  signature: not signed by" in done.stdout
        assert "FAIL  trainyard manifest: 1 attached, none of them signed by" in done.stdout


def test_a_retagged_image_and_a_signature_of_another_fail(
    job: Registry, image: Image, sigstore: Sigstore
) -> None:
    sign(job, image)
    genuine, held = job.manifest(signing.tag(image.digest)), job.manifest(ID)
    job.put_manifest("cu121-pt29", held.body, held.media_type)
    assert list(look(job, sigstore, "cu121-pt29")) == ["tag"]

    other = make_image(job, b"another layer")  # under the same tag
    job.put_manifest(signing.tag(other.digest), genuine.body, genuine.media_type)
    found = look(job, sigstore)
    assert "not signed by" in found["signature"]
    assert found["trainyard manifest"] == "not attached"


def test_what_somebody_else_signed_and_attached_does_not_count(
    job: Registry, image: Image, sigstore: Sigstore
) -> None:
    sign(job, image)
    ours, sigstore.identity = sigstore.identity, OTHER
    attest.attach(job, image.digest, {attest.TESTS_TYPE: b"not ours"}, keyless.signer(job))
    sigstore.identity = ours
    assert look(job, sigstore) == {}


@pytest.mark.parametrize(
    "name", ["SIGSTORE_ROOT_FILE", "SIGSTORE_REKOR_PUBLIC_KEY", "SIGSTORE_CT_LOG_PUBLIC_KEY_FILE"]
)
def test_another_ca_or_log_is_not_trusted(
    name: str, job: Registry, image: Image, tls: Tls, sigstore: Sigstore, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyless.signer(job).sign(job, [image.digest])
    assert "signature" not in look(job, sigstore)
    other = Path(os.environ[name]).with_name("other")
    other.write_bytes(tls.ca.read_bytes() if name == "SIGSTORE_ROOT_FILE" else pem(new_key().public_key()))
    monkeypatch.setenv(name, str(other))
    assert "not signed by" in look(job, sigstore)["signature"]


def test_where_cosign_cannot_look_that_is_said(
    job: Registry, image: Image, sigstore: Sigstore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIGSTORE_REKOR_PUBLIC_KEY", "/nowhere/rekor.pub")
    found = look(job, sigstore)["signature"]
    assert found.startswith("cosign cannot verify: ")
    assert "/nowhere/rekor.pub: no such file" in found


def test_nothing_secret_is_in_an_argument_or_a_message(
    job: Registry, image: Image, sigstore: Sigstore, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COSIGN_KEY", "/nowhere/cosign.key")  # else cosign would sign with it
    monkeypatch.setenv("COSIGN_PASSWORD", "the key's password")
    sign(job, image)
    token = sigstore.give()
    monkeypatch.setenv("SIGSTORE_ID_TOKEN", token[:-8] + "AAAAAAAA")  # not what the issuer signed
    monkeypatch.delenv("ACTIONS_ID_TOKEN_REQUEST_TOKEN")
    with pytest.raises(StepFailed, match="cosign did not sign") as refused:
        keyless.signer(job).sign(job, [image.digest])
    done = build("verify", f"{job.name}:{ID}", "--identity", sigstore.identity, "--issuer", sigstore.url)
    assert done.returncode == 0

    auth = base64.b64encode(f"{LOGIN.user}:{LOGIN.password}".encode()).decode()
    login = (LOGIN.password, auth)
    said = spy.argv + str(refused.value) + done.stdout + done.stderr
    assert f"{job.name}@{image.digest}" in spy.argv
    for secret in (*login, *sigstore.tokens, token[:-8], REQUEST_TOKEN):
        assert secret not in said
    for secret in (*login, "the key's password", "/nowhere/cosign.key"):
        assert secret not in spy.environ
    assert {mode for mode, _ in spy.logins} == {"700"}
    assert not any(path.exists() for _, path in spy.logins)


def test_a_token_of_the_environment_will_do(
    job: Registry, image: Image, sigstore: Sigstore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*sigstore.job, "GITHUB_ACTIONS"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("SIGSTORE_ID_TOKEN", sigstore.give())
    keyless.signer(job).sign(job, [image.digest])
    assert "signature" not in look(job, sigstore)


def test_the_login_of_docker_will_do(
    job: Registry,
    image: Image,
    server: Server,
    sigstore: Sigstore,
    spy: Spy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(registry.USER_VARIABLE)
    monkeypatch.delenv(registry.PASSWORD_VARIABLE)
    (tmp_path / "docker").mkdir()
    auth = base64.b64encode(f"{LOGIN.user}:{LOGIN.password}".encode()).decode()
    (tmp_path / "docker/config.json").write_text(json.dumps({"auths": {server.host: {"auth": auth}}}))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    where = registry.connect(job.name)
    keyless.signer(where).sign(where, [image.digest])
    assert "signature" not in look(where, sigstore)
    assert {path for _, path in spy.logins} == {tmp_path / "docker"}


def test_a_login_that_the_registry_refuses_is_said(
    job: Registry, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(registry.PASSWORD_VARIABLE, "a wrong password")
    where = registry.connect(job.name)
    with pytest.raises(StepFailed, match=r"cosign did not sign: .*UNAUTHORIZED") as refused:
        keyless.signer(where).sign(where, [image.digest])
    assert "a wrong password" not in str(refused.value)


def test_signing_again_adds_a_signature(job: Registry, image: Image, sigstore: Sigstore) -> None:
    for _ in range(2):
        keyless.signer(job).sign(job, [image.digest])
    assert len(job.manifest(signing.tag(image.digest)).json["layers"]) == 2
    assert "signature" not in look(job, sigstore)


@pytest.mark.parametrize("first", ["key", "keyless"])
def test_signatures_by_key_and_keyless_stand_side_by_side(
    first: str, job: Registry, image: Image, sigstore: Sigstore
) -> None:
    key = new_key()
    signers: list[signing.Signer] = [signing.KeySigner(key), keyless.signer(job)]
    for one in signers if first == "key" else reversed(signers):
        one.sign(job, [image.digest])
    assert "signature" not in look(job, sigstore)
    assert signing.is_signed(job, image.digest, key.public_key())
    assert not signing.is_signed(job, image.digest, new_key().public_key())
