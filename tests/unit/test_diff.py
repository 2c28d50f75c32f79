"""Differences of two images: complete, typed, and short where people read them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainyard import diff
from trainyard.diff import Change, Difference, Resized

DATA = Path(__file__).parent / "data"
#: Measured in an image; trimmed to a dozen packages of each kind.
MANIFEST: dict[str, Any] = json.loads((DATA / "manifest-cpu-pt213.json").read_text())

Step = Callable[[dict[str, Any]], object]


def tomorrow(*steps: Step) -> dict[str, Any]:
    """The next night's image, changed by these steps."""
    found = copy.deepcopy(MANIFEST)
    found |= {"image_id": "sha256:" + "7" * 64, "built_at": "2026-12-01T21:19:38+00:00", "build_seconds": 1.5}
    found["contents_id"] = found["config"]["Labels"]["dev.trainyard.contents-id"] = "0" * 16
    for step in steps:
        step(found)
    return found


def change(path: str, value: Any) -> Step:
    def apply(document: dict[str, Any]) -> None:
        *folders, last = path.split("/")
        for name in folders:
            document = document[int(name)] if isinstance(document, list) else document[name]
        if value is None:
            del document[last]
        else:
            document[last] = value

    return apply


def compare(*steps: Step) -> Difference:
    return diff.diff(MANIFEST, tomorrow(*steps))


# -- equality ------------------------------------------------------------------------------


def test_an_image_equals_itself() -> None:
    found = diff.diff(MANIFEST, copy.deepcopy(MANIFEST))
    assert found.same_image
    assert found.equal
    for shown in (diff.text(found), diff.markdown(found)):
        assert "The same image." in shown
        assert len(shown.splitlines()) <= 4


def test_the_same_contents_built_again_are_equal() -> None:
    found = compare()
    assert found.equal
    assert not found.same_image
    assert "Built again; nothing that is measured differs." in diff.text(found)
    assert "Built again" in diff.markdown(found)


def test_a_few_bytes_are_no_news_but_no_equality_either() -> None:
    found = compare(change("size_bytes", MANIFEST["size_bytes"] + 100))
    assert not found.equal
    assert found.size.growth == 100
    assert "only sizes differ, by little" in diff.markdown(found)


# -- each kind of change -------------------------------------------------------------------

KIND_OF_CHANGE = [
    ("measured/torch/version", "2.14.0", "versions", Change("torch", "2.13.0+cpu", "2.14.0+cpu")),
    ("measured/torch/cuda", "13.0", "versions", Change("CUDA", None, "13.0")),
    (
        "measured/cudnn",
        {"version": "9.20.0", "files": []},
        "versions",
        Change("cuDNN", None, "9.20.0"),
    ),
    (
        "measured/nccl",
        {"version": "2.29.7", "files": []},
        "versions",
        Change("NCCL", None, "2.29.7"),
    ),
    ("measured/deepspeed/version", "0.20.0", "versions", Change("DeepSpeed", "0.19.8", "0.20.0")),
    ("measured/python", "3.11.9", "versions", Change("Python", "3.11.2", "3.11.9")),
    ("measured/os", "debian-13", "versions", Change("OS", "debian-12", "debian-13")),
    ("measured/torch/archs", ["sm_80"], "versions", Change("GPU code of torch", None, "sm_80")),
    ("measured/compilers", ["gcc"], "versions", Change("compilers", None, "gcc")),
    ("measured/pip/tqdm", "5.0", "pip", Change("tqdm", "4.70.1", "5.0")),
    ("measured/pip/rich", "15.0", "pip", Change("rich", None, "15.0")),
    ("measured/pip/tqdm", None, "pip", Change("tqdm", "4.70.1", None)),
    ("measured/apt/bash", "5.3", "apt", Change("bash", "5.2.15-2+b13", "5.3")),
    (
        "measured/deepspeed/ops/cpu_adam/elf",
        ["sm_80", "sm_90"],
        "kernels",
        Change("cpu_adam", "host", "sm_80 sm_90"),
    ),
    ("measured/deepspeed/ops/cpu_adam", None, "kernels", Change("cpu_adam", "host", None)),
    ("measured/deepspeed/ops/cpu_adam/loads", False, "kernels", Change("cpu_adam", "host", "does not load")),
    ("config/Env", None, "environment", Change("DS_ACCELERATOR", "cpu", None)),
    ("config/Cmd", ["sh"], "environment", Change("(Cmd)", '["/bin/bash"]', '["sh"]')),
    (
        "config/Labels/dev.trainyard.features",
        "deepspeed",
        "labels",
        Change("dev.trainyard.features", "deepspeed,jupyter,sshd", "deepspeed"),
    ),
]


