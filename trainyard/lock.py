"""Locks: every Python package of an image, with hashes, as uv resolves them for the row.

Two files per row: ``requirements.lock`` is what the image holds, ``build.lock`` is what only the
toolchain stage needs on top.  ``images/uv.lock`` pins uv itself, once for all rows.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from uv import find_uv_bin

from trainyard import mirrors
from trainyard.hostenv import find_ca, torch_wheels, wheelhouse_dirs
from trainyard.model import Arch, Row, StepFailed

#: pip stays in the image (people add packages), JupyterLab only with its feature.
FEATURE_PACKAGES = {"jupyter": ("jupyterlab",)}

#: uv's names; 2.28 is the floor of torch's own wheels.
PLATFORMS: dict[Arch, str] = {"amd64": "x86_64-manylinux_2_28", "arm64": "aarch64-manylinux_2_28"}


@dataclass(frozen=True)
class Lock:
    """One lock file and what it is made from."""

    path: Path
    requirements: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    constraints: Path | None = None  # another lock whose versions must be kept
    limits: tuple[str, ...] = ()  # versions for packages that others pull in without one
    python: str = ""
    arch: Arch = "amd64"
    index: str | None = None  # the build whose PyTorch index is asked beside PyPI, such as "cpu"

    @property
    def inputs_id(self) -> str:
        """Hash of the inputs; kept in the file's head so that a stale lock is seen offline."""
        parts = [*self.requirements, "overrides", *self.overrides, "python", self.python, *self.limits]
        if self.arch != "amd64":
            parts += ["arch", self.arch]
        if self.constraints:
            found = self.constraints.read_text() if self.constraints.exists() else "missing"
            parts += ["constraints", found]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def recorded_id(self) -> str | None:
        """The inputs id in the head of the file; None where there is no file."""
        try:
            head = self.path.read_text().split("\n", 3)[:3]
        except FileNotFoundError:
            return None
        return next((line.split()[-1] for line in head if line.startswith("# inputs ")), "none")

    def why_stale(self) -> str | None:
        """Say in words why the file must be made anew; None where it is current."""
        recorded = self.recorded_id()
        if recorded is None:
            return "missing"
        if recorded != self.inputs_id:
            lines = self.path.read_text().splitlines()
            pins = {_pin(line.split(" ")[0]) for line in lines if "==" in line and line[0].isalpha()}
            moved = [r for r in self.requirements if "==" in r and _pin(r) not in pins]
            return f"the row asks for {', '.join(moved)}" if moved else "its inputs changed"
        return None


def _name(requirement: str) -> str:
    return requirement.split("==")[0].split("[")[0]


def _pin(requirement: str) -> str:
    """``name==version`` without extras; 13.0.3.0 and 13.0.3 are one version to pip."""
    version = requirement.split("==")[1]
    while version.endswith(".0"):
        version = version.removesuffix(".0")
    return f"{_name(requirement)}=={version}"


def locks(row: Row, images: Path) -> tuple[Lock, ...]:
    """The lock files of one row, in the order in which they must be made."""
    folder = images / row.id
    index = None if row.torch.on_pypi else row.torch.build
    main = Lock(
        folder / "requirements.lock",
        _requirements(row),
        row.overrides,
        limits=_limits(row),
        python=row.python,
        arch=row.arch,
        index=index,
    )
    if not row.has_deepspeed:
        return (main,)
    build = Lock(
        folder / "build.lock",
        _build_requirements(row),
        row.overrides,
        constraints=main.path,
        python=row.python,
        arch=row.arch,
        index=index,
    )
    return main, build


def uv_lock(images: Path) -> Lock:
    """The lock of uv itself, at the version that Trainyard runs on."""
    return Lock(images / "uv.lock", (f"uv=={version('uv')}",), python="3.11")


def _requirements(row: Row) -> tuple[str, ...]:
    found = [row.torch.requirement, "pip", "numpy"]
    if row.cudnn_package:
        found.append(f"{row.cudnn_package}=={row.cudnn}")
    if row.nccl_package:
        found.append(f"{row.nccl_package}=={row.nccl}")
    if row.deepspeed:
        found += [f"deepspeed=={row.deepspeed}", *row.requirements]
        if not row.is_cpu:  # the wheel asks for it where setup.py saw CUDA; the sdist does not say so
            found.append("nvidia-ml-py")
    if row.has_devel and row.toolkit and row.toolkit.requirement:
        found.append(row.toolkit.requirement)
    for feature in sorted(row.features):
        found += FEATURE_PACKAGES.get(feature, ())
    return tuple(sorted(found))


