"""Locks: what they are made from, when they are stale, and that a failure changes nothing."""

from __future__ import annotations

import base64
import hashlib
import re
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from shipped import BY_ID, IDS, IMAGES, ROWS

from trainyard import lock
from trainyard.lock import Lock
from trainyard.model import Row, StepFailed

PACKAGE = re.compile(
    r"^([a-z0-9][a-z0-9._-]*(?:\[[a-z,-]+\])?)==\S+ \\\n((?:    --hash=sha256:[0-9a-f]{64}.*\n)+)", re.M
)
LOCKS = [one for row in ROWS for one in lock.locks(row, IMAGES)] + [lock.uv_lock(IMAGES)]
LOCK_IDS = [str(one.path.relative_to(IMAGES)) for one in LOCKS]


def entries(path: Path) -> dict[str, str]:
    """Name and hash lines of each package of a lock file."""
    return {name.partition("[")[0]: hashes for name, hashes in PACKAGE.findall(path.read_text())}


def written(one: Lock, pins: str = "") -> Lock:
    """The same lock with a file that has its head."""
    one.path.write_text(f"# Generated\n# from somewhere\n# inputs {one.inputs_id}\n{pins}")
    return one


# -- the inputs id and staleness -----------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"requirements": ("torch==2.9.1",)},
        {"requirements": ("pip", "torch==2.9.0")},
        {"overrides": ("nvidia-nccl-cu12==2.28.3",)},
        {"overrides": ()},
        {"limits": ("nvidia-cuda-cccl==13.1.*",)},
        {"limits": ()},
        {"python": "3.12"},
    ],
    ids=str,
)
def test_the_inputs_id_changes_with_every_input(change: dict[str, object], tmp_path: Path) -> None:
    one = Lock(
        tmp_path / "requirements.lock",
        ("pip", "torch==2.9.1"),
        ("nvidia-nccl-cu12==2.27.5",),
        limits=("nvidia-cuda-cccl==13.0.*",),
        python="3.13",
    )
    assert replace(one, **change).inputs_id != one.inputs_id  # type: ignore[arg-type]


def test_the_inputs_id_does_not_depend_on_where_the_checkout_lies(tmp_path: Path) -> None:
    row = BY_ID["cu121-pt29"]
    here, there = lock.locks(row, IMAGES)[0], lock.locks(row, tmp_path)[0]
    assert here.inputs_id == there.inputs_id


def test_a_build_lock_is_stale_after_the_lock_that_it_must_agree_with_changed(tmp_path: Path) -> None:
    main = written(Lock(tmp_path / "requirements.lock", ("torch==2.9.1",), python="3.13"))
    build = written(Lock(tmp_path / "build.lock", ("wheel",), constraints=main.path, python="3.13"))
    assert build.why_stale() is None
    written(replace(main, requirements=("torch==2.9.0",)))
    assert build.why_stale() == "its inputs changed"


def test_a_lock_that_is_not_there_is_missing(tmp_path: Path) -> None:
    one = Lock(tmp_path / "requirements.lock", ("torch==2.9.1",))
    assert one.recorded_id() is None
    assert one.why_stale() == "missing"


def test_a_stale_lock_names_the_pin_that_moved(tmp_path: Path) -> None:
    pins = "pip==26.0 \\\n    --hash=sha256:0\ntorch==2.9.0 \\\n    --hash=sha256:0\n"
    before = written(Lock(tmp_path / "requirements.lock", ("pip", "torch==2.9.0")), pins)
    assert before.why_stale() is None
    after = replace(before, requirements=("pip", "torch==2.9.1"))
    assert after.why_stale() == "the row asks for torch==2.9.1"


def test_a_stale_lock_names_every_pin_that_moved_and_none_that_did_not(tmp_path: Path) -> None:
    pins = "cuda-toolkit[cudart,nvcc]==13.0.3 \\\n    --hash=sha256:0\nnumpy==2.3.1 \\\n    --hash=sha256:0\n"
    before = written(Lock(tmp_path / "requirements.lock", ("numpy",)), pins)
    wanted = ("cuda-toolkit[nvcc]==13.0.3", "deepspeed==0.18.9", "numpy", "torch==2.13.0+cpu")
    after = replace(before, requirements=wanted)
    assert after.why_stale() == "the row asks for deepspeed==0.18.9, torch==2.13.0+cpu"


