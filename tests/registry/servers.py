"""A real registry with htpasswd and TLS, and a proxy in front of it that makes faults."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import bcrypt
import trustme

from trainyard.registry import Credentials, Policy, Registry

USER, PASSWORD = "publisher", "correct horse battery"
READY_SECONDS = 20
COSIGN_SUITE, COSIGN_MIRROR = "trixie", "http://deb.debian.org/debian"
LOGIN = Credentials(USER, PASSWORD, "the tests")
#: Patient enough for a registry that is restarted, without making a test slow.
QUICK = Policy(attempts=6, first_wait=0.2, longest_wait=1.0, chunk=2**20)
HASTY = Policy(attempts=2, first_wait=0.05, longest_wait=0.1, chunk=2**20)
Opener = Callable[..., Registry]


@dataclass(frozen=True)
class Tls:
    """A certificate for this machine and the CA that signed it."""

    ca: Path
    chain: Path
    key: Path

    @classmethod
    def make(cls, folder: Path) -> Tls:
        authority = trustme.CA()
        mine = authority.issue_cert("127.0.0.1", "localhost")
        made = cls(folder / "ca.pem", folder / "chain.pem", folder / "key.pem")
        authority.cert_pem.write_to_path(made.ca)
        for number, blob in enumerate(mine.cert_chain_pems):
            blob.write_to_path(made.chain, append=number > 0)
        mine.private_key_pem.write_to_path(made.key)
        return made


def find_program(folder: Path) -> Path:
    """The distribution's docker-registry: installed, or unpacked from its package."""
    if found := shutil.which("docker-registry"):
        return Path(found)
    for prepare in ((), ("apt-get", "update", "-qq")):
        if prepare:
            subprocess.run(prepare, check=True)
        got = subprocess.run(
            ["apt-get", "download", "-qq", "docker-registry"], cwd=folder, text=True, capture_output=True
        )
        if got.returncode == 0:
            break
    else:
        raise RuntimeError(f"the package docker-registry cannot be had: {got.stderr}")
    subprocess.run(["dpkg-deb", "-x", str(next(folder.glob("*.deb"))), str(folder / "unpacked")], check=True)
    return folder / "unpacked" / "usr" / "bin" / "docker-registry"


def find_cosign(folder: Path) -> Path:
    """cosign: installed, or Debian 13's, unpacked with an apt that is ours alone.

    It runs from Debian 12 on (glibc 2.34).
    """
    if found := shutil.which("cosign"):
        return Path(found)
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    (folder / "sources.list").write_text(f"deb {COSIGN_MIRROR} {COSIGN_SUITE} main\n")
    (folder / "status").touch()
    settings = {
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::lists": folder / "lists",
        "Dir::State::status": folder / "status",
        "Dir::Cache": folder / "cache",
        "APT::Sandbox::User": "root",
    }
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    for command in (["update", "-qq"], ["download", "-qq", "cosign"]):
        subprocess.run(["apt-get", *options, *command], cwd=folder, check=True)
    subprocess.run(["dpkg-deb", "-x", next(folder.glob("*.deb")), folder / "unpacked"], check=True)
    return folder / "unpacked" / "usr" / "bin" / "cosign"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Server:
    """A registry process; its storage and its port outlive it."""

    def __init__(
        self, program: Path, tls: Tls, folder: Path, secret: str = "the same after a restart"
    ) -> None:
        self.program, self.tls, self.folder = program, tls, folder
        self.storage = folder / "storage"
        self.storage.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.secret = secret
        self.deletes = True
        hashed = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(rounds=4)).decode()
        (folder / "htpasswd").write_text(f"{USER}:{hashed}\n")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        config = self.folder / "config.yml"
        config.write_text(
            f"""
version: 0.1
log: {{level: warn, accesslog: {{disabled: true}}}}
storage:
  filesystem: {{rootdirectory: {self.storage}}}
  delete: {{enabled: {str(self.deletes).lower()}}}
http:
  addr: {self.host}
  secret: {self.secret}
  tls: {{certificate: {self.tls.chain}, key: {self.tls.key}}}
auth:
  htpasswd: {{realm: trainyard, path: {self.folder / "htpasswd"}}}
"""
        )
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(self.program), "serve", str(config)], stdout=log, stderr=log, start_new_session=True
            )
        limit = time.monotonic() + READY_SECONDS
        while time.monotonic() < limit:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            if self._process.poll() is not None:
                break
            time.sleep(0.05)
        raise RuntimeError(f"the registry does not start:\n{(self.folder / 'log').read_text()[-2000:]}")

    def blob_file(self, digest: str) -> Path:
        """The file in which it keeps a blob."""
        value = digest.removeprefix("sha256:")
        return self.storage / "docker/registry/v2/blobs/sha256" / value[:2] / value / "data"

    def kill(self) -> None:
        """End it as a power cut would."""
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None


