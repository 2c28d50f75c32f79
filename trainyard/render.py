"""Render a row to ``images/<id>/Dockerfile``.  Same row, same text, on every machine."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from trainyard.hostenv import Say, silent
from trainyard.lock import locks, uv_lock
from trainyard.model import InputError, Row

#: What the `base` stage holds: Python, and the libraries that torch and the kernels load.
BASE_PACKAGES = ("ca-certificates", "libgomp1", "python3", "tini")
#: What the toolchain stage needs whatever the row is.
TOOLCHAIN_PACKAGES = ("ccache", "libaio-dev", "python3-dev")
#: Where code compiled at run time goes: one place that any uid can write to, also without a home.
CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "/var/cache/trainyard/inductor",
    "TORCH_EXTENSIONS_DIR": "/var/cache/trainyard/extensions",
    "TRITON_CACHE_DIR": "/var/cache/trainyard/triton",
}
FEATURE_PACKAGES = {
    "devel": ("git", "libaio-dev", "make", "python3-dev"),
    "launch": ("openssh-client",),
    "rdma": ("ibverbs-providers", "ibverbs-utils", "perftest"),  # they bring libibverbs and librdmacm
    "sshd": ("openssh-client", "openssh-server"),
}
#: Features with a folder under rootfs/.
FEATURES_WITH_FILES = frozenset({"deepspeed", "jupyter", "launch", "sshd"})


def render(row: Row, root: Path) -> str:
    """Return the text of the row's Dockerfile.

    ``root`` is the checkout: the lock files under it are part of the kernels' key.
    """
    template = _environment(root / "templates").get_template("Dockerfile.j2")
    row = replace(row, summary=" ".join(row.summary.split()))  # one line, also where YAML folds it
    return (
        template.render(
            row=row,
            contents=_contents(row),
            base_packages=sorted({*BASE_PACKAGES, row.base.libaio}),
            uv_packages=("python3-venv",),
            toolchain_packages=sorted({*TOOLCHAIN_PACKAGES, *_compilers(row)}),
            runtime_packages=_runtime_packages(row),
            rootfs_parts=rootfs_parts(row),
            caches=CACHES,
            kernels_key=kernels_key(row, root, row.accelerator, row.ops),
            twin_key=kernels_key(row, root, "cpu", row.twin_ops),
            labels={name: _quotable(value) for name, value in labels(row).items()},
        ).rstrip()
        + "\n"
    )


def kernels_key(row: Row, root: Path, accelerator: str, ops: tuple[str, ...]) -> str:
    """Hash everything that changes the wheel and that is known before the build.

    The compilers' exact versions are known only inside the build; ``kernels/build_wheel.py``
    adds them.  Rows that share this key share the wheel.
    """
    if not row.has_deepspeed:
        return ""
    parts = [accelerator, *ops, row.cpu_isa, row.base.suite, row.python, str(row.kernel_gcc)]
    parts += [_entry(root / "images" / row.id / "requirements.lock", name) for name in ("torch", "deepspeed")]
    if accelerator == "cuda" and row.toolkit:
        parts += [row.toolkit.provider, row.toolkit.version, row.torch_arch_list]
    parts += [script.read_text() for script in sorted(_files(root / "kernels"))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def labels(row: Row) -> dict[str, str]:
    """What the image says of itself before anything is measured (OCI names where they exist)."""
    found = {
        "org.opencontainers.image.title": row.id,
        "org.opencontainers.image.description": row.summary,
        "org.opencontainers.image.base.name": row.base.image,
        "dev.trainyard.id": row.id,
        "dev.trainyard.python": row.python,
        "dev.trainyard.torch": row.torch.version,
        "dev.trainyard.torch.build": row.torch.build,
        "dev.trainyard.cuda-level": row.cuda_level,
        "dev.trainyard.driver-floor": row.driver_floor,
        "dev.trainyard.cudnn": row.cudnn,
        "dev.trainyard.nccl": row.nccl,
        "dev.trainyard.deepspeed": row.deepspeed,
        "dev.trainyard.ops": ",".join(row.ops),
        "dev.trainyard.gpu-archs": row.torch_arch_list,
        "dev.trainyard.cpu-isa": row.cpu_isa,
        "dev.trainyard.features": ",".join(sorted(row.features)),
    }
    return {name: value for name, value in found.items() if value}


def rootfs_parts(row: Row) -> tuple[str, ...]:
    """The folders of rootfs/ that are laid into the image: one of all images, one a feature."""
    return ("common", *sorted(row.features & FEATURES_WITH_FILES))


def inputs(row: Row, root: Path) -> tuple[Path, ...]:
    """The files that the build reads, in a stable order: the basis of the contents id."""
    found = [root / "images" / row.id / "Dockerfile", uv_lock(root / "images").path]
    found += [lock.path for lock in locks(row, root / "images")]
    folders = [f"rootfs/{part}" for part in rootfs_parts(row)]
    for folder in [*folders, *(["kernels"] if row.has_deepspeed else [])]:
        found += _files(root / folder)
    return tuple(sorted(found))


def _files(folder: Path) -> list[Path]:
    """The files that reach a build: .dockerignore keeps Python's caches out."""
    return [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]


