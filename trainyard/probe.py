"""Measure an image from inside; runs under the image's own Python, in a throwaway container.

:mod:`trainyard.manifest` sends this file, behind the source of :mod:`trainyard.fatbin`, to
``python -``.  So it may use the image's packages and the standard library, nothing else, and it
prints one JSON object.  It reports what it sees; judging is the gate's work.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any


def measure() -> dict[str, Any]:
    """Everything that the manifest says about the inside of the image."""
    import torch

    site = Path(torch.__file__).parents[1]
    return {
        "os": os_release(),
        "glibc": platform.libc_ver()[1],
        "python": platform.python_version(),
        "torch": {
            "version": torch.__version__.partition("+")[0],
            "local": torch.__version__.partition("+")[2],
            "cuda": torch.version.cuda,
            "archs": arch_list(torch),
            "distributed": torch.distributed.is_available(),
            "fsdp": has("torch.distributed.fsdp", "FullyShardedDataParallel"),
            "fsdp2": has("torch.distributed.fsdp", "fully_shard"),
        },
        "cudnn": cudnn(site),
        "nccl": nccl(site),
        "deepspeed": deepspeed(site),
        "compilers": [name for name in COMPILERS if on_path(name)],
        "apt": apt_packages(),
        "pip": {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()},
        "environment": sorted(os.environ),
    }


COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "nvcc")

LOAD_OP = """
import sys
from deepspeed.ops.op_builder.all_ops import ALL_OPS
module = ALL_OPS[sys.argv[1]].load(verbose=False)
print(getattr(module, "__file__", ""))
"""


def os_release() -> str:
    fields = dict(
        line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line
    )
    return f"{fields['ID']}-{fields['VERSION_ID']}".replace('"', "")


def arch_list(torch: Any) -> list[str]:
    """The GPU code in torch's own libraries; get_arch_list() is empty where no GPU is."""
    if torch.version.cuda is None:
        return []
    return list(torch._C._cuda_getArchFlags().split())


def has(module: str, name: str) -> bool:
    with contextlib.suppress(ImportError):
        return hasattr(__import__(module, fromlist=[name]), name)
    return False


def on_path(name: str) -> bool:
    return any(os.access(Path(folder, name), os.X_OK) for folder in os.environ["PATH"].split(":"))


def loaded(pattern: str, site: Path) -> list[Path]:
    """Every library of that name that a process could load: in the environment and the system."""
    roots = (site, Path("/usr/lib"), Path("/usr/local"), Path("/opt"))
    return sorted({path.resolve() for root in roots for path in root.rglob(pattern) if path.is_file()})


def cudnn(site: Path) -> dict[str, Any] | None:
    """cuDNN's version as its library answers, not as torch was compiled."""
    files = loaded("libcudnn.so.*", site)
    if not files:
        return None
    number = ctypes.CDLL(str(files[0])).cudnnGetVersion()
    version = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return {"version": version, "files": [str(path) for path in files]}


def nccl(site: Path) -> dict[str, Any] | None:
    """NCCL's version as its library answers; torch.cuda.nccl.version() is compiled in."""
    files = loaded("libnccl.so.*", site)
    if not files:
        return None
    number = ctypes.c_int()
    ctypes.CDLL(str(files[0])).ncclGetVersion(ctypes.byref(number))
    major, rest = divmod(number.value, 10000)
    version = f"{major}.{rest // 100}.{rest % 100}"
    return {"version": version, "files": [str(path) for path in files]}


def deepspeed(site: Path) -> dict[str, Any] | None:
    """DeepSpeed as installed: what the wheel says, and what each op does when it is loaded."""
    record = site / "deepspeed/git_version_info_installed.py"
    if not record.exists():
        return None
    said: dict[str, Any] = {}
    exec(record.read_text(), said)
    ops = sorted(name for name, there in said["installed_ops"].items() if there)
    return {
        "version": importlib.metadata.version("deepspeed"),
        "accelerator": said["accelerator_name"],
        "torch": said["torch_info"]["version"],
        "ops": {op: load_op(op, said["accelerator_name"], site) for op in ops},
    }


def load_op(op: str, accelerator: str, site: Path) -> dict[str, Any]:
    """Load one op in a process of its own that has no compiler to fall back on."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD_OP, op],
        env={
            "PATH": "/nonexistent",
            "HOME": "/tmp",
            "DS_ACCELERATOR": accelerator,
            "TORCH_EXTENSIONS_DIR": "/nonexistent",
        },
        text=True,
        capture_output=True,
    )
    if done.returncode:
        words = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {"loads": False, "error": words[-1]}
    file = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
    return {"loads": True, "file": file, "prebuilt": file.startswith(str(site)) or not file} | code(file)


def code(file: str) -> dict[str, Any]:
    """The GPU architectures really in the op's library."""
    if not file:
        return {"elf": [], "ptx": []}
    found = archs(file)  # type: ignore[name-defined]  # noqa: F821 - from trainyard.fatbin
    return {kind: [f"sm_{number}" for number in sorted(found[kind])] for kind in ("elf", "ptx")}


def apt_packages() -> dict[str, str]:
    done = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Package} ${Version}\n"], text=True, capture_output=True, check=True
    )
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


if __name__ == "__main__":
    print(json.dumps(measure()))
