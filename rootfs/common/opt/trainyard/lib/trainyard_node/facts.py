"""Facts about the node a process runs on, as plain data that travels as JSON.

NamedTuple and not dataclass, no pathlib: importing those costs more than everything that is read
here, and the health check has a budget of a few dozen milliseconds.
"""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

UNLIMITED = -1
READ_ONLY = "is on a read-only filesystem"
CACHES = ("TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
_SIOCGIFADDR = 0x8915  # netdevice(7)


class Folder(NamedTuple):
    """A folder that has to be writable: the variable that names it, its path, and what is wrong."""

    variable: str
    path: str
    problem: str


class Facts(NamedTuple):
    """One node, as seen from inside the container.  Sizes are bytes, ``-1`` is unlimited."""

    hostname: str
    image: str
    contents: str
    uid: int
    gpus: int  # GPUs that a process here may use
    gpus_why: str
    host_gpus: int  # GPUs in the machine, whether or not they are in the container
    no_gpus_wanted: bool  # somebody said so: CPU image, empty CUDA_VISIBLE_DEVICES, ...
    driver: str  # version of NVIDIA's kernel driver, or ""
    require_cuda: str  # NVIDIA_REQUIRE_CUDA of the image, or ""
    shm_size: int
    shm_free: int
    memlock: int
    nofile: int
    memory: int
    cores: int
    rdma: bool
    caches: tuple[Folder, ...]
    home: Folder
    interfaces: tuple[tuple[str, str], ...]  # (name, IPv4 or IPv6 address), loopback included


def from_json(data: Mapping[str, Any]) -> Facts:
    """Facts that came over a wire; a missing one raises ``TypeError``."""
    values = dict(data)
    values["caches"] = tuple(Folder(*folder) for folder in values["caches"])
    values["home"] = Folder(*values["home"])
    values["interfaces"] = tuple((name, address) for name, address in values["interfaces"])
    return Facts(**values)


def collect(env: Mapping[str, str], *, ask_driver: bool = True, root: str = "/") -> Facts:
    """Look at this node.

    ``ask_driver`` allows starting ``nvidia-smi`` (it can take a second where no persistence daemon
    runs) when the kernel does not tell the driver's version.  ``root`` is where /dev, /proc and
    /sys are looked up.
    """
    devices = _gpu_devices(root)
    gpus, why = visible_gpus(env, devices)
    shm_size, shm_free = _space(os.path.join(root, "dev/shm"))
    return Facts(
        hostname=socket.gethostname(),
        image=env.get("TRAINYARD_IMAGE", ""),
        contents=env.get("TRAINYARD_CONTENTS", ""),
        uid=os.getuid(),
        gpus=gpus,
        gpus_why=why,
        host_gpus=max(devices, _host_gpus(root)),
        no_gpus_wanted=no_gpus_wanted(env),
        driver=_driver(root, ask=ask_driver and devices > 0),
        require_cuda=env.get("NVIDIA_REQUIRE_CUDA", ""),
        shm_size=shm_size,
        shm_free=shm_free,
        memlock=_limit(resource.RLIMIT_MEMLOCK),
        nofile=_limit(resource.RLIMIT_NOFILE),
        memory=_memory(root),
        cores=_cores(root),
        rdma=os.path.isdir(os.path.join(root, "dev/infiniband")),
        caches=tuple(folder(name, env[name]) for name in CACHES if env.get(name)),
        home=folder("HOME", env.get("HOME", "")),
        interfaces=interfaces(),
    )


# -- GPUs ----------------------------------------------------------------------------------


def visible_gpus(env: Mapping[str, str], devices: int) -> tuple[int, str]:
    """How many GPUs a process may use, and why, from its environment and the device files.

    CUDA reads CUDA_VISIBLE_DEVICES up to the first entry that is not a device:
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#cuda-environment-variables
    A MIG instance has no device file of its own, so those are counted by name.
    """
    if env.get("DS_ACCELERATOR") == "cpu":
        return 0, "DS_ACCELERATOR=cpu"
    cuda = env.get("CUDA_VISIBLE_DEVICES")
    if cuda is not None and cuda != "all":
        entries = [entry.strip() for entry in cuda.split(",")]
        named = 0
        for entry in entries:
            if not entry or entry.startswith("-") or entry == "NoDevFiles":
                break
            named += 1
        mig = any(entry.startswith("MIG-") for entry in entries)
        count = named if mig and devices else min(named, devices)
        return count, f"CUDA_VISIBLE_DEVICES={cuda}, {devices} device files"
    container = env.get("NVIDIA_VISIBLE_DEVICES", "")
    if devices and container.startswith("MIG-"):
        return len(container.split(",")), f"NVIDIA_VISIBLE_DEVICES={container}"
    return devices, f"{devices} device files /dev/nvidia<n>"


def no_gpus_wanted(env: Mapping[str, str]) -> bool:
    """Did somebody say that GPUs are not to be used here?"""
    return (
        env.get("DS_ACCELERATOR") == "cpu"
        or env.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1", "NoDevFiles")
        or env.get("NVIDIA_VISIBLE_DEVICES") in ("none", "void")
    )


def _gpu_devices(root: str) -> int:
    names = _names(os.path.join(root, "dev"))
    return sum(name.startswith("nvidia") and name[6:].isdigit() for name in names)


def _host_gpus(root: str) -> int:
    """GPUs that the host's driver drives; /proc shows them in every container."""
    return len(_names(os.path.join(root, "proc/driver/nvidia/gpus")))


def _driver(root: str, *, ask: bool) -> str:
    """The version of the NVIDIA driver that is loaded: from the kernel, else from nvidia-smi."""
    for line in _read(os.path.join(root, "proc/driver/nvidia/version")).splitlines():
        for word in line.split() if line.startswith("NVRM") else ():
            if word[0].isdigit() and "." in word and word.replace(".", "").isdigit():
                return word
    if not ask:
        return ""
    import subprocess  # costs 10 ms

    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    first = done.stdout.strip().splitlines()[:1]
    return first[0].strip() if first and done.returncode == 0 else ""


# -- memory, limits, cores -----------------------------------------------------------------


def _space(path: str) -> tuple[int, int]:
    try:
        found = os.statvfs(path)
    except OSError:
        return 0, 0
    return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail


def _limit(which: int) -> int:
    soft, _hard = resource.getrlimit(which)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _memory(root: str) -> int:
    """Bytes of memory that this container may use: the cgroup's limit or the machine's."""
    total = 0
    for line in _read(os.path.join(root, "proc/meminfo")).splitlines():
        if line.startswith("MemTotal:"):
            total = int(line.split()[1]) * 1024
    limit = _read(os.path.join(root, "sys/fs/cgroup/memory.max")).strip()
    return min(total, int(limit)) if limit.isdigit() and total else total


def _cores(root: str) -> int:
    """Cores that this process may use: affinity (``--cpuset-cpus``) and quota (``--cpus``)."""
    cores = len(os.sched_getaffinity(0))
    quota = _read(os.path.join(root, "sys/fs/cgroup/cpu.max")).split()
    if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit():
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return cores


# -- folders and interfaces ----------------------------------------------------------------


def folder(variable: str, path: str) -> Folder:
    """Can files be made in this folder, or the folder itself where it does not exist yet?"""
    if not path:
        return Folder(variable, path, "is not set")
    if not os.path.exists(path):
        parent = path
        while parent and not os.path.exists(parent):
            above = os.path.dirname(parent)
            if above == parent:
                break
            parent = above
        if os.access(parent or ".", os.W_OK | os.X_OK):
            return Folder(variable, path, "")
        return Folder(variable, path, "does not exist and cannot be made")
    if not os.path.isdir(path):
        return Folder(variable, path, "is not a folder")
    if not os.access(path, os.W_OK | os.X_OK):
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            return Folder(variable, path, READ_ONLY)
        return Folder(variable, path, f"is not writable for uid {os.getuid()}")
    return Folder(variable, path, "")


def interfaces() -> tuple[tuple[str, str], ...]:
    """Every network interface that has an address, with it; several addresses, several entries."""
    found: list[tuple[str, str]] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _index, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # no IPv4 address
            found.append((name, socket.inet_ntoa(answer[20:24])))
    for line in _read("/proc/net/if_inet6").splitlines():
        words = line.split()
        found.append((words[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[0]))))
    return tuple(found)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _names(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []
