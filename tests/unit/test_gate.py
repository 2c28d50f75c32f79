"""The gate names each thing in which a measured image differs from its row."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from shipped import BY_ID, IDS, ROWS

from trainyard import gate
from trainyard.model import Row

ROW = BY_ID["cu121-pt29"]
DEVEL = BY_ID["cu121-pt29-devel"]
CPU = BY_ID["cpu-pt213"]
#: Ops of ROW without GPU code.
HOST_OPS = ("async_io", "cpu_adagrad", "cpu_adam", "cpu_lion", "deepspeed_shm_comm", "utils")


def manifest(row: Row) -> dict[str, Any]:
    """What the probe prints in an image that is just what the row says."""
    site = row.site_packages
    library = {"nccl": row.nccl, "cudnn": row.cudnn and ".".join(row.cudnn.split(".")[:3])}
    deepspeed = {
        "version": row.deepspeed,
        "accelerator": row.accelerator,
        "torch": row.torch.minor,
        "ops": {op: op_facts(row, op) for op in row.ops},
    }
    measured: dict[str, Any] = {
        "os": row.base.name,
        "glibc": row.base.glibc,
        "python": f"{row.python}.4",
        "torch": {
            "version": row.torch.version,
            "local": row.torch.build,
            "cuda": row.torch.cuda,
            "archs": [] if row.is_cpu else [*row.sm_archs, "compute_120"],
        },
        "deepspeed": deepspeed if row.has_deepspeed else None,
        "compilers": ["gcc", "g++", "nvcc"] if row.has_devel else [],
    }
    for name, version in library.items():
        files = [f"{site}/nvidia/{name}/lib/lib{name}.so.2"]
        measured[name] = {"version": version, "files": files} if version else None
    config = {"Env": ["PATH=/opt/venv/bin:/usr/bin", "VIRTUAL_ENV=/opt/venv"]}
    return {"id": row.id, "platform": row.platform, "config": config, "measured": measured}


def op_facts(row: Row, op: str) -> dict[str, Any]:
    gpu = not row.is_cpu and op not in HOST_OPS
    return {
        "loads": True,
        "prebuilt": True,
        "file": f"{row.site_packages}/deepspeed/ops/{op}_op.so",
        "elf": list(row.sm_archs) if gpu else [],
        "ptx": [row.sm_archs[-1]] if gpu else [],
    }


def differences(row: Row, change: Callable[[dict[str, Any]], object]) -> list[str]:
    """What the gate says after one change to what was measured."""
    changed = copy.deepcopy(manifest(row))
    change(changed["measured"])
    return gate.differences(row, changed)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_an_image_that_is_what_its_row_says_passes(row: Row) -> None:
    assert gate.differences(row, manifest(row)) == []


VERSIONS = {
    "operating system": (("os",), "debian-12", "operating system: the row says debian-13"),
    "Python": (("python",), "3.12.9", "Python: the row says 3.13, the image has 3.12"),
    "torch": (("torch", "version"), "2.9.0", "torch: the row says 2.9.1, the image has 2.9.0"),
    "torch's build": (("torch", "local"), "cu126", "torch's build: the row says cu128, the image has cu126"),
    "torch's CUDA": (("torch", "cuda"), "12.6", "torch's CUDA: the row says 12.8, the image has 12.6"),
    "torch without CUDA": (("torch", "cuda"), None, "torch's CUDA: the row says 12.8, the image has none"),
    "cuDNN": (("cudnn", "version"), "9.8.0", "cuDNN: the row says 9.10.2, the image has 9.8.0"),
    "no cuDNN": (("cudnn",), None, "cuDNN: the row says 9.10.2, the image has none"),
    "NCCL": (("nccl", "version"), "2.27.3", "NCCL: the row says 2.27.5, the image has 2.27.3"),
    "no NCCL": (("nccl",), None, "NCCL: the row says 2.27.5, the image has none"),
    "DeepSpeed": (("deepspeed", "version"), "0.18.8", "DeepSpeed: the row says 0.18.9, the image has 0.18.8"),
    "no DeepSpeed": (("deepspeed",), None, "DeepSpeed: the row says 0.18.9, the image has none"),
}


@pytest.mark.parametrize(("path", "value", "said"), VERSIONS.values(), ids=VERSIONS)
def test_a_version_that_differs_is_named_with_both_sides(
    path: tuple[str, ...], value: object, said: str
) -> None:
    def change(measured: dict[str, Any]) -> None:
        for step in path[:-1]:
            measured = measured[step]
        measured[path[-1]] = value

    (found,) = differences(ROW, change)
    assert found.startswith(said)


def test_a_torch_wheel_of_pypi_without_a_local_version_passes() -> None:
    assert differences(ROW, lambda m: m["torch"].update(local="")) == []


def test_cuda_libraries_in_a_cpu_image_are_named() -> None:
    found = differences(CPU, lambda m: m.update(nccl={"version": "2.27.5", "files": ["/a"]}))
    assert found == ["NCCL: the row says none, the image has 2.27.5"]


def test_deepspeed_in_a_base_image_is_named() -> None:
    base = BY_ID["cu121-pt29-base"]
    there = manifest(ROW)["measured"]["deepspeed"]
    found = differences(base, lambda m: m.update(deepspeed=there))
    assert found == ["DeepSpeed: the row says none, the image has 0.18.9"]


@pytest.mark.parametrize("name", ["nccl", "cudnn"])
def test_a_second_copy_of_a_library_is_named_with_both_paths(name: str) -> None:
    extra = f"/usr/lib/x86_64-linux-gnu/lib{name}.so.2"
    (found,) = differences(ROW, lambda m: m[name]["files"].append(extra))
    assert found.startswith(f"{name}: more than one copy: ")
    assert extra in found
    assert ROW.site_packages in found


def test_an_architecture_that_torch_has_no_code_for_is_named() -> None:
    (found,) = differences(ROW, lambda m: m["torch"].update(archs=["sm_80", "sm_86", "sm_100"]))
    assert found == "torch has no code for sm_90; it has sm_80, sm_86, sm_100"


def test_code_for_an_earlier_minor_of_the_same_major_is_enough_for_torch() -> None:
    assert differences(ROW, lambda m: m["torch"].update(archs=["sm_80", "sm_90"])) == []
    (found,) = differences(ROW, lambda m: m["torch"].update(archs=["sm_86", "sm_90"]))
    assert "torch has no code for sm_80" in found


def test_architecture_specific_code_of_torch_counts_for_exactly_its_own_gpu() -> None:
    assert differences(ROW, lambda m: m["torch"].update(archs=["sm_80", "sm_90a"])) == []
    row = replace(ROW, gpu_archs=("10.3",))
    found = list(gate._stack(row, manifest(row)["measured"] | {"torch": torch_with("sm_100a")}))
    assert found == ["torch has no code for sm_103; it has sm_100a"]


def torch_with(*archs: str) -> dict[str, Any]:
    torch: dict[str, Any] = manifest(ROW)["measured"]["torch"]
    return torch | {"archs": list(archs)}


# -- kernels -------------------------------------------------------------------------------


def test_kernels_for_another_accelerator_are_named() -> None:
    (found,) = differences(ROW, lambda m: m["deepspeed"].update(accelerator="cpu"))
    assert found == "kernels: built for accelerator cpu, the row says cuda"


def test_kernels_built_against_another_torch_are_named() -> None:
    (found,) = differences(ROW, lambda m: m["deepspeed"].update(torch="2.8"))
    assert found == "kernels: built against torch 2.8, the image has 2.9"


def test_a_missing_op_is_named() -> None:
    assert differences(ROW, lambda m: m["deepspeed"]["ops"].pop("fused_adam")) == [
        "kernels: op fused_adam is missing"
    ]


def test_every_missing_op_is_named() -> None:
    found = differences(ROW, lambda m: m["deepspeed"]["ops"].clear())
    assert found == [f"kernels: op {op} is missing" for op in ROW.ops]


def test_an_op_that_nobody_asked_for_is_named() -> None:
    extra = op_facts(ROW, "evoformer_attn")
    found = differences(ROW, lambda m: m["deepspeed"]["ops"].update(evoformer_attn=extra))
    assert found == ["kernels: op evoformer_attn is there, but the row does not ask for it"]


def test_an_op_that_does_not_load_is_named_with_its_error() -> None:
    error = "ImportError: libaio.so.1: cannot open shared object file"
    broken = {"loads": False, "error": error}
    found = differences(ROW, lambda m: m["deepspeed"]["ops"].update(async_io=broken))
    assert found == [f"kernels: op async_io does not load: {error}"]


def test_an_op_that_was_compiled_at_run_time_is_named_with_its_file() -> None:
    there = {"prebuilt": False, "file": "/tmp/extensions/cpu_adam.so"}
    found = differences(ROW, lambda m: m["deepspeed"]["ops"]["cpu_adam"].update(there))
    assert found == ["kernels: op cpu_adam was compiled at run time: /tmp/extensions/cpu_adam.so"]


@pytest.mark.parametrize("archs", [["sm_80", "sm_86"], ["sm_80", "sm_86", "sm_90", "sm_100"], ["sm_75"]])
def test_an_op_with_code_for_other_gpus_is_named(archs: list[str]) -> None:
    found = differences(ROW, lambda m: m["deepspeed"]["ops"]["fused_adam"].update(elf=archs))
    assert found == [
        f"kernels: op fused_adam has code for {', '.join(archs)}, the row says sm_80, sm_86, sm_90"
    ]


def test_gpu_code_in_an_op_of_a_cpu_image_is_named() -> None:
    (found,) = differences(CPU, lambda m: m["deepspeed"]["ops"]["cpu_adam"].update(elf=["sm_90"]))
    assert found.startswith("kernels: op cpu_adam has code for sm_90")


# -- what must not be there ----------------------------------------------------------------


@pytest.mark.parametrize("row", [ROW, CPU, BY_ID["cu121-pt29-base"]], ids=lambda row: row.id)
def test_a_compiler_in_a_runtime_image_is_named(row: Row) -> None:
    found = differences(row, lambda m: m.update(compilers=["cc", "gcc"]))
    assert found == ["compilers in a runtime image: cc, gcc"]


def test_a_devel_image_without_a_compiler_is_named() -> None:
    assert differences(DEVEL, lambda m: m.update(compilers=[])) == ["no compiler in a -devel image"]


@pytest.mark.parametrize("name", ["http_proxy", "HTTPS_PROXY", "no_proxy", "ALL_PROXY"])
def test_a_proxy_setting_in_the_environment_is_named(name: str) -> None:
    found = manifest(ROW)
    found["config"]["Env"].append(f"{name}=http://proxy:3128")
    assert gate.differences(ROW, found) == [f"proxy settings in the image's environment: {name}"]


def test_all_differences_are_told_at_once() -> None:
    def change(measured: dict[str, Any]) -> None:
        measured["torch"]["version"] = "2.8.0"
        measured["compilers"] = ["gcc"]
        measured["deepspeed"]["ops"].pop("utils")

    assert len(differences(ROW, change)) == 3


def test_an_image_for_another_platform_is_refused() -> None:
    found = manifest(ROW) | {"platform": "linux/arm64"}
    assert gate.differences(ROW, found) == [
        "platform: the row says linux/amd64, the image is for linux/arm64"
    ]