def test_a_lock_without_our_head_is_stale(tmp_path: Path) -> None:
    path = tmp_path / "requirements.lock"
    path.write_text("pip==26.0 --hash=sha256:0\n")
    assert Lock(path, ("pip",)).why_stale() == "its inputs changed"


def test_an_empty_lock_file_is_stale(tmp_path: Path) -> None:
    path = tmp_path / "requirements.lock"
    path.write_text("")
    assert Lock(path, ("pip==26.0",)).why_stale() == "the row asks for pip==26.0"


# -- what a row asks for -------------------------------------------------------------------


def test_a_row_pins_torch_cudnn_nccl_and_deepspeed() -> None:
    row = BY_ID["cu121-pt29"]
    main, build = lock.locks(row, IMAGES)
    assert {
        "torch==2.9.1",
        f"nvidia-cudnn-cu12=={row.cudnn}",
        f"nvidia-nccl-cu12=={row.nccl}",
        f"deepspeed=={row.deepspeed}",
    } <= set(main.requirements)
    assert main.python == build.python == row.python
    assert build.constraints == main.path


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_only_rows_with_deepspeed_have_a_build_lock(row: Row) -> None:
    names = [one.path.name for one in lock.locks(row, IMAGES)]
    assert names == ["requirements.lock", "build.lock"][: 2 if row.has_deepspeed else 1]
    assert (IMAGES / row.id / "build.lock").exists() == row.has_deepspeed


def test_jupyterlab_comes_only_with_its_feature() -> None:
    row = BY_ID["cu121-pt29"]
    without = replace(row, features=row.features - {"jupyter"})
    assert "jupyterlab" in lock.locks(row, IMAGES)[0].requirements
    assert "jupyterlab" not in lock.locks(without, IMAGES)[0].requirements


def test_only_a_build_that_pypi_does_not_carry_gets_another_index() -> None:
    for row in ROWS:
        for one in lock.locks(row, IMAGES):
            wanted = None if row.torch.on_pypi else row.torch.build
            assert one.index == wanted


def test_the_pip_toolkit_is_in_a_devel_image_and_not_in_a_runtime_image() -> None:
    def toolkit(id_: str, which: int) -> bool:
        return any(r.startswith("cuda-toolkit[") for r in lock.locks(BY_ID[id_], IMAGES)[which].requirements)

    assert toolkit("cu130-pt213-devel", 0)
    assert not toolkit("cu130-pt213", 0)
    assert toolkit("cu130-pt213", 1)
    assert not toolkit("cu121-pt29-devel", 0)


# -- the shipped files ---------------------------------------------------------------------


@pytest.mark.parametrize("one", LOCKS, ids=LOCK_IDS)
def test_every_shipped_lock_is_current(one: Lock) -> None:
    assert one.why_stale() is None


@pytest.mark.parametrize("one", LOCKS, ids=LOCK_IDS)
def test_every_package_of_a_shipped_lock_has_a_hash(one: Lock) -> None:
    text = one.path.read_text()
    named = [line for line in text.splitlines() if line and not line.startswith(("#", " "))]
    assert named
    assert len(PACKAGE.findall(text)) == len(named)
    assert all("==" in line for line in named)


@pytest.mark.parametrize("one", LOCKS, ids=LOCK_IDS)
def test_a_shipped_lock_holds_every_pin_that_its_row_asks_for(one: Lock) -> None:
    pins = {
        f"{name}=={version.removesuffix('.0')}"
        for name, version in re.findall(r"^([a-z0-9-]+)(?:\[.*?\])?==(\S+)", one.path.read_text(), re.M)
    }
    for requirement in (*one.requirements, *one.overrides):
        if "==" in requirement:
            assert re.sub(r"\[.*?\]", "", requirement).removesuffix(".0") in pins


