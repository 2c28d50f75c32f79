"""Rendering: the same text everywhere, nothing that floats, and ids that follow the inputs."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

import pytest
from jinja2 import UndefinedError
from shipped import BY_ID, IDS, IMAGES, ROOT, ROWS

from trainyard import render
from trainyard.matrix import Feature
from trainyard.model import Row

COMPILER = re.compile(r"\b(gcc|g\+\+|clang|cpp|make|nvidia-cuda-toolkit|build-essential|ccache)\b")
TEMPLATES = sorted((ROOT / "templates").rglob("*.j2"))
WITH_DEEPSPEED = [row for row in ROWS if row.has_deepspeed]
RENDERED = {row.id: render.render(row, ROOT) for row in ROWS}
ROW = BY_ID["cu121-pt29"]
DIGEST = "sha256:" + "1" * 64


@dataclass
class Stage:
    """One stage of a Dockerfile: where it starts from, and its instructions, each on one line."""

    origin: str
    steps: list[str] = field(default_factory=list)


def stages(text: str) -> dict[str, Stage]:
    """The stages by name, in order."""
    kept = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    found: dict[str, Stage] = {}
    name = ""
    for line in kept.replace("\\\n", " ").splitlines():
        step = " ".join(line.split())
        if match := re.fullmatch(r"FROM (\S+) AS (\S+)", step):
            name = match[2]
            found[name] = Stage(match[1])
        elif step and name:
            found[name].steps.append(step)
    return found


def shipped_steps(text: str) -> list[str]:
    """Every instruction whose layer is in the image: the last stage's and those it starts from."""
    found = stages(text)
    steps: list[str] = []
    name = list(found)[-1]
    while name in found:
        steps = found[name].steps + steps
        name = found[name].origin
    return steps


# -- the text ------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_rendering_twice_gives_the_same_text(row: Row) -> None:
    assert render.render(row, ROOT) == RENDERED[row.id]


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_the_committed_dockerfile_is_what_the_matrix_and_templates_give(row: Row) -> None:
    assert (IMAGES / row.id / "Dockerfile").read_text() == RENDERED[row.id]


def test_a_dockerfile_does_not_depend_on_where_the_checkout_lies(tmp_path: Path) -> None:
    assert render.render(ROW, copied(tmp_path)) == RENDERED[ROW.id]


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_nothing_floats_and_no_frontend_is_fetched(row: Row) -> None:
    text = RENDERED[row.id]
    assert not re.search(r":latest\b", text)
    assert not re.search(r"^#\s*syntax\s*=", text, re.M | re.I)
    assert not re.search(r"\bADD\b\s", text)
    assert "{{" not in text
    assert "{%" not in text


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_every_stage_starts_from_the_named_base_from_another_stage_or_from_nothing(row: Row) -> None:
    text = RENDERED[row.id]
    found = stages(text)
    assert len(found) == len(re.findall(r"^FROM ", text, re.M))
    known = {"${BASE}", "scratch"}
    for name, stage in found.items():
        assert stage.origin in known
        known.add(name)
    assert [s.origin for s in found.values()].count("${BASE}") == 1
    assert re.findall(r"^ARG BASE=(.*)$", text, re.M) == [row.base.image]
    assert list(found)[-1] == "runtime"


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_what_a_step_copies_or_mounts_comes_from_a_stage_before_it(row: Row) -> None:
    seen: list[str] = []
    for name, stage in stages(RENDERED[row.id]).items():
        for step in stage.steps:
            for source in re.findall(r"(?:--from=|,from=)([\w-]+)", step):
                assert source in seen
        seen.append(name)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_every_instruction_is_whole(row: Row) -> None:
    """A template that loses a line break glues two instructions together or ends one too early."""
    known = {"RUN", "COPY", "ENV", "ARG", "LABEL", "HEALTHCHECK", "ENTRYPOINT"}
    for stage in stages(RENDERED[row.id]).values():
        for step in stage.steps:
            assert step.split(" ")[0] in known
            assert not re.search(r"\s(RUN|COPY|FROM) --", step)
            assert not step.endswith(("\\", ";", "&&"))


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_a_compiler_reaches_the_image_only_where_the_variant_says_so(row: Row) -> None:
    installs = [step for step in shipped_steps(RENDERED[row.id]) if "apt-get install" in step]
    assert installs
    assert any(COMPILER.search(step.partition("apt-get install")[2]) for step in installs) == row.has_devel
    assert not any("from=toolchain" in step for step in shipped_steps(RENDERED[row.id]))


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_every_package_of_pip_or_uv_is_checked_against_a_hash(row: Row) -> None:
    for stage in stages(RENDERED[row.id]).values():
        for step in stage.steps:
            for command in re.split(r"[;&]\s", step):
                if "pip install" in command:
                    assert "--require-hashes" in command or "--no-index" in command


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_no_lists_archives_or_secrets_stay_in_a_layer(row: Row) -> None:
    for stage in stages(RENDERED[row.id]).values():
        for step in stage.steps:
            if "apt-get" in step:
                assert "target=/var/cache/apt" in step
                assert "target=/var/lib/apt/lists" in step
            if "/run/secrets/ca" in step:
                assert "--mount=type=secret,id=ca" in step
            assert not re.search(r"^(ENV|ARG|LABEL)\b.*(proxy|token|password|secret)", step, re.I)


