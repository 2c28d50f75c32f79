"""The only module that talks to a registry, by the OCI distribution API.

https://github.com/opencontainers/distribution-spec/blob/v1.1.1/spec.md

One :class:`Registry` is one repository (``host/org/name``).  Everything that it returns was
checked against its digest.  What may pass by itself (a lost connection, 429, 5xx) is tried again;
what does not is one message that names the registry and never holds a credential.
"""

from __future__ import annotations

import base64
import hashlib
import io
import ipaddress
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import quote, urljoin, urlsplit
from urllib.request import parse_http_list, parse_keqv_list

import docker.auth
import requests
import tenacity
from docker.errors import DockerException

from trainyard.hostenv import Say, find_ca, silent
from trainyard.model import InputError, StepFailed

USER_VARIABLE = "TRAINYARD_REGISTRY_USER"
PASSWORD_VARIABLE = "TRAINYARD_REGISTRY_PASSWORD"
CA_VARIABLE = "REGISTRY_CA"
#: Where Docker's own daemon looks for the CA of one registry.
DOCKER_CERTS = Path("/etc/docker/certs.d")

OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
EMPTY = b"{}"
INDEX_TYPES = (OCI_INDEX, DOCKER_LIST)
MANIFEST_TYPES = (OCI_MANIFEST, DOCKER_MANIFEST, *INDEX_TYPES)

#: Bytes that a manifest may have; what registries must accept, and ours are far below.
MAX_MANIFEST = 4 * 2**20
#: Bytes of a blob that :meth:`Registry.blob` holds in memory.
MAX_BLOB = 256 * 2**20
#: Times that a registry may forget an upload, or a fallback tag may change under us.
RESTARTS = 5

