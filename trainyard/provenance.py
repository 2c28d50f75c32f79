"""Provenance: who built an image, from what and when, as an in-toto statement with SLSA's predicate.

BuildKit can write provenance of its own, but only into an image *index*: an attestation is one more
manifest beside the platform's.  The engine's classic image store (overlay2 and the like) keeps one
manifest for an image and no index, so a build that loads its result there must switch attestations
off; with the containerd store or a push straight from BuildKit they survive:
https://docs.docker.com/build/metadata/attestations/ and
https://docs.docker.com/engine/storage/containerd/.  An image that is tested before it is pushed has
to be loaded first, so its statement is written here and attached in the registry.  That also lets it
say what BuildKit does not know: the matrix row, the locks, and the source of the kernels.

The formats: https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md and
https://slsa.dev/spec/v1.0/provenance.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from packageurl import PackageURL

from trainyard import sbom

MEDIA_TYPE = "application/vnd.in-toto+json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "https://trainyard.dev/build/dockerfile/v1"
LOCAL_BUILDER = "https://trainyard.dev/builder/local"
#: Of a resolved row: where it lies on the builder's disk, and sentences for people.
NOT_PARAMETERS = ("where", "notes")


@dataclass(frozen=True)
class Source:
    """The checkout that an image was built from."""

    uri: str  # git+https://host/org/name, or git+file where nobody can fetch it
    commit: str  # 40 hex digits
    modified: bool  # files differ from the commit


@dataclass(frozen=True)
class Run:
    """Who ran the build."""

    builder: str  # a URI
    invocation: str  # a URI of this run


def find_source(root: Path) -> Source | None:
    """The commit that is checked out in ``root``; None where there is no git or no commit."""
    commit = _git(root, "rev-parse", "--verify", "HEAD")
    if not commit:
        return None
    remote = _git(root, "config", "--get", "remote.origin.url") or ""
    modified = bool(_git(root, "status", "--porcelain", "--untracked-files=normal"))
    return Source(f"git+{_without_credentials(remote)}" if remote else "git+file:.", commit, modified)


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(root), *words],
            text=True,
            capture_output=True,
            check=False,
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _without_credentials(remote: str) -> str:
    """``https://user:token@host/x`` without what lies before the host; a token must not be published."""
    parts = urlsplit(remote)
    if not parts.hostname:  # git@host:org/name, or a path
        host, colon, path = remote.rpartition("@")[2].partition(":")
        return f"ssh://{host}/{path}" if colon and parts.scheme != "file" else "file:."
    port = f":{parts.port}" if parts.port else ""
    return urlunsplit((parts.scheme, parts.hostname + port, parts.path, "", ""))


def find_run(environment: Mapping[str, str], manifest: Mapping[str, Any]) -> Run:
    """The CI run that this process belongs to, as GitHub Actions tells it; else this host.

    https://docs.github.com/en/actions/reference/workflows-and-actions/variables
    """
    if environment.get("GITHUB_ACTIONS") == "true":
        home = f"{environment['GITHUB_SERVER_URL']}/{environment['GITHUB_REPOSITORY']}"
        run = f"{home}/actions/runs/{environment['GITHUB_RUN_ID']}"
        return Run(
            builder=f"{environment['GITHUB_SERVER_URL']}/{environment['GITHUB_WORKFLOW_REF']}",
            invocation=f"{run}/attempts/{environment.get('GITHUB_RUN_ATTEMPT', '1')}",
        )
    return Run(LOCAL_BUILDER, f"urn:uuid:{uuid.uuid5(sbom.NAMESPACE, 'build ' + manifest['image_id'])}")