def open_modes(row: Row, root: Path, say: Say = silent) -> None:
    """Let everybody read what goes into an image as it is.

    COPY keeps modes, of folders too, and a checkout made under umask 077 has only the owner's: /etc and
    /usr would be root's alone.  git keeps nothing of it but whether a file is executable.
    https://github.com/moby/buildkit/issues/3602
    Raises InputError with the command that mends it where we may not.
    """
    closed = {}
    for part in rootfs_parts(row):
        for path in (root / "rootfs" / part).rglob("*"):
            mode = path.stat().st_mode
            wanted = mode | 0o044 | (0o011 if mode & 0o100 else 0)
            if mode != wanted:
                closed[path] = wanted
    if not closed:
        return
    say(f"rootfs/: made {len(closed)} files and folders readable for everybody, as images need them")
    try:
        for path, mode in closed.items():
            path.chmod(mode)
    except OSError as error:
        raise InputError(f"{path}: not readable for everybody\nRun: chmod -R go=rX rootfs") from error


def input_digests(row: Row, root: Path, base_digest: str) -> dict[str, str]:
    """What an image is made from, by name: files of the checkout, and the base.

    File modes count: a launch script that is no longer executable is another image.
    """
    found = {"base": base_digest}
    for path in inputs(row, root):
        mode = f"{path.stat().st_mode & 0o111:o}\n".encode()
        found[str(path.relative_to(root))] = hashlib.sha256(mode + path.read_bytes()).hexdigest()[:16]
    return found


def contents_id(digests: dict[str, str]) -> str:
    """Hash of all of :func:`input_digests`.  Equal ids mean that there is nothing to do."""
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()[:16]


@cache
def _environment(templates: Path) -> Environment:
    """One for all rows: it compiles each template once, and again where the file changed."""
    return Environment(
        loader=FileSystemLoader(templates),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )


def _quotable(value: str) -> str:
    """The text as it stands between double quotes in a Dockerfile."""
    return re.sub(r'([\\"$])', r"\\\1", value)


def _contents(row: Row) -> list[str]:
    """The heading: what is inside, a line each."""
    torch = f"torch {row.torch.version}"
    base = row.base.name if row.arch == "amd64" else f"{row.base.name} for {row.platform}"
    if row.is_cpu:
        lines = [f"{torch} for CPU, Python {row.python} on {base}"]
    else:
        lines = [
            f"{torch} built for CUDA {row.torch.cuda}, Python {row.python} on {base}",
            f"cuDNN {row.cudnn}, NCCL {row.nccl}; drivers >= {row.driver_floor} "
            f"(nvidia-smi: CUDA {row.cuda_level} or newer)",
        ]
    if row.deepspeed:
        lines.append(f"DeepSpeed {row.deepspeed} with prebuilt {', '.join(row.ops)}")
    return lines


def _compilers(row: Row) -> set[str]:
    found = {f"gcc-{row.kernel_gcc}", f"g++-{row.kernel_gcc}", "gcc"}
    return found | ({"nvidia-cuda-toolkit"} if row.uses_debian_toolkit else set())


def _runtime_packages(row: Row) -> list[str]:
    found = {name for feature in row.features for name in FEATURE_PACKAGES.get(feature, ())}
    return sorted(found | (_compilers(row) if row.has_devel else set()))


def _entry(lock: Path, package: str) -> str:
    """The line of one package in a lock file, with its hashes."""
    lines = lock.read_text().split("\n") if lock.exists() else []
    for at, line in enumerate(lines):
        if line.startswith(f"{package}=="):
            end = next((n for n in range(at + 1, len(lines)) if not lines[n].startswith(" ")), len(lines))
            return "\n".join(lines[at:end])
    return ""