@pytest.mark.parametrize("row", [row for row in ROWS if row.has_sshd], ids=lambda row: row.id)
def test_host_keys_are_removed_in_the_step_that_makes_them(row: Row) -> None:
    (step,) = [step for step in shipped_steps(RENDERED[row.id]) if "openssh-server" in step]
    assert "rm -f /etc/ssh/ssh_host_*" in step


def test_every_folder_of_rootfs_belongs_to_all_images_or_to_a_feature() -> None:
    there = {path.name for path in (ROOT / "rootfs").iterdir()}
    assert there == {"common", *render.FEATURES_WITH_FILES}
    assert set(get_args(Feature)) >= render.FEATURES_WITH_FILES


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_an_image_gets_the_files_of_its_features_and_no_others(row: Row) -> None:
    (step,) = [step for step in shipped_steps(RENDERED[row.id]) if step.startswith("COPY --link rootfs/")]
    parts = {part.removeprefix("rootfs/") for part in step.split()[2:-1]}
    assert parts == {"common"} | (row.features & render.FEATURES_WITH_FILES)
    assert step.endswith(" /")


@pytest.mark.parametrize("row", [row for row in ROWS if row.has_devel], ids=lambda row: row.id)
def test_a_devel_image_compiles_with_the_compiler_of_its_kernels(row: Row) -> None:
    (step,) = [step for step in shipped_steps(RENDERED[row.id]) if step.startswith("ENV CC=")]
    assert f"CC=gcc-{row.kernel_gcc} CXX=g++-{row.kernel_gcc}" in step


@pytest.mark.parametrize("row", WITH_DEEPSPEED, ids=lambda row: row.id)
def test_kernels_are_compiled_for_the_accelerator_and_ops_of_the_row(row: Row) -> None:
    (step,) = [s for s in stages(RENDERED[row.id])["kernels"].steps if "build_wheel.py" in s]
    assert f"--accelerator {row.accelerator} " in step
    assert f"--ops {','.join(row.ops)} " in step
    assert "--out /wheels" in step


@pytest.mark.parametrize("row", [row for row in ROWS if row.twin_ops], ids=lambda row: row.id)
def test_the_cpu_twin_is_never_part_of_the_image(row: Row) -> None:
    (step,) = [s for s in stages(RENDERED[row.id])["twin-build"].steps if "build_wheel.py" in s]
    assert "--accelerator cpu " in step
    assert f"--ops {','.join(row.twin_ops)} " in step
    assert not any("twin" in step for step in shipped_steps(RENDERED[row.id]))


def test_cuda_kernels_are_compiled_for_cuda_on_a_host_without_a_gpu() -> None:
    (step,) = [s for s in stages(RENDERED["cu121-pt29"])["kernels"].steps if "build_wheel.py" in s]
    assert "--accelerator cuda " in step


@pytest.mark.parametrize("row", [row for row in ROWS if not row.has_deepspeed], ids=lambda row: row.id)
def test_a_row_without_deepspeed_compiles_nothing(row: Row) -> None:
    assert "build_wheel" not in RENDERED[row.id]
    assert "toolchain" not in RENDERED[row.id]
    assert "deepspeed==" not in RENDERED[row.id]


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_labels_say_what_is_inside_and_leave_out_what_is_not(row: Row) -> None:
    found = render.labels(row)
    assert found["dev.trainyard.id"] == row.id
    assert all(found.values())
    assert ("dev.trainyard.deepspeed" in found) == row.has_deepspeed
    assert ("dev.trainyard.driver-floor" in found) == (not row.is_cpu)
    for name, value in found.items():
        assert f'{name}="{value}"' in RENDERED[row.id]


def test_a_summary_of_any_text_stays_one_comment_and_one_label() -> None:
    row = replace(ROW, summary='the "big" one\nRUN false\nfor $HOME \\')
    text = render.render(row, ROOT)
    assert '# cu121-pt29: the "big" one RUN false for $HOME \\\n' in text
    assert 'description="the \\"big\\" one RUN false for \\$HOME \\\\"' in text
    assert not re.search("^RUN false", text, re.M)
    assert len(stages(text)) == len(stages(RENDERED[ROW.id]))


def test_no_label_says_when_it_was_built() -> None:
    """A date would make every rendering differ."""
    assert not any("created" in name for row in ROWS for name in render.labels(row))


