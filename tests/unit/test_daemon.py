"""The private engine's judgement: whose process, mount and network something is; what apt plans."""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import APIError, ImageNotFound

from trainyard import bases, daemon, hostenv
from trainyard.model import Base, InputError, StepFailed

AT = daemon.Layout(Path("/nowhere/trainyard"))
OTHER = daemon.Layout(Path("/mnt/big/trainyard"))
CGROUP = f"0::/{AT.cgroup}/buildkit/abc\n"


# -- clients -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("github.com/docker/buildx 0.13.1+ds1 0.13.1+ds1-3", (0, 13, 1)),
        ("github.com/docker/buildx v0.24.0 d0e5e86", (0, 24, 0)),
        ("Docker version 26.1.5+dfsg1, build a72d7cd", (26, 1, 5)),
        ("Docker version 20.10.24+dfsg1, build 297e128", (20, 10, 24)),
        ("29.0.0-rc.1", (29, 0, 0)),
        ("docker: 'buildx' is not a docker command.", ()),
        ("", ()),
    ],
)
def test_versions_are_read_from_what_the_tools_print(text: str, version: tuple[int, ...]) -> None:
    assert daemon.parse_version(text) == version


def test_the_first_client_with_a_new_enough_buildx_is_chosen() -> None:
    versions = {Path("/a/docker"): (), Path("/b/docker"): (0, 12, 9), Path("/c/docker"): (0, 13)}
    versions[Path("/d/docker")] = (1, 0)
    assert daemon.choose_client(versions, versions.__getitem__) == Path("/c/docker")
    assert daemon.choose_client([Path("/a/docker")], versions.__getitem__) is None


