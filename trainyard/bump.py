"""What could be newer: releases that the matrix does not use yet, and packages in the locks.

It proposes; `compat/` decides.  A release that nobody has checked is named as such and is left to
a person, while packages that a row's own versions allow can be written into its lock at once.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from uv import find_uv_bin

from trainyard import lock
from trainyard.facts import Facts
from trainyard.lock import Lock
from trainyard.model import Row, StepFailed


@dataclass(frozen=True)
class Release:
    """A field of a row for which the index has a newer version."""

    field: str  # torch, deepspeed, nccl, cudnn
    package: str
    has: str
    newest: str
    listed: bool | None  # is the newest one in compat/? None: compat/ does not list that field


@dataclass(frozen=True)
class Change:
    """A package of a lock that moved; None where it is new or gone."""

    package: str
    old: str | None
    new: str | None

    def __str__(self) -> str:
        return f"{self.package} {self.old or '(new)'} -> {self.new or '(gone)'}"


def releases(row: Row, facts: Facts) -> tuple[Release, ...]:
    """Newer releases of what the row names by version."""
    return tuple(_releases(row, facts))


def _releases(row: Row, facts: Facts) -> Iterator[Release]:
    named = [("torch", "torch", row.torch.version, set(facts.torch.torch))]
    if row.deepspeed:
        named.append(("deepspeed", "deepspeed", row.deepspeed, set(facts.deepspeed.versions)))
    for field, package, has in (
        ("cudnn", row.cudnn_package, row.cudnn),
        ("nccl", row.nccl_package, row.nccl),
    ):
        if package and has:
            named.append((field, package, has, set()))
    for field, package, has, listed in named:
        newest = newest_release(package)
        if _number(newest) > _number(has):
            yield Release(field, package, has, newest, newest in listed if listed else None)


def newest_release(package: str) -> str:
    """The newest final release of a package on the index that uv uses.

    Raises StepFailed where the index does not answer or does not know the package.
    """
    command = [find_uv_bin(), "pip", "compile", "-", "--quiet", "--no-deps", "--no-header", "--no-annotate"]
    command += ["--no-python-downloads", "--system-certs", "--python-platform", lock.PLATFORMS["amd64"]]
    done = subprocess.run(command, input=package, text=True, capture_output=True, env=lock.environment())
    found = re.search(rf"^{re.escape(package)}==(\S+)", done.stdout, re.MULTILINE)
    if done.returncode or not found:
        raise StepFailed(f"no release of {package} found\n{done.stderr.strip()}")
    return found[1]


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def upgrade(locks: Sequence[Lock], wheelhouse: tuple[Path, ...], write: bool) -> dict[Path, list[Change]]:
    """Resolve one row's locks anew with the newest versions it allows; say what moves.

    With ``write`` the lock files are replaced, each whole, and only after all of them resolved.
    """
    changes: dict[Path, list[Change]] = {}
    with tempfile.TemporaryDirectory(prefix="bump-") as folder:
        fresh = {one.path: Path(folder) / one.path.name for one in locks}
        for one in locks:
            constraints = fresh.get(one.constraints, one.constraints) if one.constraints else None
            lock.make(replace(one, path=fresh[one.path], constraints=constraints), wheelhouse, upgrade=True)
        for path, new in fresh.items():
            changes[path] = compare(path.read_text() if path.exists() else "", new.read_text())
        if write and any(changes.values()):  # all: a lock's head names the one that constrains it
            for path, new in fresh.items():
                part = path.with_suffix(".part")
                part.write_text(new.read_text())
                part.rename(path)
    return changes


def compare(old: str, new: str) -> list[Change]:
    """The packages whose pins differ between two lock files, by name."""
    before, after = pins(old), pins(new)
    names = sorted({*before, *after})
    return [
        Change(name, before.get(name), after.get(name))
        for name in names
        if before.get(name) != after.get(name)
    ]


def pins(text: str) -> dict[str, str]:
    """name -> version of every package in a lock file."""
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", text, re.MULTILINE))
