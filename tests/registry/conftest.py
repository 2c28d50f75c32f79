"""Publishing, against a real registry with htpasswd and TLS that the tests start.

pytest tests/registry                            small images, every fault
pytest tests/registry --publish cpu-pt213        also the built and tested image itself
pytest tests/registry --nights                   also nights that build and test, some 10 minutes
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # whatever import mode pytest uses

import servers
import small
from servers import LOGIN, QUICK, Opener, Proxy, Server, Tls
from small import Maker

from trainyard import engine, matrix, publish, resolve
from trainyard.model import Row
from trainyard.registry import Credentials, Policy, Registry, parse

ROOT = Path(__file__).resolve().parents[2]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which real images to publish, and where their reports are."""
    group = parser.getgroup("trainyard")
    group.addoption("--publish", default="", help="ids of built and tested images to publish too")
    group.addoption("--publish-out", type=Path, default=ROOT / "out", help="the out/ folder they are in")
    group.addoption("--nights", action="store_true", help="also run nights that build and test images")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "published_id" in metafunc.fixturenames:
        ids = [one for one in metafunc.config.getoption("--publish").split(",") if one]
        metafunc.parametrize("published_id", ids or [None], ids=ids or ["none"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect, and so count, what needs an image or a time that was not asked for."""
    dropped = [
        item
        for item in items
        if ((spec := getattr(item, "callspec", None)) and spec.params.get("published_id", "") is None)
        or (item.path.name == "test_nights.py" and not config.getoption("--nights"))
    ]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]


@pytest.fixture(scope="session")
def docker() -> Iterator[engine.Engine]:
    found = engine.connect()
    yield found
    for image in found.client.images.list(small.REPOSITORY):
        for tag in image.tags:
            found.untag(tag)
        found.discard(str(image.id))


@pytest.fixture(scope="session")
def rows() -> dict[str, Row]:
    return {row.id: row for row in resolve.rows(matrix.load(ROOT / "matrix.yaml"))}


@pytest.fixture(scope="session")
def row(rows: dict[str, Row]) -> Row:
    """The row that small images stand for."""
    return rows["cpu-pt213"]


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return Tls.make(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return servers.find_program(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="session")
def cosign_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return servers.find_cosign(tmp_path_factory.mktemp("cosign"))


@pytest.fixture
def server(program: Path, tls: Tls, tmp_path: Path) -> Iterator[Server]:
    """A registry of its own for each test: empty, and free to be killed."""
    one = Server(program, tls, tmp_path / "registry")
    one.start()
    yield one
    one.kill()


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    one = Proxy(server)
    yield one
    one.close()


@pytest.fixture
def opened(server: Server, tls: Tls) -> Opener:
    """Open the repository: ``opened()`` straight, ``opened(proxy)`` through the proxy."""

    def make(
        proxy: Proxy | None = None, policy: Policy = QUICK, login: Credentials | None = LOGIN
    ) -> Registry:
        host = proxy.host if proxy else server.host
        return Registry(parse(f"{host}/acme/trainyard"), login, tls.ca, policy=policy)

    return make


@pytest.fixture
def registry(opened: Opener) -> Registry:
    return opened()


@pytest.fixture
def image(docker: engine.Engine, row: Row, tmp_path: Path) -> Maker:
    """Make a small image: ``image(day=1)``."""
    count = [0]

    def make(day: int = 0, sizes: tuple[int, ...] = (small.MB, 3 * small.MB)) -> small.Small:
        count[0] += 1
        return small.make(docker, row, tmp_path / "out" / f"image{count[0]}", day, sizes)

    return make


@pytest.fixture
def floating(registry: Registry, docker: engine.Engine, image: Maker, row: Row) -> str:
    """The digest that the floating tags hold before a fault: an image that was published well."""
    pushed = publish.push(registry, docker, image(day=0, sizes=(small.MB,)).check(docker))
    publish.promote(registry, row.id, pushed.digest, default=True)
    assert registry.digest(row.id) == registry.digest("latest") == pushed.digest
    return pushed.digest
