"""Builds that reach Debian and PyPI only through a site's mirrors, one of them with a password."""

from __future__ import annotations

import base64
import re
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import requests

from trainyard import apt, bases, mirrors
from trainyard.engine import BuildRequest, Engine
from trainyard.hostenv import find_ca
from trainyard.model import Row, StepFailed

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "hunter2-" + uuid.uuid4().hex
MARK = uuid.uuid4().hex  # of the caches that these builds use


@dataclass
class Site:
    """A mirror on this host that hands requests on, and what it was asked for."""

    port: int
    asked: list[str] = field(default_factory=list)

    def file(self, host: str, token: str = TOKEN) -> str:
        """The text of a mirrors file, as a container sees this host."""
        return (
            f"apt: {{debian: 'http://{host}:{self.port}/debian',"
            f" debian-security: 'http://{host}:{self.port}/debian-security'}}\n"
            f"pypi: http://ci:{token}@{host}:{self.port}/pypi/simple\n"
        )


@pytest.fixture
def site() -> Iterator[Site]:
    archive, security = apt.debian_mirrors()
    upstream = {"debian": archive, "debian-security": security, "pypi": "https://pypi.org"}
    allowed = "Basic " + base64.b64encode(f"ci:{TOKEN}".encode()).decode()
    ca = str(find_ca() or True)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _, name, *rest = self.path.split("/")
            if name == "pypi" and self.headers.get("Authorization") != allowed:
                self.send_response(401)
                self.send_header("WWW-Authenticate", 'Basic realm="site"')
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            found.asked.append(self.path)
            passed = {key: value for key in ("Accept", "Range") if (value := self.headers.get(key))}
            with requests.get(
                "/".join([upstream[name], *rest]),
                headers={"Accept-Encoding": "identity", **passed},
                verify=ca,
                timeout=60,
            ) as answer:
                self.send_response(answer.status_code)
                for key in ("Content-Type", "Last-Modified"):
                    if key in answer.headers:
                        self.send_header(key, answer.headers[key])
                self.send_header("Content-Length", str(len(answer.content)))
                self.end_headers()
                self.wfile.write(answer.content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("0.0.0.0", 0), Handler)
    found = Site(server.server_address[1])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield found
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def no_caches_left(docker: Engine) -> Iterator[None]:
    yield
    docker._prune("exec.cachemount", (MARK,))


@pytest.fixture
def gateway(docker: Engine, base: bases.BaseImage) -> str:
    """This host's address, as a build's containers have it."""
    script = "ip=$(sed -n 's/^[^\\t]*\\t00000000\\t\\([0-9A-F]*\\).*/\\1/p' /proc/net/route); echo $ip"
    hexed = docker.cli("run", "--rm", base.ref, "sh", "-c", script).stdout.strip()
    return ".".join(str(int(hexed[at : at + 2], 16)) for at in (6, 4, 2, 0))


def request(row: Row, site_file: Path, base: bases.BaseImage, folder: Path) -> BuildRequest:
    """The row's `python` stage with one small package for a lock, every step of it done anew."""
    lock = (ROOT / "images" / row.id / "requirements.lock").read_text()
    small = re.search(r"^idna==.*\n(\s+--hash=.*\n)+", lock, re.MULTILINE)
    assert small
    (folder / "locks").mkdir()
    (folder / "locks/requirements.lock").write_text(small[0])
    text = (ROOT / "images" / row.id / "Dockerfile").read_text()
    text = text.replace("set -eux; \\", f"set -eux; : {uuid.uuid4().hex}; \\")
    text = text.replace(
        f"--mount=type=bind,source=images/{row.id}/requirements.lock,target=/tmp",
        "--mount=type=bind,from=locks,source=requirements.lock,target=/tmp",
    )
    text = re.sub(r"(--mount=type=cache,id=[\w-]+)", rf"\1-{MARK}", text)  # none from earlier builds
    text = text.replace("grep -E '^(cuda|nvidia|torch|triton)'", "cat")
    (folder / "Dockerfile").write_text(text)
    ca = find_ca()
    written = mirrors.write(mirrors.secrets(mirrors._read(site_file), row, ca), folder / "secrets")
    return BuildRequest(
        dockerfile=folder / "Dockerfile",
        context=ROOT,
        log=folder / "build.log",
        args={"BASE": base.ref, "TORCH_INDEX": ""},
        secrets=({"ca": ca} if ca else {}) | written,
        contexts={"locks": folder / "locks"},
        target="python",
        tag="trainyard-e2e:mirrors",
    )


def test_apt_pip_and_uv_ask_the_mirrors_and_nothing_of_them_is_left(
    docker: Engine, cpu_row: Row, base: bases.BaseImage, site: Site, gateway: str, tmp_path: Path
) -> None:
    file = tmp_path / "mirrors.yaml"
    file.write_text(site.file(gateway))
    image = docker.build(request(cpu_row, file, base, tmp_path))
    try:
        suites = {path.split("/")[3] for path in site.asked if "/dists/" in path}
        assert suites >= {"bookworm", "bookworm-updates", "bookworm-security"}
        assert any(path.startswith("/debian/pool/") for path in site.asked)
        assert {"/pypi/simple/uv/", "/pypi/simple/idna/"} <= set(site.asked)

        history = str(docker.client.images.get(image).history()) + str(docker.image(image).attrs)  # type: ignore[union-attr]
        assert TOKEN not in history + (tmp_path / "build.log").read_text()
        assert str(site.port) not in history
        look = f"ls -A /run/secrets; grep -rlE ':{site.port}|{TOKEN}' /etc /opt /root /tmp /usr /var; :"
        found = docker.cli("run", "--rm", image, "sh", "-c", look)
        assert found.stdout.strip() == "", found.stdout
    finally:
        docker.untag("trainyard-e2e:mirrors")
        docker.discard(image)


def test_a_mirror_that_refuses_fails_the_build_and_its_password_is_not_shown(
    docker: Engine, cpu_row: Row, base: bases.BaseImage, site: Site, gateway: str, tmp_path: Path
) -> None:
    file = tmp_path / "mirrors.yaml"
    file.write_text(site.file(gateway, token="wrong-" + TOKEN))
    with pytest.raises(StepFailed) as caught:
        docker.build(request(cpu_row, file, base, tmp_path))
    assert TOKEN not in str(caught.value) + (tmp_path / "build.log").read_text()
