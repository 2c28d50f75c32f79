"""Nights that really build: what one change moves, and what it leaves alone.

    pytest tests/registry --nights        some 10 minutes: five nights of two small images

Two images of one stack, torch without DeepSpeed: one with `launch`, one without.  A copy of the checkout
has a matrix of its own, so that the names of shipped images are never touched.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from servers import LOGIN, Opener, Server
from uv import find_uv_bin

from trainyard import bases, lock
from trainyard.engine import Engine

ROOT = Path(__file__).resolve().parents[2]
BIG, SMALL = "cpu-nights-pt213", "cpu-nights-pt213-plain"
MATRIX = f"""\
default: {BIG}
repository: trainyard-nights
variants:
  "": {{features: [launch]}}
  "-plain": {{features: []}}
stacks:
"""
PACKAGE = "filelock"


@dataclass
class Site:
    """A checkout, a registry, and the means to run a night."""

    checkout: Path
    server: Server
    opened: Opener

    def night(self) -> tuple[dict[str, dict[str, Any]], str, float]:
        """Run one; the outcome of each image, what was said, and the seconds it took."""
        env = os.environ | {
            "REGISTRY": f"{self.server.host}/acme/trainyard",
            "REGISTRY_CA": str(self.server.tls.ca),
            "TRAINYARD_REGISTRY_USER": LOGIN.user,
            "TRAINYARD_REGISTRY_PASSWORD": LOGIN.password,
        }
        command = [sys.executable, "build.py", "nightly", "all", "--json", "--history", "history"]
        began = time.monotonic()
        done = subprocess.run(command, cwd=self.checkout, env=env, text=True, capture_output=True)
        seconds = time.monotonic() - began
        assert done.returncode == 0, done.stdout + done.stderr
        told = "\n".join(
            line for line in done.stderr.splitlines() if re.match(rf"{BIG}(-plain)?: \w+: ", line)
        )
        sys.stderr.write(f"\n{told}\n({seconds:.0f} s)\n")
        # the suites of the images write to the same stdout; the outcomes are the last array
        outcomes = json.loads(done.stdout[("\n" + done.stdout).rindex("\n[\n") :])
        return {one["id"]: one for one in outcomes}, done.stderr, seconds

    def digests(self) -> dict[str, str | None]:
        """What the floating tags hold."""
        registry = self.opened()
        return {one: registry.digest(one) for one in (BIG, SMALL)}


@pytest.fixture
def site(docker: Engine, server: Server, opened: Opener, tmp_path: Path) -> Iterator[Site]:
    copy = tmp_path / "checkout"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    shipped = (ROOT / "matrix.yaml").read_text()
    stack = re.search(r"^  cpu-pt213:\n(?:    .*\n)+", shipped, re.MULTILINE)
    assert stack
    (copy / "matrix.yaml").write_text(MATRIX + stack[0].replace("cpu-pt213", BIG))
    for row_id in (BIG, SMALL):
        (copy / "images" / row_id).mkdir()
        shutil.copy2(ROOT / "images/cpu-pt213-base/requirements.lock", copy / "images" / row_id)
    older(copy / "images" / SMALL / "requirements.lock")
    build_py(copy, "lock", "--check")
    build_py(copy, "render", "all")
    yield Site(copy, server, opened)
    for row_id in (BIG, SMALL):
        if found := docker.image(f"trainyard:{row_id}"):
            docker.untag(f"trainyard:{row_id}")
            docker.discard(str(found.id))


def build_py(checkout: Path, *words: str) -> None:
    command = [sys.executable, "build.py", *words]
    done = subprocess.run(command, cwd=checkout, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr


def older(file: Path) -> None:
    """Put the release before the locked one of a package into a lock, with its own hashes."""
    text = file.read_text()
    entry = re.search(rf"^{PACKAGE}==(\S+) .*\n(?:    .*\n)+", text, re.MULTILINE)
    assert entry
    command = [find_uv_bin(), "pip", "compile", "-", "--quiet", "--generate-hashes", "--no-header"]
    command += ["--no-annotate", "--no-deps", "--system-certs", "--python-version", "3.11"]
    wanted = f"{PACKAGE}<{entry[1]}"
    done = subprocess.run(command, input=wanted, text=True, capture_output=True, env=lock.environment())
    assert done.returncode == 0, done.stderr
    file.write_text(text.replace(entry[0], done.stdout.rstrip() + "\n"))


@pytest.fixture
def another_base(docker: Engine) -> Iterator[Any]:
    """Make the base anew with one file more, as a security update would; undone afterwards."""
    made = []

    def make(row_base: Any) -> None:
        kept = bases._kept(row_base, docker)
        assert kept, "only a bootstrapped base can be changed here; the registry's is what it is"
        image = docker.image(kept[0])
        assert image
        labels = image.labels | {f"{bases.LABEL}.created": f"{time.time():.0f}"}
        box = docker.client.containers.create(kept[0], ["true"])
        try:
            words = [word for key, value in labels.items() for word in ("-c", f"LABEL {key}={value}")]
            ref = f"{bases.REPOSITORY}:{row_base.suite}-nights"
            text = f"docker export {box.id} > base.tar && touch updated && tar -rf base.tar updated"
            folder = Path("/tmp") / f"nights-{os.getpid()}"
            folder.mkdir()
            try:
                env = docker.environment
                subprocess.run(["sh", "-c", text], cwd=folder, env=env, check=True)
                done = docker.cli(
                    "import", *words, "-c", "ENV PATH=" + bases._PATH, str(folder / "base.tar"), ref
                )
                assert done.returncode == 0, done.stderr
                made.append(ref)
            finally:
                shutil.rmtree(folder)
        finally:
            box.remove()

    yield make
    for ref in made:
        docker.untag(ref)


def test_each_change_rebuilds_just_the_images_that_have_it(
    site: Site, another_base: Any, row: Any, tmp_path: Path
) -> None:
    first, _, _ = site.night()
    assert {one: outcome["work"] for one, outcome in first.items()} == {BIG: "build", SMALL: "build"}
    held = site.digests()
    assert None not in held.values()

    again, _, seconds = site.night()
    assert {outcome["work"] for outcome in again.values()} == {"nothing"}
    assert seconds < 20
    assert site.digests() == held

    script = site.checkout / "rootfs/launch/usr/local/bin/launch"
    script.write_text(script.read_text() + "\n# edited\n")
    night, said, _ = site.night()
    assert (night[BIG]["work"], night[SMALL]["work"]) == ("build", "nothing")
    assert night[BIG]["why"] == "changed: rootfs/launch/usr/local/bin/launch"
    assert f"{BIG}: build: changed: rootfs/launch/usr/local/bin/launch" in said
    held = moved(site, held, {BIG})

    build_py(site.checkout, "bump", SMALL, "--write")
    assert f"{PACKAGE}==" in (site.checkout / "images" / SMALL / "requirements.lock").read_text()
    night, _, _ = site.night()
    assert (night[BIG]["work"], night[SMALL]["work"]) == ("nothing", "build")
    assert night[SMALL]["why"] == f"changed: images/{SMALL}/requirements.lock"
    held = moved(site, held, {SMALL})

    another_base(row.base)
    night, _, _ = site.night()
    assert (night[BIG]["work"], night[SMALL]["work"]) == ("build", "build")
    assert {outcome["why"] for outcome in night.values()} == {"changed: the base image"}
    moved(site, held, {BIG, SMALL})

    # the nights are there to look back on
    nights = {
        one: sorted(p.name for p in (site.checkout / "history" / one).iterdir()) for one in (BIG, SMALL)
    }
    assert (len(nights[BIG]), len(nights[SMALL])) == (3, 3)
    page = (site.checkout / "out/catalog/images" / f"{SMALL}.html").read_text()
    assert PACKAGE in page  # the changelog of the bump
    if kept := os.environ.get("NIGHTS_KEEP"):
        shutil.copytree(site.checkout / "out/catalog", kept, dirs_exist_ok=True)


def moved(site: Site, before: dict[str, str | None], wanted: set[str]) -> dict[str, str | None]:
    """The floating tags now; only the wanted ones may hold another image."""
    now = site.digests()
    assert {one for one in now if now[one] != before[one]} == wanted
    return now