@pytest.mark.parametrize(("path", "value", "part", "expected"), KIND_OF_CHANGE)
def test_one_change_is_one_difference(path: str, value: Any, part: str, expected: Change) -> None:
    found = compare(change(path, value))
    assert expected in getattr(found, part)
    others = {"versions", "kernels", "pip", "apt", "environment", "labels"} - {part}
    assert not any(getattr(found, other) for other in others)
    assert not found.equal
    assert expected.name in diff.text(found)


def test_no_deepspeed_on_one_side() -> None:
    found = compare(change("measured/deepspeed", {}), lambda m: m["measured"].update(deepspeed=None))
    assert Change("DeepSpeed", "0.19.8", None) in found.versions
    assert len(found.kernels) == 7
    assert all(one.after is None for one in found.kernels)


def test_layers_are_matched_by_their_command() -> None:
    def another_layer(manifest: dict[str, Any]) -> None:
        manifest["layers"][1]["size"] += 5_000_000
        new = {"created_by": "RUN |1 TORCH_INDEX= /bin/sh -c set -eux; true # buildkit", "size": 7}
        manifest["layers"].insert(2, new)
        del manifest["layers"][-1]

    found = compare(another_layer)
    assert [(one.name.split()[0], one.growth) for one in found.layers] == [
        ("RUN", 5_000_000),
        ("RUN", 7),
        ("COPY", -20182),
    ]
    assert found.layers[1].name == "RUN true"
    assert all(len(one.name) <= diff.COMMAND for one in found.layers)


BIGGEST = MANIFEST["measured"]["files"]["biggest"]


def test_files_and_folders_come_biggest_change_first() -> None:
    def grow(manifest: dict[str, Any]) -> None:
        files = manifest["measured"]["files"]
        files["biggest"][0]["bytes"] += 10
        files["biggest"][1]["bytes"] -= 2_000_000
        files["folders"][0]["bytes"] += 3

    found = compare(grow)
    assert [(one.name, one.growth) for one in found.files] == [
        (BIGGEST[1]["path"], -2_000_000),
        (BIGGEST[0]["path"], 10),
    ]
    assert [(one.name, one.growth) for one in found.folders] == [("/opt/venv", 3)]
    shown = diff.text(found)
    assert BIGGEST[1]["path"] in shown
    assert BIGGEST[0]["path"] not in shown


def test_a_file_that_fell_off_the_list_is_not_called_removed() -> None:
    """A new big file pushes the smallest one out of a list of fixed length."""

    def push_out(manifest: dict[str, Any]) -> None:
        files = manifest["measured"]["files"]["biggest"]
        files.pop()
        files.insert(0, {"path": "/opt/new", "bytes": 10**9})

    assert compare(push_out).files == (Resized("/opt/new", None, 10**9),)


def test_a_big_file_that_is_gone_is_called_removed() -> None:
    def remove(manifest: dict[str, Any]) -> None:
        manifest["measured"]["files"]["biggest"].pop(0)

    assert compare(remove).files == (Resized(BIGGEST[0]["path"], BIGGEST[0]["bytes"], None),)


@pytest.mark.parametrize("older", ["before", "after"])
def test_an_older_manifest_is_compared_as_far_as_it_goes(older: str) -> None:
    old = copy.deepcopy(MANIFEST)
    del old["config"], old["measured"]["files"], old["measured"]["packages"]
    new = tomorrow(change("measured/pip/tqdm", "5.0"))
    if older == "after":
        old["measured"]["pip"]["tqdm"] = "3.0"
    found = diff.diff(old, new) if older == "before" else diff.diff(new, old)
    assert [one.name for one in found.pip] == ["tqdm"]
    assert found.unknown == ("config", "files")
    assert not any((found.environment, found.labels, found.files, found.folders))
    assert "Not compared" in diff.text(found)
    assert "environment and labels, files and folders" in diff.text(found)


# -- showing -------------------------------------------------------------------------------


