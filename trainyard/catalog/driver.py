"""Which images run on a host, from what its ``nvidia-smi`` prints: the row's two facts, no others.

``assets/catalog.js`` answers the same question in the page; the browser test holds both to one
table of cases.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from trainyard.facts import major_of, older
from trainyard.model import InputError, Row

#: runs; runs if the driver is at or above the row's floor; does not run.
Answer = Literal["runs", "floor", "no"]


@dataclass(frozen=True)
class Asked:
    """What somebody read off ``nvidia-smi``."""

    kind: Literal["cuda", "driver"]
    version: str


def parse(text: str) -> Asked:
    """Find a driver version (three digits first), else a CUDA version, in what was typed or pasted.

    Raises InputError where there is neither.
    """
    words = re.findall(r"(?<![\w.])(?<!\d,)\d+(?:\.\d+)*(?!\w|[.,]\w)", text)
    for word in words:
        if re.fullmatch(r"\d{3}(\.\d+){0,2}", word):
            return Asked("driver", word)
    for word in words:
        if re.fullmatch(r"\d{1,2}(\.\d{1,2})?", word):
            return Asked("cuda", word)
    raise InputError(f'"{text}" is no CUDA version like 12.2 and no driver version like 535.104')


def answer(row: Row, asked: Asked) -> Answer:
    """Does the image of this row run there?

    ``cuda_level`` is what nvidia-smi must print at least.  A driver of the same CUDA major that
    prints less still runs the image from ``driver_floor`` on, but its version was not told:
    https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
    """
    if row.cuda_level is None or row.driver_floor is None:
        return "runs"
    if asked.kind == "driver":
        return "no" if older(asked.version, row.driver_floor) else "runs"
    if not older(asked.version, row.cuda_level):
        return "runs"
    return "floor" if major_of(asked.version) == major_of(row.cuda_level) else "no"
