"""The scripts of kernels/: what they decide, and the compiler wrapper run for real."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from shipped import IMAGES, ROOT, ROWS

BIN = ROOT / "kernels/bin"
LOCK = """\
# Generated
deepspeed==0.18.9 \\
    --hash=sha256:aaa \\
    --hash=sha256:bbb
deepspeed-kernels==1.0 \\
    --hash=sha256:ccc
einops==0.8.2 \\
    --hash=sha256:ddd
"""


def loaded() -> ModuleType:
    """kernels/build_wheel.py as a module, without a cache file beside it."""
    spec = importlib.util.spec_from_file_location("build_wheel", ROOT / "kernels/build_wheel.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    spec.loader.exec_module(module)
    sys.dont_write_bytecode = before
    return module


build_wheel = loaded()


# -- what build_wheel.py decides -----------------------------------------------------------


def test_the_entry_of_a_lock_is_its_pin_and_hashes_and_nothing_else() -> None:
    assert build_wheel.lock_entry(LOCK, "deepspeed") == (
        "deepspeed==0.18.9 \\\n    --hash=sha256:aaa \\\n    --hash=sha256:bbb\n"
    )
    assert build_wheel.lock_entry(LOCK, "einops") == "einops==0.8.2 \\\n    --hash=sha256:ddd\n"


def test_a_lock_without_the_package_is_a_failure_that_names_it() -> None:
    with pytest.raises(SystemExit, match="kernels: FAILED: the lock file has no entry for torch"):
        build_wheel.lock_entry(LOCK, "torch")


@pytest.mark.parametrize("row", [row for row in ROWS if row.has_deepspeed], ids=lambda row: row.id)
def test_every_shipped_lock_has_an_entry_for_deepspeed_with_a_hash(row: object) -> None:
    id_ = getattr(row, "id", "")
    entry = build_wheel.lock_entry((IMAGES / id_ / "requirements.lock").read_text(), "deepspeed")
    assert entry.startswith("deepspeed==")
    assert "--hash=sha256:" in entry
    assert entry.count("==") == 1


def test_a_compile_error_names_the_op_and_the_first_error() -> None:
    log = [
        "building 'deepspeed.ops.adam.cpu_adam_op' extension\n",
        "building 'deepspeed.ops.adam.fused_adam_op' extension\n",
        "  csrc/adam/multi_tensor_adam.cu(12): error: identifier is undefined\n",
        "  csrc/adam/multi_tensor_adam.cu(99): error: a later one\n",
    ]
    assert build_wheel.why_it_broke(log, 1) == (
        "op fused_adam did not compile: csrc/adam/multi_tensor_adam.cu(12): error: identifier is undefined"
    )


@pytest.mark.parametrize(
    "line",
    [
        "/usr/bin/ld: x.o: undefined reference to `io_submit'",
        "/usr/bin/ld: cannot find -lcurand: No such file or directory",
    ],
)
def test_a_link_error_names_the_op_and_the_linker_s_words(line: str) -> None:
    log = ["building 'deepspeed.ops.aio.async_io_op' extension\n", line + "\n"]
    assert build_wheel.why_it_broke(log, 1) == f"op async_io did not compile: {line}"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("g++-13: fatal error: Killed signal terminated program cc1plus\n", 1),
        ("anything\n", 137),
        ("anything\n", -9),
    ],
)
def test_a_killed_compiler_is_called_out_of_memory(line: str, code: int) -> None:
    log = ["building 'deepspeed.ops.transformer_op' extension\n", line]
    said = build_wheel.why_it_broke(log, code)
    assert said.startswith("op transformer: the compiler was killed: out of memory")


def test_a_failure_without_a_known_error_tells_pip_s_exit_code() -> None:
    assert build_wheel.why_it_broke([], 2) == "op ? did not compile: pip ended with 2"


@pytest.mark.parametrize(
    ("gigabytes", "wanted"),
    [(1, (1, 1)), (7, (2, 1)), (12, (4, 1)), (26, (8, 1)), (48, (8, 2)), (256, (8, 2))],
)
def test_jobs_and_nvcc_threads_fit_cores_and_memory(gigabytes: int, wanted: tuple[int, int]) -> None:
    assert build_wheel.parallelism(8, gigabytes * 1024**3) == wanted


def test_the_memory_of_this_machine_is_found() -> None:
    assert build_wheel.memory_bytes() > 0


def test_ops_find_nvidias_wheels_beside_deepspeed_where_the_toolkit_came_as_wheels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_HOME", "/opt/cuda/nvidia/cu13")
    (path,) = [flag for flag in build_wheel.link_flags("cuda").split() if "-rpath" in flag]
    op = Path("/site-packages/deepspeed/ops/transformer/stochastic_transformer_op.so")
    relative = path.partition("$ORIGIN/")[2]
    assert os.path.normpath(op.parent / relative) == "/site-packages/nvidia/cu13/lib"
    monkeypatch.setenv("CUDA_HOME", "/usr")
    assert "-rpath" not in build_wheel.link_flags("cuda")


def test_link_flags_strip_debug_symbols_and_keep_what_the_cpu_ops_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_HOME", "/usr")
    cuda, cpu = build_wheel.link_flags("cuda"), build_wheel.link_flags("cpu")
    assert "-Wl,--strip-debug" in cuda
    assert "-Wl,--strip-debug" in cpu
    assert "--as-needed" in cuda
    assert "-laio" not in cuda
    assert "--no-as-needed -laio -lgomp" in cpu
    assert "-lcuda" not in cuda + cpu


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("CUDA_HOME", "/usr")
    for name in [name for name in os.environ if name.startswith("DS_")]:
        monkeypatch.delenv(name)
    function: Callable[..., dict[str, str]] = build_wheel.build_env
    return function


def test_exactly_the_ops_asked_for_are_switched_on(env: Callable[..., dict[str, str]]) -> None:
    found = env("cuda", ("async_io", "deepspeed_shm_comm", "fused_adam"))
    switches = {name for name, value in found.items() if name.startswith("DS_BUILD_") and value == "1"}
    assert switches == {"DS_BUILD_AIO", "DS_BUILD_SHM_COMM", "DS_BUILD_FUSED_ADAM"}
    assert found["DS_BUILD_OPS"] == "0"
    assert found["DS_ACCELERATOR"] == "cuda"


def test_the_wrappers_are_the_first_compilers_on_path(env: Callable[..., dict[str, str]]) -> None:
    found = env("cpu", ("cpu_adam",))
    assert found["PATH"].split(":")[0] == str(BIN)
    assert found["PATH"].endswith("/usr/bin:/bin")
    assert (found["CC"], found["CXX"]) == (str(BIN / "gcc"), str(BIN / "g++"))
    assert found["PYTORCH_NVCC"] == str(BIN / "nvcc")


# -- proving a wheel -----------------------------------------------------------------------


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """build_wheel.check() on a made-up DeepSpeed; ``recorded`` and ``load`` say what it is like."""

    def run(
        ops: tuple[str, ...], recorded: dict[str, bool], load: str = "return module", made_for: str = "cpu"
    ) -> None:
        def install(_wheel: Path, folder: Path) -> None:
            package = folder / "deepspeed/ops/op_builder"
            package.mkdir(parents=True)
            for parent in (package, package.parent, package.parent.parent):
                (parent / "__init__.py").touch()
            (folder / "deepspeed/git_version_info_installed.py").write_text(
                f"accelerator_name = {made_for!r}\ninstalled_ops = {recorded!r}\n"
            )
            (package / "all_ops.py").write_text(
                "import types\n"
                "class Builder:\n"
                "    def __init__(self, name): self.name = name\n"
                "    def load(self, verbose):\n"
                "        module = types.SimpleNamespace(\n"
                f"            __file__='{folder}/deepspeed/ops/' + self.name + '_op.so')\n"
                f"        {load}\n"
                f"ALL_OPS = {{name: Builder(name) for name in {list(recorded)!r}}}\n"
            )

        monkeypatch.setattr(build_wheel, "install", install)
        build_wheel.check(tmp_path / "deepspeed.whl", "cpu", ops)

    return run


def test_a_wheel_with_exactly_the_ops_asked_for_passes(
    check: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    check(("cpu_adam", "fused_adam"), {"cpu_adam": True, "fused_adam": True, "async_io": False})
    assert "cpu_adam_op.so" in capsys.readouterr().out


def test_an_op_that_deepspeed_skipped_fails_by_name(check: Callable[..., None]) -> None:
    with pytest.raises(SystemExit, match="op async_io was asked for, but DeepSpeed skipped it"):
        check(("async_io", "cpu_adam"), {"cpu_adam": True, "async_io": False})


def test_an_op_that_nobody_asked_for_fails_by_name(check: Callable[..., None]) -> None:
    with pytest.raises(SystemExit, match="op fused_adam was built, but nobody asked for it"):
        check(("cpu_adam",), {"cpu_adam": True, "fused_adam": True})


def test_a_wheel_for_another_accelerator_fails(check: Callable[..., None]) -> None:
    with pytest.raises(SystemExit, match="the wheel is for accelerator cuda, asked: cpu"):
        check(("cpu_adam",), {"cpu_adam": True}, made_for="cuda")


def test_an_op_that_does_not_load_fails_by_name_and_error(check: Callable[..., None]) -> None:
    with pytest.raises(SystemExit, match="an op does not load: cpu_adam: ImportError: no libgomp"):
        check(("cpu_adam",), {"cpu_adam": True}, load="raise ImportError('no libgomp')")


def test_an_op_that_comes_from_elsewhere_than_the_wheel_fails(check: Callable[..., None]) -> None:
    elsewhere = "return types.SimpleNamespace(__file__='/tmp/extensions/cpu_adam_op.so')"
    with pytest.raises(SystemExit, match="an op did not load from the wheel: cpu_adam /tmp/extensions"):
        check(("cpu_adam",), {"cpu_adam": True}, load=elsewhere)


def test_the_proof_runs_without_a_compiler_on_path(check: Callable[..., None]) -> None:
    look = "import shutil; assert not any(map(shutil.which, ('gcc', 'cc', 'c++', 'nvcc'))); return module"
    check(("cpu_adam",), {"cpu_adam": True}, load=look)


def test_a_kept_wheel_replaces_the_one_before_and_leaves_no_part(tmp_path: Path) -> None:
    wheel = tmp_path / "deepspeed-1-py3-none-any.whl"
    for text in ("one", "two"):
        wheel.write_text(text)
        kept = build_wheel.keep(wheel, tmp_path / "store/key")
        assert kept == tmp_path / "store/key" / wheel.name
        assert kept.read_text() == text
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["key"]


# -- the compiler wrapper ------------------------------------------------------------------


@pytest.fixture
def compile_(tmp_path: Path) -> Callable[..., list[str]]:
    """Run a wrapper; the real compilers are scripts that print who they are and each argument."""

    def script(name: str, end: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/sh\necho "{name}"\n{end}\n')
        path.chmod(0o755)
        return str(path)

    show = 'printf "%s\\n" "in-nvcc=${KERNEL_IN_NVCC:-}" "$@"'
    env = {
        "PATH": os.environ["PATH"],
        "KERNEL_GCC": script("real-gcc", show),
        "KERNEL_GXX": script("real-g++", show),
        "CUDA_HOME": str(Path(script("cuda/bin/nvcc", show)).parents[1]),
    }
    launcher = script("launcher", 'exec "$@"')

    def run(
        *arguments: str,
        tool: str = "gcc",
        isa: str = "x86-64-v3",
        launch: bool = False,
        in_nvcc: bool = False,
    ) -> list[str]:
        more = {"KERNEL_ISA": isa, "KERNEL_LAUNCHER": launcher if launch else ""}
        more |= {"KERNEL_IN_NVCC": "1"} if in_nvcc else {}
        done = subprocess.run(
            [BIN / tool, *arguments], env=env | more, text=True, capture_output=True, check=True
        )
        return [line for line in done.stdout.splitlines() if line != "in-nvcc="]

    return run


@pytest.mark.parametrize("isa", ["x86-64-v2", "x86-64-v3", "x86-64-v4"])
def test_the_build_host_s_instruction_set_is_replaced_by_the_named_one(
    isa: str, compile_: Callable[..., list[str]]
) -> None:
    found = compile_("-O3", "-march=native", "-c", "x.cpp", isa=isa)
    assert found == ["real-gcc", "-O3", f"-march={isa}", "-c", "x.cpp"]


@pytest.mark.parametrize("macro", ["-D__AVX512__", "-D__AVX256__", "-D__SCALAR__"])
@pytest.mark.parametrize(
    ("isa", "wanted"),
    [("x86-64-v2", "-D__SCALAR__"), ("x86-64-v3", "-D__AVX256__"), ("x86-64-v4", "-D__AVX512__")],
)
def test_deepspeed_s_simd_macro_follows_the_named_instruction_set(
    macro: str, isa: str, wanted: str, compile_: Callable[..., list[str]]
) -> None:
    assert compile_(macro, "x.cpp", isa=isa) == ["real-gcc", wanted, "x.cpp"]


def test_all_other_arguments_arrive_as_they_are(compile_: Callable[..., list[str]]) -> None:
    odd = ['-DNAME="a b"', "", "a  b", "*", "$HOME", "-D__AVX512F__", "-march=x86-64", "'", "\\"]
    assert compile_(*odd) == ["real-gcc", *odd]


def test_without_arguments_the_compiler_gets_none(compile_: Callable[..., list[str]]) -> None:
    assert compile_() == ["real-gcc"]


@pytest.mark.parametrize(
    ("tool", "real"), [("gcc", "real-gcc"), ("cc", "real-gcc"), ("g++", "real-g++"), ("c++", "real-g++")]
)
def test_each_name_of_the_wrapper_calls_its_own_compiler(
    tool: str, real: str, compile_: Callable[..., list[str]]
) -> None:
    assert compile_("x", tool=tool) == [real, "x"]


def test_the_launcher_is_used_outside_nvcc_only(compile_: Callable[..., list[str]]) -> None:
    assert compile_("x", launch=True) == ["launcher", "real-gcc", "x"]
    assert compile_("x", launch=True, in_nvcc=True) == ["real-gcc", "in-nvcc=1", "x"]
    assert compile_("x", tool="g++", launch=True) == ["launcher", "real-g++", "x"]


def test_nvcc_runs_through_the_launcher_and_tells_the_host_compiler_so(
    compile_: Callable[..., list[str]],
) -> None:
    assert compile_("-c", "a b.cu", tool="nvcc", launch=True) == [
        "launcher",
        "cuda/bin/nvcc",
        "in-nvcc=1",
        "-c",
        "a b.cu",
    ]
    assert compile_("x.cu", tool="nvcc") == ["cuda/bin/nvcc", "in-nvcc=1", "x.cu"]


def test_nvcc_is_asked_for_dependencies_in_words_that_ccache_knows(
    compile_: Callable[..., list[str]],
) -> None:
    asked = ("--generate-dependencies-with-compile", "--dependency-output", "x.o.d", "-c", "x.cu")
    assert compile_(*asked, tool="nvcc")[2:] == ["-MD", "-MF", "x.o.d", "-c", "x.cu"]


@pytest.mark.parametrize("name", ["KERNEL_ISA", "KERNEL_GCC"])
def test_a_wrapper_without_its_inputs_fails_by_their_name(name: str) -> None:
    env = {"PATH": os.environ["PATH"], "KERNEL_ISA": "x86-64-v3", "KERNEL_GCC": "true"}
    env.pop(name)
    done = subprocess.run([BIN / "gcc", "x.c"], env=env, text=True, capture_output=True)
    assert done.returncode != 0
    assert name in done.stderr


# -- link_toolkit --------------------------------------------------------------------------


def link_toolkit(home: Path, bin_dir: Path) -> subprocess.CompletedProcess[str]:
    bin_dir.mkdir(exist_ok=True)
    gcc = bin_dir / "gcc"
    gcc.write_text('#!/bin/sh\nfor last; do :; done\n: > "$last"\n')
    gcc.chmod(0o755)
    return subprocess.run(
        [ROOT / "kernels/link_toolkit", home],
        env={"PATH": f"{bin_dir}:{os.environ['PATH']}"},
        text=True,
        capture_output=True,
    )


def test_the_toolkit_of_wheels_gets_the_names_that_linkers_look_for(tmp_path: Path) -> None:
    home = tmp_path / "cu13"
    for name in ("bin/nvcc", "lib/libcudart.so.13", "lib/libcublas.so.13", "lib/libcublas.so"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(name)
    (home / "bin/nvcc").chmod(0o755)
    for _ in range(2):  # a second run changes nothing
        done = link_toolkit(home, tmp_path / "bin")
        assert done.returncode == 0, done.stderr
        assert (home / "lib64/libcudart.so").resolve() == home / "lib/libcudart.so.13"
        assert not (home / "lib/libcublas.so").is_symlink()
        assert (home / "stubs/libcuda.so").exists()


def test_a_folder_without_nvcc_is_no_toolkit(tmp_path: Path) -> None:
    done = link_toolkit(tmp_path, tmp_path / "bin")
    assert done.returncode == 1
    assert f"no nvcc in {tmp_path}" in done.stderr
