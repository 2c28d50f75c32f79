#!/usr/bin/env python3
"""Compile DeepSpeed's ops ahead of time into one wheel; run in a Dockerfile's kernels stage.

    build_wheel.py --accelerator cuda --ops async_io,fused_adam --lock requirements.lock \
        --key KEY --out /wheels

It runs under the Python that has torch.  What it guarantees, or it fails and names the op:

* the ops inside the wheel are exactly those asked for (DeepSpeed's setup.py skips an
  incompatible op in silence: https://github.com/deepspeedai/DeepSpeed/issues/6920);
* each op was recorded for the accelerator asked for, not for the one that the build host
  seems to have (https://github.com/deepspeedai/DeepSpeed/issues/7011);
* each op loads from where pip installs it, with no compiler on PATH;
* CPU code uses the named baseline instruction set (see bin/gcc);
* there are no debug symbols.

Finished wheels are kept in --cache under KEY plus what only the stage itself knows (compiler,
nvcc and C library versions), so another variant or a rebuild compiles nothing.  pip's own wheel
cache is not used: it ignores the DS_BUILD_* flags.  Standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

# op name -> the middle of its DS_BUILD_* switch, where that is not the op's own name in capitals.
# https://www.deepspeed.ai/tutorials/advanced-install/ and BUILD_VAR in each op_builder/*.py
SWITCHES = {
    "async_io": "AIO",
    "deepspeed_shm_comm": "SHM_COMM",
    "deepspeed_ccl_comm": "CCL_COMM",
    "deepspeed_not_implemented": "NOT_IMPLEMENTED",
}

LOAD_OP = """
import sys, sysconfig
from deepspeed.ops.op_builder.all_ops import ALL_OPS
for name in sys.argv[1:]:
    try:
        loaded = ALL_OPS[name].load(verbose=False)
    except Exception as error:
        sys.exit(f"{name}: {type(error).__name__}: {error}")
    print(name, getattr(loaded, "__file__", "?"), flush=True)
"""


def main() -> None:
    args = parse_args()
    ops = tuple(sorted(filter(None, args.ops.split(","))))
    store = args.cache / f"{args.key}-{measured_key(args.accelerator)}"
    wheel = next(iter(store.glob("*.whl")), None)
    if wheel:
        say(f"reusing the wheel of key {store.name}")
        check(wheel, args.accelerator, ops)
    else:
        wheel = compile_wheel(args, ops)
        check(wheel, args.accelerator, ops)  # first: a wheel that is wrong must not be kept
        wheel = keep(wheel, store)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        shutil.copy2(wheel, args.out)
    if args.unpack:
        install(wheel, args.unpack)
    say(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, {len(ops)} ops for {args.accelerator}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--accelerator", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--ops", required=True, help="comma-separated, DeepSpeed's names")
    parser.add_argument("--lock", type=Path, required=True, help="requirements file with hashes")
    parser.add_argument("--key", required=True, help="what identifies the inputs of the wheel")
    parser.add_argument("--out", type=Path, help="folder for the wheel")
    parser.add_argument("--unpack", type=Path, help="folder to install the wheel into")
    parser.add_argument("--cache", type=Path, default=Path("/cache/kernels"))
    return parser.parse_args()


def say(text: str) -> None:
    print(f"kernels: {text}", flush=True)


def fail(text: str) -> None:
    sys.exit(f"kernels: FAILED: {text}")


def measured_key(accelerator: str) -> str:
    """Hash what the stage's own packages decide and no lock file names."""
    facts = [platform.python_version(), *platform.libc_ver(), output([os.environ["KERNEL_GXX"], "-v"])]
    if accelerator == "cuda":
        facts.append(output([f"{os.environ['CUDA_HOME']}/bin/nvcc", "--version"]))
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]


def output(command: list[str]) -> str:
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True)
    return done.stdout


def compile_wheel(args: argparse.Namespace, ops: tuple[str, ...]) -> Path:
    """Build the wheel in a fixed folder (so that ccache sees the same paths each time)."""
    source = unpack(download(args.lock))
    env = build_env(args.accelerator, ops)
    say(
        f"compiling {', '.join(ops)} with MAX_JOBS={env['MAX_JOBS']} DS_NVCC_THREADS={env['DS_NVCC_THREADS']}"
    )
    wheels = Path(tempfile.mkdtemp(prefix="wheel-"))
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps"]
    command += ["--no-cache-dir", "--no-index", "-w", str(wheels), str(source)]
    log: list[str] = []
    with subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            log.append(line)
            print(line, end="", flush=True)
    if process.returncode:
        fail(why_it_broke(log, process.returncode))
    return next(wheels.glob("deepspeed-*.whl"))


