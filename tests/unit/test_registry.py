"""Names, logins, patience and uploads, against a registry that is a few lines of this file.

What only a real registry can show is in tests/registry.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from trainyard import registry
from trainyard.model import InputError
from trainyard.registry import Credentials, Denied, NotFound, Policy, Registry, RegistryError, parse

DIGEST = "sha256:" + "a" * 64

# -- names -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "host", "name", "tag", "digest"),
    [
        ("ghcr.io/acme/trainyard", "ghcr.io", "acme/trainyard", None, None),
        ("localhost/x", "localhost", "x", None, None),
        ("127.0.0.1:5000/a/b/c:cu121-pt29", "127.0.0.1:5000", "a/b/c", "cu121-pt29", None),
        ("[::1]:5000/a/b", "[::1]:5000", "a/b", None, None),
        (f"reg.example/a__b/c-d.e@{DIGEST}", "reg.example", "a__b/c-d.e", None, DIGEST),
        (f"reg.example/a:t@{DIGEST}", "reg.example", "a", "t", DIGEST),
    ],
)
def test_a_reference_is_taken_apart(
    text: str, host: str, name: str, tag: str | None, digest: str | None
) -> None:
    found = parse(text)
    assert (found.host, found.name, found.tag, found.digest) == (host, name, tag, digest)
    assert str(found) == text
    assert found.version == (digest or tag or "latest")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "acme/trainyard",
        "ghcr.io",
        "ghcr.io/",
        "ghcr.io/a//b",
        "ghcr.io/a:",
        "a.b/c@sha256:1",
    ],
)
def test_what_is_no_reference_says_how_one_looks(text: str) -> None:
    with pytest.raises(InputError, match=r"A reference is HOST\[:PORT\]/ORG/NAME"):
        parse(text)


def test_upper_case_is_named_and_mended() -> None:
    with pytest.raises(InputError, match=r"all lower case: ghcr\.io/acme/x"):
        parse("ghcr.io/Acme/x")


def test_a_scheme_is_named() -> None:
    with pytest.raises(InputError, match="leave out https://"):
        parse("https://ghcr.io/acme/x")


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost:5000", True),
        ("127.0.0.53", True),
        ("[::1]:5000", True),
        ("localhost.example.com", False),
        ("10.0.0.1:5000", False),
    ],
)
def test_plain_http_is_for_this_machine(host: str, expected: bool) -> None:
    assert registry.is_loopback(host) is expected
    if not expected:
        with pytest.raises(InputError, match="plain HTTP is for localhost only"):
            Registry(parse(f"{host}/x/y"), plain_http=True)


def test_times_of_images_and_manifests() -> None:
    assert registry.utc("2026-03-01T01:00:00+02:00").isoformat() == "2026-02-28T23:00:00+00:00"
    assert registry.utc("2026-11-30T21:19:14.877282248Z").microsecond == 877282


# -- credentials -----------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, object]], None]:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))

    def write(content: dict[str, object]) -> None:
        (tmp_path / "config.json").write_text(json.dumps(content))

    return write


def auth(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def test_the_environment_wins(config: Callable[[dict[str, object]], None]) -> None:
    config({"auths": {"reg.example": {"auth": auth("file:secret")}}})
    found = registry.credentials(
        "reg.example", {registry.USER_VARIABLE: "env", registry.PASSWORD_VARIABLE: "s3cret"}
    )
    assert found is not None
    assert (found.user, found.password) == ("env", "s3cret")
    assert "s3cret" not in repr(found)


def test_half_a_login_is_an_error() -> None:
    with pytest.raises(InputError, match="TRAINYARD_REGISTRY_PASSWORD is not set"):
        registry.credentials("reg.example", {registry.USER_VARIABLE: "env"})


def test_dockers_config(config: Callable[[dict[str, object]], None]) -> None:
    config({"auths": {"reg.example:5000": {"auth": auth("me:pass:word")}, "other": {"identitytoken": "idt"}}})
    found = registry.credentials("reg.example:5000", {})
    assert found is not None
    assert (found.user, found.password) == ("me", "pass:word")
    token = registry.credentials("other", {})
    assert token is not None
    assert token.identity_token == "idt"
    assert registry.credentials("reg.example", {}) is None


@pytest.mark.parametrize("key", ["credHelpers", "credsStore"])
def test_a_credential_helper_is_run(
    key: str,
    config: Callable[[dict[str, object]], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    helper = tmp_path / "docker-credential-test"
    helper.write_text(
        '#!/bin/sh\nread host; [ "$1 $host" = "get reg.example" ] || exit 3\n'
        'echo \'{"ServerURL":"reg.example","Username":"helped","Secret":"hush"}\'\n'
    )
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    config({key: {"reg.example": "test"} if key == "credHelpers" else "test"})
    found = registry.credentials("reg.example", {})
    assert found is not None
    assert (found.user, found.password) == ("helped", "hush")
    helper.write_text("#!/bin/sh\necho hush; exit 1\n")
    with pytest.raises(InputError, match="a credential helper") as caught:
        registry.credentials("reg.example", {})
    assert "hush" not in str(caught.value)


def test_the_ca_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    named = tmp_path / "ca.pem"
    monkeypatch.setenv("REGISTRY_CA", str(named))
    with pytest.raises(InputError, match="no such file"):
        registry.find_registry_ca("reg.example")
    named.write_text("x")
    assert registry.find_registry_ca("reg.example") == named
    monkeypatch.delenv("REGISTRY_CA")
    monkeypatch.setattr(registry, "DOCKER_CERTS", tmp_path / "certs.d")
    dockers = tmp_path / "certs.d" / "reg.example" / "ca.crt"
    dockers.parent.mkdir(parents=True)
    dockers.write_text("x")
    assert registry.find_registry_ca("reg.example") == dockers


# -- patience --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("", None),
        ("30", 30.0),
        ("soon", None),
        ("-5", None),
        (formatdate(1_000_090, usegmt=True), 90.0),
        (formatdate(999_000, usegmt=True), 0.0),
    ],
)
def test_retry_after_in_seconds_and_as_a_date(value: str | None, expected: float | None) -> None:
    assert registry.retry_after(value, now=1_000_000) == expected


# -- a registry of a few lines ----------------------------------------------------------------


@dataclass
class Answer:
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass
class Asked:
    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes


Handle = Callable[[Asked], Answer]


class Fake:
    """Answers what ``handle`` says; notes what it was asked."""

    def __init__(self) -> None:
        self.handle: Handle = lambda _asked: Answer(404)
        self.asked: list[Asked] = []
        self.waits: list[float] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def _any(self) -> None:
                parts = urlsplit(self.path)
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                asked = Asked(self.command, parts.path, parse_qs(parts.query), headers, body)
                fake.asked.append(asked)
                answer = fake.handle(asked)
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer.body)

            do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _any

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.server.server_address[1]}"

    def open(self, login: Credentials | None = None, **policy: float) -> Registry:
        patience = replace(Policy(sleep=self.waits.append, now=lambda: 1_000_000.0), **policy)  # type: ignore[arg-type]
        return Registry(parse(f"{self.host}/a/b"), login, plain_http=True, policy=patience)


@pytest.fixture
def fake() -> Iterator[Fake]:
    one = Fake()
    thread = threading.Thread(target=one.server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield one
    one.server.shutdown()
    one.server.server_close()


def test_waits_grow_and_end(fake: Fake) -> None:
    fake.handle = lambda _asked: Answer(503)
    with pytest.raises(RegistryError, match=r"503 Service Unavailable; tried 7 times"):
        fake.open().manifest("x")
    assert len(fake.asked) == 7
    for wait, least in zip(fake.waits, (1, 2, 4, 8, 16, 32), strict=True):
        assert least <= wait <= least + 1  # jitter of up to a second


def test_a_date_in_retry_after_is_waited_for(fake: Fake) -> None:
    answers = iter([Answer(429, {"Retry-After": formatdate(1_000_120, usegmt=True)})])
    fake.handle = lambda _asked: next(answers, Answer(200, {}, b"{}"))
    assert fake.open().manifest("x").body == b"{}"
    assert fake.waits == [120.0]


def test_what_does_not_pass_is_not_tried_again(fake: Fake) -> None:
    told = json.dumps({"errors": [{"code": "TAG_INVALID", "message": "bad tag", "detail": {"tag": "x"}}]})
    fake.handle = lambda _asked: Answer(400, {}, told.encode())
    with pytest.raises(RegistryError, match="400 TAG_INVALID bad tag") as caught:
        fake.open().manifest("x")
    assert caught.value.status == 400
    assert fake.waits == []


def test_nobody_listens(fake: Fake) -> None:
    here = fake.open(attempts=3)
    fake.server.socket.close()
    with pytest.raises(RegistryError, match="connection refused; tried 3 times"):
        here.tags()
    assert len(fake.waits) == 2


def test_a_token_is_fetched_and_used(fake: Fake) -> None:
    def handle(asked: Asked) -> Answer:
        if asked.path == "/token":
            assert asked.headers["authorization"] == f"Basic {auth('me:pässword')}"
            assert asked.query == {"service": ["reg"], "scope": ["repository:a/b:pull,push"]}
            return Answer(200, {}, b'{"token": "t0ken"}')
        if asked.headers.get("authorization") != "Bearer t0ken":
            scope = 'scope="repository:a/b:pull,push"'
            challenge = f'Bearer realm="http://{fake.host}/token",service="reg",{scope}'
            return Answer(401, {"WWW-Authenticate": challenge})
        return Answer(200, {}, b"{}")

    fake.handle = handle
    here = fake.open(Credentials("me", "pässword", "test"))
    here.manifest("x")
    here.manifest("y")
    assert [asked.path for asked in fake.asked].count("/token") == 1


def test_an_identity_token_is_exchanged(fake: Fake) -> None:
    def handle(asked: Asked) -> Answer:
        if asked.path == "/token":
            form = parse_qs(asked.body.decode())
            assert (form["grant_type"], form["refresh_token"]) == (["refresh_token"], ["idt"])
            return Answer(200, {}, b'{"access_token": "t0ken"}')
        if asked.headers.get("authorization") != "Bearer t0ken":
            return Answer(401, {"WWW-Authenticate": f'Bearer realm="http://{fake.host}/token",service="reg"'})
        return Answer(200, {}, b"{}")

    fake.handle = handle
    fake.open(Credentials("", "", "test", identity_token="idt")).manifest("x")


def test_a_password_is_not_sent_to_a_login_without_tls(fake: Fake) -> None:
    challenge = 'Bearer realm="http://evil.example/token",service="reg"'
    fake.handle = lambda _asked: Answer(401, {"WWW-Authenticate": challenge})
    with pytest.raises(RegistryError, match="which is not HTTPS"):
        fake.open(Credentials("me", "secret", "test")).manifest("x")


def test_a_token_that_is_not_enough_is_one_message(fake: Fake) -> None:
    def handle(asked: Asked) -> Answer:
        if asked.path == "/token":
            return Answer(200, {}, b'{"token": "t"}')
        return Answer(401, {"WWW-Authenticate": f'Bearer realm="http://{fake.host}/token"'})

    fake.handle = handle
    with pytest.raises(Denied, match="refused the credentials of user 'me' from test") as caught:
        fake.open(Credentials("me", "secret", "test")).manifest("x")
    assert "secret" not in str(caught.value)
    fake.handle = lambda _asked: Answer(403)
    with pytest.raises(Denied, match=r"may not do this \(403\)"):
        fake.open(Credentials("me", "secret", "test")).manifest("x")
    assert fake.waits == []


def test_passwords_of_netrc_are_not_sent(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    fake.handle = lambda _asked: Answer(200, {}, b"{}")
    fake.open().manifest("x")
    assert "authorization" not in fake.asked[0].headers


def test_tags_come_in_pages(fake: Fake) -> None:
    def handle(asked: Asked) -> Answer:
        if "last" not in asked.query:
            link = '</v2/a/b/tags/list?n=2&last=two>; rel="next"'
            return Answer(200, {"Link": link}, b'{"name":"a/b","tags":["one","two"]}')
        return Answer(200, {}, b'{"name":"a/b","tags":["three"]}')

    fake.handle = handle
    assert fake.open().tags() == ("one", "two", "three")
    fake.handle = lambda _asked: Answer(404)
    assert fake.open().tags() == ()
    fake.handle = lambda _asked: Answer(200, {}, b'{"name":"a/b","tags":null}')
    assert fake.open().tags() == ()


def test_what_a_digest_promises_is_compared(fake: Fake) -> None:
    fake.handle = lambda _asked: Answer(200, {}, b'{"other": 1}')
    with pytest.raises(RegistryError, match="the registry gave sha256:"):
        fake.open().manifest(DIGEST)
    with pytest.raises(RegistryError, match="gave other bytes than"):
        fake.open().blob(DIGEST)
    with pytest.raises(RegistryError, match="cannot be put as"):
        fake.open().put_manifest(DIGEST, b"{}", registry.OCI_MANIFEST)


def test_referrers_come_from_the_api_where_there_is_one(fake: Fake) -> None:
    index = {"manifests": [{"digest": DIGEST, "artifactType": "x"}]}
    fake.handle = lambda _asked: Answer(200, {}, json.dumps(index).encode())
    assert fake.open().referrers(DIGEST) == index["manifests"]
    assert [asked.path for asked in fake.asked] == [f"/v2/a/b/referrers/{DIGEST}"]


def test_a_registry_with_the_api_gets_no_fallback_tag(fake: Fake) -> None:
    def handle(asked: Asked) -> Answer:
        if asked.method == "PUT":
            return Answer(201, {"OCI-Subject": DIGEST})
        return Answer(200)  # every blob is there

    fake.handle = handle
    subject = {"mediaType": registry.OCI_MANIFEST, "digest": DIGEST, "size": 3}
    attached = fake.open().attach(subject, "application/x", [("text/plain", b"hello", {"k": "v"})])
    puts = [asked for asked in fake.asked if asked.method == "PUT"]
    assert [asked.path for asked in puts] == [f"/v2/a/b/manifests/{attached['digest']}"]
    body = json.loads(puts[0].body)
    assert body["subject"] == subject
    assert body["artifactType"] == attached["artifactType"] == "application/x"
    assert body["layers"][0]["annotations"] == {"k": "v"}


# -- uploads ---------------------------------------------------------------------------------


class Store:
    """The upload half of a registry that keeps what arrived of a part that broke off."""

    def __init__(self) -> None:
        self.data = b""
        self.blobs: set[str] = set()
        self.breaks: list[int] = []  # bytes to take of the next parts before a 502
        self.least = 0

    def __call__(self, asked: Asked) -> Answer:
        if asked.method == "HEAD":
            return Answer(200 if asked.path.rsplit("/", 1)[1] in self.blobs else 404)
        here = {"Location": "/v2/a/b/blobs/uploads/1?state=x", "Range": f"0-{max(0, len(self.data) - 1)}"}
        if asked.method == "POST":
            self.data = b""
            return Answer(202, here | {"OCI-Chunk-Min-Length": str(self.least)})
        if asked.method == "GET":
            return Answer(204, here)
        if asked.method == "PATCH":
            start = int(re.match(r"(\d+)-", asked.headers["content-range"])[1])  # type: ignore[index]
            if start != len(self.data):
                return Answer(416, here)
            if self.breaks:
                self.data += asked.body[: self.breaks.pop(0)]
                return Answer(502)
            self.data += asked.body
            return Answer(202, here | {"Range": f"0-{len(self.data) - 1}"})
        digest = asked.query["digest"][0]
        assert asked.query["state"] == ["x"]
        if f"sha256:{hashlib.sha256(self.data).hexdigest()}" != digest:
            return Answer(400, {}, b'{"errors":[{"code":"DIGEST_INVALID","message":"no"}]}')
        self.blobs.add(digest)
        return Answer(201)


def put(here: Registry, data: bytes) -> int:
    return here.put_blob(registry.sha256(data), lambda: io.BytesIO(data), len(data))


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1000])
def test_a_blob_goes_up_in_parts(fake: Fake, size: int) -> None:
    store = fake.handle = Store()
    data = bytes(number % 251 for number in range(size))
    assert put(fake.open(chunk=100), data) == size
    assert store.blobs == {registry.sha256(data)}
    assert sum(asked.method == "PATCH" for asked in fake.asked) == (size + 99) // 100
    assert put(fake.open(), data) == 0


def test_a_part_that_broke_off_goes_on_where_the_registry_stopped(fake: Fake) -> None:
    store = fake.handle = Store()
    store.breaks = [0, 37, 1, 99]
    data = bytes(range(250))
    put(fake.open(chunk=100), data)
    assert store.blobs == {registry.sha256(data)}
    starts = [asked.headers["content-range"] for asked in fake.asked if asked.method == "PATCH"]
    assert starts[:3] == ["0-99", "0-99", "37-136"]
    assert len([asked for asked in fake.asked if asked.method == "POST"]) == 1


def test_parts_are_no_smaller_than_the_registry_takes(fake: Fake) -> None:
    store = fake.handle = Store()
    store.least = 150
    put(fake.open(chunk=100), bytes(300))
    assert [len(asked.body) for asked in fake.asked if asked.method == "PATCH"] == [150, 150]


def test_a_file_that_changed_is_named_as_the_cause(fake: Fake) -> None:
    fake.handle = Store()
    with pytest.raises(RegistryError, match="DIGEST_INVALID no\nThe file is not what it was"):
        fake.open().put_blob(DIGEST, lambda: io.BytesIO(b"other"), 5)
    with pytest.raises(RegistryError, match="shorter than it was"):
        fake.open().put_blob(DIGEST, lambda: io.BytesIO(b"short"), 500)


def test_a_manifest_refused_while_another_publisher_writes_is_put_again(fake: Fake) -> None:
    refused = Answer(400, {}, b'{"errors":[{"code":"DIGEST_INVALID","message":"did not match"}]}')
    answers = [refused, Answer(201)]
    fake.handle = lambda _: answers.pop(0)
    fake.open().put_manifest("a-tag", b"{}", registry.OCI_MANIFEST)
    assert answers == []


def test_a_commit_whose_answer_was_lost_is_not_done_twice(fake: Fake) -> None:
    store = Store()
    lost = [True]

    def handle(asked: Asked) -> Answer:
        answer = store(asked)
        if asked.method == "PUT" and lost.pop():
            return Answer(504)
        return answer

    fake.handle = handle
    put(fake.open(), b"x")
    assert sum(asked.method == "PUT" for asked in fake.asked) == 1


def test_a_store_elsewhere_does_not_get_the_password(fake: Fake) -> None:
    other = Fake()
    thread = threading.Thread(target=other.server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    store = Store()
    other.handle = store

    def handle(asked: Asked) -> Answer:
        if "authorization" not in asked.headers:
            return Answer(401, {"WWW-Authenticate": 'Basic realm="x"'})
        answer = store(asked)
        if "Location" in answer.headers:
            answer.headers["Location"] = f"http://{other.host}{answer.headers['Location']}"
        return answer

    fake.handle = handle
    put(fake.open(Credentials("me", "secret", "test")), b"data")
    assert [asked.method for asked in other.asked] == ["PATCH", "PUT"]
    assert all("authorization" not in asked.headers for asked in other.asked)
    other.server.shutdown()
    other.server.server_close()


def test_only_digests_are_deleted(fake: Fake) -> None:
    with pytest.raises(RegistryError, match="only a digest can be deleted"):
        fake.open().delete_manifest("latest")
    assert fake.open().delete_manifest(DIGEST) is False
    with pytest.raises(NotFound):
        fake.open().manifest("x")
