"""Whatever fails, and wherever: floating tags stay, and the next run goes on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import servers
import small
from servers import HASTY, LOGIN, QUICK, Fault, Opener, Proxy, Server, Tls
from small import Maker

from trainyard import archive, publish
from trainyard.engine import Engine
from trainyard.model import Row, StepFailed
from trainyard.registry import Credentials, Denied, Policy, Registry, RegistryError, parse

ROOT = Path(__file__).resolve().parents[2]
BIG = (8 * small.MB, 2 * small.MB)


def publish_all(registry: Registry, docker: Engine, one: small.Small) -> publish.Pushed:
    pushed = publish.push(registry, docker, one.check(docker))
    publish.promote(registry, one.row.id, pushed.digest, default=True)
    return pushed


# -- logins ----------------------------------------------------------------------------------


def test_wrong_password(opened: Opener, docker: Engine, image: Maker, row: Row, floating: str) -> None:
    wrong = opened(login=Credentials(servers.USER, "hunter2-secret", "TRAINYARD_REGISTRY_USER"))
    with pytest.raises(Denied) as caught:
        publish_all(wrong, docker, image(day=1))
    assert "refused the credentials of user 'publisher' from TRAINYARD_REGISTRY_USER (401)" in str(
        caught.value
    )
    assert "hunter2" not in repr(caught.value) + str(vars(wrong)) + repr(wrong.login)
    assert opened().digest(row.id) == opened().digest("latest") == floating


def test_no_login(opened: Opener, docker: Engine, image: Maker, row: Row, floating: str) -> None:
    with pytest.raises(Denied, match=r"asks for a login \(401\), and there is none\ndocker login 127"):
        publish_all(opened(login=None), docker, image(day=1))
    assert opened().digest(row.id) == floating


def test_a_certificate_of_an_unknown_ca(server: Server, opened: Opener, row: Row, floating: str) -> None:
    began = time.monotonic()
    with pytest.raises(RegistryError, match=r"not trusted with .*\nName the file of its CA in REGISTRY_CA"):
        Registry(parse(f"{server.host}/acme/trainyard"), LOGIN, None, policy=QUICK).tags()
    assert time.monotonic() - began < 2  # it does not pass by itself, so it is not tried again
    assert opened().digest(row.id) == floating


# -- connections that break --------------------------------------------------------------------


def test_a_connection_lost_within_a_part_costs_that_blob_only(
    opened: Opener, proxy: Proxy, docker: Engine, image: Maker, row: Row, floating: str
) -> None:
    """The reference implementation forgets an upload that breaks off within a part."""
    one = image(day=1, sizes=BIG)
    cuts = [Fault(cut_after=600_000), Fault(cut_after=200_000)]

    def rule(seen: servers.Seen) -> Fault | None:
        second = seen.method == "PATCH" and proxy.total > BIG[0]
        return cuts.pop() if second and cuts else None

    proxy.rule = rule
    pushed = publish_all(opened(proxy), docker, one)
    assert not cuts
    assert opened().digest(row.id) == opened().digest("latest") == pushed.digest
    assert proxy.sent() < pushed.size + 2 * small.MB  # the first layer, of 8 MB, went once


def test_registry_restarted_between_two_parts_gets_only_the_rest(
    server: Server, opened: Opener, proxy: Proxy, docker: Engine, image: Maker, row: Row, floating: str
) -> None:
    one = image(day=1, sizes=BIG)
    killed = threading.Event()

    def kill() -> None:
        killed.set()
        server.kill()
        threading.Timer(1.5, server.start).start()

    def rule(seen: servers.Seen) -> Fault | None:
        fifth = seen.method == "PATCH" and proxy.total > 4 * small.MB and not killed.is_set()
        return Fault(before=kill) if fifth else None

    proxy.rule = rule
    pushed = publish_all(opened(proxy), docker, one)
    assert killed.is_set()
    assert opened().digest(row.id) == pushed.digest
    assert proxy.sent() == pushed.sent == pushed.size  # not one byte twice


def test_registry_killed_within_a_part_and_restarted(
    server: Server, opened: Opener, proxy: Proxy, docker: Engine, image: Maker, row: Row, floating: str
) -> None:
    killed = threading.Event()

    def kill(total: int) -> None:
        if total > 9 * small.MB and not killed.is_set():
            killed.set()
            server.kill()
            threading.Timer(1.5, server.start).start()

    proxy.on_bytes = kill
    pushed = publish_all(opened(proxy), docker, image(day=1, sizes=BIG))
    assert killed.is_set()
    assert opened().digest(row.id) == opened().digest("latest") == pushed.digest
    assert proxy.sent() < pushed.size + 2 * small.MB  # the first layer, of 8 MB, went once


def test_registry_killed_for_good_then_a_second_run(
    server: Server, opened: Opener, proxy: Proxy, docker: Engine, image: Maker, row: Row, floating: str
) -> None:
    one = image(day=1, sizes=BIG)

    def kill(total: int) -> None:
        if total > 9 * small.MB:
            server.kill()

    proxy.on_bytes = kill
    with pytest.raises(StepFailed, match=r"tried 2 times\nRun again; what is uploaded stays"):
        publish_all(opened(proxy, policy=HASTY), docker, one)
    server.start()
    straight = opened()
    assert straight.digest(row.id) == straight.digest("latest") == floating

    proxy.on_bytes = lambda _total: None
    proxy.forget()
    pushed = publish_all(opened(proxy), docker, one)
    assert straight.digest(row.id) == pushed.digest
    layers = straight.manifest(pushed.digest).json["layers"]
    assert pushed.blobs_there == 1  # the first layer, which was whole
    assert proxy.sent() == pushed.sent == pushed.size - layers[0]["size"]
    assert proxy.count("POST") == 2  # the second layer and the config


def test_a_registry_that_forgot_the_upload_gets_it_again(
    server: Server, opened: Opener, proxy: Proxy, docker: Engine, image: Maker, row: Row, floating: str
) -> None:
    forgot = threading.Event()

    def restart(total: int) -> None:
        if total > 3 * small.MB and not forgot.is_set():
            forgot.set()
            server.kill()
            server.secret = "another one"
            server.start()

    proxy.on_bytes = restart
    pushed = publish_all(opened(proxy), docker, image(day=1, sizes=(8 * small.MB,)))
    assert forgot.is_set()
    assert opened().digest(row.id) == pushed.digest


# -- registries that say no --------------------------------------------------------------------


@pytest.mark.parametrize("method", ["POST", "PATCH", "PUT", "HEAD", "GET"])
def test_too_many_requests_waits_as_told_and_goes_on(
    method: str, opened: Opener, proxy: Proxy, docker: Engine, image: Maker, row: Row, floating: str
) -> None:
    waits: list[float] = []
    policy = noting(waits)
    proxy.once(method, "/v2/", Fault(status=429, headers={"Retry-After": "7"}), times=2)
    pushed = publish_all(opened(proxy, policy=policy), docker, image(day=1))
    assert waits[:2] == [7.0, 7.0]
    assert opened().digest(row.id) == opened().digest("latest") == pushed.digest


def noting(waits: list[float]) -> Policy:
    """A policy that writes down how long it would wait, and does not."""
    return replace(QUICK, sleep=waits.append)


def test_too_many_requests_for_too_long_is_an_error_at_once(
    opened: Opener, proxy: Proxy, docker: Engine, image: Maker, row: Row, floating: str
) -> None:
    waits: list[float] = []
    proxy.once("POST", "/v2/", Fault(status=429, headers={"Retry-After": "7200"}), times=99)
    with pytest.raises(RegistryError, match="asks to come back in 7200 s"):
        publish_all(opened(proxy, policy=noting(waits)), docker, image(day=1))
    assert waits == []
    assert opened().digest(row.id) == floating


@pytest.mark.parametrize(
    "part", ["/blobs/uploads/", "/manifests/sha256:", "/manifests/cpu-pt213-", "/manifests/latest"]
)
def test_a_registry_that_keeps_failing(
    part: str, opened: Opener, proxy: Proxy, docker: Engine, image: Maker, row: Row, floating: str
) -> None:
    one = image(day=1)
    proxy.once("PUT", part, Fault(status=503), times=99)
    with pytest.raises(RegistryError, match="503"):
        publish_all(opened(proxy, policy=HASTY), docker, one)
    straight = opened()
    assert straight.digest("latest") == floating
    if part != "/manifests/latest":  # each tag moves by itself: this one had moved already
        assert straight.digest(row.id) == floating
    proxy.rule = lambda _seen: None
    pushed = publish_all(opened(proxy), docker, one)
    assert straight.digest(row.id) == straight.digest("latest") == pushed.digest


def test_a_registry_that_gives_other_bytes_is_caught(
    opened: Opener, proxy: Proxy, docker: Engine, image: Maker, row: Row, floating: str
) -> None:
    changed = Fault(rewrite=lambda body: body.replace(b"2026-03-02", b"2026-03-09"))
    proxy.once("GET", "/manifests/sha256:", changed, times=99)
    with pytest.raises(RegistryError, match=r"the registry gave sha256:.* where it says"):
        publish_all(opened(proxy), docker, image(day=1))
    assert opened().digest(row.id) == floating


@pytest.fixture
def tiny_disk(server: Server, tmp_path: Path) -> Iterator[Path]:
    """The registry's storage on a file system of 6 MB.  Needs root, as Trainyard's engine does."""
    server.kill()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(server.storage)], check=True)
    server.start()
    yield server.storage
    server.kill()
    subprocess.run(["umount", str(server.storage)], check=True)


def test_the_registrys_disk_is_full(
    tiny_disk: Path, opened: Opener, proxy: Proxy, docker: Engine, image: Maker, row: Row
) -> None:
    straight = opened()
    before = publish_all(straight, docker, image(day=0, sizes=(small.MB,))).digest
    one = image(day=1, sizes=(2 * small.MB, 8 * small.MB))
    with pytest.raises(RegistryError, match="the registry's disk is full\nFree some there and run again"):
        publish_all(opened(proxy), docker, one)
    assert straight.digest(row.id) == straight.digest("latest") == before
    subprocess.run(["mount", "-o", "remount,size=64m", str(tiny_disk)], check=True)
    proxy.forget()
    pushed = publish_all(opened(proxy), docker, one)
    assert straight.digest(row.id) == pushed.digest
    assert pushed.blobs_there == 1


def test_our_disk_is_full(docker: Engine, image: Maker, tmp_path: Path) -> None:
    one = image(day=1, sizes=BIG)
    cache = one.folder / "oci"
    cache.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(cache)], check=True)
    try:
        with pytest.raises(
            StepFailed, match=r"packing sha256:\w+ takes about 0.0 GB in .*; 0.0 GB are free\nFree"
        ):
            publish.push(None, docker, one.check(docker))  # type: ignore[arg-type]  # never reached
        subprocess.run(["mount", "-o", "remount,size=7m", str(cache)], check=True)
        with pytest.raises(StepFailed, match="the disk is full; what is compressed so far stays"):
            publish.push(None, docker, one.check(docker))  # type: ignore[arg-type]
        assert not list(cache.rglob("*.part"))
    finally:
        subprocess.run(["umount", str(cache)], check=True)


# -- Ctrl-C ------------------------------------------------------------------------------------

PUBLISH = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
from pathlib import Path
from trainyard import engine, matrix, publish, registry, resolve
host, folder, reference = sys.argv[1:]
docker = engine.connect()
row = next(r for r in resolve.rows(matrix.load(Path("matrix.yaml"))) if r.id == "cpu-pt213")
where = registry.connect(f"{host}/acme/trainyard", policy=registry.Policy(chunk=2**20))
pushed = publish.push(where, docker, publish.check(row, Path(folder), docker, reference))
print(publish.promote(where, row.id, pushed.digest, default=True).digest)
"""


