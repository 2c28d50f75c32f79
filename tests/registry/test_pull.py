"""What a node gets: a published image, pulled by an engine that has nothing, trains.

Only with ``--publish ID``, for images that ``make test`` has tested.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import LOGIN, Opener, Server

from trainyard import daemon, engine

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def empty_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[engine.Engine]:
    """A second private engine, with a data root of its own."""
    root = Path(f"/var/lib/trainyard-pull-{uuid.uuid4().hex[:8]}")
    with monkeypatch.context() as patch:
        patch.delenv("DOCKER_HOST", raising=False)
        patch.setenv("TRAINYARD_ENGINE", "private")
        patch.setenv("TRAINYARD_ENGINE_ROOT", str(root))
        try:
            found = engine.connect()
            assert found.client.images.list() == []
            yield found
        finally:
            daemon.purge()
            shutil.rmtree(root, ignore_errors=True)


def build_py(server: Server, *words: str) -> None:
    env = os.environ | {
        "REGISTRY": f"{server.host}/acme/trainyard",
        "REGISTRY_CA": str(server.tls.ca),
        "TRAINYARD_REGISTRY_USER": LOGIN.user,
        "TRAINYARD_REGISTRY_PASSWORD": LOGIN.password,
    }
    done = subprocess.run(
        [sys.executable, "build.py", *words], cwd=ROOT, env=env, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_published_image_is_pulled_by_tag_and_digest_and_trains(
    published_id: str, server: Server, opened: Opener, request: pytest.FixtureRequest
) -> None:
    build_py(server, "push", published_id, "--promote")
    tested = json.loads((ROOT / "out" / published_id / "tested.json").read_text())
    empty: engine.Engine = request.getfixturevalue("empty_engine")  # only now: pushing needs the full one
    login = {"username": LOGIN.user, "password": LOGIN.password}
    repository = f"{server.host}/acme/trainyard"
    digest = opened().digest(published_id)
    assert digest

    by_tag = empty.client.images.pull(repository, published_id, auth_config=login)
    assert by_tag.id == tested["image_id"]
    assert f"{repository}@{digest}" in by_tag.attrs["RepoDigests"]
    empty.client.images.remove(f"{repository}:{published_id}", force=True)
    assert empty.client.images.list() == []
    by_digest = empty.client.images.pull(f"{repository}@{digest}", auth_config=login)
    assert by_digest.id == tested["image_id"]

    command = [sys.executable, "-m", "pytest", "tests/image/test_training.py", "-p", "no:cacheprovider"]
    command += ["--images", published_id, "--image-ref", f"{repository}@{digest}"]
    done = subprocess.run(command, cwd=ROOT, env=empty.environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    sys.stderr.write(f"\n{published_id} pulled as {digest}:\n{done.stdout[-1500:]}\n")