def test_a_trailing_zero_of_a_version_is_no_difference(tmp_path: Path) -> None:
    pins = "cuda-toolkit==13.0.3.0 \\\n    --hash=sha256:0\n"
    before = written(Lock(tmp_path / "requirements.lock", ("cuda-toolkit[nvcc]==13.0.3",)), pins)
    assert replace(before, python="3.12").why_stale() == "its inputs changed"


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_deepspeed_is_locked_where_the_row_has_it_and_nowhere_else(row: Row) -> None:
    found = entries(IMAGES / row.id / "requirements.lock")
    assert ("deepspeed" in found) == row.has_deepspeed
    if row.has_deepspeed:
        assert "--hash=sha256:" in found["deepspeed"]
    else:
        assert row.variant == "-base"
        assert "nvidia-ml-py" not in found


@pytest.mark.parametrize("row", [row for row in ROWS if row.is_cpu], ids=lambda row: row.id)
def test_a_cpu_row_holds_no_nvidia_package(row: Row) -> None:
    found = entries(IMAGES / row.id / "requirements.lock")
    assert [name for name in found if name.startswith(("nvidia", "cuda", "triton"))] == []


def test_no_file_of_an_unfinished_lock_is_shipped() -> None:
    left = [path.name for path in IMAGES.rglob("*") if path.suffix in (".part", ".limits", ".overrides")]
    assert left == []


@pytest.mark.parametrize("one", LOCKS, ids=LOCK_IDS)
def test_a_shipped_lock_names_no_folder_of_the_machine_that_made_it(one: Lock) -> None:
    text = one.path.read_text()
    assert "file:" not in text
    assert "--find-links" not in text
    assert " @ " not in text


# -- making one, without a network ---------------------------------------------------------


def wheel(folder: Path, name: str, version: str, requires: str = "") -> Path:
    """A wheel that holds nothing but its metadata."""
    info = f"{name}-{version}.dist-info"
    meta = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    meta += f"Requires-Dist: {requires}\n" if requires else ""
    files = {
        f"{info}/METADATA": meta,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text)}\n"
    target = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": record + f"{info}/RECORD,,\n"}.items():
            archive.writestr(path, text)
    return target


