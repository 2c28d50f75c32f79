"""What is inside a build, in the words of the pages: parts against the row, packages, layers."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainyard.catalog.data import Build, Entry, differences
from trainyard.catalog.measured import BaseImage, DeepSpeed, Layer, Library, Measured, Package
from trainyard.model import Row


@dataclass(frozen=True)
class Line:
    """One line of the contents: what the row asks for and what was measured."""

    name: str
    wanted: str
    got: str
    agrees: bool | None  # None: nothing to compare


#: How the gate's sentences about a part start, where that is not with the part's name.
SENTENCES = {
    "GPU code in torch": ("torch has no code",),
    "cuDNN": ("cuDNN:", "cudnn:"),
    "NCCL": ("NCCL:", "nccl:"),
    "compilers": ("compilers in", "no compiler"),
}


def contents(entry: Entry) -> tuple[Line, ...]:
    """What is inside, against the row.  The gate judges; here is only what it looked at."""
    build = entry.build
    got = _got(entry.row, build.manifest.measured) if build else {}
    judged = differences(entry.row, build) if build else []
    lines = []
    for name, wanted in _wanted(entry.row).items():
        wrong = any(text.startswith(SENTENCES.get(name, (f"{name}:",))) for text in judged)
        lines.append(
            Line(name, wanted or "none", got.get(name) or "none", None if build is None else not wrong)
        )
    if build:
        lines += [Line(name, "", text, None) for name, text in _facts(build.manifest.measured).items()]
    return tuple(lines)


def _wanted(row: Row) -> dict[str, str | None]:
    return {
        "operating system": row.base.name,
        "Python": row.python,
        "torch": row.torch.version,
        "torch's build": row.torch.build,
        "torch's CUDA": row.torch.cuda,
        "GPU code in torch": ", ".join(row.sm_archs),
        "cuDNN": row.cudnn,
        "NCCL": row.nccl,
        "DeepSpeed": row.deepspeed,
        "compilers": "yes" if row.has_devel else None,
    }


def _got(row: Row, found: Measured) -> dict[str, str | None]:
    return {
        "operating system": found.os,
        "Python": found.python,
        "torch": found.torch.version,
        # The build on PyPI does not name itself; the gate takes it as the row's, too.
        "torch's build": found.torch.local or row.torch.build,
        "torch's CUDA": found.torch.cuda,
        "GPU code in torch": ", ".join(found.torch.archs),
        "cuDNN": _version(found.cudnn),
        "NCCL": _version(found.nccl),
        "DeepSpeed": _version(found.deepspeed),
        "compilers": ", ".join(found.compilers),
    }


def _facts(found: Measured) -> dict[str, str]:
    """What no row asks for."""
    return {
        "glibc": found.glibc,
        "FSDP1, FSDP2": f"{_yes(found.torch.fsdp)}, {_yes(found.torch.fsdp2)}",
        "packages": f"{len(found.pip)} Python, {len(found.apt)} Debian",
    }


def _version(part: Library | DeepSpeed | None) -> str | None:
    return part.version if part else None


def _yes(there: bool) -> str:
    return "yes" if there else "no"


def biggest(build: Build, most: int = 15) -> tuple[tuple[str, Package], ...]:
    """The biggest packages with their installer; empty where the manifest tells no sizes."""
    packages = build.manifest.measured.packages
    if packages is None:
        return ()
    found = [("Python", one) for one in packages.pip] + [("Debian", one) for one in packages.apt]
    return tuple(sorted(found, key=lambda item: (-item[1].bytes, item[1].name))[:most])


def layer_name(layer: Layer, base: BaseImage) -> str:
    """A layer in a few words, from the instruction that made it."""
    text = layer.created_by.removesuffix("# buildkit").strip()
    if not text:
        return f"base: {base.name}"
    if text.startswith("COPY"):
        return text.strip()
    if installed := re.search(r"apt-get install ((?:-\S+ )*)([^;&]+)", text):
        return f"apt-get install, {len(installed[2].split())} packages"
    if "uv pip install" in text or "pip install" in text:
        return "Python packages of the lock"
    return " ".join(text.split())
