"""Whose process and whose mount something is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainyard import owned
from trainyard.layout import Layout

AT = Layout(Path("/nowhere/trainyard"))
OTHER = Layout(Path("/mnt/big/trainyard"))
CGROUP = f"0::/{AT.cgroup}/buildkit/abc\n"


# -- whose process -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "kind"),
    [
        (["/usr/sbin/dockerd", f"--data-root={AT.data}"], "dockerd"),
        (["dockerd", "--data-root", str(AT.data)], "dockerd"),
        (["dockerd", "--data-root", str(OTHER.data)], None),
        (["dockerd", "-H", "fd://"], None),
        (["vim", f"--data-root={AT.data}"], None),
        (["tail", "-f", str(AT.log)], None),
        (["containerd", "--config", str(AT.containerd_config)], "containerd"),
        (["containerd"], None),
        (["containerd-shim-runc-v2", "-id", "1", "-address", str(AT.containerd_socket)], "shim"),
        (["containerd-shim-runc-v2", "-address", "/run/containerd/containerd.sock"], None),
        (["runc", "--log", f"{AT.data}/buildkit/executor/log.json", "run"], "runc"),
        (["runc", "--log", f"{AT.data}-of-another/log.json", "run"], None),
        ([], None),
    ],
)
def test_a_process_is_ours_only_by_its_own_command_line(argv: list[str], kind: str | None) -> None:
    assert owned.classify(argv, "0::/user.slice\n", AT) == kind


def test_a_process_in_the_engines_cgroup_is_ours_whatever_it_runs() -> None:
    assert owned.classify(["sleep", "9"], CGROUP, AT) == "container"
    assert owned.classify(["sleep", "9"], CGROUP, OTHER) is None
    assert owned.classify([], CGROUP, AT) is None, "a zombie"
    version1 = f"9:name=systemd:/{AT.cgroup}/f00\n8:pids:/{AT.cgroup}/f00\n"
    assert owned.classify(["sleep", "9"], version1, AT) == "container"
    assert owned.classify(["sleep", "9"], f"0::/x/{AT.cgroup}.service\n", AT) is None


def test_an_engine_inside_a_container_of_another_one_is_told_apart() -> None:
    outer = OTHER
    inner = Layout(AT.root, within=(outer.cgroup,))
    assert inner.tag != AT.tag
    nested = f"0::/{outer.cgroup}/c0/{inner.cgroup}/c1\n"
    assert owned.classify(["sleep"], nested, outer) == "container"
    assert owned.classify(["sleep"], nested, inner) == "container"
    assert owned.classify(["sleep"], nested, AT) is None
    beside = f"0::/{outer.cgroup}/c0\n"
    assert owned.classify(["sleep"], beside, inner) is None, "the shell that started the inner one"
    hidden = f"0::/{outer.cgroup}/c0/{AT.cgroup}/c1\n"  # the inner one could not see the outer
    assert owned.classify(["sleep"], hidden, AT) is None


def test_processes_are_read_from_proc(tmp_path: Path) -> None:
    def process(pid: int, argv: list[str], cgroup: str = "0::/\n") -> None:
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "cmdline").write_bytes(b"".join(os.fsencode(word) + b"\0" for word in argv))
        (folder / "cgroup").write_text(cgroup)

    process(7000001, ["dockerd", f"--data-root={AT.data}"])
    process(7000002, ["dockerd", "-H", "fd://"])
    process(7000003, ["sleep", "1"], CGROUP)
    process(os.getpid(), ["python"], CGROUP)
    (tmp_path / "7000004").mkdir()  # ended while we looked
    (tmp_path / "self").mkdir()
    found = {process.pid: process.kind for process in owned.owned_processes(AT, tmp_path)}
    assert found == {7000001: "dockerd", 7000003: "container"}


# -- whose mount ---------------------------------------------------------------------------


MOUNTINFO = f"""\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:40 / {AT.data}/overlay2/abc/merged rw - overlay overlay rw,lowerdir=x
31 22 0:41 / {AT.run}/docker/netns/with\\040space rw - nsfs nsfs rw
32 22 254:1 / {AT.data} rw - ext4 /dev/vdb rw
33 22 0:42 / {AT.root}-of-another rw - tmpfs tmpfs rw
34 22 0:43 / {AT.root} rw - ext4 /dev/vdc rw
35 22 0:44 / {AT.run}/docker rw master:2 - tmpfs tmpfs rw
"""


def test_mountinfo_is_read_with_its_escapes() -> None:
    points = [mount.point for mount in owned.parse_mountinfo(MOUNTINFO)]
    assert points[0] == Path("/")
    assert AT.run / "docker/netns/with space" in points


def test_our_mounts_come_deepest_first_and_the_users_disk_is_left_alone() -> None:
    ours = owned.owned_mounts(AT, owned.parse_mountinfo(MOUNTINFO))
    assert set(ours) == {
        AT.data / "overlay2/abc/merged",
        AT.run / "docker/netns/with space",
        AT.run / "docker",
    }
    assert ours[-1] == AT.run / "docker"


def test_a_mount_that_dockerd_made_of_its_own_data_folder_is_ours(tmp_path: Path) -> None:
    at = Layout(tmp_path)
    mounts = [owned.Mount(at.data, "ext4")]
    assert owned.owned_mounts(at, mounts) == []
    at.exec_root.mkdir(parents=True)
    (at.exec_root / "unmount-on-shutdown").touch()
    assert owned.owned_mounts(at, mounts) == [at.data]
