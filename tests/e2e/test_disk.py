"""Making room: build cache goes, also where one record stands on another."""

from __future__ import annotations

import uuid
from pathlib import Path

from trainyard import bases
from trainyard.engine import BuildRequest, Engine


def test_a_chain_of_cached_steps_is_removed_as_a_whole(
    docker: Engine, base: bases.BaseImage, tmp_path: Path
) -> None:
    """The engine keeps a record as long as others build on it, and lists them in no order."""
    mark = uuid.uuid4().hex
    steps = "".join(f"RUN echo {mark} {number} > /file{number}\n" for number in range(6))
    (tmp_path / "Dockerfile").write_text(f"FROM {base.ref}\n{steps}")
    image = docker.build(
        BuildRequest(dockerfile=tmp_path / "Dockerfile", context=tmp_path, log=tmp_path / "build.log")
    )
    docker.discard(image)

    def records() -> int:
        return sum(mark in one["Description"] for one in docker.client.api.df()["BuildCache"])

    assert records() == 6
    docker._prune("regular", (mark,))
    assert records() == 0
