"""A build that went wrong must say so, name what is wrong, and leave the tag where it was.

Each test breaks one thing in a copy of a real Dockerfile and builds it for real.
"""

from __future__ import annotations

import re
import uuid
from pathlib import Path

import pytest

from trainyard import bases, gate, manifest
from trainyard.engine import BuildRequest, Engine
from trainyard.hostenv import find_ca, wheelhouse_dirs
from trainyard.model import Row, StepFailed

ROOT = Path(__file__).resolve().parents[2]


def request(text: str, tmp_path: Path, base: bases.BaseImage, target: str) -> BuildRequest:
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(text)
    ca = find_ca()
    wheels = wheelhouse_dirs()
    return BuildRequest(
        dockerfile=dockerfile,
        context=ROOT,
        log=tmp_path / "build.log",
        args={"BASE": base.ref} | ({"TORCH_INDEX": ""} if wheels else {}),
        secrets={"ca": ca} if ca else {},
        contexts={"wheelhouse": wheels[0]} if wheels else {},
        target=target,
    )


def shipped(row: Row) -> str:
    """The row's Dockerfile, with a key of its own so that no kept wheel hides the fault."""
    text = (ROOT / "images" / row.id / "Dockerfile").read_text()
    return re.sub(r"--key \w+", f"--key e2e-{uuid.uuid4().hex}", text)


def test_a_missing_libaio_fails_the_build_and_names_async_io(
    docker: Engine, cpu_row: Row, base: bases.BaseImage, tmp_path: Path
) -> None:
    text = shipped(cpu_row).replace("        libaio-dev \\\n", "")
    text = re.sub(r"--ops \S+", "--ops async_io", text)
    with pytest.raises(StepFailed, match="op async_io"):
        docker.build(request(text, tmp_path, base, "kernels"))


def test_an_op_that_cannot_compile_fails_the_build_and_is_named(
    docker: Engine, cpu_row: Row, base: bases.BaseImage, tmp_path: Path
) -> None:
    # It needs oneCCL's headers, which no Debian has: https://github.com/deepspeedai/DeepSpeed/issues/5553
    text = re.sub(r"--ops \S+", "--ops deepspeed_ccl_comm", shipped(cpu_row))
    with pytest.raises(StepFailed, match=r"op deepspeed_ccl_comm did not compile: .*ccl\.hpp"):
        docker.build(request(text, tmp_path, base, "kernels"))


def test_a_package_with_another_hash_is_not_installed(
    docker: Engine, cpu_row: Row, base: bases.BaseImage, tmp_path: Path
) -> None:
    lock = (ROOT / "images" / cpu_row.id / "requirements.lock").read_text()
    wrong = re.sub(
        r"(?<=\nidna==)(.*\n\s+--hash=sha256:)\w+(.*\n\s+--hash=sha256:)\w+",
        rf"\g<1>{'0' * 64}\g<2>{'1' * 64}",
        lock,
    )
    assert wrong != lock
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks/requirements.lock").write_text(wrong)
    text = shipped(cpu_row).replace(
        f"--mount=type=bind,source=images/{cpu_row.id}/requirements.lock,target=/tmp",
        "--mount=type=bind,from=locks,source=requirements.lock,target=/tmp",
    )
    broken = request(text, tmp_path, base, "python")
    with pytest.raises(StepFailed, match=r"(?i)hash"):
        docker.build(
            BuildRequest(**{**vars(broken), "contexts": {**broken.contexts, "locks": tmp_path / "locks"}})
        )


def test_the_gate_names_what_differs_from_the_row_in_a_real_image(
    docker: Engine, cpu_row: Row, tmp_path: Path
) -> None:
    """An op removed and another torch recorded: what a careless later layer does."""
    site = cpu_row.site_packages
    text = (
        f"FROM trainyard:{cpu_row.id}\n"
        f"RUN rm {site}/deepspeed/ops/adam/cpu_adam_op*.so"
        f" && sed -i 's/2.13.0/2.12.0/' {site}/torch/version.py\n"
    )
    (tmp_path / "Dockerfile").write_text(text)
    image = docker.build(
        BuildRequest(dockerfile=tmp_path / "Dockerfile", context=tmp_path, log=tmp_path / "log")
    )
    origin = manifest.Origin(cpu_row.id, "e2e", {}, {}, 0.0)
    found = gate.differences(cpu_row, manifest.measure(docker, image, origin))
    assert "torch: the row says 2.13.0, the image has 2.12.0" in found
    assert any(line.startswith("kernels: op cpu_adam does not load: ") for line in found)
