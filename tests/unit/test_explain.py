"""`explain` says what is inside and why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainyard import resolve
from trainyard.explain import WIDTH, as_json, explain
from trainyard.matrix import load

SHIPPED = Path(__file__).parent.parent.parent / "matrix.yaml"
ROWS = {row.id: row for row in resolve.rows(load(SHIPPED))}


def words(row_id: str) -> str:
    """The page as one line, so that wrapping does not matter."""
    return " ".join(explain(ROWS[row_id]).split())


@pytest.mark.parametrize(
    "sentence",
    [
        "PyTorch publishes no CUDA 12.1 build of 2.9: it has cu126, cu128, cu129, cu130.",
        "The last torch with cu121 is 2.5.1.",
        "torch 2.9.1, built with CUDA 12.8",
        ">= 525.60.13",
        "any 12.x",
        "minor-version compatibility (https://docs.nvidia.com/deploy/cuda-compatibility/)",
        "nvcc 12.4 from Debian's nvidia-cuda-toolkit compiles the kernels, with g++-13",
        "because GCC 14 of debian-13 is too new for nvcc 12.4",
        "nvcc 12.4 beside a CUDA 12.8 torch is allowed: torch only warns",
        "table of minors that may be mixed (https://github.com/deepspeedai/DeepSpeed/",
        "async_io, cpu_adagrad, cpu_adam",
        "8.0 (A100)",
        "9.0 (H100, H200)",
        "8.9 (L4, L40, RTX 40) runs the code for 8.6: binary compatibility.",
        "x86-64-v3 (AVX2",
    ],
)
def test_cu121_says_why(sentence: str) -> None:
    assert sentence in words("cu121-pt29")


def test_cu124_has_both_fsdps() -> None:
    text = words("cu124-pt26")
    assert "FSDP1 (FullyShardedDataParallel) and FSDP2 (fully_shard) are both in" in text
    assert "fully_shard is public since 2.6" in text


def test_cpu_page_speaks_of_no_gpu() -> None:
    text = explain(ROWS["cpu-pt213"])
    assert "No GPU driver is needed" in text
    assert "nvcc" not in text
    assert "\nGPUs\n" not in text


def test_base_page_says_there_is_no_deepspeed() -> None:
    text = words("cu121-pt29-base")
    assert "No DeepSpeed in this variant" in text
    assert "compiled ahead" not in text


@pytest.mark.parametrize("row_id", ROWS)
def test_page_is_readable(row_id: str) -> None:
    text = explain(ROWS[row_id])
    assert text.startswith(f"{row_id}: ")
    assert "None" not in text
    long = [line for line in text.splitlines() if len(line) > WIDTH and "https://" not in line]
    assert long == []


@pytest.mark.parametrize("row_id", ROWS)
def test_json_round_trips(row_id: str) -> None:
    data = as_json(ROWS[row_id])
    assert json.loads(json.dumps(data)) == data
    assert data["id"] == row_id
