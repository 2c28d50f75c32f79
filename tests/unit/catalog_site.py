"""Samples for tests of the catalog: rows, and folders as builds, tests and nights leave them.

``catalog/`` has real manifests, as builds wrote them, and a real test report.  Other images are made
up from their rows, so that every status is there.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from xml.sax.saxutils import quoteattr

from trainyard import matrix, resolve
from trainyard.catalog import Sources
from trainyard.model import Row

DATA = Path(__file__).parent / "catalog"
ROOT = Path(__file__).resolve().parents[2]
ROWS = resolve.rows(matrix.load(DATA / "matrix.yaml"))
BY_ID = {row.id: row for row in ROWS}
REAL = "cpu-pt213"
REGISTRY = "registry.example.org/ml/trainyard"
TONIGHT = datetime.fromisoformat("2026-11-30T21:19:38+00:00")
YESTERDAY = TONIGHT - timedelta(days=1)

#: Ops without GPU code, as measured.
HOST_OPS = ("async_io", "cpu_adagrad", "cpu_adam", "cpu_lion", "deepspeed_shm_comm", "pin_memory", "utils")

#: What nvidia-smi said, and what an image of CUDA level 12.1, 12.4 (both driver 525.60.13) and 13.0
#: (driver 580) answers.  The page's own script is held to the same cases.
CASES = (
    ("12.1", "runs", "floor", "no"),
    ("12.2", "runs", "floor", "no"),
    ("12.4", "runs", "runs", "no"),
    ("12.9", "runs", "runs", "no"),
    ("12.10", "runs", "runs", "no"),
    ("12.0", "floor", "floor", "no"),
    ("12", "floor", "floor", "no"),
    ("11.8", "no", "no", "no"),
    ("13.0", "runs", "runs", "runs"),
    ("13", "runs", "runs", "runs"),
    ("13.2", "runs", "runs", "runs"),
    ("14.0", "runs", "runs", "runs"),
    ("535.104", "runs", "runs", "no"),
    ("535.104.05", "runs", "runs", "no"),
    ("525.60.13", "runs", "runs", "no"),
    ("525.60.12", "no", "no", "no"),
    ("525", "no", "no", "no"),
    ("526", "runs", "runs", "no"),
    ("580", "runs", "runs", "runs"),
    ("579.99.99", "runs", "runs", "no"),
    ("580.65.06", "runs", "runs", "runs"),
    ("470.82", "no", "no", "no"),
    (" 12.2. ", "runs", "floor", "no"),
    ("CUDA Version: 12.2, Driver Version: 470.82.01", "no", "no", "no"),
    ("CUDA Version: 12.2", "runs", "floor", "no"),
    ("| NVIDIA-SMI 535.104.05  Driver Version: 535.104.05  CUDA Version: 12.2 |", "runs", "runs", "no"),
)
ANSWERING = ("cu121-pt29", "cu124-pt26", "cu130-pt213")
#: What is no answer of nvidia-smi.
NONSENSE = ("", "hello", "1.2.3.4", "v12.2", "123456", "12.2.1.0", "H100", "-", "12,2", "12.2rc1", "-12.x")


def manifest(row: Row, built: datetime, contents: str = "00c0ffee00c0ffee") -> dict[str, Any]:
    """What a build of this row leaves, if it is just what the row says."""
    ops = {
        op: {
            "loads": True,
            "prebuilt": True,
            "file": f"{row.site_packages}/deepspeed/ops/{op}_op.so",
            "elf": [] if row.is_cpu or op in HOST_OPS else list(row.sm_archs),
            "ptx": [] if row.is_cpu or op in HOST_OPS else [row.sm_archs[-1]],
        }
        for op in row.ops
    }
    layers = [
        ("", 78_610_432),
        (
            "RUN /bin/sh -c set -eux; apt-get update; apt-get install -y libgomp1 python3 tini; rm x",
            61_204_480,
        ),
        (
            "RUN |1 TORCH_INDEX= /bin/sh -c set -eux; /opt/uv/bin/uv pip install -r lock # buildkit",
            6_412_300_288,
        ),
        ("COPY /staged / # buildkit", 391_220_224),
        ("COPY rootfs / # buildkit", 20_480),
    ]
    pip = {"torch": f"{row.torch.version}+{row.torch.build}", "numpy": "2.4.6"}
    sizes = [("torch", pip["torch"], 1_702_114_816, "BSD-3-Clause"), ("numpy", "2.4.6", 41_231_000, None)]
    return {
        "id": row.id,
        "image_id": f"sha256:{contents}{row.id.encode().hex():0<48}"[:71],
        "contents_id": contents,
        "built_at": built.isoformat(),
        "build_seconds": 1210.4,
        "base": {"name": row.base.image, "digest": f"sha256:{'ab' * 32}", "origin": "registry"},
        "size_bytes": sum(size for _, size in layers),
        "layers": [{"created_by": text, "size": size} for text, size in layers],
        "measured": {
            "os": row.base.name,
            "glibc": row.base.glibc,
            "python": f"{row.python}.4",
            "torch": {
                "version": row.torch.version,
                "local": row.torch.build,
                "cuda": row.torch.cuda,
                "archs": list(row.sm_archs),
                "distributed": True,
                "fsdp": True,
                "fsdp2": True,
            },
            "cudnn": row.cudnn and {"version": row.cudnn.rsplit(".", 1)[0], "files": ["libcudnn.so.9"]},
            "nccl": row.nccl and {"version": row.nccl, "files": ["libnccl.so.2"]},
            "deepspeed": row.deepspeed
            and {
                "version": row.deepspeed,
                "accelerator": row.accelerator,
                "torch": row.torch.minor,
                "ops": ops,
            },
            "compilers": ["gcc", "g++", "nvcc"] if row.has_devel else [],
            "apt": {"libc6": "2.41-12", "tini": "0.19.0-1"},
            "pip": pip,
            "packages": {
                "pip": [
                    {"name": name, "version": version, "licence": licence, "bytes": size}
                    for name, version, size, licence in sizes
                ],
                "apt": [
                    {"name": "libc6", "version": "2.41-12", "licences": ["LGPL-2.1+"], "bytes": 13_600_000}
                ],
            },
            "environment": ["HOME", "PATH"],
        },
    }


def report(row: Row, started: datetime, cases: dict[str, str] | None = None) -> str:
    """A JUnit report: test name -> "" (passed), "skipped", or the message of a failure."""
    found = cases if cases is not None else {"contract.test_starts": "", "training.test_trains": ""}
    lines = [
        '<?xml version="1.0" encoding="utf-8"?><testsuites name="pytest tests">'
        f'<testsuite name="pytest" tests="{len(found)}" timestamp="{started.isoformat()}">'
    ]
    for name, said in found.items():
        group, test = name.split(".")
        inside = (
            "<skipped/>" if said == "skipped" else f"<failure message={quoteattr(said)}/>" if said else ""
        )
        lines.append(
            f'<testcase classname="tests.image.test_{group}" name="{test}[{row.id}]" time="1.5">'
            f"{inside}</testcase>"
        )
    return "".join(lines) + "</testsuite></testsuites>"


def put(folder: Path, manifest: dict[str, Any], tests: str | None = None, **files: str) -> Path:
    """Write a build's folder; ``changelog_md="..."`` writes changelog.md."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2))
    if tests is not None:
        (folder / "tests.xml").write_text(tests)
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def real_manifest(id_: str) -> dict[str, Any]:
    """What a real build wrote."""
    found: dict[str, Any] = json.loads((DATA / id_ / "manifest.json").read_text())
    return found