@dataclass
class Seen:
    """One request that came by."""

    method: str
    path: str
    received: int = 0  # bytes of the body


@dataclass
class Fault:
    """What the proxy does instead of, or while, passing a request on."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    cut_after: int | None = None  # bytes of the body after which the connection is dropped
    before: Callable[[], None] | None = None  # called before the request goes on
    after: Callable[[], None] | None = None  # called once the registry has answered
    rewrite: Callable[[bytes], bytes] | None = None  # of the answer's body


Rule = Callable[[Seen], Fault | None]


class Proxy:
    """HTTPS to HTTPS, on a port of its own; ``rule`` decides about each request."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.rule: Rule = lambda _seen: None
        self.seen: list[Seen] = []
        self.on_bytes: Callable[[int], None] = lambda _count: None  # bytes of bodies so far
        self.total = 0
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(server.tls.chain, server.tls.key)
        self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._http.server_address[1]}"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def once(self, method: str, part: str, fault: Fault, times: int = 1) -> None:
        """Let the next ``times`` requests with this method and part of a path fail so."""
        left = [times]

        def rule(seen: Seen) -> Fault | None:
            if seen.method == method and part in seen.path and left[0]:
                left[0] -= 1
                return fault
            return None

        self.rule = rule

    def sent(self, method: str = "PATCH") -> int:
        """Bytes of all bodies of a method."""
        return sum(seen.received for seen in self.seen if seen.method == method)

    def count(self, method: str, part: str = "") -> int:
        return sum(1 for seen in self.seen if seen.method == method and part in seen.path)

    def forget(self) -> None:
        self.seen.clear()
        self.total = 0

    def _handler(proxy) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_args: object) -> None:
                pass

            def _any(self) -> None:
                seen = Seen(self.command, self.path)
                proxy.seen.append(seen)
                fault = proxy.rule(seen) or Fault()
                if fault.before:
                    fault.before()
                length = int(self.headers.get("Content-Length") or 0)
                if fault.status:
                    self.rfile.read(length)
                    self._answer(fault.status, list(fault.headers.items()), b"{}")
                    return
                try:
                    self._pass_on(seen, fault, length)
                except (OSError, http.client.HTTPException):
                    self.close_connection = True  # as a lost connection looks to the client
                    with contextlib.suppress(OSError):
                        self.connection.shutdown(socket.SHUT_RDWR)

            def _pass_on(self, seen: Seen, fault: Fault, length: int) -> None:
                context = ssl.create_default_context(cafile=str(proxy.server.tls.ca))
                link = http.client.HTTPSConnection(
                    "127.0.0.1", proxy.server.port, context=context, timeout=60
                )
                with contextlib.closing(link):
                    link.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                    for name, value in self.headers.items():
                        link.putheader(name, value)
                    link.endheaders()
                    for piece in self._body(length):
                        link.send(piece)
                        seen.received += len(piece)
                        proxy.total += len(piece)
                        proxy.on_bytes(proxy.total)
                        if fault.cut_after is not None and seen.received >= fault.cut_after:
                            raise ConnectionAbortedError
                    answer = link.getresponse()
                    body = answer.read()
                if fault.after:
                    fault.after()
                if fault.rewrite:
                    body = fault.rewrite(body)
                kept = [
                    (name, value)
                    for name, value in answer.getheaders()
                    if name.lower() not in ("content-length", "transfer-encoding", "connection")
                ]
                if self.command == "HEAD":
                    kept.append(("Content-Length", answer.headers.get("Content-Length", "0")))
                self._answer(answer.status, kept, body)

            def _body(self, length: int) -> Iterator[bytes]:
                while length > 0:
                    piece = self.rfile.read(min(length, 64 * 1024))
                    if not piece:
                        raise ConnectionAbortedError
                    length -= len(piece)
                    yield piece

            def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
                self.send_response(status)
                for name, value in headers:
                    self.send_header(name, value)
                if self.command != "HEAD" and status != 204:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _any

        return Handler
