"""The gate: does what was measured agree with the row?  Only then may a tag move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainyard.model import Row


def differences(row: Row, manifest: dict[str, Any]) -> list[str]:
    """Each difference as a sentence; an empty list means that the image is what the row says."""
    measured = manifest["measured"]
    return [
        *_platform(row, manifest),
        *_stack(row, measured),
        *_deepspeed(row, measured),
        *_contents(row, measured),
        *_environment(manifest.get("config") or {}),
    ]


def _platform(row: Row, manifest: dict[str, Any]) -> Iterator[str]:
    # A manifest without one is from before there was more than one.
    if (found := manifest.get("platform", "linux/amd64")) != row.platform:
        yield f"platform: the row says {row.platform}, the image is for {found}"


def _stack(row: Row, measured: dict[str, Any]) -> Iterator[str]:
    torch = measured["torch"]
    expected = [
        ("operating system", row.base.name, measured["os"]),
        ("Python", row.python, ".".join(measured["python"].split(".")[:2])),
        ("torch", row.torch.version, torch["version"]),
        ("torch's build", row.torch.build, torch["local"] or row.torch.build),
        ("torch's CUDA", row.torch.cuda, torch["cuda"]),
        # cuDNN reports three numbers, its package four.
        ("cuDNN", row.cudnn and row.cudnn.rsplit(".", 1)[0], _version(measured["cudnn"])),
        ("NCCL", row.nccl, _version(measured["nccl"])),
        ("DeepSpeed", row.deepspeed, _version(measured["deepspeed"])),
    ]
    for name, wanted, got in expected:
        if wanted != got:
            yield f"{name}: the row says {wanted or 'none'}, the image has {got or 'none'}"
    for name in ("cudnn", "nccl"):
        if measured[name] and len(measured[name]["files"]) > 1:
            yield f"{name}: more than one copy: {', '.join(measured[name]['files'])}"
    if missing := [arch for arch in row.sm_archs if not _runs(arch, torch["archs"])]:
        yield f"torch has no code for {', '.join(missing)}; it has {', '.join(torch['archs'])}"


def _deepspeed(row: Row, measured: dict[str, Any]) -> Iterator[str]:
    found = measured["deepspeed"]
    if not (row.deepspeed and found):
        return
    if found["accelerator"] != row.accelerator:
        yield f"kernels: built for accelerator {found['accelerator']}, the row says {row.accelerator}"
    if found["torch"] != row.torch.minor:
        yield f"kernels: built against torch {found['torch']}, the image has {row.torch.minor}"
    for op in sorted(set(row.ops) - set(found["ops"])):
        yield f"kernels: op {op} is missing"
    for op in sorted(set(found["ops"]) - set(row.ops)):
        yield f"kernels: op {op} is there, but the row does not ask for it"
    for op, facts in found["ops"].items():
        if not facts["loads"]:
            yield f"kernels: op {op} does not load: {facts['error']}"
        elif not facts["prebuilt"]:
            yield f"kernels: op {op} was compiled at run time: {facts['file']}"
        elif facts["elf"] and set(facts["elf"]) != set(row.sm_archs):
            yield (
                f"kernels: op {op} has code for {', '.join(facts['elf'])}, "
                f"the row says {', '.join(row.sm_archs)}"
            )


def _contents(row: Row, measured: dict[str, Any]) -> Iterator[str]:
    if measured["compilers"] and not row.has_devel:
        yield f"compilers in a runtime image: {', '.join(measured['compilers'])}"
    if row.has_devel and not measured["compilers"]:
        yield "no compiler in a -devel image"


def _environment(config: dict[str, Any]) -> Iterator[str]:
    # The image's own, and not what a container has: the docker client adds the user's proxies there
    # https://docs.docker.com/engine/cli/proxy/
    names = [one.partition("=")[0] for one in config.get("Env") or ()]
    leaked = [name for name in names if name.lower().endswith("_proxy")]
    if leaked:
        yield f"proxy settings in the image's environment: {', '.join(leaked)}"


def _version(part: dict[str, Any] | None) -> str | None:
    return part["version"] if part else None


def _runs(arch: str, available: list[str]) -> bool:
    """A cubin runs on its own major at the same or a later minor: sm_80 code covers sm_86.

    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#binary-compatibility
    Architecture-specific code (sm_90a) runs on its own GPU only.
    """
    number = int(arch.removeprefix("sm_"))
    plain = [code.removeprefix("sm_") for code in available if code.startswith("sm_")]
    codes = [int(code) for code in plain if code.isdecimal()]
    return f"{number}a" in plain or any(c // 10 == number // 10 and c <= number for c in codes)