@pytest.fixture
def wheelhouse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of small wheels, and no network."""
    folder = tmp_path / "wheelhouse"
    folder.mkdir()
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("UV_INDEX_URL", "UV_DEFAULT_INDEX", "UV_EXTRA_INDEX_URL", "UV_INDEX", "UV_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    for name, version, requires in (
        ("yardstick", "1.0", "railhead"),
        ("yardstick", "1.1", "railhead"),
        ("railhead", "3.0", ""),
        ("railhead", "4.0", ""),
    ):
        wheel(folder, name, version, requires)
    return folder


def one_lock(tmp_path: Path, *requirements: str, **more: object) -> Lock:
    path = tmp_path / "images" / "some-id" / "requirements.lock"
    fields = {"python": "3.11", "index": "https://unused.invalid/", **more}
    return Lock(path, requirements, **fields)  # type: ignore[arg-type]


def beside(one: Lock) -> list[str]:
    return sorted(path.name for path in one.path.parent.iterdir())


def pins(one: Lock) -> set[str]:
    return {line.split(" ")[0] for line in one.path.read_text().splitlines() if line[0].isalpha()}


def test_make_writes_pins_with_hashes_and_a_head_that_says_current(tmp_path: Path, wheelhouse: Path) -> None:
    one = one_lock(tmp_path, "yardstick")
    lock.make(one, (wheelhouse,))
    assert pins(one) == {"yardstick==1.1", "railhead==4.0"}
    assert set(entries(one.path)) == {"yardstick", "railhead"}
    digest = hashlib.sha256((wheelhouse / "railhead-4.0-py3-none-any.whl").read_bytes()).hexdigest()
    assert digest in entries(one.path)["railhead"]
    assert one.why_stale() is None
    assert str(tmp_path) not in one.path.read_text()
    assert beside(one) == ["requirements.lock"]


def test_make_twice_gives_the_same_bytes(tmp_path: Path, wheelhouse: Path) -> None:
    one = one_lock(tmp_path, "yardstick")
    lock.make(one, (wheelhouse,))
    before = one.path.read_bytes()
    lock.make(one, (wheelhouse,))
    assert one.path.read_bytes() == before


def test_make_keeps_what_is_locked_and_upgrade_does_not(tmp_path: Path, wheelhouse: Path) -> None:
    newest = wheelhouse / "railhead-4.0-py3-none-any.whl"
    later = newest.rename(tmp_path / newest.name)
    lock.make(one_lock(tmp_path, "yardstick"), (wheelhouse,))
    later.rename(newest)
    again = one_lock(tmp_path, "railhead", "yardstick")
    lock.make(again, (wheelhouse,))
    assert "railhead==3.0" in pins(again)
    lock.make(again, (wheelhouse,), upgrade=True)
    assert "railhead==4.0" in pins(again)


def test_overrides_limits_and_constraints_are_obeyed_and_leave_no_file(
    tmp_path: Path, wheelhouse: Path
) -> None:
    overridden = one_lock(tmp_path, "yardstick", overrides=("railhead==3.0",))
    lock.make(overridden, (wheelhouse,))
    assert "railhead==3.0" in pins(overridden)
    limited = one_lock(tmp_path, "yardstick", limits=("railhead==3.*", "yardstick==1.0"))
    lock.make(limited, (wheelhouse,), upgrade=True)
    assert pins(limited) == {"yardstick==1.0", "railhead==3.0"}
    build = Lock(
        limited.path.with_name("build.lock"),
        ("railhead",),
        constraints=limited.path,
        python="3.11",
        index=limited.index,
    )
    lock.make(build, (wheelhouse,))
    assert pins(build) == {"railhead==3.0"}
    assert beside(limited) == ["build.lock", "requirements.lock"]


def test_a_failed_make_leaves_the_old_lock_as_it_was(tmp_path: Path, wheelhouse: Path) -> None:
    lock.make(one_lock(tmp_path, "yardstick"), (wheelhouse,))
    broken = one_lock(
        tmp_path, "no-such-package==1.0", overrides=("railhead==3.0",), limits=("yardstick==1.0",)
    )
    before = broken.path.read_bytes()
    with pytest.raises(StepFailed) as caught:
        lock.make(broken, (wheelhouse,))
    assert "no-such-package" in str(caught.value)
    assert str(broken.path) in str(caught.value)
    assert broken.path.read_bytes() == before
    assert beside(broken) == ["requirements.lock"]


def test_a_failed_first_make_leaves_nothing(tmp_path: Path, wheelhouse: Path) -> None:
    one = one_lock(tmp_path, "no-such-package")
    with pytest.raises(StepFailed, match="no-such-package"):
        lock.make(one, (wheelhouse,))
    assert beside(one) == []


def test_an_interrupted_make_leaves_the_old_lock_and_nothing_else(
    tmp_path: Path, wheelhouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = one_lock(tmp_path, "yardstick", overrides=("railhead==3.0",), limits=("yardstick==1.0",))
    lock.make(one, (wheelhouse,))
    before = one.path.read_bytes()

    def interrupted(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainyard.lock.subprocess.run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lock.make(one, (wheelhouse,))
    assert one.path.read_bytes() == before
    assert beside(one) == ["requirements.lock"]


def test_a_wheelhouse_without_this_torch_does_not_hide_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    one = one_lock(tmp_path, "torch==2.13.0+cpu", "numpy")
    (tmp_path / "torch-2.12.0+cpu-cp311-cp311-linux_x86_64.whl").touch()
    (tmp_path / "torch-2.13.0+cpu-cp312-cp312-linux_x86_64.whl").touch()
    assert lock._wheelhouse(one) == ()
    (tmp_path / "torch-2.13.0%2Bcpu-cp311-cp311-linux_x86_64.whl").touch()
    assert lock._wheelhouse(one) == (tmp_path,)