def start_publisher(host: str, one: small.Small, tls: Tls) -> subprocess.Popen[str]:
    """A publisher as a process of its own, with its credentials in the environment."""
    return subprocess.Popen(
        [sys.executable, "-c", PUBLISH, host, str(one.folder), one.reference],
        cwd=ROOT,
        env=os.environ
        | {
            "PYTHONPATH": str(ROOT),
            "REGISTRY_CA": str(tls.ca),
            "TRAINYARD_REGISTRY_USER": servers.USER,
            "TRAINYARD_REGISTRY_PASSWORD": servers.PASSWORD,
        },
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_during_upload(
    number: signal.Signals,
    opened: Opener,
    proxy: Proxy,
    docker: Engine,
    image: Maker,
    row: Row,
    tls: Tls,
    floating: str,
) -> None:
    one = image(day=1, sizes=BIG)
    reached, go_on = threading.Event(), threading.Event()

    def hold(total: int) -> None:
        if total > 9 * small.MB:
            reached.set()
            go_on.wait(20)

    proxy.on_bytes = hold
    publisher = start_publisher(proxy.host, one, tls)
    assert reached.wait(60), publisher.communicate()[1]
    publisher.send_signal(number)
    go_on.set()
    _, complaint = publisher.communicate(timeout=30)
    assert publisher.returncode != 0
    assert servers.PASSWORD not in complaint
    straight = opened()
    assert straight.digest(row.id) == straight.digest("latest") == floating

    proxy.on_bytes = lambda _total: None
    again = start_publisher(proxy.host, one, tls)
    printed, complaint = again.communicate(timeout=60)
    assert again.returncode == 0, complaint
    assert straight.digest(row.id) == straight.digest("latest") == printed.strip()


def test_no_secret_in_the_process_list(
    opened: Opener, proxy: Proxy, docker: Engine, image: Maker, tls: Tls, floating: str
) -> None:
    lines: list[bytes] = []
    publisher: list[subprocess.Popen[str]] = []

    def look(_total: int) -> None:
        if publisher:
            lines.append(Path(f"/proc/{publisher[0].pid}/cmdline").read_bytes())

    proxy.on_bytes = look
    publisher.append(start_publisher(proxy.host, image(day=1), tls))
    _, complaint = publisher[0].communicate(timeout=60)
    assert publisher[0].returncode == 0, complaint
    assert lines
    assert all(servers.PASSWORD.encode() not in line for line in lines)


# -- two publishers ----------------------------------------------------------------------------


def test_a_tag_that_moved_since_we_looked_is_left_alone(
    registry: Registry, docker: Engine, image: Maker, row: Row, floating: str
) -> None:
    looked = publish.look(registry, row.id, default=True)
    ours = publish.push(registry, docker, image(day=2).check(docker))
    theirs = publish_all(registry, docker, image(day=1))
    with pytest.raises(StepFailed, match=f"moved while we were at work: it was {floating}.*{theirs.digest}"):
        publish.promote(registry, row.id, ours.digest, default=True, since=looked)
    assert registry.digest(row.id) == registry.digest("latest") == theirs.digest


def test_a_tag_that_moves_between_our_two_looks_is_left_alone(
    opened: Opener, proxy: Proxy, docker: Engine, image: Maker, row: Row, floating: str
) -> None:
    """The other publisher is done while ours sets its immutable tag."""
    straight = opened()
    ours = publish.push(straight, docker, image(day=2).check(docker))
    theirs = publish.push(straight, docker, image(day=1).check(docker))
    other = Fault(before=lambda: ignore(publish.promote(straight, row.id, theirs.digest, default=True)))
    proxy.once("PUT", f"/manifests/{row.id}-", other)
    with pytest.raises(StepFailed, match=f"moved while we were at work.*{theirs.digest}"):
        publish.promote(opened(proxy), row.id, ours.digest, default=True)
    assert straight.digest(row.id) == straight.digest("latest") == theirs.digest


def test_a_tag_that_is_taken_right_after_our_move_is_noticed(
    opened: Opener, proxy: Proxy, docker: Engine, image: Maker, row: Row, floating: str
) -> None:
    straight = opened()
    ours = publish.push(straight, docker, image(day=1).check(docker))
    theirs = publish.push(straight, docker, image(day=2).check(docker))
    other = Fault(after=lambda: ignore(publish.promote(straight, row.id, theirs.digest)))
    proxy.once("PUT", f"/manifests/{row.id}", other)
    proxy.rule = only_exact(proxy.rule, f"/manifests/{row.id}")
    with pytest.raises(StepFailed, match=f"reads back as {theirs.digest}"):
        publish.promote(opened(proxy), row.id, ours.digest)
    assert straight.digest(row.id) == theirs.digest


def only_exact(rule: servers.Rule, end: str) -> servers.Rule:
    return lambda seen: rule(seen) if seen.path.endswith(end) else None


def ignore(_value: object) -> None:
    pass


def test_two_publishers_at_the_same_moment(
    opened: Opener, docker: Engine, image: Maker, row: Row, floating: str
) -> None:
    """Whoever wins: each tag holds one whole image, and each immutable tag its own."""
    straight = opened()
    digests = [publish.push(straight, docker, image(day=1).check(docker)).digest for _ in range(4)]
    gate = threading.Barrier(len(digests))
    promoted: list[publish.Promoted] = []
    refused: list[StepFailed] = []

    def run(digest: str) -> None:
        one = opened()
        gate.wait()
        try:
            promoted.append(publish.promote(one, row.id, digest, default=True))
        except StepFailed as error:
            refused.append(error)

    threads = [threading.Thread(target=run, args=(digest,)) for digest in digests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(promoted) + len(refused) == len(digests)
    assert all("Another publisher" in str(error) for error in refused)
    assert straight.digest(row.id) in digests
    assert straight.digest("latest") in digests
    for one in publish.history(straight, row.id):
        assert one.digest in (*digests, floating)
        assert straight.manifest(one.digest).json["config"]["digest"]
    for done in promoted:
        assert straight.digest(done.immutable) == done.digest


def test_those_who_attach_at_the_same_moment_all_stay(opened: Opener, floating: str) -> None:
    subject = opened().manifest(floating).descriptor
    kinds = [f"application/vnd.example.{number}" for number in range(5)]
    threads = [
        threading.Thread(target=lambda kind=kind: opened().attach(subject, kind, [("text/plain", b"x", {})]))
        for kind in kinds
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one["artifactType"] for one in opened().referrers(floating)) == kinds


def test_nothing_is_left_on_this_disk_by_a_killed_run(docker: Engine, image: Maker) -> None:
    one = image(day=1)
    blobs = one.folder / "oci" / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    (blobs / "layer.999999.part").write_bytes(b"half")
    packed = archive.pack(docker, one.image_id, one.folder / "oci", {})
    assert {path.name for path in blobs.iterdir()} == {
        blob.digest.removeprefix("sha256:") for blob in (packed.config, *packed.layers)
    }
    shutil.rmtree(one.folder / "oci")
