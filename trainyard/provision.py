"""The packages that a private engine needs, and getting them from the distribution."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from trainyard import apt
from trainyard.address import (
    MIN_ENGINE,
    at_least,
    buildx_version,
    choose_client,
    client_candidates,
    parse_version,
)
from trainyard.hostenv import Say, ask, find_tool, os_release
from trainyard.model import InputError, StepFailed


def missing_packages() -> list[str]:
    """Debian package names for what a private engine lacks on this host; [] where complete.

    Raises:
        InputError: a dockerd is installed that is too old.
    """
    missing = []
    dockerd = find_tool("dockerd")
    if dockerd is None:
        missing.append("docker.io")
    elif parse_version(version := ask([str(dockerd), "--version"]).stdout) < MIN_ENGINE:
        raise InputError(_too_old(dockerd, version))
    if choose_client(client_candidates(os.environ)) is None:
        missing += ["docker-cli", "docker-buildx"]
    for tool in ("iptables", "ip"):
        if find_tool(tool) is None:
            missing.append({"ip": "iproute2"}.get(tool, tool))
    if _apparmor_enabled() and find_tool("apparmor_parser") is None:
        missing.append("apparmor")  # without it no container starts on such a kernel
    return missing


def _too_old(dockerd: Path, version: str) -> str:
    found = ".".join(map(str, parse_version(version))) or "of an unknown version"
    return (
        f"{dockerd} is {found}; {at_least(MIN_ENGINE)} needed. Please upgrade it (on Debian 12, "
        "remove the packages docker.io and docker-cli and run this again)."
    )


def _apparmor_enabled() -> bool:
    with contextlib.suppress(OSError):
        return Path("/sys/module/apparmor/parameters/enabled").read_text().startswith("Y")
    return False


def install_missing(say: Say, host_problem: str | None) -> None:
    """Install what is missing from the distribution; on Debian 12 Docker comes from Debian 13.

    Debian 12 has Docker 20.10 and no buildx at all.  Debian 13's packages need only what
    Debian 12 has (libc6 >= 2.34), and nothing else may come from there.
    """
    missing = missing_packages()
    if not apt.has_apt():
        raise InputError(advice(host_problem, ""))
    say(f"Looking for the packages {' '.join(missing)}")
    with apt.Apt(say) as manager:
        manager.update()
        if {"docker-buildx", "docker.io"} & set(missing) and not manager.offers("docker-buildx"):
            if os_release().get("VERSION_CODENAME") != "bookworm":
                raise InputError(advice(host_problem, "apt-get offers no docker-buildx here."))
            say("Debian 12 has no buildx: taking Docker's packages, and only those, from Debian 13")
            docker = ("docker.io", "docker-cli", "docker-buildx")
            manager.borrow(apt.BorrowedSuite("trixie", apt.debian_mirrors()[0], docker))
            manager.update()
        if "docker-cli" in missing and not manager.offers("docker-cli"):  # Ubuntu
            missing[missing.index("docker-cli")] = "docker.io"
        manager.install(missing)
    buildx_version.cache_clear()
    if still := missing_packages():
        raise StepFailed(f"apt-get installed everything, but this is still missing: {still}")


def advice(problem: str | None, hint: str) -> str:
    """What to do where there is no engine: why there is none, what to install, and a hint."""
    what = "Please install Docker with buildx >= 0.13 and start it, or set DOCKER_HOST."
    return " ".join(part for part in (problem, what, hint) if part)
