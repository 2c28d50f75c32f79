"""The shipped matrix becomes rows that agree with the facts."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainyard import compat, resolve
from trainyard.facts import load_facts, older, parts, within
from trainyard.matrix import Stack, load
from trainyard.model import InputError, Row, Toolkit

SHIPPED = Path(__file__).parent.parent.parent / "matrix.yaml"
FACTS = load_facts()
MATRIX = load(SHIPPED)
ROWS = resolve.rows(MATRIX)
BY_ID = {row.id: row for row in ROWS}


def stack(name: str, **changes: object) -> Stack:
    """A shipped stack with some keys changed."""
    data = MATRIX.file.stacks[name].model_dump()
    return Stack.model_validate({**data, **changes})


def findings(name: str, **changes: object) -> list[str]:
    return [text for _, text in compat.check(stack(name, **changes), FACTS)]


def test_the_shipped_matrix_has_five_stacks_of_which_two_are_also_for_arm64() -> None:
    assert len(ROWS) == len(BY_ID) == 3 * (5 + 2)
    assert [row.id for row in ROWS[:3]] == ["cpu-pt213", "cpu-pt213-base", "cpu-pt213-devel"]
    for row in ROWS:
        suffix = {"amd64": "", "arm64": "-arm64"}[row.arch]
        assert row.id == row.stack + suffix + row.variant


def test_an_arm64_row_is_its_twin_for_another_cpu() -> None:
    for row in ROWS:
        if row.arch == "arm64":
            other = BY_ID[row.id.replace("-arm64", "")]
            assert (row.platform, row.cpu_isa) == ("linux/arm64", "armv8.2-a")
            assert dataclasses.replace(row, id=other.id, base=other.base, cpu_isa=other.cpu_isa) == other
    assert {row.stack for row in ROWS if row.arch == "arm64"} == {"cu130-pt213", "cu132-pt215"}


def test_base_variant_holds_nothing_compiled() -> None:
    row = BY_ID["cu121-pt29-base"]
    assert (row.deepspeed, row.ops, row.twin_ops, row.toolkit) == (None, (), (), None)
    assert (row.requirements, row.env) == ((), ())


def test_cu121_uses_the_wheel_for_12_8_and_the_compiler_12_4() -> None:
    row = BY_ID["cu121-pt29"]
    assert row.torch.requirement == "torch==2.9.1"
    assert (row.torch.cuda, row.cuda_level, row.driver_floor) == ("12.8", "12.1", "525.60.13")
    assert row.toolkit == Toolkit("debian", "12.4", 13)
    assert row.kernel_gcc != row.base.gcc
    assert row.sm_archs == ("sm_80", "sm_86", "sm_90")
    assert row.torch_arch_list == "8.0;8.6;9.0+PTX"
    assert (row.cudnn_package, row.nccl_package) == ("nvidia-cudnn-cu12", "nvidia-nccl-cu12")
    assert row.overrides == ()


def test_cuda_13_row() -> None:
    row = BY_ID["cu130-pt213-devel"]
    assert row.toolkit is not None
    assert (row.toolkit.provider, row.toolkit.version, row.toolkit.gcc) == ("pip", "13.0.3", 14)
    assert row.toolkit.requirement is not None
    assert re.fullmatch(r"cuda-toolkit\[[a-z,]*profiler\]==13\.0\.3", row.toolkit.requirement)
    assert (row.driver_floor, row.nccl_package) == ("580", "nvidia-nccl-cu13")
    assert "pin_memory" in row.ops
    assert row.kernel_gcc == row.base.gcc


def test_cpu_row() -> None:
    row = BY_ID["cpu-pt213"]
    assert row.is_cpu
    assert row.torch.requirement == "torch==2.13.0+cpu"
    assert (row.toolkit, row.cudnn, row.nccl, row.overrides) == (None, None, None, ())
    assert row.ops == (
        "async_io",
        "cpu_adagrad",
        "cpu_adam",
        "cpu_lion",
        "deepspeed_shm_comm",
        "fused_adam",
        "pin_memory",
    )
    assert row.twin_ops == ()


def test_twin_has_only_ops_of_its_deepspeed() -> None:
    assert BY_ID["cu121-pt29"].twin_ops == ("cpu_adam", "deepspeed_shm_comm", "fused_adam")
    assert "cpu_lion" in BY_ID["cu130-pt213"].twin_ops


def test_every_op_is_one_of_its_deepspeed() -> None:
    for row in ROWS:
        if row.deepspeed:
            assert set(row.ops) <= set(FACTS.deepspeed.ops_of(row.accelerator, row.deepspeed))
            assert list(row.ops) == sorted(row.ops)


def test_deepspeed_before_0_19_8_gets_setuptools_on_new_python() -> None:
    for row in ROWS:
        old = row.deepspeed is not None and older(row.deepspeed, "0.19.8")
        assert ("setuptools" in row.requirements) == old


def test_curand_is_there_where_the_ops_need_it_and_torch_does_not_bring_it() -> None:
    """Fails once torch's own wheel asks for it again or no row needs it: then the fact can go."""
    needing = {row.id for row in ROWS if any("curand" in name for name in row.requirements)}
    assert needing == {id for id in BY_ID if id.startswith("cu132-pt215") and not id.endswith("-base")}
    for row in ROWS:
        lock = (SHIPPED.parent / "images" / row.id / "requirements.lock").read_text()
        if row.builds_cuda_kernels:
            assert "nvidia-curand" in lock
    assert (
        "nvidia-curand" not in (SHIPPED.parent / "images" / "cu132-pt215-base/requirements.lock").read_text()
    )


