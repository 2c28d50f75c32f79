"""What is attached to an image is made from what it was built from, and from nothing newer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from shipped import BY_ID

from trainyard import attest, provenance, render, sbom
from trainyard.model import StepFailed

ROOT = Path(__file__).resolve().parents[2]
ROW = BY_ID["cpu-pt213"]
MANIFEST: dict[str, Any] = json.loads((Path(__file__).parent / "data/manifest-cpu-pt213.json").read_text())
DIGEST = "sha256:" + "5" * 64
SOURCE = provenance.Source("git+https://git.example/t", "c" * 40, modified=False)
RUN = provenance.Run("https://ci.example/builder", "https://ci.example/1")
REPORT = b'<testsuites><testsuite tests="1"/></testsuites>'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout that was built and tested."""
    for folder in ("images/cpu-pt213", "kernels", "rootfs"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy2(ROOT / "images/uv.lock", tmp_path / "images/uv.lock")
    out = tmp_path / "out/cpu-pt213"
    out.mkdir(parents=True)
    (out / "tests.xml").write_bytes(REPORT)
    return tmp_path


def built(root: Path) -> dict[str, Any]:
    return MANIFEST | {"inputs": render.input_digests(ROW, root, MANIFEST["base"]["digest"])}


def documents(root: Path, manifest: dict[str, Any]) -> dict[str, bytes]:
    return attest.documents(ROW, manifest, root, ("registry.example/t", DIGEST), SOURCE, RUN)


def test_the_four_files_are_about_one_image(root: Path) -> None:
    manifest = built(root)
    found = documents(root, manifest)
    assert list(found) == list(attest.ATTACHED)
    assert json.loads(found[attest.MANIFEST_TYPE]) == manifest
    assert found[attest.TESTS_TYPE] == REPORT
    described = sbom.read(found[sbom.MEDIA_TYPE])
    assert (described.image_id, described.digest) == (MANIFEST["image_id"], DIGEST)
    stated = provenance.read(found[provenance.MEDIA_TYPE])
    assert (stated.id, stated.digests) == ("cpu-pt213", frozenset({DIGEST}))


def test_the_provenance_names_every_lock_and_byproduct(root: Path) -> None:
    text = documents(root, built(root))[provenance.MEDIA_TYPE].decode()
    for name in ("images/cpu-pt213/requirements.lock", "images/cpu-pt213/build.lock"):
        assert f'"{name}"' in text
    byproducts = json.loads(text)["predicate"]["runDetails"]["byproducts"]
    assert [one["name"] for one in byproducts] == ["manifest.json", "tests.xml"]


@pytest.mark.parametrize("name", ["requirements.lock", "build.lock"])
def test_a_lock_that_changed_since_the_build_is_refused(root: Path, name: str) -> None:
    manifest = built(root)
    path = root / "images/cpu-pt213" / name
    path.write_text(path.read_text() + "rich==15.0.0\n")
    with pytest.raises(StepFailed, match=rf"changed since it was built: images/cpu-pt213/{name}"):
        documents(root, manifest)


def test_an_untested_image_is_refused(root: Path) -> None:
    (root / "out/cpu-pt213/tests.xml").unlink()
    with pytest.raises(StepFailed, match="make test MATRIX=cpu-pt213"):
        documents(root, built(root))