def real() -> tuple[dict[str, Any], str]:
    """The real manifest and the real test report of one image."""
    return real_manifest(REAL), (DATA / REAL / "tests.xml").read_text()


def real_yesterday() -> tuple[dict[str, Any], str]:
    """The real ones as they may have been a night before: an older DeepSpeed, another size."""
    found, tests = real()
    before = copy.deepcopy(found)
    before["built_at"] = YESTERDAY.isoformat()
    before["contents_id"] = "41d0b2a7c9e35f68"
    before["image_id"] = "sha256:" + "41d0b2a7" * 8
    before["measured"]["pip"]["deepspeed"] = before["measured"]["deepspeed"]["version"] = "0.19.7"
    before["layers"][2]["size"] -= 18_350_080
    before["size_bytes"] -= 18_350_080
    return before, tests.replace("2026-11-30T", "2026-11-29T")


CHANGELOG = """# cpu-pt213

| package | before | now |
|---|---|---|
| deepspeed | 0.19.7 | 0.19.8 |
| numpy | 2.4.5 | 2.4.6 |

- kernels: the same seven ops
- size: +18 MB in the layer of Python packages
"""
SBOM = json.dumps({"bomFormat": "CycloneDX", "specVersion": "1.6", "components": [{"name": "torch"}] * 247})


def site(folder: Path, registry: str | None = REGISTRY) -> Sources:
    """Two nights of history and every status."""
    out, history = folder / "out", folder / "history"
    now, tests = real()
    before, tests_before = real_yesterday()
    put(out / REAL, now, tests)
    put(history / REAL / f"20261129-{before['contents_id']}", before, tests_before)
    more = {"changelog_md": CHANGELOG, "sbom_json": SBOM}
    put(history / REAL / f"20261130-{now['contents_id']}", now, tests, **more)
    put(out / REAL, now, tests, **more)

    failing = BY_ID["cu121-pt29"]
    fails = {"training.test_trains_with_torchrun": "RuntimeError: NCCL error: unhandled system error"}
    cases = {"contract.test_python_and_torch_are_the_rows": "", "kernels.test_ops_load": ""}
    built = {20261129: manifest(failing, YESTERDAY, "a1" * 8), 20261130: real_manifest(failing.id)}
    for night, found in built.items():
        when = datetime.fromisoformat(found["built_at"]) + timedelta(minutes=1)
        said = fails if night == 20261130 else dict.fromkeys(fails, "")
        tests = report(failing, when, cases | said)
        put(history / failing.id / f"{night}-{found['contents_id']}", found, tests)
    untested = BY_ID["cu124-pt26"]
    put(out / untested.id, manifest(untested, TONIGHT))
    stale = BY_ID["cu124-pt26-base"]
    put(out / stale.id, manifest(stale, TONIGHT), report(stale, YESTERDAY))
    other = replace(BY_ID["cu130-pt213"], deepspeed="0.19.7")
    put(out / other.id, manifest(other, TONIGHT), report(other, TONIGHT + timedelta(minutes=1)))
    return Sources(ROWS, out, ROOT / "images", history, registry)


def many(folder: Path, count: int) -> Sources:
    """A big matrix: ``count`` rows, each built and tested in two nights."""
    rows = []
    for index in range(count):
        row = ROWS[index % len(ROWS)]
        rows.append(replace(row, id=f"{row.stack}x{index}{row.variant}", stack=f"{row.stack}x{index}"))
    for row in rows:
        for when, contents in ((YESTERDAY, "a1" * 8), (TONIGHT, "b2" * 8)):
            tests = report(row, when + timedelta(minutes=1), {f"contract.test_{n}": "" for n in range(60)})
            put(
                folder / "history" / row.id / f"{when:%Y%m%d}-{contents}",
                manifest(row, when, contents),
                tests,
                changelog_md=CHANGELOG,
            )
    return Sources(tuple(rows), folder / "out", folder / "images", folder / "history", REGISTRY)
