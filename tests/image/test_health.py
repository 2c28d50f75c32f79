"""``healthcheck``: what it sees, what it says, and the exit code that Docker acts on."""

from __future__ import annotations

import json
import time

import pytest
from containers import Image


def test_a_healthy_container_is_healthy(image: Image) -> None:
    found = json.loads(image.exec("healthcheck --json").ok())
    assert found["status"].startswith("healthy")
    assert found["facts"]["image"] == image.row.id
    assert found["facts"]["contents"] == image.env["TRAINYARD_CONTENTS"]
    assert not [f for f in found["findings"] if f["severity"] == "error"]


def test_deep_runs_a_collective(image: Image) -> None:
    ran = image.exec("healthcheck --deep", timeout=120)
    assert "all_reduce" in ran.ok()


def test_it_is_cheap(image: Image) -> None:
    """It runs every half minute on every node: it must not load torch."""
    probe = "import sys; sys.argv = ['healthcheck']\n" + (
        "import runpy\n"
        "try: runpy.run_path('/usr/local/bin/healthcheck', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    assert image.python(probe).ok().strip().splitlines()[-1] == "False"


def test_small_shared_memory_is_said_with_its_remedy(image: Image) -> None:
    ran = image.run_new(["healthcheck"], shm_size="16m")
    assert "/dev/shm" in ran.text
    assert "--shm-size" in ran.text
    assert image.run_new(["healthcheck", "--strict"], shm_size="16m").rc in (1, 3)


@pytest.mark.only("has_sshd")
def test_a_service_that_died_is_an_error(image: Image) -> None:
    with image.fresh() as container:
        container.exec("mkdir -p /run/trainyard && echo 22 > /run/trainyard/sshd.port").ok()
        ran = container.exec("healthcheck")
        assert ran.rc == 1
        assert "sshd" in ran.text
        assert "22" in ran.text


def test_docker_calls_it(image: Image) -> None:
    with image.fresh(healthcheck={"interval": 1_000_000_000}) as container:
        deadline = time.monotonic() + 30
        while True:
            container.raw.reload()
            status = container.raw.attrs["State"]["Health"]["Status"]
            if status != "starting":
                break
            assert time.monotonic() < deadline
            time.sleep(0.3)
        assert status == "healthy", container.raw.attrs["State"]["Health"]["Log"]