# -- the templates -------------------------------------------------------------------------


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_no_macro_is_longer_than_forty_lines(path: Path) -> None:
    text = path.read_text()
    lines = {m[1]: m[0].count("\n") + 1 for m in re.finditer(r"{% macro (\w+).*?endmacro %}", text, re.S)}
    assert len(lines) == text.count("endmacro")
    assert {name: count for name, count in lines.items() if count > 40} == {}


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_no_template_compares_versions(path: Path) -> None:
    for block in re.findall(r"{[%{].*?[%}]}", path.read_text(), re.S):
        assert not re.search(r"[<>]=?\s*[\"']?\d", block)
        assert not re.search(r"[=!]=\s*[\"']?\d", block)


def test_a_name_that_nobody_gave_a_template_is_an_error(tmp_path: Path) -> None:
    root = copied(tmp_path)
    with (root / "templates/Dockerfile.j2").open("a") as file:
        file.write("# {{ row.no_such_name }}\n")
    with pytest.raises(UndefinedError, match="no_such_name"):
        render.render(ROW, root)


# -- the contents id -----------------------------------------------------------------------


def contents_id(row: Row, root: Path, base_digest: str) -> str:
    return render.contents_id(render.input_digests(row, root, base_digest))


def copied(tmp_path: Path, row: Row = ROW) -> Path:
    """The part of the checkout that one row's image is made from."""
    root = tmp_path / "checkout"
    for name in ("templates", "kernels", "rootfs", f"images/{row.id}"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, root / name, symlinks=True, ignore=ignore)
    shutil.copy2(IMAGES / "uv.lock", root / "images")
    return root


def append(root: Path, name: str) -> None:
    with (root / name).open("a") as file:
        file.write("\n# changed\n")


def a_file_of(root: Path) -> Path:
    return min(path for path in (root / "rootfs").rglob("*") if path.is_file())