NIGHT = (
    change("measured/torch/version", "2.14.0"),
    change("measured/pip/torch", "2.14.0+cpu"),
    change("measured/pip/rich", "15.0.0"),
    change("measured/apt/libssl3", "3.0.23-1"),
    change("measured/deepspeed/ops/cpu_lion", None),
    change("size_bytes", MANIFEST["size_bytes"] + 25_400_000),
    change("layers/2/size", MANIFEST["layers"][2]["size"] + 25_400_000),
    change(
        "measured/files/folders/0/bytes", MANIFEST["measured"]["files"]["folders"][0]["bytes"] + 25_000_000
    ),
    change("config/Labels/dev.trainyard.torch", "2.14.0"),
)


def test_text_is_for_a_terminal() -> None:
    assert (
        diff.text(compare(*NIGHT))
        == """\
cpu-pt213: 2026-11-30 (210027e0e9ec) -> 2026-12-01 (777777777777)

Versions
  ~ torch  2.13.0+cpu -> 2.14.0+cpu

Kernels
  - cpu_lion  host (removed)

Python packages
  + rich  15.0.0 (new)
  ~ torch  2.13.0+cpu -> 2.14.0+cpu

Debian packages
  ~ libssl3  3.0.22-1~deb12u2 -> 3.0.23-1

Labels
  ~ dev.trainyard.torch  2.13.0 -> 2.14.0

Layers
    +25.4 MB  RUN export UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_NO_MANAGED_PY...

Folders
    +25.0 MB  /opt/venv

size  1.35 GB -> 1.37 GB (+25.4 MB)
"""
    )


def test_markdown_is_a_changelog() -> None:
    assert (
        diff.markdown(compare(*NIGHT))
        == """\
### cpu-pt213: 2026-11-30 (210027e0e9ec) -> 2026-12-01 (777777777777)

**Versions**

- `torch` `2.13.0+cpu` -> `2.14.0+cpu`

**Kernels**

- `cpu_lion` `host` (removed)

**Python packages**

- `rich` `15.0.0` (new)
- `torch` `2.13.0+cpu` -> `2.14.0+cpu`

**Debian packages**

- `libssl3` `3.0.22-1~deb12u2` -> `3.0.23-1`

**Size** 1.35 GB -> 1.37 GB (+25.4 MB): `/opt/venv` +25.0 MB
"""
    )


def test_markdown_stays_short() -> None:
    many = {f"package{number:03}": "1.0" for number in range(300)}
    found = compare(lambda manifest: manifest["measured"]["apt"].update(many))
    shown = diff.markdown(found)
    assert len(found.apt) == 300
    assert len(shown.splitlines()) < 30
    assert f"- and {300 - diff.CHANGELOG_LINES} more" in shown
    assert "package299" in diff.text(found)


def test_markdown_cannot_be_broken_by_a_value() -> None:
    found = compare(change("measured/pip/tqdm", "`5`"))
    assert "`` `5` ``" in diff.markdown(found)


def test_two_images_are_named_by_their_ids() -> None:
    found = compare(change("id", "cpu-pt213-devel"))
    assert diff.text(found).startswith("cpu-pt213 -> cpu-pt213-devel\n")


def test_json_has_everything() -> None:
    found = json.loads(json.dumps(diff.as_json(compare(*NIGHT))))
    assert found["equal"] is False
    assert found["same_image"] is False
    assert found["before"]["image_id"] == MANIFEST["image_id"]
    assert found["versions"] == [{"name": "torch", "before": "2.13.0+cpu", "after": "2.14.0+cpu"}]
    assert found["kernels"] == [{"name": "cpu_lion", "before": "host", "after": None}]
    assert found["size"]["after"] - found["size"]["before"] == 25_400_000


@pytest.mark.parametrize(
    ("op", "words"),
    [
        ({"elf": ["sm_80", "sm_90"], "ptx": ["sm_90"]}, "sm_80 sm_90, PTX sm_90"),
        ({"elf": ["sm_80"], "ptx": []}, "sm_80"),
        ({"elf": [], "ptx": ["sm_90"]}, "PTX sm_90"),
        ({"elf": [], "ptx": []}, "host"),
    ],
)
def test_gpu_code_in_words(op: dict[str, list[str]], words: str) -> None:
    assert diff.op_code(op) == words


def test_another_base_is_named_even_where_nothing_measured_moved() -> None:
    (found,) = compare(change("base/digest", "sha256:" + "e" * 64)).versions
    assert found.name == "base image"
    assert found.after == "debian:bookworm-slim eeeeeeeeeeee"
    assert found.before
    assert found.before.startswith("debian:bookworm-slim ")
