"""Looks at everything a build needs and says what is wrong and what would help.

Nothing here starts, installs or changes anything.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from trainyard import daemon, hostenv, mirrors
from trainyard.bases import NoAnswer, registry_digest
from trainyard.engine import Engine
from trainyard.layout import layout
from trainyard.model import Base, StepFailed

Status = Literal["ok", "warn", "fail"]
GIB = 2**30


@dataclass(frozen=True)
class Check:
    """One finding."""

    name: str
    status: Status
    detail: str
    remedy: str = ""  # empty where nothing needs doing


def checks(*, need_bytes: int = 0, bases: Iterable[Base] = ()) -> list[Check]:
    """Look at the host.

    Args:
        need_bytes: what the selected images will need on the engine's disk.
        bases: whose registries are asked, through the engine if one runs.

    Raises:
        InputError: a TRAINYARD_ variable, or the file that one names, is wrong.
    """
    found = daemon.status()
    return [
        _engine(found),
        _store(found),
        _buildx(found),
        _disk(found, need_bytes),
        *_registries(found, bases),
        _certificates(),
        _proxy(),
        _mirrors(),
        _wheelhouse(),
        _gpus(found),
    ]


def as_json(check: Check) -> dict[str, str]:
    """A check as ``doctor --json`` prints it."""
    return asdict(check)


def _engine(found: daemon.EngineStatus) -> Check:
    if found.address is None:
        if found.startable:
            return Check("engine", "warn", found.problem or "none", "Nothing to do.")
        remedy = "Install Docker with buildx >= 0.13 and start it, or set DOCKER_HOST."
        return Check("engine", "fail", found.problem or "none", remedy)
    kind = "private" if found.address.private else "this host's"
    return Check("engine", "ok", f"{found.version}, {kind}, {found.address.host}")


def _store(found: daemon.EngineStatus) -> Check:
    if found.address is None:
        return Check("image store", "warn", "unknown: no engine runs")
    if found.containerd_store:
        return Check(
            "image store",
            "warn",
            f"containerd's image store ({found.driver}): exports are many times slower",
            'Set "features": {"containerd-snapshotter": false} in the engine\'s daemon.json, or '
            "TRAINYARD_ENGINE=private.",
        )
    if found.driver == "vfs":
        remedy = "Put the engine's data on ext4 or XFS, where overlay2 works."
        return Check("image store", "warn", "vfs copies every layer in full", remedy)
    return Check("image store", "ok", found.driver)


def _buildx(found: daemon.EngineStatus) -> Check:
    if found.address is None:
        return Check("buildx", "warn", "unknown: no engine runs")
    return Check("buildx", "ok", f"{found.buildx} of {found.address.client}")


def existing_parent(path: Path) -> Path:
    """The deepest folder on the way to ``path`` that exists and may be looked at."""
    for candidate in (path, *path.parents):
        if os.access(candidate, os.X_OK) and candidate.is_dir():
            return candidate
    return Path("/")


def _disk(found: daemon.EngineStatus, need: int) -> Check:
    address = found.address
    if address is not None and not address.host.startswith("unix://"):
        return Check("disk", "warn", f"unknown: {address.host} is another host")
    root = Path(found.data_root) if found.data_root else layout().data
    free = shutil.disk_usage(existing_parent(root)).free
    detail = f"{free / GIB:.1f} GiB free at {root}; the selection needs {need / GIB:.1f} GiB"
    if free < need:
        remedy = "Free some space, or put TRAINYARD_ENGINE_ROOT on a larger disk."
        return Check("disk", "fail", detail, remedy)
    return Check("disk", "ok", detail)


def _registries(found: daemon.EngineStatus, bases: Iterable[Base]) -> Iterator[Check]:
    ordered = sorted(set(bases), key=lambda base: base.name)
    if found.address is None:
        for base in ordered:
            yield Check(f"base {base.name}", "warn", f"{base.image} was not asked for: no engine runs")
        return
    engine = Engine(found.address)
    for base in ordered:
        yield _registry(base, engine)


def _registry(base: Base, engine: Engine) -> Check:
    name = f"base {base.name}"
    image = mirrors.configured().image(base)
    try:
        digest = registry_digest(image, engine)
    except (NoAnswer, StepFailed) as error:
        remedy = "Nothing to do: the base is bootstrapped from the distribution's mirror instead."
        return Check(name, "warn", f"{image}: {error}", remedy)
    return Check(name, "ok", f"{image}@{digest}")


def _certificates() -> Check:
    broken = [
        f"{name}={value}"
        for name in hostenv.CA_VARIABLES
        if (value := os.environ.get(name)) and not Path(value).exists()
    ]
    if broken:
        detail = f"names a file that does not exist: {', '.join(broken)}"
        return Check("certificates", "warn", detail, "Correct or unset it.")
    path = hostenv.find_ca()
    if path is None:
        return Check("certificates", "warn", "no CA bundle found", "Install ca-certificates.")
    named = [name for name in hostenv.CA_VARIABLES if os.environ.get(name)]
    source = f"from {named[0]}" if named else "the system store"
    return Check("certificates", "ok", f"{path} ({source})")


def _proxy() -> Check:
    found = hostenv.proxies()
    text = ", ".join(f"{name}={value}" for name, value in found.items())
    return Check("proxy", "ok", text or "none set")


def _mirrors() -> Check:
    found = mirrors.configured()
    if not found.model_fields_set:
        return Check("mirrors", "ok", f"none ({mirrors.VARIABLE} is not set)")
    detail = f"{os.environ[mirrors.VARIABLE]}: {', '.join(sorted(found.model_fields_set))}"
    return Check("mirrors", "ok", detail)


def _wheelhouse() -> Check:
    folders = hostenv.wheelhouse_dirs()
    wheels = sorted({path.name for folder in folders for path in folder.glob("torch-*+cpu-*.whl")})
    versions = sorted({name.split("-")[1] for name in wheels})
    if not os.environ.get("PIP_FIND_LINKS"):
        return Check("wheelhouse", "ok", "none (PIP_FIND_LINKS is not set)")
    if not folders:
        remedy = "Only local folders count; correct PIP_FIND_LINKS."
        return Check("wheelhouse", "warn", "PIP_FIND_LINKS names no existing folder", remedy)
    torch = f"torch {', '.join(versions)}" if versions else "no torch +cpu wheel"
    return Check("wheelhouse", "ok", f"{', '.join(map(str, folders))}: {torch}")


def _nvidia_smi() -> str | None:
    """The output of ``nvidia-smi -L``; None where there is no driver."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _gpus(found: daemon.EngineStatus, ask: Callable[[], str | None] = _nvidia_smi) -> Check:
    output = ask()
    gpus = [line for line in (output or "").splitlines() if line.startswith("GPU ")]
    if not gpus:
        return Check("gpus", "ok", "none: tests run on the CPU with gloo")
    detail = "; ".join(line.partition(" (UUID")[0] for line in gpus)
    hook = hostenv.find_tool("nvidia-container-runtime-hook")
    if found.address is not None and "nvidia" not in found.runtimes and hook is None:
        remedy = "Install nvidia-container-toolkit and restart the engine."
        return Check("gpus", "warn", f"{detail}; the engine has no nvidia runtime", remedy)
    return Check("gpus", "ok", detail)