def _limits(row: Row) -> tuple[str, ...]:
    """Keep the headers that torch pulls in at the toolkit's minor.

    torch 2.15 asks for nvidia-cuda-cccl without a version and would get one of a newer CUDA,
    which NVIDIA's cuda-toolkit metapackage then refuses; seen with uv on PyPI's metadata.
    """
    if row.uses_pip_toolkit and row.toolkit:
        return (f"nvidia-cuda-cccl=={row.toolkit.minor}.*",)
    return ()


def _build_requirements(row: Row) -> tuple[str, ...]:
    found = ["setuptools", "wheel"]
    if row.toolkit and row.toolkit.requirement:
        found.append(row.toolkit.requirement)
    return tuple(found)


def make(lock: Lock, wheelhouse: tuple[Path, ...] = (), upgrade: bool = False) -> None:
    """Resolve with uv and write the file, whole or not at all.

    Raises StepFailed with uv's own words where no solution exists or no index answers.
    """
    lock.path.parent.mkdir(parents=True, exist_ok=True)
    part = lock.path.with_suffix(".part")
    try:
        _resolve(lock, part, wheelhouse, upgrade)
        part.write_text(_head(lock) + part.read_text())
        part.rename(lock.path)
    finally:
        for suffix in (".part", ".overrides", ".limits"):
            lock.path.with_suffix(suffix).unlink(missing_ok=True)


def _resolve(lock: Lock, part: Path, wheelhouse: tuple[Path, ...], upgrade: bool) -> None:
    command = [find_uv_bin(), "pip", "compile", "-", "--quiet", "--generate-hashes", "--no-header"]
    command += ["--no-annotate", "--no-python-downloads", "--system-certs", "-o", str(part)]
    command += ["--python-platform", PLATFORMS[lock.arch], "--python-version", lock.python]
    if lock.path.exists() and not upgrade:  # what is locked already stays, unless the inputs forbid it
        part.write_text(lock.path.read_text())
    if lock.overrides:
        overrides = lock.path.with_suffix(".overrides")
        overrides.write_text("\n".join(lock.overrides) + "\n")
        command += ["--overrides", str(overrides)]
    if lock.constraints:
        command += ["--constraints", str(lock.constraints)]
    if lock.limits:
        limits = lock.path.with_suffix(".limits")
        limits.write_text("\n".join(lock.limits) + "\n")
        command += ["--constraints", str(limits)]
    found = wheelhouse or _wheelhouse(lock)
    if lock.index and found:
        command += [word for folder in found for word in ("--find-links", str(folder))]
    env = environment()
    if lock.index and not found:
        env["UV_INDEX"] = mirrors.configured().pytorch_index(lock.index)
        command += ["--index-strategy", "unsafe-best-match"]
    text = "\n".join(lock.requirements)
    done = subprocess.run(command, input=text, text=True, capture_output=True, env=env)
    if done.returncode:
        raise StepFailed(f"{lock.path}: uv found no solution\n{done.stderr.strip()}")


def _wheelhouse(lock: Lock) -> tuple[Path, ...]:
    """This host's wheelhouses, if this lock's torch is in one: else the index must be asked."""
    torch = next((one.partition("==")[2] for one in lock.requirements if one.startswith("torch==")), "")
    return wheelhouse_dirs() if torch_wheels(torch, lock.python) else ()


def _head(lock: Lock) -> str:
    return (
        "# Generated by `python build.py lock`. Do not edit.\n"
        f"# from {' '.join(lock.requirements + lock.overrides)}\n"
        f"# inputs {lock.inputs_id}\n"
    )


def environment() -> dict[str, str]:
    """What uv runs with: this process's variables, the host's CA bundle, the site's index."""
    env = {**os.environ, **mirrors.uv_variables(mirrors.configured())}
    if ca := find_ca():
        env.setdefault("SSL_CERT_FILE", str(ca))
    return env