def download(lock: Path) -> Path:
    """Fetch DeepSpeed's sdist, checked against the hash in the lock file."""
    folder = Path(tempfile.mkdtemp(prefix="sdist-"))
    wanted = folder / "deepspeed.lock"
    wanted.write_text(lock_entry(lock.read_text(), "deepspeed"))
    env = os.environ | {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}  # metadata only
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation"]
    command += ["--require-hashes", "--no-binary", "deepspeed", "-d", str(folder), "-r", str(wanted)]
    if subprocess.run(command, env=env).returncode:
        fail(f"could not fetch what {lock.name} names: {wanted.read_text().splitlines()[0]}")
    return next(folder.glob("deepspeed-*.tar.gz"))


def lock_entry(text: str, package: str) -> str:
    """One package's lines of a requirements file: its pin and the hashes that follow it."""
    found = re.search(rf"^{package}==(?:.*\\\n)*.*\n?", text, re.MULTILINE)
    if not found:
        fail(f"the lock file has no entry for {package}")
        raise AssertionError
    return found.group(0)


def unpack(sdist: Path) -> Path:
    root = Path("/build")
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    subprocess.run(["tar", "-xzf", str(sdist), "-C", str(root)], check=True)
    return next(root.glob("deepspeed-*"))


def build_env(accelerator: str, ops: tuple[str, ...]) -> dict[str, str]:
    bin_dir = HERE / "bin"
    jobs, threads = parallelism(len(os.sched_getaffinity(0)), memory_bytes())
    env = dict(os.environ)
    env |= {
        "DS_ACCELERATOR": accelerator,
        "DS_BUILD_OPS": "0",
        "DS_ENABLE_NINJA": "1",
        "DS_NVCC_THREADS": str(threads),
        "MAX_JOBS": str(jobs),
        "CC": str(bin_dir / "gcc"),
        "CXX": str(bin_dir / "g++"),
        "PYTORCH_NVCC": str(bin_dir / "nvcc"),
        "PATH": f"{bin_dir}:{Path(sys.executable).parent}:{os.environ['PATH']}",  # ninja is there
        "LDFLAGS": link_flags(accelerator),
        # torch would put another ccache before ours, which cannot see what our compiler replaces.
        "TORCH_NO_COMPILER_WRAPPER": "1",
        "CCACHE_NOHASHDIR": "1",
        # By default ccache knows a compiler by its time stamp: one that pip or COPY wrote anew, for
        # another checkout say, would look like another compiler.
        "CCACHE_COMPILERCHECK": "content",
        "CCACHE_IGNOREOPTIONS": "--threads=*",  # it does not change what comes out
    }
    for op in ops:
        env[f"DS_BUILD_{SWITCHES.get(op, op.upper())}"] = "1"
    return env


def link_flags(accelerator: str) -> str:
    """Strip debug symbols; on CPU link libaio and libgomp, on CUDA drop libcuda where unused.

    DeepSpeed's CPU builder drops its own link flags, so a prebuilt async_io would not load
    (undefined symbol io_submit; seen in 0.19.8, op_builder/cpu/builder.py).  With CUDA it asks
    for -lcuda, which no image has: only the host's driver brings it.
    """
    if accelerator == "cuda":
        return f"-Wl,--strip-debug -Wl,--as-needed{library_path(Path(os.environ['CUDA_HOME']))}"
    return "-Wl,--strip-debug -Wl,--push-state,--no-as-needed -laio -lgomp -Wl,--pop-state"


def library_path(cuda_home: Path) -> str:
    """Where an op looks for NVIDIA's libraries once it lies in site-packages/deepspeed/ops/NAME/.

    torch loads most of them before any op, but no longer all: its 2.15 wheel does without cuRAND.
    Only where the toolkit comes as wheels: their folder in site-packages has the same name.
    """
    if cuda_home.parent.name != "nvidia":
        return ""
    return f" -Wl,-rpath,$ORIGIN/../../../nvidia/{cuda_home.name}/lib"


