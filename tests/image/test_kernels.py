"""DeepSpeed's prebuilt ops: all there, for the right accelerator, GPUs and instruction set."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import capstone
import pytest
from containers import VENV, Image

from trainyard import fatbin

pytestmark = pytest.mark.only("has_deepspeed")

#: Ops that run on the GPU, so their library must hold GPU code (others are plain C++).
GPU_OPS = re.compile(r"fused_|transformer|quantizer|random_ltd|inference|ragged|evoformer|cutlass")

RECORD = """
import json
from deepspeed.git_version_info_installed import accelerator_name, installed_ops, torch_info
ops = sorted(op for op, installed in installed_ops.items() if installed)
print(json.dumps([accelerator_name, ops, torch_info]))
"""

# PATH and TORCH_EXTENSIONS_DIR leave no way to compile; mapped files tell what was loaded.
LOAD = """
import json, sys
from deepspeed.ops.op_builder.all_ops import ALL_OPS
before = set(line.split(maxsplit=5)[-1].strip() for line in open("/proc/self/maps"))
module = ALL_OPS[sys.argv[1]].load(verbose=False)
after = set(line.split(maxsplit=5)[-1].strip() for line in open("/proc/self/maps"))
file = getattr(module, "__file__", None)
print(json.dumps([file, sorted(path for path in after - before if "/deepspeed/" in path)]))
"""


def load(image: Image, op: str, user: str = "") -> str:
    """Load an op as DeepSpeed does, with no compiler in reach; return the file it came from."""
    env = {
        "PATH": f"{VENV}/bin",
        "TORCH_EXTENSIONS_DIR": "/nonexistent",
        "DS_ACCELERATOR": image.row.accelerator,
    }
    out = image.python(LOAD, op, env=env, user=user).ok()
    file, mapped = json.loads(out.strip().splitlines()[-1])
    return str(file or mapped[0])


def record(image: Image) -> list[Any]:
    """What DeepSpeed's wheel says of itself."""
    found: list[Any] = json.loads(image.python(RECORD).ok().strip().splitlines()[-1])
    return found


def test_the_wheel_holds_the_rows_ops_for_the_rows_accelerator(image: Image) -> None:
    accelerator, ops, _ = record(image)
    assert accelerator == image.row.accelerator
    assert ops == sorted(image.row.ops)


def test_the_wheel_was_built_for_the_rows_torch(image: Image) -> None:
    """DeepSpeed compares major.minor when an op is loaded, and refuses others."""
    _, _, torch_info = record(image)
    assert torch_info["version"] == image.row.torch.minor


def test_op_loads_prebuilt(image: Image, op: str) -> None:
    assert load(image, op).startswith(f"{image.row.site_packages}/deepspeed/")


def test_ops_load_for_an_unprivileged_user(image: Image) -> None:
    assert load(image, "cpu_adam", user="12345:12345").startswith(image.row.site_packages)


def test_ds_report_lists_the_ops_as_installed(image: Image) -> None:
    report = image.exec("ds_report", env={"DS_ACCELERATOR": image.row.accelerator}).ok()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", report)
    listed = dict(re.findall(r"^(\w+) \.* *\[(\w+)\]", plain, re.MULTILINE))
    assert {op for op, state in listed.items() if state == "YES"} == set(image.row.ops)


def op_files(image: Image) -> list[str]:
    """Every op library in the image."""
    found = image.exec(f"find {image.row.site_packages}/deepspeed -name '*.so'").ok().split()
    assert len(found) >= len(image.row.ops)
    return found


@pytest.mark.only("is_cpu")
def test_cpu_ops_hold_no_gpu_code(image: Image, tmp_path: Path) -> None:
    for file in op_files(image):
        assert fatbin.archs(image.container.fetch(file, tmp_path)) == {"elf": set(), "ptx": set()}


@pytest.mark.only("builds_cuda_kernels")
def test_cuda_ops_are_compiled_for_exactly_the_rows_gpus(image: Image, tmp_path: Path) -> None:
    row = image.row
    machine = {int(name.removeprefix("sm_")) for name in row.sm_archs}
    ptx = {int(a[:-4].replace(".", "")) for a in row.gpu_archs if a.endswith("+PTX")}
    seen = set()
    for file in op_files(image):
        found = fatbin.archs(image.container.fetch(file, tmp_path))
        name = Path(file).name
        if GPU_OPS.search(name) or found["elf"] or found["ptx"]:
            assert found == {"elf": machine, "ptx": ptx}, name
            seen.add(name.split(".")[0].removesuffix("_op"))
    assert {op for op in row.ops if GPU_OPS.search(op)} <= seen


def needs_avx512(library: Path) -> list[str]:
    """Instructions of the EVEX encoding, which only processors with AVX-512 have."""
    disassembler = capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
    disassembler.skipdata = True
    found = []
    for code in fatbin.sections(library, b".text"):
        for at, size, name, operands in disassembler.disasm_lite(code, 0):
            if name != ".byte" and code[at : at + size].lstrip(b"\x67\x64\x65")[:1] == b"\x62":
                found.append(f"{at:#x}: {name} {operands}")
    return found


def test_cpu_code_keeps_to_the_rows_instruction_set(image: Image, tmp_path: Path) -> None:
    """No AVX-512 unless the row says so: elsewhere it would end in SIGILL, not in slowness."""
    allowed = image.row.cpu_isa == "x86-64-v4"
    for file in op_files(image):
        # It has AVX-512 functions of its own and asks the processor before it uses them
        # (vector_kernel_level in csrc/cpu/comm/shm_interface.cpp).
        if Path(file).name.startswith("deepspeed_shm_comm"):
            continue
        found = needs_avx512(image.container.fetch(file, tmp_path))
        assert allowed or not found, f"{Path(file).name}: {found[:3]}"


STEP = """
import json, sys, torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
kind, device = sys.argv[1:]
torch.manual_seed(0)
start = torch.randn(1031)
settings = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
def train(make, where):
    weight = torch.nn.Parameter(start.clone().to(where))
    optimizer = make([weight])
    for step in range(5):
        weight.grad = torch.sin(weight.detach() * (step + 1))
        optimizer.step()
    return weight.detach().cpu()
ours = {"FusedAdam": lambda p: FusedAdam(p, adam_w_mode=True, **settings),
        "DeepSpeedCPUAdam": lambda p: DeepSpeedCPUAdam(p, adamw_mode=True, **settings)}[kind]
difference = (train(ours, device) - train(lambda p: torch.optim.AdamW(p, **settings), device)).abs()
print(json.dumps(difference.max().item()))
"""


@pytest.mark.only("is_cpu")
@pytest.mark.parametrize("optimizer", ["FusedAdam", "DeepSpeedCPUAdam"])
def test_adam_computes_what_torch_computes(image: Image, optimizer: str) -> None:
    out = image.python(STEP, optimizer, "cpu", env={"TORCH_EXTENSIONS_DIR": "/nonexistent"}).ok()
    assert float(out.strip().splitlines()[-1]) < 1e-5


@pytest.mark.only("gpus_given")
@pytest.mark.parametrize(("optimizer", "device"), [("FusedAdam", "cuda"), ("DeepSpeedCPUAdam", "cpu")])
def test_adam_computes_what_torch_computes_on_a_gpu(image: Image, optimizer: str, device: str) -> None:
    out = image.python(STEP, optimizer, device, env={"TORCH_EXTENSIONS_DIR": "/nonexistent"}).ok()
    assert float(out.strip().splitlines()[-1]) < 1e-5