def test_newer_nccl_is_an_override() -> None:
    newer = stack("cu121-pt29", nccl="2.30.7")
    assert compat.check(newer, FACTS) == ()
    row = _only_row(newer, "cu121-pt29")
    assert row.overrides == ("nvidia-nccl-cu12==2.30.7",)
    assert any("2.30.7 replaces 2.27.5" in note for note in row.notes)


def test_build_off_pypi_pins_both_libraries() -> None:
    row = _only_row(stack("cu121-pt29", build="cu126"), "cu121-pt29")
    assert row.torch.requirement == "torch==2.9.1+cu126"
    assert row.overrides == ("nvidia-cudnn-cu12==9.10.2.21", "nvidia-nccl-cu12==2.27.5")


def test_ops_can_be_replaced_and_skipped() -> None:
    skip = {"cpu_adam": {"reason": "slow here", "url": "https://example.org/1"}}
    row = _only_row(stack("cu121-pt29", ops=["cpu_adam", "fused_adam"], skip_ops=skip), "cu121-pt29")
    assert row.ops == ("fused_adam",)
    assert [op.op for op in row.skipped_ops] == ["cpu_adam"]


def test_unlisted_versions_are_built_when_asked_for_openly() -> None:
    assert "not in compat/torch.yaml" in findings("cu121-pt29", torch="2.9.7")[0]
    asked = {"torch": "2.9.7", "allow_unlisted": "a hotfix we need"}
    assert findings("cu121-pt29", **asked) == []
    row = _only_row(stack("cu121-pt29", **asked), "cu121-pt29")
    assert row.unlisted == "a hotfix we need"
    assert any("nobody checked it: torch" in note for note in row.notes)


def test_listed_12_x_mix_is_accepted_and_13_x_is_not() -> None:
    assert findings("cu121-pt29", build="cu129") == []
    toolkit = {"provider": "pip", "version": "13.2.2", "gcc": "14"}
    assert "no other minor on CUDA 13" in findings("cu130-pt213", toolkit=toolkit)[0]


def test_torch_may_be_stricter_about_gcc_than_nvcc() -> None:
    assert FACTS.cuda.nvcc_gcc.max["12.8"] == 14
    assert FACTS.torch.gcc_below("2.11.0", "12.8") == 14
    assert FACTS.torch.gcc_below("2.15.0", "12.8") == 15
    assert FACTS.torch.gcc_below("2.15.0", "13.2") is None


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", ["cpu-pt213"]),
        ("cu121-pt29-base", ["cu121-pt29-base"]),
        ("cu130-pt213, cpu-pt213", ["cpu-pt213", "cu130-pt213"]),
        ("cu121-*", ["cu121-pt29", "cu121-pt29-base", "cu121-pt29-devel"]),
        ("cpu-*,cpu-pt213", ["cpu-pt213", "cpu-pt213-base", "cpu-pt213-devel"]),
        ("all", [row.id for row in ROWS]),
    ],
)
def test_select(text: str, ids: list[str]) -> None:
    assert [row.id for row in resolve.select(ROWS, text, MATRIX.default)] == ids


@pytest.mark.parametrize("text", ["cu121-pt28", "cpu-pt213,cu99*"])
def test_select_refuses_what_is_not_there(text: str) -> None:
    with pytest.raises(InputError, match=r"no image .*cpu-pt213-devel, cu124-pt26"):
        resolve.select(ROWS, text, MATRIX.default)


def test_select_suggests() -> None:
    with pytest.raises(InputError, match='did you mean "cu121-pt29"'):
        resolve.select(ROWS, "cu121-pt28", MATRIX.default)


def test_facts_agree_with_each_other() -> None:
    for version, entry in FACTS.torch.torch.items():
        assert entry.pypi in entry.builds
        assert set(entry.builds) <= set(FACTS.cuda.builds)
        assert set(entry.sources) <= set(FACTS.torch.sources)
        assert set(entry.archs) <= set(entry.builds), version
        for archs in entry.archs.values():
            assert set(archs) <= set(FACTS.cuda.archs.by_arch)
    for version in FACTS.deepspeed.recommended.values():
        assert version in FACTS.deepspeed.versions
    for base, versions in FACTS.cuda.toolkits.debian.by_base.items():
        assert base in FACTS.bases
        assert set(versions) <= set(FACTS.cuda.nvcc_gcc.max)
    for base_facts in FACTS.bases.values():
        assert base_facts.gcc in base_facts.gccs


VERSIONS = st.lists(st.integers(0, 30), min_size=1, max_size=4).map(
    lambda numbers: ".".join(map(str, numbers))
)


@settings(database=None)
@given(VERSIONS, VERSIONS)
def test_versions_are_ordered_as_numbers(a: str, b: str) -> None:
    assert not (older(a, b) and older(b, a))
    assert older(a, b) == within(a, f"<{b}") == (not within(a, f">={b}"))
    if older(a, b):
        assert parts(a) < parts(b)


def _only_row(changed: Stack, name: str) -> Row:
    """The row of a changed stack, through the same path as the shipped ones."""
    stacks = {**MATRIX.file.stacks, name: changed}
    file = MATRIX.file.model_copy(update={"stacks": stacks})
    rows = resolve.rows(dataclasses.replace(MATRIX, file=file))
    return next(row for row in rows if row.id == name)


def test_fsdp2_is_known_to_need_a_gpu_with_torch_2_6_only() -> None:
    found = {row.stack for row in ROWS if not row.fsdp2_on_cpu}
    assert found == {"cu124-pt26"}
