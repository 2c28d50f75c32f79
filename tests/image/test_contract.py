"""What every image promises, whatever is in it: versions, cleanliness, any user, no network."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest
from containers import VENV, Image
from docker.types import Mount

from trainyard import hostenv

COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "nvcc")
USERS = ("0:0", "12345:0", "12345:12345")

# -- versions ------------------------------------------------------------------------------

VERSIONS = """
import json, platform, sys, torch
print(json.dumps({
    "python": platform.python_version(),
    "prefix": sys.prefix,
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "flags": torch._C._cuda_getArchFlags() if torch.version.cuda else None,
    "conv": list(torch.nn.functional.conv2d(torch.ones(1, 1, 4, 4), torch.ones(1, 1, 2, 2)).shape),
}))
"""

# As loaded, by asking the library: torch.cuda.nccl.version() is a number compiled into torch.
LOADED = """
import ctypes, importlib.util, json, pathlib, sys
import torch
name, function = sys.argv[1:]
files = [pathlib.Path(line.split(maxsplit=5)[-1]) for line in open("/proc/self/maps")
         if f"/lib{name}.so" in line]
files = sorted({str(path).strip() for path in files})
library = ctypes.CDLL(files[0])
if function == "cudnnGetVersion":
    library.cudnnGetVersion.restype = ctypes.c_size_t
    number = library.cudnnGetVersion()
    version = (number // 10000, number // 100 % 100, number % 100)
else:
    value = ctypes.c_int()
    assert library.ncclGetVersion(ctypes.byref(value)) == 0
    version = (value.value // 10000, value.value // 100 % 100, value.value % 100)
print(json.dumps({"files": files, "version": ".".join(map(str, version))}))
"""


def last_json(text: str) -> Any:
    """The JSON document on the last line of an output."""
    return json.loads(text.strip().splitlines()[-1])


def test_python_and_torch_are_the_rows(image: Image) -> None:
    found = last_json(image.python(VERSIONS).ok())
    assert found["prefix"] == VENV
    assert found["python"].split(".")[:2] == image.row.python.split(".")
    assert found["torch"].partition("+")[0] == image.row.torch.version
    assert found["cuda"] == image.row.torch.cuda
    if image.row.is_cpu:
        assert found["torch"].endswith("+cpu")
    assert found["conv"] == [1, 1, 3, 3]


@pytest.mark.only("not is_cpu")
def test_torch_has_code_for_the_rows_gpus(image: Image) -> None:
    """Machine code of the same major architecture and an equal or older minor one, or PTX."""
    flags = last_json(image.python(VERSIONS).ok())["flags"].split()
    machine = {int(f[3:]) for f in flags if f.startswith("sm_") and f[3:].isdigit()}
    ptx = {int(f[8:]) for f in flags if f.startswith("compute_") and f[8:].isdigit()}
    for name in image.row.sm_archs:
        arch = int(name[3:])
        runs = any(m // 10 == arch // 10 and m <= arch for m in machine)
        assert runs or any(p <= arch for p in ptx), f"{name} cannot run {flags}"


@pytest.mark.only("not is_cpu")
def test_cudnn_is_the_rows_as_loaded(image: Image) -> None:
    assert image.row.cudnn is not None
    found = last_json(image.python(LOADED, "cudnn", "cudnnGetVersion").ok())
    assert len(found["files"]) == 1, found
    assert found["version"] == ".".join(image.row.cudnn.split(".")[:3])


@pytest.mark.only("not is_cpu")
def test_nccl_is_the_rows_as_loaded_and_the_only_one(image: Image) -> None:
    found = last_json(image.python(LOADED, "nccl", "ncclGetVersion").ok())
    assert found["version"] == image.row.nccl
    there = image.exec("find / -xdev -name 'libnccl.so*' -not -type d").ok().split()
    assert there == found["files"]


@pytest.mark.only("is_cpu")
def test_no_nvidia_library_in_a_cpu_image(image: Image) -> None:
    assert image.exec("find / -xdev -name 'libnccl*' -o -xdev -name 'libcudart*'").ok() == ""


def test_operating_system_is_the_rows(image: Image) -> None:
    system = image.host.system_info
    assert f"{system.distribution}-{system.release}".split(".")[0] == image.row.base.name
    assert system.codename == image.row.base.suite


@pytest.mark.only("has_deepspeed")
def test_deepspeed_is_the_rows(image: Image) -> None:
    out = image.python("import deepspeed; print(deepspeed.__version__, deepspeed.__file__)").ok()
    version, path = out.split()[-2:]
    assert version.partition("+")[0] == image.row.deepspeed
    assert path.startswith(image.row.site_packages)


@pytest.mark.only("not has_deepspeed")
def test_no_deepspeed_in_a_torch_only_image(image: Image) -> None:
    assert "ModuleNotFoundError" in image.python("import deepspeed").err


def test_labels_say_what_is_inside(image: Image) -> None:
    labels = image.labels
    assert labels["dev.trainyard.id"] == image.row.id
    assert labels["dev.trainyard.torch"] == image.row.torch.version
    assert labels.get("dev.trainyard.deepspeed") == image.row.deepspeed
    assert labels["org.opencontainers.image.title"] == image.row.id


# -- the environment -----------------------------------------------------------------------


def test_environment_comes_from_env_and_not_from_the_entrypoint(image: Image) -> None:
    """Slurm, Kubernetes and ``docker exec`` bypass the entrypoint."""
    env = image.env
    assert env["PATH"].split(":")[0] == f"{VENV}/bin"
    assert env["PIP_CONSTRAINT"] == "/opt/trainyard/constraints.txt"
    assert env["TRAINYARD_IMAGE"] == image.row.id
    assert env["TRAINYARD_CONTENTS"] == image.labels["dev.trainyard.contents-id"]
    assert env.get("DS_ACCELERATOR") == ("cpu" if image.row.is_cpu else None)
    for tool in ("python", "python3", "torchrun", "pip"):
        assert image.exec(["sh", "-c", f"command -v {tool}"]).ok().strip() == f"{VENV}/bin/{tool}"
    bypassed = image.run_new("python -c 'import torch, sys; print(sys.prefix)'", entrypoint=[])
    assert bypassed.ok().strip() == VENV


@pytest.mark.only("has_deepspeed")
def test_deepspeeds_commands_are_the_venvs(image: Image) -> None:
    for tool in ("deepspeed", "ds_report"):
        assert image.exec(["sh", "-c", f"command -v {tool}"]).ok().strip() == f"{VENV}/bin/{tool}"


def test_pid_1_forwards_signals_and_reaps(image: Image) -> None:
    assert image.config["Entrypoint"][:3] == ["/usr/bin/tini", "-s", "-g"]
    assert image.host.file("/proc/1/comm").content_string.strip() == "tini"


def test_the_command_can_be_any(image: Image) -> None:
    assert image.run_new(["true"]).ok() == ""
    assert image.run_new(["sh", "-c", "exit 7"]).rc == 7


def test_no_build_or_proxy_setting_stays_in_env(image: Image) -> None:
    names = {name.upper() for name in image.env}
    left = {n for n in names if "PROXY" in n or n.endswith(("_CERT", "_CA_BUNDLE", "CERT_FILE"))}
    assert not left
    assert not {n for n in names if n.startswith(("NCCL_", "DS_BUILD", "NV_LIB"))}
    assert not {n for n in names if any(w in n for w in ("TOKEN", "SECRET", "PASSWORD"))}


def test_history_tells_nothing_of_the_build_host(image: Image) -> None:
    """`docker history` shows build arguments and commands to everybody who pulls."""
    told = json.dumps(image.client.api.history(image.ref))  # type: ignore[no-untyped-call]
    private = [
        os.environ.get(name, "") for name in ("PIP_INDEX_URL", "PIP_CERT", "HTTPS_PROXY", "https_proxy")
    ]
    for text in ("BEGIN CERTIFICATE", "_proxy=", "_PROXY=", "password", "token", *filter(None, private)):
        assert text not in told


def test_stub_libraries_are_not_on_the_run_time_path(image: Image) -> None:
    """A stub libcuda on it answers instead of the driver (error 34)."""
    assert "stubs" not in image.env.get("LD_LIBRARY_PATH", "")
    assert image.exec("grep -rs stubs /etc/ld.so.conf /etc/ld.so.conf.d; true").ok() == ""
    assert "stubs" not in image.exec("/sbin/ldconfig -p").ok()


# -- features ------------------------------------------------------------------------------


@pytest.mark.only("has_sshd")
def test_sshd_is_there(image: Image) -> None:
    assert image.host.package("openssh-server").is_installed
    image.run_new("mkdir -p /run/sshd && ssh-keygen -qA && /usr/sbin/sshd -t").ok()


@pytest.mark.only("has_jupyter")
def test_jupyterlab_is_there(image: Image) -> None:
    assert image.exec("jupyter lab --version").ok().strip()[0].isdigit()


@pytest.mark.only("not has_sshd")
def test_no_sshd_where_the_row_has_none(image: Image) -> None:
    assert not image.host.file("/usr/sbin/sshd").exists


# -- nothing left behind -------------------------------------------------------------------


@pytest.mark.only("not has_devel")
@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_runtime_image_has_no_compiler(image: Image, compiler: str) -> None:
    assert not image.host.exists(compiler)
    found = image.exec(f"find / -xdev -type f -name '{compiler}' -perm /111 -o -xdev -name cc1plus")
    assert found.ok() == ""


@pytest.mark.only("has_devel")
def test_a_devel_image_compiles(image: Image) -> None:
    source = "int main() { return 0; }"
    image.exec(f"echo '{source}' | ${{CXX:-g++}} -x c++ - -o /tmp/compiled && /tmp/compiled").ok()
    if not image.row.is_cpu:
        assert image.row.toolkit is not None
        assert f"release {image.row.toolkit.minor}" in image.exec("nvcc --version").ok()


def test_no_private_key_is_in_the_image(image: Image) -> None:
    """A host key in a layer is everybody's host key."""
    assert image.exec("ls /etc/ssh/ssh_host_* 2>/dev/null; true").ok() == ""
    names = "-name 'id_rsa' -o -name 'id_ed25519' -o -name 'id_ecdsa' -o -name authorized_keys"
    assert image.exec(rf"find / -xdev \( {names} \)").ok() == ""
    pattern = "^-----BEGIN [A-Z ]*PRIVATE KEY-----"
    found = image.exec(f"grep -rlsIE -e '{pattern}' /etc /root /home /opt/trainyard /var; true")
    assert found.ok() == ""


#: Published with a package's own tests, so no secret of anybody.
TEST_KEYS = re.compile(r"/opt/venv/lib/python[\d.]+/site-packages/tornado/test/test\.key")
KEY_NAMES = re.compile(r"/(ssh_host_\w+_key|id_(rsa|ecdsa|ed25519)|authorized_keys|known_hosts)$")
KEY_HEADER = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----\s")


def test_no_private_key_is_in_any_layer(image: Image) -> None:
    """A file that a later layer removes can still be read from the layer below."""
    found, seen = [], 0
    for layer in image.layers():
        for path in layer.rglob("*"):
            if path.is_symlink() or not path.is_file():
                continue
            seen += 1
            inside = f"/{path.relative_to(layer)}"
            with path.open("rb") as file:
                keyed = KEY_HEADER.match(file.read(100))
            if (keyed or KEY_NAMES.search(inside)) and not TEST_KEYS.fullmatch(inside):
                found.append(inside)
    assert found == []
    assert seen > 5000  # it did look


def test_no_certificate_of_the_build_host_is_left(image: Image) -> None:
    assert image.exec("find /usr/local/share/ca-certificates -type f").ok() == ""
    assert image.exec("ls -A /run/secrets 2>/dev/null; true").ok() == ""
    listed = "/etc/ssl/certs/ca-certificates.crt"
    count = int(image.exec(f"grep -c BEGIN {listed}").ok())
    assert count == int(image.exec("find /usr/share/ca-certificates -name '*.crt' | wc -l").ok())


def test_pip_and_apt_are_configured_by_nobody(image: Image) -> None:
    lines = image.exec("pip config list").ok().splitlines()
    assert [line.split("=")[0] for line in lines] == [":env:.constraint"]
    homes = "/root/.netrc /root/.curlrc /root/.wgetrc /root/.gitconfig /root/.docker /root/.config"
    assert image.exec(f"ls -d {homes} 2>/dev/null; true").ok() == ""
    assert image.exec("grep -rsi proxy /etc/apt/apt.conf.d /etc/environment; true").ok() == ""


def test_caches_of_the_build_are_not_in_a_layer(image: Image) -> None:
    folders = "/root/.cache /var/lib/apt/lists /var/cache/apt/archives /tmp /run/secrets"
    found = image.run_new(f"find {folders} -type f -not -name lock 2>/dev/null; true").ok()
    assert found == ""


# -- packages ------------------------------------------------------------------------------


#: The metadata in NVIDIA's arm64 wheel names the platform "sbsa", which is none that pip knows; its file
#: name, by which it is installed, says aarch64.  Ends with a wheel that says the same in both places.
SBSA = re.compile(r"nvidia-cusparselt-cu\d+ \S+ is not supported on this platform")


def test_packages_agree_with_each_other(image: Image) -> None:
    done = image.exec("pip check")
    if image.row.arch == "arm64":
        assert SBSA.fullmatch(done.out.strip()), "mended by NVIDIA? then this branch can go"
    else:
        assert "No broken requirements" in done.ok()


EXTENSIONS = r"""
import importlib, importlib.machinery, json, pathlib, sys, sysconfig
site = pathlib.Path(sysconfig.get_paths()["platlib"])
suffixes = sorted(importlib.machinery.EXTENSION_SUFFIXES, key=len, reverse=True)
skip = tuple(sys.argv[1:])
failed, good = {}, 0
import torch
for path in sorted(site.rglob("*.so")):
    suffix = next((s for s in suffixes if path.name.endswith(s)), None)
    relative = path.relative_to(site)
    if suffix in (None, ".so") or str(relative).startswith(skip):
        continue
    name = ".".join([*relative.parent.parts, path.name.removesuffix(suffix)])
    try:
        importlib.import_module(name)
        good += 1
    except BaseException as error:
        failed[name] = f"{type(error).__name__}: {error}"
print(json.dumps({"good": good, "failed": failed}))
"""


def test_every_extension_module_imports(image: Image) -> None:
    """All compiled modules but DeepSpeed's, which test_kernels loads as DeepSpeed does.

    Nor those that a package keeps for itself (debugpy/_vendored), nor functorch._C, a left-over in
    torch 2.9's own wheel that refuses to be initialised beside torch's.
    """
    skip = ("deepspeed/", "debugpy/_vendored/", "functorch/")
    found = last_json(image.python(EXTENSIONS, *skip, timeout=300).ok())
    assert not found["failed"], found["failed"]
    assert found["good"] > 0


def test_shared_libraries_find_what_they_need(image: Image) -> None:
    """What Python loads: nothing is missing but the driver, which the host brings."""
    code = "import torch, torch.distributed, torch.nn.functional, numpy; print('ok')"
    done = image.python(code, env={"LD_BIND_NOW": "1"})
    assert done.ok().strip() == "ok"


# -- any user, no network ------------------------------------------------------------------

CACHES = """
import os, pathlib, tempfile, torch
import torch._dynamo  # makes a cache folder when it is imported; FSDP2 needs it
for name in ("TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
    path = pathlib.Path(os.environ[name])
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path):
        pass
print(torch.ones(2, 2).sum().item(), pathlib.Path.home())
"""


@pytest.mark.parametrize("user", USERS)
def test_runs_as_any_user_without_network(image: Image, user: str) -> None:
    """Unknown uids have no home and no name; caches are writable all the same."""
    with image.fresh(user=user, network_mode="none") as container:
        assert container.python(CACHES).ok().startswith("4.0")
        assert container.exec("id -u").ok().strip() == user.split(":")[0]
        if image.row.has_deepspeed:
            container.python("import deepspeed").ok()


def test_runs_with_a_read_only_root(image: Image) -> None:
    with image.fresh(read_only=True, tmpfs={"/tmp": ""}, user="12345:12345") as container:
        container.python("import torch; assert torch.ones(3).sum() == 3").ok()


def test_the_environment_is_not_writable_for_users(image: Image) -> None:
    done = image.exec(f"touch {image.row.site_packages}/x", user="12345:0")
    assert done.rc != 0
    found = image.exec(f"find {VENV} -xdev -perm -o+w -not -type l | head")
    assert found.ok() == ""


# -- images built on this one --------------------------------------------------------------


def pip_options() -> dict[str, Any]:
    """What a container needs to reach the package index as this host does."""
    env = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    env |= {n: os.environ[n] for n in ("PIP_INDEX_URL",) if n in os.environ} | hostenv.proxies()
    ca = hostenv.find_ca()
    if ca is None:
        return {"environment": env}
    env["PIP_CERT"] = "/tmp/ca.crt"
    return {
        "environment": env,
        "mounts": [Mount("/tmp/ca.crt", str(ca), type="bind", read_only=True)],
    }


def test_installing_on_top_leaves_torch_alone(image: Image) -> None:
    """``RUN pip install`` of something that needs torch must not swap its build."""
    show = "python -c 'import torch; print(torch.__version__, torch.version.cuda)'"
    install = "pip install -q torchmetrics >&2; python -c 'import torchmetrics'"
    command = f"set -e; {show}; {install}; {show}"
    before, after = image.run_new(command, timeout=400, **pip_options()).ok().splitlines()
    assert before == after


def test_another_torch_is_refused(image: Image) -> None:
    done = image.run_new("pip install torch==2.5.0", timeout=300, **pip_options())
    assert done.rc != 0
    assert "constraint" in done.text, done.text


# -- fabric --------------------------------------------------------------------------------


@pytest.mark.only("has_rdma")
def test_rdma_is_there_once_and_names_no_interface(image: Image) -> None:
    """Two libibverbs of different age are what NCCL and perftest would disagree about."""
    found = image.exec("find / -xdev -type f -name 'libibverbs.so*'").ok().split()
    assert len(found) == 1, found
    assert "Version" in image.exec("ib_write_bw --version").text  # its exit code is 1 then, too
    image.python("import ctypes; ctypes.CDLL('libibverbs.so.1'); ctypes.CDLL('librdmacm.so.1')").ok()
    assert image.exec("ls /usr/lib/x86_64-linux-gnu/libibverbs/libmlx5-rdmav*.so").ok()
    assert not image.host.file("/etc/nccl.conf").exists


@pytest.mark.only("not has_rdma")
def test_no_rdma_where_the_row_has_none(image: Image) -> None:
    assert image.exec("find / -xdev -name 'libibverbs.so*'").ok() == ""