CHANGES: dict[str, Callable[[Path], object]] = {
    "the Dockerfile": lambda root: append(root, f"images/{ROW.id}/Dockerfile"),
    "requirements.lock": lambda root: append(root, f"images/{ROW.id}/requirements.lock"),
    "build.lock": lambda root: append(root, f"images/{ROW.id}/build.lock"),
    "uv.lock": lambda root: append(root, "images/uv.lock"),
    "a script of kernels": lambda root: append(root, "kernels/bin/gcc"),
    "a file of rootfs": lambda root: append(root, str(a_file_of(root).relative_to(root))),
    "a new file of rootfs": lambda root: (root / "rootfs/common/new").write_text("new"),
    "a file less": lambda root: a_file_of(root).unlink(),
    "another name": lambda root: a_file_of(root).rename(root / "rootfs/common/renamed"),
    "an exec bit": lambda root: a_file_of(root).chmod(a_file_of(root).stat().st_mode ^ 0o111),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_contents_id_changes_with(change: Callable[[Path], object], tmp_path: Path) -> None:
    root = copied(tmp_path)
    before = contents_id(ROW, root, DIGEST)
    change(root)
    assert contents_id(ROW, root, DIGEST) != before


def test_the_contents_id_changes_with_the_base_digest() -> None:
    other = DIGEST.replace("1", "2")
    assert contents_id(ROW, ROOT, DIGEST) != contents_id(ROW, ROOT, other)


def test_the_contents_id_does_not_change_with_times_place_or_python_caches(tmp_path: Path) -> None:
    root = copied(tmp_path)
    before = contents_id(ROW, root, DIGEST)
    assert before == contents_id(ROW, ROOT, DIGEST)
    for path in root.rglob("*"):
        os.utime(path, (1, 1), follow_symlinks=False)
    for folder in ("kernels", "rootfs/common"):
        (root / folder / "__pycache__").mkdir()
        (root / folder / "__pycache__/x.pyc").write_bytes(b"\xa7\xff")
    assert contents_id(ROW, root, DIGEST) == before
    assert render.kernels_key(ROW, root, "cuda", ROW.ops) == key(ROW)


def test_the_contents_id_does_not_depend_on_another_row(tmp_path: Path) -> None:
    root = copied(tmp_path)
    before = contents_id(ROW, root, DIGEST)
    (root / "images/other").mkdir()
    (root / "images/other/Dockerfile").write_text("FROM scratch")
    assert contents_id(ROW, root, DIGEST) == before


def test_kernels_are_no_input_of_an_image_without_deepspeed(tmp_path: Path) -> None:
    row = BY_ID["cu121-pt29-base"]
    root = copied(tmp_path, row)
    before = contents_id(row, root, DIGEST)
    append(root, "kernels/build_wheel.py")
    assert contents_id(row, root, DIGEST) == before


def test_a_file_of_a_feature_is_no_input_of_an_image_without_it(tmp_path: Path) -> None:
    row = BY_ID["cu121-pt29-base"]
    root = copied(tmp_path, row)
    before = contents_id(row, root, DIGEST)
    (root / "rootfs/sshd/new").write_text("new")
    assert contents_id(row, root, DIGEST) == before
    (root / "rootfs/common/new").write_text("new")
    assert contents_id(row, root, DIGEST) != before


def test_every_row_has_a_contents_id_of_its_own() -> None:
    assert len({contents_id(row, ROOT, DIGEST) for row in ROWS}) == len(ROWS)


# -- the kernels' key ----------------------------------------------------------------------


def key(row: Row, root: Path = ROOT, accelerator: str = "cuda", ops: tuple[str, ...] | None = None) -> str:
    return render.kernels_key(row, root, accelerator, row.ops if ops is None else ops)


@pytest.mark.parametrize("stack", sorted({row.stack for row in WITH_DEEPSPEED}))
def test_an_image_and_its_devel_variant_share_their_kernels(stack: str) -> None:
    row, devel = BY_ID[stack], BY_ID[f"{stack}-devel"]
    assert key(row, accelerator=row.accelerator) == key(devel, accelerator=row.accelerator)
    assert render.kernels_key(row, ROOT, "cpu", row.twin_ops) == render.kernels_key(
        devel, ROOT, "cpu", devel.twin_ops
    )


def test_no_two_stacks_share_cuda_kernels() -> None:
    rows = [row for row in WITH_DEEPSPEED if row.variant == "" and not row.is_cpu]
    assert len({key(row) for row in rows}) == len(rows)


def test_the_kernels_key_changes_with_ops_architectures_isa_compiler_and_python() -> None:
    assert ROW.toolkit
    others = [
        key(ROW, ops=ROW.ops[1:]),
        key(ROW, accelerator="cpu"),
        key(replace(ROW, gpu_archs=("8.0",))),
        key(replace(ROW, gpu_archs=("8.0", "8.6", "9.0"))),
        key(replace(ROW, cpu_isa="x86-64-v2")),
        key(replace(ROW, python="3.12")),
        key(replace(ROW, base=replace(ROW.base, suite="bookworm"))),
        key(replace(ROW, toolkit=replace(ROW.toolkit, gcc=12))),
        key(replace(ROW, toolkit=replace(ROW.toolkit, version="12.6"))),
        key(replace(ROW, toolkit=replace(ROW.toolkit, provider="nvidia"))),
    ]
    assert len({key(ROW), *others}) == len(others) + 1


@pytest.mark.parametrize("package", ["torch", "deepspeed"])
def test_the_kernels_key_changes_with_version_and_file_of(package: str, tmp_path: Path) -> None:
    root = copied(tmp_path)
    path = root / "images" / ROW.id / "requirements.lock"
    text = path.read_text()
    assert key(ROW, root) == key(ROW)
    path.write_text(re.sub(rf"^{package}==", f"{package}==9", text, flags=re.M))
    other_version = key(ROW, root)
    path.write_text(re.sub(rf"^({package}==.*\n.*sha256:)....", r"\g<1>0000", text, flags=re.M))
    other_file = key(ROW, root)
    assert len({key(ROW), other_version, other_file}) == 3


def test_the_kernels_key_does_not_change_with_other_packages_or_features(tmp_path: Path) -> None:
    root = copied(tmp_path)
    path = root / "images" / ROW.id / "requirements.lock"
    path.write_text(re.sub(r"^numpy==", "numpy==9", path.read_text(), flags=re.M))
    assert key(ROW, root) == key(ROW)
    assert key(replace(ROW, features=frozenset({"deepspeed"}), summary="other")) == key(ROW)


def test_the_key_of_cpu_kernels_does_not_depend_on_the_cuda_side_of_a_row() -> None:
    assert ROW.toolkit
    other = replace(ROW, gpu_archs=("8.0",), toolkit=replace(ROW.toolkit, version="12.6"))
    assert key(ROW, accelerator="cpu", ops=ROW.twin_ops) == key(other, accelerator="cpu", ops=ROW.twin_ops)


def test_the_kernels_key_changes_with_the_scripts_that_build_them(tmp_path: Path) -> None:
    root = copied(tmp_path)
    append(root, "kernels/bin/gcc")
    assert key(ROW, root) != key(ROW)


@pytest.mark.parametrize("row", WITH_DEEPSPEED, ids=lambda row: row.id)
def test_the_key_in_the_dockerfile_is_the_key_of_the_row(row: Row) -> None:
    assert f"--key {key(row, accelerator=row.accelerator)} " in RENDERED[row.id]


def test_a_row_without_deepspeed_has_no_kernels_key() -> None:
    assert key(BY_ID["cu121-pt29-base"]) == ""