# The grammars of the distribution specification.
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REFERENCE = re.compile(
    r"(?P<host>\[[0-9a-fA-F:]+\](?::\d+)?|[A-Za-z0-9.-]+(?::\d+)?)"
    rf"/(?P<name>{_PART}(?:/{_PART})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?"
    r"(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
#: ENOSPC in words, and as the reference implementation's file system driver spells it.
_DISK_FULL = re.compile(r"no space left|'Err': 28\b", re.IGNORECASE)

Descriptor = dict[str, Any]  # mediaType, digest, size, and what the specification adds
T = TypeVar("T")


class RegistryError(StepFailed):
    """A registry refused, or could not be reached.  ``status`` is HTTP's, 0 where none came."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Denied(RegistryError):
    """401 or 403, after everything that the registry asked for was tried."""


class NotFound(RegistryError):
    """The registry does not have this manifest or blob."""


class _Transient(Exception):
    """What may pass by itself; ``str()`` says what it was."""

    def __init__(self, what: str, status: int = 0, retry_after: float | None = None) -> None:
        super().__init__(what)
        self.status = status
        self.retry_after = retry_after


class _UploadLost(Exception):
    """The registry does not know this upload any more."""


# -- names ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """``host[:port]/org/name[:tag][@digest]``, taken apart."""

    host: str
    name: str
    tag: str | None = None
    digest: str | None = None

    @property
    def repository(self) -> str:
        return f"{self.host}/{self.name}"

    @property
    def version(self) -> str:
        """What to ask the registry for: the digest where there is one, else the tag."""
        return self.digest or self.tag or "latest"

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return self.repository + tag + (f"@{self.digest}" if self.digest else "")


def parse(text: str) -> Reference:
    """Take a reference apart.  Raises InputError that says how one looks."""
    shape = "A reference is HOST[:PORT]/ORG/NAME[:TAG][@sha256:...], for example ghcr.io/acme/trainyard"
    if "://" in text:
        raise InputError(f"{text!r}: a reference has no scheme; leave out {text.split('://')[0]}://\n{shape}")
    found = _REFERENCE.fullmatch(text)
    host = found["host"] if found else ""
    if not found and _REFERENCE.fullmatch(text.lower()):
        raise InputError(f"{text!r}: a repository's name is all lower case: {text.lower()}")
    # Docker's own rule, which keeps "org/name" from being read as a host.
    if not found or not ("." in host or ":" in host or host == "localhost"):
        raise InputError(f"{text!r}: not a reference with a registry's host\n{shape}")
    return Reference(host, found["name"], found["tag"], found["digest"])


def is_loopback(host: str) -> bool:
    """Whether ``host[:port]`` is this machine by its name or address."""
    name = urlsplit(f"//{host}").hostname or ""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def sha256(body: bytes) -> str:
    """The digest of these bytes, as registries spell it."""
    return f"sha256:{hashlib.sha256(body).hexdigest()}"


def referrers_tag(digest: str) -> str:
    """The tag that lists a manifest's referrers where a registry has no API for them."""
    return digest.replace(":", "-")


def canonical(document: Mapping[str, Any]) -> bytes:
    """JSON whose bytes, and so whose digest, depend on nothing but its content."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


# -- credentials ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Credentials:
    """Who we are; ``origin`` says where that came from and is all that a message shows."""

    user: str
    password: str = field(repr=False)
    origin: str
    identity_token: str | None = field(default=None, repr=False)


def credentials(host: str, environ: Mapping[str, str] | None = None) -> Credentials | None:
    """The credentials for a registry: ours in the environment, else those of ``docker login``.

    Docker's config file is read by Docker's SDK: ``$DOCKER_CONFIG/config.json`` with ``auths``,
    ``credHelpers`` and ``credsStore``.  None where there are none: many registries can be read so.
    Raises InputError where only half of them is set, or where a helper fails.
    """
    env = os.environ if environ is None else environ
    user, password = env.get(USER_VARIABLE), env.get(PASSWORD_VARIABLE)
    if bool(user) != bool(password):
        missing = PASSWORD_VARIABLE if user else USER_VARIABLE
        raise InputError(
            f"{missing} is not set; set both {USER_VARIABLE} and {PASSWORD_VARIABLE}, or neither"
        )
    if user and password:
        return Credentials(user, password, USER_VARIABLE)
    try:
        config = docker.auth.load_config()
        found = docker.auth.resolve_authconfig(config, host)
    except DockerException as error:
        # Not the error's text: it quotes what the helper printed.
        raise InputError(
            f"{host}: Docker's config names a credential helper for it, or an entry, that does not work\n"
            f"Mend {_docker_config()}, or set {USER_VARIABLE} and {PASSWORD_VARIABLE}"
        ) from error
    # An entry of the file is in lower case, one of a helper is not.
    values = {str(key).lower(): str(value) for key, value in (found or {}).items() if value}
    if token := values.get("identitytoken"):
        return Credentials("", "", _docker_config(), identity_token=token)
    if values.get("username"):
        return Credentials(values["username"], values.get("password", ""), _docker_config())
    return None


def _docker_config() -> str:
    folder = os.environ.get("DOCKER_CONFIG")
    return str(Path(folder, "config.json")) if folder else "~/.docker/config.json"


def find_registry_ca(host: str) -> Path | None:
    """The CA file for this registry: REGISTRY_CA, Docker's own for it, else the host's bundle.

    Raises InputError where REGISTRY_CA names no file.
    """
    if named := os.environ.get(CA_VARIABLE):
        if not Path(named).is_file():
            raise InputError(f"{CA_VARIABLE}={named}: no such file")
        return Path(named)
    dockers = DOCKER_CERTS / host / "ca.crt"
    return dockers if dockers.is_file() else find_ca()


# -- patience ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Policy:
    """How patient we are.  Times in seconds; ``sleep`` and ``now`` are what tests replace."""

    attempts: int = 7  # about 1 + 2 + 4 + 8 + 16 + 32 s: a registry that is restarted
    first_wait: float = 1.0
    longest_wait: float = 60.0
    longest_retry_after: float = 300.0
    connect_timeout: float = 10.0
    read_timeout: float = 600.0  # a registry hashes a blob of many GB before it answers
    chunk: int = 32 * 2**20  # bytes in one request of an upload
    sleep: Callable[[float], None] = time.sleep
    now: Callable[[], float] = time.time


def retry_after(value: str | None, now: float) -> float | None:
    """Seconds to wait, from a Retry-After header: a number or an HTTP date; None where neither.

    https://www.rfc-editor.org/rfc/rfc9110#name-retry-after
    """
    if not value:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        when = parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() - now)


# -- the registry --------------------------------------------------------------------------


@dataclass(frozen=True)
class Fetched:
    """A manifest as the registry has it; ``digest`` is computed from ``body``."""

    body: bytes
    digest: str
    media_type: str

    @property
    def json(self) -> dict[str, Any]:
        try:
            found = json.loads(self.body)
        except ValueError as error:
            raise RegistryError(f"manifest {self.digest} is not JSON") from error
        if not isinstance(found, dict):
            raise RegistryError(f"manifest {self.digest} is not a JSON object")
        return found

    @property
    def descriptor(self) -> Descriptor:
        return {"mediaType": self.media_type, "digest": self.digest, "size": len(self.body)}


@dataclass
class _Upload:
    """An upload under way: where it goes on, and how many bytes the registry has."""

    location: str
    offset: int = 0
    known: bool = True  # False: an attempt broke off, so ask how far it came


class _Part:
    """``size`` bytes of a file from where it stands, as a request's body of known length."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream, self._left, self._size = stream, size, size

    def __len__(self) -> int:
        return self._size

    def read(self, size: int = -1) -> bytes:
        wanted = self._left if size < 0 else min(size, self._left)
        data = self._stream.read(wanted)
        if len(data) < wanted:
            raise RegistryError("the file being uploaded is shorter than it was")
        self._left -= len(data)
        return data


class Registry:
    """One repository of a registry."""

    def __init__(
        self,
        where: Reference,
        login: Credentials | None = None,
        ca: Path | None = None,
        plain_http: bool = False,
        policy: Policy | None = None,
        say: Say = silent,
    ) -> None:
        if plain_http and not is_loopback(where.host):
            raise InputError(f"{where.host}: plain HTTP is for localhost only; this registry needs HTTPS")
        self.where = where
        self.login = login
        self.policy = policy or Policy()
        self.say = say
        self._verify: str | bool = str(ca) if ca else True
        # Docker Hub's API does not live under the name that its images have.
        host = "registry-1.docker.io" if where.host in ("docker.io", "index.docker.io") else where.host
        self._root = f"{'http' if plain_http else 'https'}://{host}"
        self._base = f"{self._root}/v2/{where.name}"
        self._authorization: str | None = None
        self._http = requests.Session()
        self._http.headers["User-Agent"] = "trainyard"
        # Without this, requests would send the passwords of ~/.netrc.
        self._http.auth = lambda request: request

    @property
    def name(self) -> str:
        """``host/org/name``."""
        return self.where.repository

    # -- manifests and tags ----------------------------------------------------------------

    def manifest(self, ref: str) -> Fetched:
        """The manifest under a tag or digest.  Raises NotFound where there is none."""
        headers = {"Accept": ", ".join(MANIFEST_TYPES)}
        answer = self._call("GET", f"{self._base}/manifests/{ref}", f"{self.name}: {ref}", headers=headers)
        body, digest = answer.content, sha256(answer.content)
        if len(body) > MAX_MANIFEST:
            raise RegistryError(f"{self.name}: the manifest of {ref} has {len(body)} bytes, too many for one")
        claimed = ref if _DIGEST.fullmatch(ref) else answer.headers.get("Docker-Content-Digest", digest)
        if digest != claimed:
            raise RegistryError(f"{self.name}: the registry gave {digest} where it says {claimed}")
        media_type = answer.headers.get("Content-Type", "").split(";")[0].strip()
        return Fetched(body, digest, media_type or OCI_MANIFEST)

    def find(self, ref: str) -> Fetched | None:
        """The manifest under a tag or digest; None where there is none."""
        try:
            return self.manifest(ref)
        except NotFound:
            return None

    def digest(self, tag: str) -> str | None:
        """The digest that a tag points to; None where the tag does not exist."""
        found = self.find(tag)
        return found.digest if found else None

    def put_manifest(self, ref: str, body: bytes, media_type: str) -> str:
        """Put a manifest under a tag or its own digest; one request, so never half done."""
        self._put_manifest(ref, body, media_type)
        return sha256(body)

    def _put_manifest(self, ref: str, body: bytes, media_type: str) -> requests.Response:
        digest = sha256(body)
        if _DIGEST.fullmatch(ref) and ref != digest:
            raise RegistryError(f"{self.name}: a manifest with digest {digest} cannot be put as {ref}")
        answer = self._call(
            "PUT",
            f"{self._base}/manifests/{ref}",
            f"{self.name}: putting {ref}",
            headers={"Content-Type": media_type},
            body=lambda: body,
        )
        if (claimed := answer.headers.get("Docker-Content-Digest", digest)) != digest:
            raise RegistryError(f"{self.name}: put {digest} as {ref}, but the registry took it as {claimed}")
        return answer

    def delete_manifest(self, digest: str) -> bool:
        """Delete a manifest and every tag that points to it; False where it was not there."""
        if not _DIGEST.fullmatch(digest):
            raise RegistryError(f"{digest}: only a digest can be deleted")
        try:
            self._call("DELETE", f"{self._base}/manifests/{digest}", f"{self.name}: deleting {digest}")
        except NotFound:
            return False
        except RegistryError as error:
            if error.status == 405:
                raise RegistryError(
                    f"{self.name}: the registry does not allow deletion\n"
                    "Of a registry of your own: REGISTRY_STORAGE_DELETE_ENABLED=true",
                    405,
                ) from error
            raise
        return True

    def tags(self) -> tuple[str, ...]:
        """Every tag of the repository, in the registry's order; () where it does not exist yet."""
        try:
            pages = list(self._pages(f"{self._base}/tags/list?n=1000", "listing tags"))
        except NotFound:
            return ()
        return tuple(dict.fromkeys(tag for page in pages for tag in page.get("tags") or ()))

    def _pages(
        self, url: str, what: str, headers: Mapping[str, str] | None = None
    ) -> Iterator[dict[str, Any]]:
        seen = set()
        while url and url not in seen:
            seen.add(url)
            answer = self._call("GET", url, f"{self.name}: {what}", headers=headers)
            try:
                page = answer.json()
            except ValueError as error:
                raise RegistryError(f"{self.name}: {what}: the answer is not JSON") from error
            yield page
            following = answer.links.get("next", {}).get("url")
            url = urljoin(url, following) if following else ""

    # -- referrers -------------------------------------------------------------------------

    def referrers(self, digest: str) -> list[Descriptor]:
        """What is attached to a manifest, from the API or from the fallback tag of OCI 1.1."""
        try:
            pages = list(
                self._pages(f"{self._base}/referrers/{digest}", "referrers", headers={"Accept": OCI_INDEX})
            )
            return [one for page in pages for one in page.get("manifests") or ()]
        except NotFound:
            return self._fallback(digest)
        except RegistryError as error:
            if error.status in (400, 405):  # registries from before the API
                return self._fallback(digest)
            raise

    def _fallback(self, digest: str) -> list[Descriptor]:
        found = self.find(referrers_tag(digest))
        return list(found.json.get("manifests") or ()) if found else []

    def attach(
        self,
        subject: Descriptor,
        artifact_type: str,
        layers: Sequence[tuple[str, bytes, Mapping[str, str]]],
        annotations: Mapping[str, str] | None = None,
    ) -> Descriptor:
        """Attach files (media type, bytes, annotations) to a manifest; attaching twice is one.

        Where the registry has no referrers API, the fallback tag is kept up to date.  Two that
        attach at the same moment see each other when they read the tag back, and go again.  The
        API has no compare-and-swap: a write between our read-back and its own can still be lost.
        """
        descriptors = []
        for media_type, data, notes in layers:
            one: Descriptor = {"mediaType": media_type, "digest": self.put_bytes(data), "size": len(data)}
            descriptors.append(one | ({"annotations": dict(notes)} if notes else {}))
        manifest: dict[str, Any] = {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "artifactType": artifact_type,
            "config": {"mediaType": EMPTY_TYPE, "digest": self.put_bytes(EMPTY), "size": len(EMPTY)},
            "layers": descriptors,
            "subject": {key: subject[key] for key in ("mediaType", "digest", "size")},
        }
        if annotations:
            manifest["annotations"] = dict(annotations)
        body = canonical(manifest)
        attached: Descriptor = {
            "mediaType": OCI_MANIFEST,
            "digest": sha256(body),
            "size": len(body),
            "artifactType": artifact_type,
        }
        if annotations:
            attached["annotations"] = dict(annotations)
        answer = self._put_manifest(attached["digest"], body, OCI_MANIFEST)
        # The header says that the registry keeps the list itself:
        # https://github.com/opencontainers/distribution-spec/blob/v1.1.1/spec.md#pushing-manifests-with-subject
        if "OCI-Subject" not in answer.headers:
            self._add_to_fallback(subject["digest"], attached)
        return attached

    def _add_to_fallback(self, subject: str, attached: Descriptor) -> None:
        tag = referrers_tag(subject)
        for attempt in range(RESTARTS):
            listed = self._fallback(subject)
            if any(one["digest"] == attached["digest"] for one in listed):
                return
            index = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [*listed, attached]}
            self.put_manifest(tag, canonical(index), OCI_INDEX)
            # Long enough for another's write, which read the list before ours, to land.
            self.policy.sleep(0.1 * (attempt + 1))
        if not any(one["digest"] == attached["digest"] for one in self._fallback(subject)):
            raise RegistryError(f"{self.name}: {tag} is being written by others all the time; run again")

    # -- blobs -----------------------------------------------------------------------------

    def has_blob(self, digest: str) -> bool:
        """Whether the registry has this blob in this repository."""
        try:
            self._call("HEAD", f"{self._base}/blobs/{digest}", f"{self.name}: blob {digest}")
        except NotFound:
            return False
        return True

    def blob(self, digest: str) -> bytes:
        """A small blob, checked.  Raises NotFound where there is none."""
        answer = self._call("GET", f"{self._base}/blobs/{digest}", f"{self.name}: blob {digest}", stream=True)
        with answer:
            body = bytearray()
            try:
                for data in answer.iter_content(2**20):
                    body += data
                    if len(body) > MAX_BLOB:
                        raise RegistryError(f"{self.name}: blob {digest} is larger than {MAX_BLOB} bytes")
            except requests.RequestException as error:
                raise RegistryError(f"{self.name}: blob {digest} broke off; run again") from error
        if sha256(bytes(body)) != digest:
            raise RegistryError(f"{self.name}: the registry gave other bytes than {digest}")
        return bytes(body)

    def put_bytes(self, data: bytes) -> str:
        """Upload a small blob where it is not there yet; return its digest."""
        digest = sha256(data)
        self.put_blob(digest, lambda: io.BytesIO(data), len(data))
        return digest

    def put_blob(self, digest: str, open_stream: Callable[[], BinaryIO], size: int) -> int:
        """Upload a blob of ``size`` bytes in parts; return the bytes sent, 0 where it was there.

        An upload that breaks off goes on where the registry says it stopped.  One that forgot it
        gets the blob from its start; the reference implementation does, where a connection broke
        within a part, since what it wrote then differs from the offset in the upload's address:
        https://github.com/distribution/distribution/blob/v2.8.2/registry/handlers/blobupload.go
        The registry compares the whole with the digest before the blob exists.
        """
        if self.has_blob(digest):
            return 0
        damaged = False
        for _ in range(RESTARTS):
            try:
                with open_stream() as stream:
                    return self._upload(digest, stream, size)
            except _UploadLost:
                self.say(f"{self.name}: the registry lost the upload of {digest[:19]}; starting it again")
            except RegistryError as error:
                if "DIGEST_INVALID" not in str(error):
                    raise
                if damaged:  # twice: it is the file
                    raise RegistryError(
                        f"{error}\nThe file is not what it was when it was compressed: remove out/<id>/oci",
                        400,
                    ) from error
                damaged = True
        raise RegistryError(f"{self.name}: the registry lost the upload of {digest} {RESTARTS} times")

    def _upload(self, digest: str, stream: BinaryIO, size: int) -> int:
        what = f"{self.name}: uploading {digest[:19]}"
        started = self._call("POST", f"{self._base}/blobs/uploads/", what)
        # Absent, it is 0: https://github.com/opencontainers/distribution-spec/blob/v1.1.1/spec.md#pushing-a-blob-in-chunks
        least = started.headers.get("OCI-Chunk-Min-Length", "0")
        chunk = max(self.policy.chunk, int(least) if least.isdecimal() else 0)
        upload = _Upload(self._location(started))
        sent = 0
        while upload.offset < size:
            sent += self._again(lambda: self._send_part(upload, stream, size, chunk, what), what)
        self._again(lambda: self._commit(upload, digest, what), what)
        return sent

    def _send_part(self, upload: _Upload, stream: BinaryIO, size: int, chunk: int, what: str) -> int:
        if not upload.known:
            self._ask_offset(upload, size, what)
        if upload.offset >= size:
            return 0
        start, length = upload.offset, min(chunk, size - upload.offset)
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Range": f"{start}-{start + length - 1}",
        }

        def body() -> _Part:
            stream.seek(start)
            return _Part(stream, length)

        upload.known = False
        answer = self._once("PATCH", upload.location, what, headers=headers, body=body)
        if answer.status_code == 416:
            raise _Transient("the registry has another part of the upload than we think", 416)
        self._check_upload(answer, what)
        upload.location = self._location(answer)
        upload.offset = start + length
        upload.known = True
        return length

    def _ask_offset(self, upload: _Upload, size: int, what: str) -> None:
        answer = self._once("GET", upload.location, what)
        self._check_upload(answer, what)
        found = re.fullmatch(r"(?:bytes=)?0-(\d+)", answer.headers.get("Range", "").strip())
        last = int(found[1]) if found else 0
        # "0-0" is one byte by the specification, and none by the reference implementation:
        # https://github.com/distribution/distribution/blob/v2.8.2/registry/handlers/blobupload.go
        upload.offset = last + 1 if last else 0
        if upload.offset > size:
            raise _UploadLost
        upload.location = self._location(answer)
        upload.known = True
        if upload.offset:
            self.say(f"{what}: going on at {upload.offset / 1e6:.0f} of {size / 1e6:.0f} MB")

    def _commit(self, upload: _Upload, digest: str, what: str) -> None:
        # A commit whose answer was lost may have worked.
        if not upload.known and self.has_blob(digest):
            return
        upload.known = False
        joint = "&" if urlsplit(upload.location).query else "?"
        url = f"{upload.location}{joint}digest={quote(digest, safe='')}"
        answer = self._once("PUT", url, what, headers={"Content-Length": "0"})
        if answer.status_code == 404 and self.has_blob(digest):
            return
        self._check_upload(answer, what)

    def _check_upload(self, answer: requests.Response, what: str) -> None:
        if answer.status_code == 404 or (answer.status_code == 400 and "BLOB_UPLOAD" in answer.text):
            raise _UploadLost
        self._check(answer, what)

    def _location(self, answer: requests.Response) -> str:
        location = answer.headers.get("Location")
        if not location:
            raise RegistryError(f"{self.name}: the registry's answer to an upload has no Location")
        return urljoin(answer.url, location)

    # -- requests --------------------------------------------------------------------------

    def _call(
        self,
        method: str,
        url: str,
        what: str,
        headers: Mapping[str, str] | None = None,
        body: Callable[[], bytes | _Part] | None = None,
        stream: bool = False,
    ) -> requests.Response:
        """Send a request until it is answered; raise what the answer means."""

        def attempt() -> requests.Response:
            answer = self._once(method, url, what, headers=headers, body=body, stream=stream)
            self._check(answer, what)
            return answer

        return self._again(attempt, what)

    def _again(self, attempt: Callable[[], T], what: str) -> T:
        policy = self.policy
        backoff = tenacity.wait_exponential_jitter(multiplier=policy.first_wait, max=policy.longest_wait)

        def wait(state: tenacity.RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome else None
            asked = error.retry_after if isinstance(error, _Transient) else None
            return backoff(state) if asked is None else asked

        def tell(state: tenacity.RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome else None
            pause = state.next_action.sleep if state.next_action else 0.0
            self.say(f"{what}: {error}; trying again in {pause:.0f} s")

        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(policy.attempts),
            wait=wait,
            retry=tenacity.retry_if_exception(self._may_pass),
            sleep=policy.sleep,
            before_sleep=tell,
            reraise=True,
        )
        try:
            return retrying(attempt)
        except _Transient as error:
            if not self._may_pass(error):
                raise RegistryError(
                    f"{what}: {error}; the registry asks to come back in {error.retry_after:.0f} s\n"
                    "Run again then; what is uploaded stays",
                    error.status,
                ) from error
            raise RegistryError(
                f"{what}: {error}; tried {policy.attempts} times\nRun again; what is uploaded stays",
                error.status,
            ) from error

    def _may_pass(self, error: BaseException) -> bool:
        if not isinstance(error, _Transient):
            return False
        return error.retry_after is None or error.retry_after <= self.policy.longest_retry_after

    def _once(
        self,
        method: str,
        url: str,
        what: str,
        headers: Mapping[str, str] | None = None,
        body: Callable[[], bytes | _Part] | None = None,
        stream: bool = False,
    ) -> requests.Response:
        """Send a request once, and once more where it needs a (new) login.

        Raises _Transient for what may pass by itself, and Denied.
        """
        answer = self._send(method, url, what, headers, body, stream)
        if answer.status_code == 401 and self._log_in(answer, what):
            answer = self._send(method, url, what, headers, body, stream)
        if answer.status_code in (401, 403):
            raise Denied(self._denied(answer), answer.status_code)
        if answer.status_code >= 500 and _DISK_FULL.search(_told(answer)):
            raise RegistryError(
                f"{what}: the registry's disk is full\nFree some there and run again; what is uploaded stays",
                answer.status_code,
            )
        if answer.status_code in (408, 429, 500, 502, 503, 504):
            raise _Transient(
                f"{answer.status_code} {_told(answer) or answer.reason}",
                answer.status_code,
                retry_after(answer.headers.get("Retry-After"), self.policy.now()),
            )
        return answer

    def _send(
        self,
        method: str,
        url: str,
        what: str,
        headers: Mapping[str, str] | None,
        body: Callable[[], Any] | None,
        stream: bool,
    ) -> requests.Response:
        sent = dict(headers or {})
        # Uploads and downloads may go to a store elsewhere, which must not learn our password.
        if self._authorization and urlsplit(url)[:2] == urlsplit(self._root)[:2]:
            sent["Authorization"] = self._authorization
        try:
            return self._http.request(
                method,
                url,
                headers=sent,
                data=body() if body else None,
                timeout=(self.policy.connect_timeout, self.policy.read_timeout),
                # For each request: CURL_CA_BUNDLE would win over the session's own setting.
                verify=self._verify,
                allow_redirects=method in ("GET", "HEAD"),
                stream=stream,
            )
        except requests.RequestException as error:
            raise self._failure(error, what) from error

    def _failure(self, error: requests.RequestException, what: str) -> Exception:
        text = str(error)
        if "CERTIFICATE_VERIFY_FAILED" in text or "certificate verify failed" in text:
            return RegistryError(
                f"{self.where.host}: its certificate is not trusted with {self._verify}\n"
                f"Name the file of its CA in {CA_VARIABLE}"
            )
        if "WRONG_VERSION_NUMBER" in text or "record layer failure" in text:
            return RegistryError(
                f"{self.where.host}: does not speak TLS; plain HTTP is for localhost, when asked"
            )
        if isinstance(error, requests.exceptions.InvalidURL | requests.exceptions.MissingSchema):
            return RegistryError(f"{what}: the registry named a wrong address")
        if isinstance(error, requests.Timeout):
            return _Transient(f"no answer in {self.policy.read_timeout:.0f} s")
        if isinstance(error, OSError) and not isinstance(error, requests.ConnectionError):
            # A CA file that cannot be read is an OSError that requests does not wrap.
            return _Transient("the connection was lost")
        if "Connection refused" in text:
            return _Transient("connection refused")
        if "resolve" in text or "Name or service not known" in text:
            return _Transient(f"{self.where.host} cannot be resolved")
        return _Transient("the connection was lost")

    def _check(self, answer: requests.Response, what: str) -> None:
        status = answer.status_code
        if status < 300:
            return
        told = _told(answer)
        if status == 404:
            raise NotFound(f"{what}: not found{f' ({told})' if told else ''}", 404)
        if status == 400 and "/manifests/" in answer.url and "DIGEST_INVALID" in told:
            # The digest of a manifest is of the bytes we send. docker-registry 2.8 says this where it
            # reads a blob's link file while another publisher of the same blob writes it: seen when
            # five attached at once. It ends once no registry keeps such files without a lock.
            raise _Transient("the registry was busy with another publisher (DIGEST_INVALID)", status)
        if status == 507:
            raise RegistryError(f"{what}: the registry's disk is full (507)", 507)
        raise RegistryError(f"{what}: {status} {told or answer.reason}", status)

    # -- logging in ------------------------------------------------------------------------

    def _log_in(self, answer: requests.Response, what: str) -> bool:
        """Do what the registry's challenge asks for; False where that cannot help.

        https://distribution.github.io/distribution/spec/auth/token/
        """
        challenge = answer.headers.get("WWW-Authenticate", "")
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic" and self.login and not self.login.identity_token:
            basic = _basic(self.login)
            changed = basic != self._authorization
            self._authorization = basic
            return changed
        if scheme.lower() == "bearer":
            self._authorization = f"Bearer {self._token(_parameters(rest), what)}"
            return True
        return False

    def _token(self, challenge: Mapping[str, str], what: str) -> str:
        realm = challenge.get("realm", "")
        if urlsplit(realm).scheme != "https" and not (
            self._root.startswith("http://") and is_loopback(urlsplit(realm).netloc)
        ):
            raise RegistryError(f"{self.where.host}: asks for a login at {realm!r}, which is not HTTPS")
        asked = {key: challenge[key] for key in ("service", "scope") if key in challenge}
        method, headers, form = "GET", {}, None
        if self.login and self.login.identity_token:
            method = "POST"
            form = asked | {"grant_type": "refresh_token", "client_id": "trainyard"}
            form["refresh_token"] = self.login.identity_token
        elif self.login:
            headers["Authorization"] = _basic(self.login)
        try:
            answer = self._http.request(
                method,
                realm,
                params=None if form else asked,
                data=form,
                headers=headers,
                timeout=(self.policy.connect_timeout, self.policy.connect_timeout * 3),
                verify=self._verify,
            )
        except requests.RequestException as error:
            raise self._failure(error, what) from error
        if answer.status_code in (400, 401, 403):
            raise Denied(self._denied(answer), answer.status_code)
        if answer.status_code == 429 or answer.status_code >= 500:
            wait = retry_after(answer.headers.get("Retry-After"), self.policy.now())
            raise _Transient(f"{answer.status_code} from the login service", answer.status_code, wait)
        try:
            found = answer.json()
            return str(found.get("token") or found["access_token"])
        except (ValueError, KeyError, AttributeError) as error:
            raise RegistryError(f"{self.where.host}: the login service gave no token") from error

    def _denied(self, answer: requests.Response) -> str:
        if not self.login:
            return (
                f"{self.name}: the registry asks for a login ({answer.status_code}), and there is none\n"
                f"docker login {self.where.host}, or set {USER_VARIABLE} and {PASSWORD_VARIABLE}"
            )
        user = f"of user {self.login.user!r}" if self.login.user else "(a token)"
        if answer.status_code == 403:
            return f"{self.name}: the credentials {user} from {self.login.origin} may not do this (403)"
        return f"{self.name}: the registry refused the credentials {user} from {self.login.origin} (401)"


def _parameters(text: str) -> dict[str, str]:
    """``realm="...",scope="repository:x:pull,push"`` of a challenge."""
    return parse_keqv_list([part for part in parse_http_list(text) if "=" in part])


def _basic(login: Credentials) -> str:
    """The Authorization header of RFC 7617."""
    return "Basic " + base64.b64encode(f"{login.user}:{login.password}".encode()).decode()


def _told(answer: requests.Response) -> str:
    """The registry's own words, on one line."""
    try:
        errors = answer.json()["errors"]
        return "; ".join(
            " ".join(
                str(part)
                for part in (one.get("code"), one.get("message"), one.get("detail"))
                if part not in (None, "", [], {})
            )
            for one in errors
        )[:500]
    except (ValueError, KeyError, TypeError, AttributeError, requests.RequestException):
        return ""


def connect(text: str, plain_http: bool = False, policy: Policy | None = None, say: Say = silent) -> Registry:
    """The repository that ``host[:port]/org/name`` names, with this host's credentials and CA.

    No request is sent yet.  Raises InputError where the name or the credentials are wrong.
    """
    where = parse(text)
    return Registry(where, credentials(where.host), find_registry_ca(where.host), plain_http, policy, say)


def utc(text: str) -> datetime:
    """A time as images and manifests spell it (RFC 3339), in UTC."""
    # Docker writes nanoseconds, which Python 3.11 takes only up to microseconds.
    trimmed = re.sub(r"(\.\d{6})\d+", r"\1", text.replace("Z", "+00:00"))
    found = datetime.fromisoformat(trimmed)
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).astimezone(UTC)
