"""Where an engine is, which client to use for it, and asking it what it is."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trainyard.hostenv import ask, tail

MIN_BUILDX = (0, 13)
MIN_ENGINE = (23, 0)  # the first whose built-in BuildKit knows COPY --link and heredocs


@dataclass(frozen=True)
class EngineAddress:
    """Where the engine is and which client to use for it."""

    host: str  # a value for DOCKER_HOST: unix:///... tcp://...
    private: bool
    client: Path  # a docker client that has buildx

    def environ(self) -> dict[str, str]:
        """This process's environment, with what makes ``client`` and the SDK use ``host``.

        DOCKER_CONTEXT goes, since it would win over DOCKER_HOST
        (https://docs.docker.com/reference/cli/docker/#environment-variables), and so does a
        BUILDX_BUILDER of the user's where the engine is private: it belongs to another engine.
        """
        env = {k: v for k, v in os.environ.items() if k != "DOCKER_CONTEXT"}
        env["DOCKER_HOST"] = self.host
        if self.private:
            for name in ("DOCKER_TLS", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"):
                env.pop(name, None)
            env["BUILDX_BUILDER"] = "default"
        return env


# -- clients -------------------------------------------------------------------------------


def parse_version(text: str) -> tuple[int, ...]:
    """The first dotted number in a text: ``buildx 0.13.1+ds1`` gives (0, 13, 1); () if none."""
    match = re.search(r"(?<![\w.])v?(\d+(?:\.\d+)+)", text)
    return tuple(int(part) for part in match[1].split(".")) if match else ()


def client_candidates(environ: Mapping[str, str]) -> list[Path]:
    """Every ``docker`` on PATH in its order, then Debian's, each file once."""
    folders = [*environ.get("PATH", os.defpath).split(os.pathsep), "/usr/bin", "/usr/local/bin"]
    found: dict[Path, Path] = {}
    for folder in folders:
        path = Path(folder) / "docker"
        if folder and path.is_file() and os.access(path, os.X_OK):
            found.setdefault(path.resolve(), path)
    return list(found.values())


@cache
def buildx_version(client: Path) -> tuple[int, ...]:
    """The version of a client's buildx plugin; () where it has none."""
    done = ask([str(client), "buildx", "version"])
    return parse_version(done.stdout) if done.returncode == 0 else ()


def choose_client(
    candidates: Iterable[Path], version: Callable[[Path], tuple[int, ...]] = buildx_version
) -> Path | None:
    """The first client whose buildx is new enough; None if there is none."""
    return next((client for client in candidates if version(client) >= MIN_BUILDX), None)


# -- asking an engine ----------------------------------------------------------------------


def engine_info(client: Path, env: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """``docker info`` of the engine that ``env`` points at: the fields, or {} and the reason."""
    done = ask([str(client), "info", "--format", "{{json .}}"], env)
    try:
        info = json.loads(done.stdout.strip().splitlines()[0])
    except (ValueError, IndexError):
        info = {}
    if info.get("ServerVersion") and not info.get("ServerErrors"):
        return dict(info), ""
    errors = info.get("ServerErrors") or [tail(done.stderr, 3) or "no answer"]
    return {}, "; ".join(str(error) for error in errors)


def host_engine() -> EngineAddress | str:
    """The engine that the user's docker settings point at, or why it will not do."""
    named = os.environ.get("DOCKER_HOST", "")
    candidates = client_candidates(os.environ)
    client = choose_client(candidates)
    if client is None:
        return _no_client(candidates)
    host = named or _context_host(client)
    if wrong := _unreachable(host, named, client):
        return wrong
    info, reason = engine_info(client, os.environ)
    if not info:
        return f"The Docker engine at {host or 'the default address'} does not answer: {reason}"
    if parse_version(str(info["ServerVersion"])) < MIN_ENGINE:
        version = info["ServerVersion"]
        return f"The Docker engine at {host} is {version}; {at_least(MIN_ENGINE)} needed."
    return EngineAddress(host, private=False, client=client)


def at_least(version: tuple[int, ...]) -> str:
    """The beginning of a sentence that ends in "needed": ``at least 23.0 is``."""
    return "at least " + ".".join(map(str, version)) + " is"


def _no_client(candidates: Sequence[Path]) -> str:
    if not candidates:
        return "No docker client was found on PATH."
    names = ", ".join(map(str, candidates))
    return f"No docker client with buildx >= 0.13 was found (looked at {names})."


def _unreachable(host: str, named: str, client: Path) -> str:
    """Why we could not talk to an engine that the docker client itself can talk to; "" if we can."""
    if host.startswith("ssh://"):
        # the SDK wants paramiko for it: https://github.com/docker/docker-py/blob/7.1.0/docker/transport/sshconn.py
        return (
            f"The Docker engine is {host}, and ssh is not supported. Bring its socket here: "
            f"ssh -nNT -L /tmp/docker.sock:/var/run/docker.sock {host.removeprefix('ssh://')} & "
            "export DOCKER_HOST=unix:///tmp/docker.sock"
        )
    if not named and host.startswith("tcp://"):
        done = ask([str(client), "context", "inspect", "--format", "{{json .TLSMaterial}}"])
        if done.stdout.strip() not in ("", "{}", "null"):
            return (
                f"The Docker engine at {host} is a context with certificates of its own. Name it by "
                f"variables: DOCKER_HOST={host} DOCKER_TLS_VERIFY=1 DOCKER_CERT_PATH=..."
            )
    return ""


def _context_host(client: Path) -> str:
    done = ask([str(client), "context", "inspect", "--format", "{{.Endpoints.docker.Host}}"])
    return done.stdout.strip() or "unix:///var/run/docker.sock"
