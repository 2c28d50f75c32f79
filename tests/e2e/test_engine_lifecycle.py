"""The private engine for real: start, build, be killed, recover, stop, leave nothing behind.

Needs root and the rights to mount; runs beside any other engine without touching it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from trainyard import bases, daemon, network, owned
from trainyard.engine import Engine
from trainyard.layout import Layout, layout
from trainyard.model import Base, StepFailed

ROOT = Path(__file__).resolve().parents[2]
TRIXIE = Base("debian-13", "trixie", "debian:trixie-slim", "3.13", 14, "2.41", "libaio1t64")
NAP = "86399"  # seconds; a `sleep` of this length is one of ours


@dataclass
class Yard:
    """A private engine in a state folder of its own."""

    at: Layout
    said: list[str]

    def ensure(self) -> Engine:
        return Engine(daemon.ensure(self.said.append))

    def kinds(self) -> list[str]:
        return sorted(process.kind for process in owned.owned_processes(self.at))

    def pid(self, kind: str) -> int:
        return next(process.pid for process in owned.owned_processes(self.at) if process.kind == kind)

    def mounts(self) -> list[Path]:
        text = Path("/proc/self/mountinfo").read_text()
        points = [mount.point for mount in owned.parse_mountinfo(text)]
        return [point for point in points if self.at.root in (point, *point.parents)]

    def traces(self) -> dict[str, object]:
        """Whatever is left of the engine on this host, apart from its files; empty if nothing."""
        found: dict[str, object] = {
            "processes": self.kinds(),
            "mounts": self.mounts(),
            "bridge": [name for name in os.listdir("/sys/class/net") if name == self.at.bridge],
            "firewall": [line for line in firewall() if self.at.chain in line],
            "cgroups": list(Path("/sys/fs/cgroup").glob(f"**/{self.at.cgroup}")),
            "sleepers": sleepers(),
        }
        return {name: value for name, value in found.items() if value}


def firewall() -> list[str]:
    """The rules of this host, without counters and comments."""
    output = subprocess.run(["iptables-save"], capture_output=True, text=True, check=True).stdout
    lines = [re.sub(r" \[\d+:\d+\]$", "", line) for line in output.splitlines()]
    return [line for line in lines if not line.startswith("#")]


def others_firewall() -> list[str]:
    """The rules that no private engine made."""
    return [line for line in firewall() if "TRAINYARD-" not in line]


def sleepers() -> list[int]:
    done = subprocess.run(["pgrep", "-x", "-f", f"sleep {NAP}"], capture_output=True, text=True, check=False)
    return [int(word) for word in done.stdout.split()]


def until(true: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        time.sleep(0.1)


def build(engine: Engine, context: Path, dockerfile: str, tag: str) -> str:
    """Build with plain output; the output comes back."""
    (context / "Dockerfile").write_text(dockerfile)
    done = engine.cli("buildx", "build", "--progress=plain", "--tag", tag, str(context))
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def yard() -> Iterator[Yard]:
    assert os.geteuid() == 0, "the private engine needs root"
    root = tempfile.mkdtemp(prefix="yard-", dir="/var/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINYARD_ENGINE_ROOT", root)
        patch.setenv("TRAINYARD_ENGINE", "private")
        try:
            yield Yard(layout(), [])
        finally:
            daemon.purge()
            shutil.rmtree(root)


@pytest.fixture(scope="module")
def base(yard: Yard) -> str:
    """The base of all builds here, made by the fallback."""
    return bases.resolve_base(TRIXIE, "bootstrap", yard.ensure(), yard.said.append).ref


def test_status_starts_nothing(yard: Yard) -> None:
    found = daemon.status()
    assert found.address is None
    assert found.startable
    assert not yard.traces()


def test_two_at_once_start_one_engine_and_no_other_ones_firewall_changes(yard: Yard) -> None:
    before = others_firewall()
    code = "from trainyard import daemon; print(daemon.ensure(lambda line: None).host)"
    starting = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    hosts = {process.communicate(timeout=120)[0].strip() for process in starting}
    assert hosts == {yard.at.host}
    assert yard.kinds() == ["containerd", "dockerd"]
    assert others_firewall() == before


def test_a_running_engine_is_used_again(yard: Yard) -> None:
    before = yard.pid("dockerd")
    engine = yard.ensure()
    assert engine.address.private
    assert yard.pid("dockerd") == before
    found = daemon.status()
    assert found.driver == "overlay2"
    assert not found.containerd_store
    assert found.data_root == str(yard.at.data)


def test_the_bootstrapped_base_is_slim_says_what_it_is_and_is_made_once(
    yard: Yard, base: str, tmp_path: Path
) -> None:
    engine = yard.ensure()
    image = bases.resolve_base(TRIXIE, "bootstrap", engine, yard.said.append)
    assert image.ref == base
    assert image.origin == "bootstrap"
    assert base.startswith("trainyard-base:trixie-")
    assert any("NOT the official debian:trixie-slim" in line for line in yard.said)
    container = engine.client.containers.create(base)
    exported = tmp_path / "base.tar"
    assert engine.cli("export", "--output", str(exported), str(container.id)).returncode == 0
    container.remove()
    with tarfile.open(exported) as tar:
        files = {member.name: member.size for member in tar if member.isfile()}
    assert "usr/share/doc/dpkg/copyright" in files
    assert not files["etc/resolv.conf"], "the host's"
    unwanted = ("usr/share/man/", "var/lib/apt/lists/", "var/log/apt/")
    left = [name for name, size in files.items() if size and name.startswith(unwanted)]
    assert not left


def test_builds_and_containers_have_a_network_and_names(yard: Yard, base: str, tmp_path: Path) -> None:
    engine = yard.ensure()
    build(engine, tmp_path, f"FROM {base}\nRUN apt-get -q update -o APT::Update::Error-Mode=any\n", "net")
    engine.cli("network", "create", "pair")
    serve = (
        "use IO::Socket; $s = IO::Socket::INET->new(LocalPort => 99, Listen => 1);"
        "while ($c = $s->accept) { print $c qq(hello\\n); close $c }"
    )
    engine.cli("run", "--detach", "--name", "server", "--network", "pair", base, "perl", "-e", serve)
    ask = "use IO::Socket; $s = IO::Socket::INET->new(q(server:99)) or die $!; print <$s>"
    answers: list[str] = []

    def answered() -> bool:
        done = engine.cli("run", "--rm", "--network", "pair", base, "perl", "-e", ask)
        answers.append(done.stdout + done.stderr)
        return done.stdout == "hello\n"

    until(answered, 30)
    outside = engine.cli("run", "--rm", "--network", "pair", base, "apt-get", "-q", "update")
    assert "Failed" not in outside.stdout + outside.stderr
    engine.cli("rm", "--force", "server")


def test_no_container_sends_larger_packets_than_the_uplink_carries(
    yard: Yard, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "uplink_mtu", lambda: 1380)  # as behind a VPN; no default of Docker's
    daemon.stop()
    engine = yard.ensure()
    engine.cli("network", "create", "narrow")
    for name in ("bridge", "narrow"):
        done = engine.cli("run", "--rm", "--network", name, base, "cat", "/sys/class/net/eth0/mtu")
        assert done.stdout == "1380\n", (name, done.stderr)
    engine.cli("network", "rm", "narrow")


def start_long_build(engine: Engine, base: str, folder: Path) -> subprocess.Popen[str]:
    (folder / "Dockerfile").write_text(f"FROM {base}\nRUN echo {time.time()}; sleep {NAP}\n")
    before = len(sleepers())
    command = [engine.docker, "buildx", "build", "--progress=plain", str(folder)]
    running = subprocess.Popen(
        command, env=engine.environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    until(lambda: len(sleepers()) > before)
    return running


@pytest.mark.parametrize("killed", [["dockerd"], ["containerd"], ["dockerd", "containerd"]])
def test_killed_during_a_build_it_recovers_and_the_build_ends(
    yard: Yard, base: str, tmp_path: Path, killed: list[str]
) -> None:
    engine = yard.ensure()
    engine.cli("run", "--detach", "--restart", "no", "--publish", "18099:99", base, "sleep", NAP)
    building = start_long_build(engine, base, tmp_path)
    assert len(sleepers()) == 2
    for kind in killed:
        os.kill(yard.pid(kind), signal.SIGKILL)

    until(lambda: not set(killed) & set(yard.kinds()))
    yard.said.clear()
    engine = yard.ensure()

    assert any("cleaned up" in line for line in yard.said), yard.said
    assert building.wait(timeout=30) != 0
    assert not sleepers()
    assert yard.kinds() == ["containerd", "dockerd"]
    mark = f"built {time.time()}"
    assert mark in build(engine, tmp_path, f"FROM {base}\nRUN echo {mark}\n", "again")
    engine.cli("container", "prune", "--force")


def test_a_reused_pid_in_a_stale_pid_file_is_left_alone(yard: Yard) -> None:
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        for kind in ("dockerd", "containerd"):
            os.kill(yard.pid(kind), signal.SIGKILL)
        until(lambda: not yard.kinds())
        yard.at.pidfile.write_text(str(bystander.pid))
        yard.ensure()
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_an_engine_that_cannot_start_shows_the_end_of_its_log(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.stop()
    broken = daemon.dockerd_flags
    monkeypatch.setattr(daemon, "dockerd_flags", lambda at: [*broken(at), "--storage-driver=nonsense"])
    with pytest.raises(StepFailed, match="nonsense"):
        yard.ensure()
    assert not yard.traces()


def test_stop_in_the_midst_of_work_leaves_nothing_but_the_images(
    yard: Yard, base: str, tmp_path: Path
) -> None:
    before = others_firewall()
    engine = yard.ensure()
    engine.cli("run", "--detach", base, "sleep", NAP)
    building = start_long_build(engine, base, tmp_path)

    done = daemon.stop(yard.said.append)

    assert any("stopped dockerd" in line for line in done), done
    building.wait(timeout=30)
    assert not yard.traces()
    assert others_firewall() == before
    assert daemon.stop() == []
    assert base in yard.ensure().client.images.get(base).tags


def test_purge_empties_the_state_folder(yard: Yard, base: str) -> None:
    yard.ensure()
    daemon.purge(yard.said.append)
    assert not yard.traces()
    left = [path for path in yard.at.root.rglob("*") if path.is_file() and path != yard.at.lock]
    assert not left
