"""Measure an image from inside; runs under the image's own Python, in a throwaway container.

:mod:`trainyard.manifest` sends this file, behind the source of :mod:`trainyard.fatbin`, to
``python -``.  So it may use the image's packages and the standard library, nothing else, and it
prints one JSON object.  It reports what it sees; judging is the gate's work.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import heapq
import importlib.metadata
import json
import os
import platform
import stat
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def measure() -> dict[str, Any]:
    """Everything that the manifest says about the inside of the image."""
    sizes = files()  # before anything that measuring itself may write

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
        "packages": {"pip": pip_details(), "apt": apt_details()},
        "files": sizes,
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


#: Files that the manifest lists by name; the rest only counts in its folder.
BIGGEST = 200
#: A License field that is longer than this is the licence's text, not its name.
LICENCE_NAME = 120
DPKG_FIELDS = ("Package", "Version", "Architecture", "source:Package", "source:Version", "Installed-Size")


def pip_details() -> list[dict[str, Any]]:
    """Each Python package: version, licence as declared, bytes, and the hash of its RECORD.

    RECORD lists every file that the installer wrote, with its sha256, so its own hash stands for
    the package as it lies in the image:
    https://packaging.python.org/en/latest/specifications/recording-installed-packages/
    """
    found = []
    for package in importlib.metadata.distributions():
        record = package.read_text("RECORD")
        sizes = [line.rsplit(",", 1)[-1] for line in (record or "").splitlines()]
        found.append(
            {
                "name": package.metadata["Name"],
                "version": package.version,
                "licence": pip_licence(package.metadata),
                "record_sha256": hashlib.sha256(record.encode()).hexdigest() if record else None,
                "bytes": sum(int(size) for size in sizes if size.isdecimal()),
            }
        )
    return sorted(found, key=lambda one: (one["name"].lower(), one["version"]))


def pip_licence(metadata: Any) -> str | None:
    """What the package says of itself: an SPDX expression, else a name, else a classifier.

    https://peps.python.org/pep-0639/ replaces the free License field and the classifiers.
    """
    expression, name = (
        " ".join((metadata.get(key) or "").split()) for key in ("License-Expression", "License")
    )
    if expression:
        return expression
    if name and name != "UNKNOWN" and len(name) <= LICENCE_NAME:
        return name
    parts = [
        value.split(" :: ") for value in metadata.get_all("Classifier") or () if value.startswith("License")
    ]
    names = [value[-1] for value in parts if value[-1] != "OSI Approved"]
    return " / ".join(names) or None


def apt_details() -> list[dict[str, Any]]:
    """Each Debian package: version, source, licences where they can be read, bytes, and a hash.

    The hash is the sha256 of dpkg's own list of the package's files with their md5 sums.
    """
    layout = "\\t".join(f"${{{field}}}" for field in DPKG_FIELDS) + "\\n"
    done = subprocess.run(["dpkg-query", "-W", "-f", layout], text=True, capture_output=True, check=True)
    found = []
    for line in done.stdout.splitlines():
        name, version, architecture, source, source_version, kibibytes = line.split("\t")
        found.append(
            {
                "name": name,
                "version": version,
                "architecture": architecture,
                "source": source,
                "source_version": source_version,
                "licences": debian_licences(Path("/usr/share/doc", name, "copyright")),
                "md5sums_sha256": sha256(
                    Path(f"/var/lib/dpkg/info/{name}.md5sums"),
                    Path(f"/var/lib/dpkg/info/{name}:{architecture}.md5sums"),
                ),
                "bytes": int(kibibytes or 0) * 1024,
            }
        )
    return found


def debian_licences(file: Path) -> list[str]:
    """The licence names of a machine-readable copyright file; none where it is free text.

    https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
    """
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return []
    if not lines or not lines[0].startswith("Format") or "copyright-format" not in lines[0]:
        return []
    names = {line.partition(":")[2].strip() for line in lines if line.lower().startswith("license:")}
    return sorted(names - {""})


def sha256(*candidates: Path) -> str | None:
    """The hash of the first of these files that is there."""
    for file in candidates:
        with contextlib.suppress(OSError):
            return hashlib.sha256(file.read_bytes()).hexdigest()
    return None


def files(root: str = "/") -> dict[str, Any]:
    """Where the bytes are: the biggest files, and the sum of each folder of the second level.

    A hard link counts once.  What the engine puts into a container is not the image's.
    """
    mounts = {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    engines = mounts - {"/"} | {"/.dockerenv"}
    base = root.rstrip("/")
    biggest: list[tuple[int, str]] = []
    folders: dict[str, int] = {}
    linked: set[tuple[int, int]] = set()
    count = 0
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        top = "/" + "/".join(folder.removeprefix(base).split("/")[1:3])
        with contextlib.suppress(PermissionError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.path in engines:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                    continue
                facts = entry.stat(follow_symlinks=False)
                inode = (facts.st_dev, facts.st_ino)
                if not stat.S_ISREG(facts.st_mode) or inode in linked:
                    continue
                if facts.st_nlink > 1:
                    linked.add(inode)
                count += 1
                folders[top] = folders.get(top, 0) + facts.st_size
                item = (facts.st_size, entry.path.removeprefix(base))
                (heapq.heappush if len(biggest) < BIGGEST else heapq.heappushpop)(biggest, item)
    return {
        "count": count,
        "bytes": sum(folders.values()),
        "folders": largest_first((size, path) for path, size in folders.items()),
        "biggest": largest_first(biggest),
    }


def largest_first(sizes: Iterable[tuple[int, str]]) -> list[dict[str, Any]]:
    return [{"path": path, "bytes": size} for size, path in sorted(sizes, key=lambda one: (-one[0], one[1]))]


if __name__ == "__main__":
    print(json.dumps(measure()))