def parallelism(cores: int, memory: int) -> tuple[int, int]:
    """Compile jobs, and threads of each nvcc, for so many cores and bytes of memory.

    One nvcc thread peaks at about 3 GB.  Ops are built one after another, and each ends with one
    large file, so nvcc gets two threads (one an architecture) where memory allows: otherwise all
    cores but one wait for that file.  https://github.com/LMCache/LMCache/pull/4733
    """
    budget = max(1, memory // (3 * 1024**3))
    jobs = max(1, min(cores, budget))
    return jobs, 2 if budget >= 2 * jobs else 1


def memory_bytes() -> int:
    """Memory that this stage may use: the machine's, or its control group's where less."""
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limit = min(limit, int(Path("/sys/fs/cgroup", name).read_text()))
        except (OSError, ValueError):
            continue
    return limit


def why_it_broke(log: list[str], code: int) -> str:
    text = "".join(log)
    at = re.findall(r"building '([\w.]+)' extension", text)
    op = at[-1].rsplit(".", 1)[-1].removesuffix("_op") if at else "?"
    if code in (137, -9) or re.search(r"[Kk]ill(ed)? signal", text):
        return f"op {op}: the compiler was killed: out of memory; give the engine more or fewer cores"
    errors = [line.strip() for line in log if re.search(r"error\s*:|undefined reference|cannot find", line)]
    return f"op {op} did not compile: {errors[0] if errors else f'pip ended with {code}'}"


def keep(wheel: Path, store: Path) -> Path:
    """Move the wheel into the store, whole or not at all."""
    store.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=store.parent, prefix=".part-"))
    shutil.copy2(wheel, part)
    shutil.rmtree(store, ignore_errors=True)
    part.rename(store)
    return store / wheel.name


def check(wheel: Path, accelerator: str, ops: tuple[str, ...]) -> None:
    """Install the wheel into a folder of its own and prove its ops."""
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        install(wheel, Path(folder))
        libraries = Path(sysconfig.get_paths()["purelib"], "nvidia")  # where library_path() leads
        if libraries.is_dir():
            Path(folder, "nvidia").symlink_to(libraries)
        env = {"PATH": "/nonexistent", "PYTHONPATH": folder, "DS_ACCELERATOR": accelerator}
        env |= {"HOME": folder, "TORCH_EXTENSIONS_DIR": "/nonexistent"}
        recorded = installed(folder)
        if recorded["accelerator_name"] != accelerator:
            fail(f"the wheel is for accelerator {recorded['accelerator_name']}, asked: {accelerator}")
        got = {name for name, there in recorded["installed_ops"].items() if there}
        if missing := set(ops) - got:
            fail(f"op {', '.join(sorted(missing))} was asked for, but DeepSpeed skipped it as incompatible")
        if extra := got - set(ops):
            fail(f"op {', '.join(sorted(extra))} was built, but nobody asked for it")
        done = subprocess.run(
            [sys.executable, "-c", LOAD_OP, *ops], env=env, cwd=folder, text=True, capture_output=True
        )
        sys.stdout.write(done.stdout)
        if done.returncode:
            fail(f"an op does not load: {last_words(done, ops)}")
        strays = [line for line in done.stdout.splitlines() if "_op" in line and folder not in line]
        if strays:
            fail(f"an op did not load from the wheel: {strays[0]}")


def last_words(done: subprocess.CompletedProcess[str], ops: tuple[str, ...]) -> str:
    """Why LOAD_OP ended; where a signal ended it (SIGILL: a foreign instruction set) it said nothing."""
    if done.returncode < 0:
        loaded = {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
        op = next((op for op in ops if op not in loaded), "?")
        return f"{op}: killed by {signal.Signals(-done.returncode).name}"
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def install(wheel: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", str(folder), str(wheel)], check=True)


def installed(folder: str) -> dict[str, Any]:
    """What the wheel says of itself (deepspeed/git_version_info_installed.py)."""
    scope: dict[str, Any] = {}
    exec(Path(folder, "deepspeed/git_version_info_installed.py").read_text(), scope)
    return {key: scope[key] for key in ("accelerator_name", "installed_ops")}


if __name__ == "__main__":
    main()