def statement(
    manifest: Mapping[str, Any],
    row: Mapping[str, Any],
    locks: Mapping[str, bytes],
    subject: tuple[str, str],
    source: Source | None,
    run: Run,
    byproducts: Mapping[str, bytes] | None = None,
) -> bytes:
    """The provenance of a published image, as an in-toto statement in JSON.

    ``row`` is the resolved row as plain data, ``locks`` the lock files by name (``requirements.lock``
    among them), ``subject`` the repository's name and the digest of the manifest that was published
    in it, ``byproducts`` what the build left beside the image (its manifest and test report).
    The caller sees to it that row and locks are those of the manifest's contents id.
    """
    finished = datetime.fromisoformat(manifest["built_at"]).astimezone(UTC)
    started = finished - timedelta(seconds=manifest["build_seconds"])
    name, digest = subject
    predicate = {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": {
                "id": manifest["id"],
                "row": {key: value for key, value in row.items() if key not in NOT_PARAMETERS},
            },
            "internalParameters": {
                "contentsId": manifest["contents_id"],
                "inputs": manifest.get("inputs", {}),
            },
            "resolvedDependencies": _dependencies(manifest, locks, source),
        },
        "runDetails": {
            "builder": {"id": run.builder},
            "metadata": {
                "invocationId": run.invocation,
                "startedOn": _time(started),
                "finishedOn": _time(finished),
            },
            "byproducts": [
                {"name": one, "digest": {"sha256": hashlib.sha256(body).hexdigest()}}
                for one, body in sorted((byproducts or {}).items())
            ],
        },
    }
    whole = {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": _digest(digest)}],
        "predicateType": PREDICATE,
        "predicate": predicate,
    }
    return (json.dumps(whole, indent=2, sort_keys=True) + "\n").encode()


def _dependencies(
    manifest: Mapping[str, Any], locks: Mapping[str, bytes], source: Source | None
) -> list[dict[str, Any]]:
    base = manifest["base"]
    found: list[dict[str, Any]] = [
        {
            "name": base["name"],
            "digest": _digest(base["digest"]),
            # A bootstrapped base is made on the builder and stands in for the official image.
            "annotations": {"origin": base["origin"], "ref": base.get("ref", base["name"])},
        }
    ]
    if source:
        found.append(
            {
                "uri": f"{source.uri}@{source.commit}",
                "digest": {"gitCommit": source.commit},
                "annotations": {"modified": source.modified},
            }
        )
    for name, body in sorted(locks.items()):
        path = f"images/{manifest['id']}/{name}"
        found.append({"name": path, "digest": {"sha256": hashlib.sha256(body).hexdigest()}})
    pin = sbom.locked(locks.get("requirements.lock", b"").decode()).get("deepspeed")
    if pin:
        purl = PackageURL("pypi", name="deepspeed", version=pin.version).to_string()
        found += [{"name": "deepspeed", "uri": purl, "digest": {"sha256": one}} for one in pin.hashes]
    return found


def _digest(value: str) -> dict[str, str]:
    algorithm, _, digits = value.partition(":")
    return {algorithm: digits}


def _time(moment: datetime) -> str:
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")


@dataclass(frozen=True)
class Stated:
    """What a statement says about its subject."""

    id: str
    contents_id: str
    digests: frozenset[str]  # of its subjects, as sha256:...
    builder: str
    commit: str | None


def read(body: bytes) -> Stated:
    """Read a statement that :func:`statement` wrote; raises ValueError for anything else."""
    try:
        whole = json.loads(body)
        if (whole["_type"], whole["predicateType"]) != (STATEMENT, PREDICATE):
            raise ValueError(f"{whole['_type']} with {whole['predicateType']} instead of SLSA provenance v1")
        definition = whole["predicate"]["buildDefinition"]
        commits = [one["digest"].get("gitCommit") for one in definition["resolvedDependencies"]]
        return Stated(
            id=definition["externalParameters"]["id"],
            contents_id=definition["internalParameters"]["contentsId"],
            digests=frozenset(f"sha256:{one['digest']['sha256']}" for one in whole["subject"]),
            builder=whole["predicate"]["runDetails"]["builder"]["id"],
            commit=next((one for one in commits if one), None),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a provenance of Trainyard: {error!r}") from error