def test_clients_are_looked_for_in_the_order_of_path_and_each_file_once(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
    for name in ("one", "two"):
        (tmp_path / name / "docker").write_text("#!/bin/sh\n")
    (tmp_path / "two/docker").chmod(0o755)  # the one in "one" is not executable
    (tmp_path / "three/docker").symlink_to(tmp_path / "two/docker")
    path = ":".join(str(tmp_path / name) for name in ("one", "three", "two"))
    found = daemon.client_candidates({"PATH": path})
    assert found[0] == tmp_path / "three/docker"
    assert tmp_path / "two/docker" not in found


def test_a_client_with_a_plugin_is_recognised_and_one_without_is_not(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_text("#!/bin/sh\necho 'github.com/docker/buildx v0.30.1 abc'\n")
    bad.write_text('#!/bin/sh\necho "unknown command 0.30.1" >&2; exit 1\n')
    for file in (good, bad):
        file.chmod(0o755)
    assert daemon.buildx_version(good) == (0, 30, 1)
    assert daemon.buildx_version(bad) == ()
    assert daemon.buildx_version(tmp_path / "missing") == ()


def test_the_private_engine_gets_nothing_of_the_users_docker_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("DOCKER_CONTEXT", "DOCKER_TLS_VERIFY", "BUILDX_BUILDER", "DOCKER_HOST"):
        monkeypatch.setenv(name, "users")
    env = daemon.EngineAddress("unix:///x", private=True, client=Path("docker")).environ()
    assert env["DOCKER_HOST"] == "unix:///x"
    assert env["BUILDX_BUILDER"] == "default"
    assert not {"DOCKER_CONTEXT", "DOCKER_TLS_VERIFY"} & set(env)
    env = daemon.EngineAddress("tcp://x", private=False, client=Path("docker")).environ()
    assert env["BUILDX_BUILDER"] == env["DOCKER_TLS_VERIFY"] == "users"


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
    assert daemon.classify(argv, "0::/user.slice\n", AT) == kind


def test_a_process_in_the_engines_cgroup_is_ours_whatever_it_runs() -> None:
    assert daemon.classify(["sleep", "9"], CGROUP, AT) == "container"
    assert daemon.classify(["sleep", "9"], CGROUP, OTHER) is None
    assert daemon.classify([], CGROUP, AT) is None, "a zombie"
    version1 = f"9:name=systemd:/{AT.cgroup}/f00\n8:pids:/{AT.cgroup}/f00\n"
    assert daemon.classify(["sleep", "9"], version1, AT) == "container"
    assert daemon.classify(["sleep", "9"], f"0::/x/{AT.cgroup}.service\n", AT) is None


def test_an_engine_inside_a_container_of_another_one_is_told_apart() -> None:
    outer = OTHER
    inner = daemon.Layout(AT.root, within=(outer.cgroup,))
    assert inner.tag != AT.tag
    nested = f"0::/{outer.cgroup}/c0/{inner.cgroup}/c1\n"
    assert daemon.classify(["sleep"], nested, outer) == "container"
    assert daemon.classify(["sleep"], nested, inner) == "container"
    assert daemon.classify(["sleep"], nested, AT) is None
    beside = f"0::/{outer.cgroup}/c0\n"
    assert daemon.classify(["sleep"], beside, inner) is None, "the shell that started the inner one"
    hidden = f"0::/{outer.cgroup}/c0/{AT.cgroup}/c1\n"  # the inner one could not see the outer
    assert daemon.classify(["sleep"], hidden, AT) is None


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
    found = {process.pid: process.kind for process in daemon.owned_processes(AT, tmp_path)}
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
    points = [mount.point for mount in daemon.parse_mountinfo(MOUNTINFO)]
    assert points[0] == Path("/")
    assert AT.run / "docker/netns/with space" in points


def test_our_mounts_come_deepest_first_and_the_users_disk_is_left_alone() -> None:
    ours = daemon.owned_mounts(AT, daemon.parse_mountinfo(MOUNTINFO))
    assert set(ours) == {
        AT.data / "overlay2/abc/merged",
        AT.run / "docker/netns/with space",
        AT.run / "docker",
    }
    assert ours[-1] == AT.run / "docker"


def test_a_mount_that_dockerd_made_of_its_own_data_folder_is_ours(tmp_path: Path) -> None:
    at = daemon.Layout(tmp_path)
    mounts = [daemon.Mount(at.data, "ext4")]
    assert daemon.owned_mounts(at, mounts) == []
    at.exec_root.mkdir(parents=True)
    (at.exec_root / "unmount-on-shutdown").touch()
    assert daemon.owned_mounts(at, mounts) == [at.data]


# -- network -------------------------------------------------------------------------------


def test_the_pool_avoids_routes_and_name_servers() -> None:
    routes = (
        "default via 192.0.2.1 dev eth0\n"
        "192.168.208.0/24 dev vpn proto kernel\n"
        "local 127.0.0.1 dev lo table local\n"
    )
    used = daemon.used_networks(routes, "search x\nnameserver 172.30.250.53\nnameserver ::1\n")
    assert ipaddress.IPv4Network("0.0.0.0/0") not in used
    assert daemon.pick_pool(used) == ipaddress.IPv4Network("10.213.192.0/20")


def test_the_pool_of_last_time_is_kept_while_it_is_free() -> None:
    last = ipaddress.IPv4Network("10.9.0.0/20")
    assert daemon.pick_pool([], last) == last
    assert daemon.pick_pool([last], last) != last


def test_no_free_pool_is_said() -> None:
    with pytest.raises(StepFailed, match="in use"):
        daemon.pick_pool([ipaddress.IPv4Network(pool) for pool in daemon.POOLS])


def test_only_bridges_of_dockers_own_making_inside_the_pool_are_ours() -> None:
    def link(name: str, address: str) -> dict[str, object]:
        return {"ifname": name, "addr_info": [{"local": address}]}

    text = json.dumps(
        [
            link("br-0123456789ab", "192.168.209.1"),
            link("br-ba9876543210", "172.18.0.1"),
            link("docker0", "192.168.210.1"),
            {"ifname": "br-000000000000"},
        ]
    )
    pool = ipaddress.IPv4Network("192.168.208.0/20")
    assert daemon.bridges_in(pool, text) == ["br-0123456789ab"]
    assert daemon.bridges_in(None, text) == []
    assert daemon.bridges_in(pool, "") == []


def test_names_fit_the_kernels_limits() -> None:
    assert len(AT.bridge) <= 15
    assert len(AT.chain) <= 28


@pytest.mark.parametrize("root", ["relative", "/", "/" + "x" * 61])
def test_an_impossible_state_folder_is_refused(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINYARD_ENGINE_ROOT", root)
    with pytest.raises(InputError, match="TRAINYARD_ENGINE_ROOT"):
        daemon.layout()


def test_an_unknown_choice_of_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINYARD_ENGINE", "podman")
    with pytest.raises(InputError, match="'podman'"):
        daemon.ensure()


def test_a_docker_host_that_does_not_answer_is_an_error_and_not_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client = tmp_path / "docker"
    client.write_text(
        '#!/bin/sh\n[ "$1" = buildx ] && { echo "buildx v0.30.0"; exit 0; }\n'
        "echo 'Cannot connect to the Docker daemon' >&2; exit 1\n"
    )
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    monkeypatch.delenv("TRAINYARD_ENGINE", raising=False)
    with pytest.raises(InputError, match=r"unix:///nowhere\.sock does not answer: Cannot connect"):
        daemon.ensure()
    found = daemon.status()
    assert found.address is None
    assert not found.startable


# -- apt -----------------------------------------------------------------------------------

SIMULATION = """\
NOTE: This is only a simulation!
Inst libc6 [2.36-9+deb12u10] (2.41-12 Debian:13.0/stable [amd64]) []
Inst docker.io (26.1.5+dfsg1-9+b3 Debian:13.0/stable [amd64])
Remv old-thing [1.0] []
Conf docker.io (26.1.5+dfsg1-9+b3 Debian:13.0/stable [amd64])
"""


def test_what_apt_would_change_is_read_from_its_simulation() -> None:
    plan = hostenv.parse_simulation(SIMULATION)
    assert plan == hostenv.AptPlan(("docker.io",), ("libc6",), ("old-thing",))
    message = hostenv.refusal(["docker.io"], plan)
    assert "libc6" in message
    assert "old-thing" in message


def test_borrowed_packages_are_pinned_and_all_others_of_that_suite_kept_away() -> None:
    pins = hostenv.BorrowedSuite("trixie", "http://mirror/debian", ("docker.io",)).preferences()
    assert "Package: *\nPin: release n=trixie\nPin-Priority: 50\n" in pins
    assert "Package: docker.io\nPin: release n=trixie\nPin-Priority: 990\n" in pins


DEB822 = """\
Types: deb
# a comment
URIs: http://mirror.example/debian/
Suites: bookworm
 bookworm-updates
Components: main

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security

Types: deb-src
URIs: http://sources.example/debian
Suites: bookworm

Enabled: no
Types: deb
URIs: http://off.example/debian
Suites: bookworm
"""


def test_both_formats_of_apt_sources_are_read() -> None:
    found = hostenv.parse_sources(DEB822)
    assert found == [
        hostenv.AptSource("http://mirror.example/debian", ("bookworm", "bookworm-updates")),
        hostenv.AptSource("http://mirror.example/debian-security", ("bookworm-security",)),
    ]
    line = "# deb http://no/debian x main\ndeb [arch=amd64 signed-by=/k] http://yes/debian trixie main"
    assert hostenv.parse_sources(line) == [hostenv.AptSource("http://yes/debian", ("trixie",))]


def test_the_hosts_mirror_is_used_but_never_one_with_a_password() -> None:
    found = hostenv.parse_sources(DEB822)
    assert hostenv.debian_mirrors(found) == (
        "http://mirror.example/debian",
        "http://mirror.example/debian-security",
    )
    secret = [hostenv.AptSource("https://me:pass@mirror.example/debian", ("trixie",))]
    assert hostenv.debian_mirrors(secret)[0] == hostenv.DEBIAN_MIRROR


# -- what the host offers ------------------------------------------------------------------


def test_the_first_existing_bundle_of_certificates_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.touch()
    monkeypatch.setenv("PIP_CERT", str(tmp_path / "missing.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
    assert hostenv.find_ca() == bundle.resolve()


def test_find_links_may_hold_folders_file_addresses_and_web_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = tmp_path / "one", tmp_path / "two 2"
    one.mkdir()
    two.mkdir()
    address = two.as_uri()
    monkeypatch.setenv("PIP_FIND_LINKS", f"{one} {address} https://x.example/ {one} /nowhere")
    assert hostenv.wheelhouse_dirs() == (one.resolve(), two.resolve())


def test_passwords_of_proxies_are_not_shown() -> None:
    env = {"HTTPS_PROXY": "http://me:secret@proxy:3128", "no_proxy": "localhost"}
    assert hostenv.proxies(env) == {"https_proxy": "http://proxy:3128", "no_proxy": "localhost"}


# -- the base's registry -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("toomanyrequests: You have reached your pull rate limit", "busy"),
        ("received unexpected HTTP status: 429 Too Many Requests", "busy"),
        ("manifest unknown: manifest unknown", "missing"),
        ("dial tcp: lookup registry-1.docker.io: no such host", "unreachable"),
        ("unauthorized: authentication required", "unreachable"),
        ("net/http: request canceled while waiting for connection", "unreachable"),
    ],
)
def test_a_registrys_refusal_is_understood(reason: str, kind: str) -> None:
    assert bases.classify_refusal(reason) == kind


def test_the_bootstrap_keeps_nothing_of_the_host() -> None:
    command = bases.bootstrap_command("trixie", ("http://m/debian", "http://m/debian-security"), Path("t"))
    hooks = " ".join(word for word in command if word.startswith("--customize-hook"))
    for file in ("etc/hostname", "etc/resolv.conf", "var/lib/apt/lists", "var/log"):
        assert file in hooks
    assert "--dpkgopt=path-include=/usr/share/doc/*/copyright" in command


TRIXIE = Base("debian-13", "trixie", "debian:trixie-slim", "3.13", 14, "2.41", "libaio1t64")
DIGEST = "sha256:" + "d" * 64


class FakeEngine:
    """An engine whose registry gives the listed answers, one for each question."""

    def __init__(self, *answers: str | Exception, pulled: list[str] | None = None) -> None:
        self.answers = list(answers)
        self.asked = 0
        self.pulled = pulled
        images = SimpleNamespace(get_registry_data=self._registry, get=self._get, list=self._list)
        self.client: Any = SimpleNamespace(images=images, api=SimpleNamespace(base_url="http+docker://x"))

    def cli(self, *args: str) -> subprocess.CompletedProcess[str]:
        raise AssertionError(args)

    def _registry(self, _image: str) -> Any:
        self.asked += 1
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(id=answer)

    def _get(self, image: str) -> Any:
        if self.pulled is None:
            raise ImageNotFound(f"no {image}")
        return SimpleNamespace(attrs={"RepoDigests": self.pulled})

    def _list(self, _name: str, filters: dict[str, list[str]]) -> list[Any]:
        labels = dict(label.split("=") for label in filters["label"])
        assert labels["dev.trainyard.base.suite"] == "trixie"
        made = {"dev.trainyard.base.created": str(time.time() - 86400)}
        attrs = {"RootFS": {"Layers": ["sha256:layer"]}}
        return [SimpleNamespace(labels=made, tags=["trainyard-base:trixie-1234"], attrs=attrs)]


def refused(reason: str) -> APIError:
    return APIError("500 Server Error", explanation=reason)


def test_the_registrys_digest_is_what_from_gets(tmp_path: Path) -> None:
    found = bases.resolve_base(TRIXIE, "auto", FakeEngine(DIGEST), cache=tmp_path)
    assert found.ref == f"debian:trixie-slim@{DIGEST}"
    assert (found.origin, found.digest) == ("registry", DIGEST)


def test_a_registry_that_does_not_answer_is_asked_once_and_an_earlier_bootstrap_used(tmp_path: Path) -> None:
    engine = FakeEngine(refused("dial tcp: no such host"))
    said: list[str] = []
    for _ in range(3):
        found = bases.resolve_base(TRIXIE, "auto", engine, said.append, cache=tmp_path)
        assert (found.ref, found.origin) == ("trainyard-base:trixie-1234", "bootstrap")
    assert engine.asked == 1
    assert all("NOT the official debian:trixie-slim" in line and "no such host" in line for line in said)


def test_registry_mode_asks_again_and_fails_rather_than_bootstraps(tmp_path: Path) -> None:
    bases.resolve_base(TRIXIE, "auto", FakeEngine(refused("i/o timeout")), cache=tmp_path)
    again = FakeEngine(refused("i/o timeout"))
    with pytest.raises(StepFailed, match="i/o timeout"):
        bases.resolve_base(TRIXIE, "registry", again, cache=tmp_path)
    assert bases.resolve_base(TRIXIE, "registry", FakeEngine(DIGEST), cache=tmp_path).digest == DIGEST
    assert bases.resolve_base(TRIXIE, "auto", FakeEngine(DIGEST), cache=tmp_path).digest == DIGEST


def test_an_official_image_pulled_earlier_beats_a_bootstrap(tmp_path: Path) -> None:
    engine = FakeEngine(refused("no such host"), pulled=[f"debian@{DIGEST}"])
    found = bases.resolve_base(TRIXIE, "auto", engine, cache=tmp_path)
    assert (found.origin, found.ref) == ("registry", f"debian:trixie-slim@{DIGEST}")


def test_too_many_requests_is_tried_again() -> None:
    busy = refused("toomanyrequests: slow down")
    waits: list[float] = []
    assert bases.registry_digest("x", FakeEngine(busy, busy, DIGEST), sleep=waits.append) == DIGEST
    assert waits == [2.0, 5.0]
    with pytest.raises(bases.NoAnswer, match="toomanyrequests"):
        bases.registry_digest("x", FakeEngine(busy, busy, busy, busy), sleep=waits.append)


def test_an_image_that_the_registry_does_not_have_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StepFailed, match="has no image debian:trixie-slim"):
        bases.resolve_base(TRIXIE, "auto", FakeEngine(refused("manifest unknown")), cache=tmp_path)
