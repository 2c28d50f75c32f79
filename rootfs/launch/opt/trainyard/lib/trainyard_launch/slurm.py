"""Slurm's compact notations: node lists and task counts.

https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
"""

from __future__ import annotations

import itertools
import re

from trainyard_launch.errors import LaunchError

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def nodes(text: str) -> list[str]:
    """``["node01", "node02", "node07"]`` from ``node[01-02,07]``.

    Several lists, several brackets in one name and zero-padded numbers are understood.
    """
    found: list[str] = []
    for part in _split(text):
        pieces = _BRACKETS.split(part)  # text, inside, text, inside, text
        if any(character in piece for piece in pieces[0::2] for character in "[]"):
            raise LaunchError(f"Slurm's node list {text!r} is not understood: unbalanced brackets")
        choices = [[piece] if index % 2 == 0 else _numbers(piece, text) for index, piece in enumerate(pieces)]
        found += ["".join(combination) for combination in itertools.product(*choices)]
    if not found:
        raise LaunchError(f"Slurm's node list {text!r} names no node")
    return found


def tasks(text: str) -> list[int]:
    """Tasks of each node: ``[2, 2, 2, 1]`` from ``2(x3),1``."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise LaunchError(f"Slurm's task counts {text!r} are not understood; expected like 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _split(text: str) -> list[str]:
    """Split at commas that are not in brackets."""
    parts, depth, current = [], 0, ""
    for character in text:
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += character
    return [part.strip() for part in [*parts, current] if part.strip()]


def _numbers(inside: str, text: str) -> list[str]:
    found: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise LaunchError(f"Slurm's node list {text!r} is not understood: [{inside}]")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise LaunchError(f"Slurm's node list {text!r} is not understood: {part} runs backwards")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found
