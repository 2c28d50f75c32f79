"""Every check of a node says what is wrong and what to do, from facts alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

_ROOTFS = Path(__file__).resolve().parents[2] / "rootfs"
sys.path.insert(0, str(_ROOTFS / "common/opt/trainyard/lib"))

from trainyard_node import checks, facts  # noqa: E402

MIB = 2**20

HEALTHY = facts.Facts(
    hostname="node1",
    image="cu121-pt29",
    contents="0123456789abcdef",
    uid=1000,
    gpus=8,
    gpus_why="8 device files /dev/nvidia<n>",
    host_gpus=8,
    no_gpus_wanted=False,
    driver="550.54.15",
    require_cuda="cuda>=12.1 driver>=525.60.13",
    shm_size=1024 * MIB,
    shm_free=1024 * MIB,
    memlock=facts.UNLIMITED,
    nofile=65536,
    memory=64 * 1024 * MIB,
    cores=16,
    rdma=False,
    caches=(facts.Folder("TRITON_CACHE_DIR", "/var/cache/trainyard/triton", ""),),
    home=facts.Folder("HOME", "/home/trainyard", ""),
    interfaces=(("lo", "127.0.0.1"), ("eth0", "10.0.0.2")),
)


def test_a_healthy_node_has_nothing_to_say() -> None:
    findings = checks.check(HEALTHY, ranks=8)
    assert [finding.line() for finding in findings if finding.severity != "ok"] == []
    assert checks.worst(findings) == "ok"


@pytest.mark.parametrize(
    ("shm", "gpus", "ranks", "severity"),
    [
        (16, 0, 2, "error"),
        (63, 0, 2, "error"),
        (64, 0, 2, "warning"),  # Docker's default
        (131, 0, 2, "warning"),
        (132, 0, 2, "ok"),
        (16, 0, 1, "ok"),
        (64, 0, 4, "error"),
        (132, 2, 2, "warning"),
        (512, 2, 2, "ok"),
        (16, 0, None, "warning"),
        (64, 0, None, "ok"),
        (64, 2, None, "warning"),
    ],
)
def test_shm_by_size_and_ranks(shm: int, gpus: int, ranks: int | None, severity: str) -> None:
    found = checks.shm(HEALTHY._replace(shm_size=shm * MIB, gpus=gpus), ranks)
    assert found.severity == severity
    if severity != "ok":
        assert f"{shm} MB" in found.text
        assert "--shm-size=1g" in found.remedy


@pytest.mark.parametrize(
    ("limit", "rdma", "gpus", "severity"),
    [
        (64 * 1024, True, 0, "warning"),
        (8 * MIB, False, 8, "warning"),
        (64 * 1024, False, 0, "ok"),
        (facts.UNLIMITED, True, 8, "ok"),
    ],
)
def test_memlock_matters_only_with_rdma_or_gpus(limit: int, rdma: bool, gpus: int, severity: str) -> None:
    found = checks.memlock(HEALTHY._replace(memlock=limit, rdma=rdma, gpus=gpus))
    assert found.severity == severity
    assert (found.remedy == "docker run --ulimit memlock=-1") == (severity == "warning")


def test_few_open_files_are_a_warning() -> None:
    assert checks.nofile(HEALTHY._replace(nofile=256)).severity == "warning"
    assert checks.nofile(HEALTHY._replace(nofile=facts.UNLIMITED)).severity == "ok"


@pytest.mark.parametrize(
    ("driver", "severity"),
    [("525.60.13", "ok"), ("525.60.9", "error"), ("470.223.02", "error"), ("580.95.05", "ok"), ("", "ok")],
)
def test_an_old_driver_is_named_with_floor_and_level(driver: str, severity: str) -> None:
    found = checks.driver(HEALTHY._replace(driver=driver))
    assert found.severity == severity
    if severity == "error":
        for part in (driver, "525.60.13", "12.1"):
            assert part in found.text


def test_the_driver_of_a_node_without_gpus_plays_no_part() -> None:
    assert checks.driver(HEALTHY._replace(driver="470.1", gpus=0)).severity == "ok"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cuda>=12.1 driver>=525.60.13", ("12.1", "525.60.13")),
        ("cuda>=12.1", ("12.1", "")),
        ("cuda>=13.0 brand=tesla,driver>=580", ("13.0", "580")),
        ("", ("", "")),
        ("nonsense>= =>", ("", "")),
    ],
)
def test_requirements_are_read(text: str, expected: tuple[str, str]) -> None:
    assert checks.requirement(text) == expected


def test_gpus_that_nobody_passed_in_are_a_warning_unless_nobody_wants_them() -> None:
    hidden = HEALTHY._replace(gpus=0)
    found = checks.hidden_gpus(hidden)
    assert found.severity == "warning"
    assert "--gpus all" in found.remedy
    assert checks.hidden_gpus(hidden._replace(no_gpus_wanted=True)).severity == "ok"
    assert checks.hidden_gpus(hidden._replace(host_gpus=0)).severity == "ok"
    assert checks.hidden_gpus(hidden._replace(require_cuda="")).severity == "ok"  # a CPU image


@pytest.mark.parametrize(("gpus", "ranks", "severity"), [(2, 2, "ok"), (2, 3, "error"), (8, 1, "ok")])
def test_every_rank_needs_a_gpu_where_there_are_gpus(gpus: int, ranks: int, severity: str) -> None:
    found = checks.enough_gpus(HEALTHY._replace(gpus=gpus), ranks)
    assert found.severity == severity
    if severity == "error":
        assert f"{ranks} ranks but {gpus} GPUs" in found.text


def test_ranks_run_on_the_cpu_where_the_image_is_for_it_or_somebody_chose_it() -> None:
    bare = HEALTHY._replace(gpus=0)
    assert checks.enough_gpus(bare._replace(require_cuda=""), 3).severity == "ok"
    assert checks.enough_gpus(bare._replace(no_gpus_wanted=True), 3).severity == "ok"
    assert "--gpus all" in checks.enough_gpus(bare, 3).remedy


def test_tasks_that_see_one_gpu_each_are_told_about_slurms_binding() -> None:
    found = checks.enough_gpus(HEALTHY._replace(gpus=1), 4, bound=True)
    assert "--gpu-bind=none" in found.remedy


def test_an_unwritable_cache_is_an_error_with_variable_and_folder() -> None:
    bad = facts.Folder("TRITON_CACHE_DIR", "/var/cache/x", "is not writable for uid 7")
    (found,) = checks.caches(HEALTHY._replace(caches=(bad,)))
    assert found.severity == "error"
    assert "TRITON_CACHE_DIR=/var/cache/x is not writable" in found.text


def test_the_same_problem_of_several_caches_is_one_finding() -> None:
    folders = tuple(facts.Folder(name, f"/c/{name}", "is not a folder") for name in ("A", "B"))
    (found,) = checks.caches(HEALTHY._replace(caches=folders))
    assert found.text == "A=/c/A, B=/c/B is not a folder"


def test_a_read_only_root_is_meant_and_only_warned_of() -> None:
    bad = facts.Folder("TRITON_CACHE_DIR", "/var/cache/x", facts.READ_ONLY)
    (found,) = checks.caches(HEALTHY._replace(caches=(bad,)))
    assert found.severity == "warning"
    assert "TRITON_CACHE_DIR=/var/cache/x is on a read-only filesystem" in found.text


@pytest.mark.parametrize(
    ("path", "problem", "severity", "text"),
    [
        ("/", "is not writable for uid 1000", "warning", "HOME=/ is not writable"),
        ("", "is not set", "warning", "HOME is not set"),
        ("/home/trainyard", "", "ok", "HOME=/home/trainyard"),
    ],
)
def test_home(path: str, problem: str, severity: str, text: str) -> None:
    found = checks.home(HEALTHY._replace(home=facts.Folder("HOME", path, problem)))
    assert found.severity == severity
    assert text in found.text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (-1, "unlimited"),
        (64 * 1024, "64 KB"),
        (1000, "1000 bytes"),
        (16 * MIB, "16 MB"),
        (1536 * MIB, "1.5 GB"),
    ],
)
def test_sizes_for_people(number: int, text: str) -> None:
    assert checks.size(number) == text


# -- facts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "devices", "gpus"),
    [
        ({}, 8, 8),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 8, 2),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 2, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 8, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 8, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, 8, 1),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 8, 0),
        ({"CUDA_VISIBLE_DEVICES": "GPU-aa,GPU-bb"}, 8, 2),
        ({"CUDA_VISIBLE_DEVICES": "MIG-aa,MIG-bb"}, 1, 2),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, 4, 4),
        ({"NVIDIA_VISIBLE_DEVICES": "MIG-aa,MIG-bb,MIG-cc"}, 1, 3),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, 0, 0),
        ({"DS_ACCELERATOR": "cpu"}, 8, 0),
    ],
)
def test_visible_gpus(env: dict[str, str], devices: int, gpus: int) -> None:
    assert facts.visible_gpus(env, devices)[0] == gpus


def test_facts_are_looked_up_in_the_files_of_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    for name in ("0000:17:00.0", "0000:31:00.0", "0000:65:00.0"):
        (tmp_path / "proc/driver/nvidia/gpus" / name).mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC version: 12\n"
    )
    (tmp_path / "proc/meminfo").write_text("MemTotal:        4096 kB\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("1048576\n")
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("100000 100000\n")
    found = facts.collect({"TRAINYARD_IMAGE": "cu121-pt29"}, root=str(tmp_path))
    assert (found.gpus, found.host_gpus, found.driver) == (2, 3, "570.86.15")
    assert (found.memory, found.cores, found.rdma) == (2**20, 1, True)
    assert found.image == "cu121-pt29"


def test_facts_survive_the_wire() -> None:
    assert facts.from_json(json.loads(json.dumps(HEALTHY._asdict()))) == HEALTHY


def test_folders(tmp_path: Path) -> None:
    assert facts.folder("X", str(tmp_path)).problem == ""
    assert facts.folder("X", str(tmp_path / "new/one")).problem == ""
    (tmp_path / "file").touch()
    assert facts.folder("X", str(tmp_path / "file")).problem == "is not a folder"
    assert facts.folder("X", "").problem == "is not set"


def test_a_folder_that_nobody_can_write_to() -> None:
    assert facts.folder("X", "/proc/sys/none").problem == "does not exist and cannot be made"


def test_the_loopback_interface_is_found() -> None:
    assert "127.0.0.1" in dict((address, name) for name, address in facts.interfaces())
