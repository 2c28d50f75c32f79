"""Provenance: an in-toto statement that other tools can read, and that tells nothing it should not."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict, ParseError
from in_toto_attestation.predicates.provenance.v1.provenance_pb2 import Provenance
from in_toto_attestation.v1.statement import Statement
from shipped import BY_ID

from trainyard import explain, provenance
from trainyard.provenance import Run, Source

DATA = Path(__file__).parent / "data"
MANIFEST: dict[str, Any] = json.loads((DATA / "manifest-cpu-pt213.json").read_text())
LOCKS = {
    "requirements.lock": (DATA / "manifest-cpu-pt213.lock").read_bytes(),
    "build.lock": b"setuptools==84.2.1\n",
}
DIGEST = "sha256:" + "5" * 64
SUBJECT = ("registry.example/acme/trainyard", DIGEST)
SOURCE = Source("git+https://git.example/acme/trainyard", "c" * 40, modified=False)
RUN = Run("https://ci.example/builder", "https://ci.example/runs/7")
TESTS = b"<testsuites/>"


def statement(source: Source | None = SOURCE) -> dict[str, Any]:
    row = explain.as_json(BY_ID["cpu-pt213"])
    body = provenance.statement(MANIFEST, row, LOCKS, SUBJECT, source, RUN, {"tests.xml": TESTS})
    found: dict[str, Any] = json.loads(body)
    return found


def test_a_statement_by_in_totos_own_library() -> None:
    found = statement()
    # Fails on a field that the specification does not know.
    parsed = ParseDict(found, Statement([], "", {}).pb)
    Statement.copy_from_pb(parsed).validate()
    ParseDict(found["predicate"], Provenance())


def test_in_totos_library_sees_a_wrong_field() -> None:
    found = statement()
    found["predicate"]["buildDefinition"]["builtBy"] = "me"
    with pytest.raises(ParseError):
        ParseDict(found["predicate"], Provenance())


def test_its_subject_is_the_published_manifest() -> None:
    found = statement()
    assert found["subject"] == [{"name": SUBJECT[0], "digest": {"sha256": "5" * 64}}]
    assert found["predicateType"] == "https://slsa.dev/provenance/v1"


def test_what_was_asked_for_is_the_row() -> None:
    asked = statement()["predicate"]["buildDefinition"]["externalParameters"]
    assert asked["id"] == "cpu-pt213"
    assert asked["row"]["torch"]["version"] == BY_ID["cpu-pt213"].torch.version
    assert asked["row"]["ops"] == list(BY_ID["cpu-pt213"].ops)


def test_no_path_of_the_builder_is_published() -> None:
    root = str(Path(__file__).parents[2])
    assert root in json.dumps(explain.as_json(BY_ID["cpu-pt213"]))
    assert root not in json.dumps(statement())


def test_dependencies_have_digests() -> None:
    found = statement()["predicate"]["buildDefinition"]["resolvedDependencies"]
    digests = {one.get("name", one.get("uri")): one["digest"] for one in found}
    lock = hashlib.sha256(LOCKS["requirements.lock"]).hexdigest()
    assert digests["debian:bookworm-slim"] == {"sha256": MANIFEST["base"]["digest"].removeprefix("sha256:")}
    assert digests[f"{SOURCE.uri}@{SOURCE.commit}"] == {"gitCommit": SOURCE.commit}
    assert digests["images/cpu-pt213/requirements.lock"] == {"sha256": lock}
    assert digests["images/cpu-pt213/build.lock"] == {
        "sha256": hashlib.sha256(LOCKS["build.lock"]).hexdigest()
    }
    assert digests["deepspeed"]["sha256"] in LOCKS["requirements.lock"].decode()
    (base,) = [one for one in found if one.get("name") == "debian:bookworm-slim"]
    assert base["annotations"]["origin"] == "bootstrap"


def test_without_git_there_is_no_commit() -> None:
    found = statement(source=None)["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert not [one for one in found if "gitCommit" in one["digest"]]


def test_times_are_the_builds() -> None:
    times = statement()["predicate"]["runDetails"]["metadata"]
    assert MANIFEST["built_at"] == "2026-11-30T21:19:38+00:00"
    assert MANIFEST["build_seconds"] == 393.3
    assert times == {
        "invocationId": RUN.invocation,
        "startedOn": "2026-11-30T21:13:04Z",
        "finishedOn": "2026-11-30T21:19:38Z",
    }


def test_byproducts_have_digests() -> None:
    (tests,) = statement()["predicate"]["runDetails"]["byproducts"]
    assert tests == {"name": "tests.xml", "digest": {"sha256": hashlib.sha256(TESTS).hexdigest()}}


def test_read_gives_back_what_was_stated() -> None:
    found = provenance.read(json.dumps(statement()).encode())
    assert found == provenance.Stated(
        "cpu-pt213", MANIFEST["contents_id"], frozenset({DIGEST}), RUN.builder, SOURCE.commit
    )


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"_type": "https://in-toto.io/Statement/v0.1"}'])
def test_reading_something_else_is_a_value_error(body: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        provenance.read(body)


# -- where it runs -------------------------------------------------------------------------

ACTIONS = {
    "GITHUB_ACTIONS": "true",
    "GITHUB_SERVER_URL": "https://github.com",
    "GITHUB_REPOSITORY": "acme/trainyard",
    "GITHUB_WORKFLOW_REF": "acme/trainyard/.github/workflows/nightly.yml@refs/heads/main",
    "GITHUB_RUN_ID": "42",
    "GITHUB_RUN_ATTEMPT": "2",
}


def test_the_run_of_a_workflow() -> None:
    assert provenance.find_run(ACTIONS, MANIFEST) == Run(
        "https://github.com/acme/trainyard/.github/workflows/nightly.yml@refs/heads/main",
        "https://github.com/acme/trainyard/actions/runs/42/attempts/2",
    )


def test_the_run_on_any_other_host_is_named_by_the_image() -> None:
    here = provenance.find_run({}, MANIFEST)
    assert here == provenance.find_run({}, MANIFEST)
    assert here != provenance.find_run({}, MANIFEST | {"image_id": "sha256:" + "1" * 64})
    assert here.builder == provenance.LOCAL_BUILDER


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *words], text=True, capture_output=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "file").write_text("one\n")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "--message", "one")
    return tmp_path


@pytest.mark.parametrize(
    ("remote", "uri"),
    [
        ("https://git.example/acme/t.git", "git+https://git.example/acme/t.git"),
        ("https://user:s3cret@git.example:8443/acme/t?x=s3cret", "git+https://git.example:8443/acme/t"),
        ("git@git.example:acme/t.git", "git+ssh://git.example/acme/t.git"),
        ("/home/somebody/t", "git+file:."),
        ("file:///home/somebody/t", "git+file:."),
        (None, "git+file:."),
    ],
)
def test_the_source_is_named_without_credentials_and_paths(
    checkout: Path, remote: str | None, uri: str
) -> None:
    if remote:
        git(checkout, "remote", "add", "origin", remote)
    assert provenance.find_source(checkout) == Source(uri, git(checkout, "rev-parse", "HEAD"), modified=False)


def test_a_modified_checkout_says_so(checkout: Path) -> None:
    (checkout / "file").write_text("two\n")
    found = provenance.find_source(checkout)
    assert found is not None
    assert found.modified


def test_no_git_no_source(tmp_path: Path) -> None:
    assert provenance.find_source(tmp_path) is None
