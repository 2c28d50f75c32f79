"""The verbs themselves, on a real tested image: push, promote, verify, diff, catalog, rollback, prune.

Only with ``--publish ID``, for an image that ``make test`` has tested.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from servers import LOGIN, Opener, Server, Tls

from trainyard import keys, publish
from trainyard.registry import Registry, utc

ROOT = Path(__file__).resolve().parents[2]
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(server: Server, tls: Tls, tmp_path: Path) -> Command:
    """Run build.py against the registry, with a key to sign with."""
    private, public = keys.generate("a password")
    (tmp_path / "cosign.key").write_bytes(private)
    (tmp_path / "cosign.pub").write_bytes(public)
    env = os.environ | {
        "REGISTRY": f"{server.host}/acme/trainyard",
        "REGISTRY_CA": str(tls.ca),
        "TRAINYARD_REGISTRY_USER": LOGIN.user,
        "TRAINYARD_REGISTRY_PASSWORD": LOGIN.password,
        "COSIGN_KEY": str(tmp_path / "cosign.key"),
        "COSIGN_PUBLIC_KEY": str(tmp_path / "cosign.pub"),
        "COSIGN_PASSWORD": "a password",
    }

    def run(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "build.py", *words]
        return subprocess.run(argv, cwd=ROOT, env=env | more, text=True, capture_output=True, timeout=600)

    return run


def ok(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_tested_image_is_published_verified_and_shown(
    published_id: str, command: Command, opened: Opener, server: Server, tmp_path: Path
) -> None:
    registry, reference = opened(), f"{server.host}/acme/trainyard:{published_id}"
    manifest = json.loads((ROOT / "out" / published_id / "manifest.json").read_text())

    first = ok(command("push", published_id))
    assert "signed" in first
    assert registry.find(published_id) is None  # uploaded, but no tag promises it yet
    ok(command("promote", published_id))
    held = registry.manifest(published_id)
    assert held.json["config"]["digest"] == manifest["image_id"]  # what was tested is what is published

    again = ok(command("push", published_id, "--promote"))
    assert "sent 0 MB" in again
    assert registry.digest(published_id) == held.digest

    said = ok(command("verify", reference))
    assert len(re.findall(r"^ +ok ", said, re.M)) >= 8
    assert "FAIL" not in said
    assert "The same image." in ok(command("diff", published_id, reference))
    sbom = json.loads(ok(command("sbom", published_id)))
    assert sbom["bomFormat"] == "CycloneDX"

    index = ok(
        command("catalog", "--to", str(tmp_path / "site"), "--history", str(tmp_path / "h"), "--fetch")
    )
    page = (Path(index.strip()).parent / "images" / f"{published_id}.html").read_text()
    assert publish.immutable_tag(published_id, utc(manifest["built_at"]), manifest["contents_id"]) in page

    assert "The SBOM lists" in page  # as it was attached, and fetched again
    assert "up to date" in command("nightly", published_id, "--dry-run").stderr
    assert "kept" in ok(command("prune", published_id, "--keep", "1"))
    assert registry.digest(published_id) == held.digest


def test_what_is_wrong_ends_with_one_message_and_moves_no_tag(
    published_id: str, command: Command, opened: Opener, server: Server
) -> None:
    ok(command("push", published_id, "--promote"))
    held = opened().digest(published_id)
    other = f"{server.host}/acme/trainyard:another"
    opened().put_manifest("another", *_raw(opened(), published_id))
    cases = {
        ("push", published_id): ({"TRAINYARD_REGISTRY_PASSWORD": "wrong"}, 1, "401"),
        ("promote", published_id, "--digest", "sha256:" + "0" * 64): ({}, 1, "0000"),
        ("rollback", published_id): ({}, 2, published_id),
        ("push", published_id, "-r", "https://r.example/t"): ({}, 2, "scheme"),
        ("verify", other): ({}, 1, "tag"),
        ("prune", published_id, "--keep", "0"): ({}, 2, "at least 1"),
    }
    for words, (more, code, said) in cases.items():
        done = command(*words, **more)
        text = done.stdout + done.stderr
        assert done.returncode == code, (words, text)
        assert said in text, (words, text)
        assert "Traceback" not in text
        assert LOGIN.password not in text
        assert opened().digest(published_id) == held


def _raw(registry: Registry, ref: str) -> tuple[bytes, str]:
    found = registry.manifest(ref)
    return found.body, found.media_type
