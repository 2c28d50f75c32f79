"""What differs between two images, by what was measured inside them.

Takes two manifests (``manifest.json``) and gives one typed :class:`Difference`, which is shown as text,
JSON or Markdown.  Markdown is the changelog of a nightly: short, and what people act on first.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

#: Changes of one kind that the changelog names; the rest is a number.
CHANGELOG_LINES = 15
#: Folders that the changelog names for what an image grew by.
CHANGELOG_PARTS = 3
#: Bytes by which a file or folder must change to be worth a line for people.  JSON has them all.
WORTH_A_LINE = 10**6
#: Characters of a layer's command that are shown.
COMMAND = 70
#: Labels and variables that only repeat the contents id.
CONTENTS = ("dev.trainyard.contents-id", "TRAINYARD_CONTENTS")

Part = Mapping[str, Any]
Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Side:
    """One of the two images."""

    id: str
    image_id: str
    contents_id: str
    built_at: str


@dataclass(frozen=True)
class Change:
    """Something by name: added (no ``before``), removed (no ``after``) or changed."""

    name: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Resized:
    """Bytes of a file, folder or layer; None where it is not there."""

    name: str
    before: int | None
    after: int | None

    @property
    def growth(self) -> int:
        """Bytes added, or taken away."""
        return (self.after or 0) - (self.before or 0)


@dataclass(frozen=True)
class Difference:
    """Everything in which two images differ; empty fields mean equality."""

    before: Side
    after: Side
    versions: tuple[Change, ...]  # the stack: torch, CUDA, DeepSpeed, ...
    kernels: tuple[Change, ...]  # DeepSpeed's ops, with their GPU architectures
    pip: tuple[Change, ...]
    apt: tuple[Change, ...]
    environment: tuple[Change, ...]  # ENV, entrypoint and the like, from the image's config
    labels: tuple[Change, ...]
    layers: tuple[Resized, ...]
    folders: tuple[Resized, ...]
    files: tuple[Resized, ...]  # the biggest ones only
    size: Resized  # the image, uncompressed
    unknown: tuple[str, ...]  # what one of the two manifests does not hold, so was not compared

    @property
    def same_image(self) -> bool:
        """Whether both are one image, byte for byte."""
        return self.before.image_id == self.after.image_id

    @property
    def equal(self) -> bool:
        """Whether nothing that was measured differs."""
        parts = (getattr(self, one.name) for one in fields(self) if one.name not in NOT_DIFFERENCES)
        return not any(parts) and self.size.growth == 0


NOT_DIFFERENCES = ("before", "after", "size", "unknown")


def diff(before: Part, after: Part) -> Difference:
    """Compare two manifests."""
    old, new = before["measured"], after["measured"]
    old_config, new_config = _both(before.get("config"), after.get("config"))
    old_files, new_files = _both(old.get("files"), new.get("files"))
    compared = {"config": new_config, "files": new_files}
    return Difference(
        before=_side(before),
        after=_side(after),
        versions=_changes(_versions(before), _versions(after), ordered=True),
        kernels=_changes(_kernels(old), _kernels(new)),
        pip=_changes(old.get("pip", {}), new.get("pip", {})),
        apt=_changes(old.get("apt", {}), new.get("apt", {})),
        environment=_changes(_environment(old_config), _environment(new_config)),
        labels=_changes(_labels(old_config), _labels(new_config)),
        layers=_layers(before.get("layers", ()), after.get("layers", ())),
        folders=_resized(_sizes(old_files, "folders"), _sizes(new_files, "folders")),
        files=_resized(*_comparable(_sizes(old_files, "biggest"), _sizes(new_files, "biggest"))),
        size=Resized("image", before["size_bytes"], after["size_bytes"]),
        unknown=tuple(name for name, part in compared.items() if not part),
    )


def _both(before: Part | None, after: Part | None) -> tuple[Part, Part]:
    """Two parts of manifests; nothing on either side where one of them is missing."""
    return (before, after) if before and after else ({}, {})


# -- comparing -----------------------------------------------------------------------------


def _side(manifest: Part) -> Side:
    return Side(manifest["id"], manifest["image_id"], manifest["contents_id"], manifest["built_at"])


def _versions(manifest: Part) -> dict[str, str | None]:
    """The stack by name, most important first; None for what the image does not have."""
    measured = manifest["measured"]
    torch, base = measured["torch"], manifest.get("base") or {}
    return {
        "torch": torch["version"] + (f"+{torch['local']}" if torch.get("local") else ""),
        "CUDA": torch["cuda"],
        "DeepSpeed": _version(measured["deepspeed"]),
        "cuDNN": _version(measured["cudnn"]),
        "NCCL": _version(measured["nccl"]),
        "Python": measured["python"],
        "OS": measured["os"],
        "base image": f"{base['name']} {_short(base['digest'])}" if base.get("digest") else None,
        "glibc": measured["glibc"],
        "GPU code of torch": " ".join(torch["archs"]) or None,
        "compilers": " ".join(measured["compilers"]) or None,
    }


def _version(part: Part | None) -> str | None:
    return part["version"] if part else None


def _kernels(measured: Part) -> dict[str, str]:
    ops = (measured["deepspeed"] or {"ops": {}})["ops"]
    return {name: op_code(op) if op["loads"] else "does not load" for name, op in ops.items()}


def op_code(op: Mapping[str, Any]) -> str:
    """Which GPUs an op has code for, in words: ``sm_80 sm_90, PTX sm_90``; ``host`` without any."""
    parts = [" ".join(op["elf"])] if op.get("elf") else []
    if op.get("ptx"):
        parts.append("PTX " + " ".join(op["ptx"]))
    return ", ".join(parts) or "host"


def _environment(config: Part) -> dict[str, str]:
    """ENV, and what else of the config decides how a container runs; OCI's own names."""
    found = {name: value for name, _, value in (one.partition("=") for one in config.get("Env") or ())}
    for name in ("Entrypoint", "Cmd", "User", "WorkingDir", "ExposedPorts", "Healthcheck", "StopSignal"):
        if value := config.get(name):
            found[f"({name})"] = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return {name: value for name, value in found.items() if name not in CONTENTS}


def _labels(config: Part) -> dict[str, str]:
    return {name: value for name, value in (config.get("Labels") or {}).items() if name not in CONTENTS}


def _changes(
    before: Mapping[str, str | None], after: Mapping[str, str | None], ordered: bool = False
) -> tuple[Change, ...]:
    names: Iterable[str] = after if ordered else sorted({*before, *after}, key=str.lower)
    pairs = ((name, before.get(name), after.get(name)) for name in names)
    return tuple(Change(*one) for one in pairs if one[1] != one[2])


def _layers(before: Sequence[Part], after: Sequence[Part]) -> tuple[Resized, ...]:
    """Layers are matched by the command that made them, in order."""
    old, new = ([str(layer["created_by"]) for layer in side] for side in (before, after))
    found: list[Resized] = []
    for kind, i, i_end, j, j_end in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "equal":
            pairs = zip(before[i:i_end], after[j:j_end], strict=True)
            found += [
                Resized(_command(now), was["size"], now["size"])
                for was, now in pairs
                if was["size"] != now["size"]
            ]
            continue
        found += [Resized(_command(layer), layer["size"], None) for layer in before[i:i_end]]
        found += [Resized(_command(layer), None, layer["size"]) for layer in after[j:j_end]]
    return tuple(found)


def _command(layer: Part) -> str:
    """What made a layer, without what is the same in each."""
    text = re.sub(r"^RUN (\|\d+ .*?)?/bin/sh -c (set -\w+; )?", "RUN ", layer["created_by"] or "base image")
    text = re.sub(r"if \[ -s /run/secrets/\S+ \].*?fi; |DEBIAN_FRONTEND=\S+ ", "", text)
    text = text.removesuffix(" # buildkit")
    return text if len(text) <= COMMAND else f"{text[: COMMAND - 3]}..."


def _sizes(files: Part, part: str) -> Sizes:
    return {one["path"]: one["bytes"] for one in files.get(part, ())}


def _resized(before: Sizes, after: Sizes) -> tuple[Resized, ...]:
    """The biggest change first."""
    pairs = [Resized(path, before.get(path), after.get(path)) for path in {*before, *after}]
    changed = [one for one in pairs if one.before != one.after]
    return tuple(sorted(changed, key=lambda one: (-abs(one.growth), one.name)))


def _comparable(before: Sizes, after: Sizes) -> tuple[Sizes, Sizes]:
    """Lists that end somewhere: a file that is only in one may just be too small for the other."""
    least = max((min(side.values()) for side in (before, after) if side), default=0)
    both = before.keys() & after.keys()
    first, second = (
        {path: size for path, size in side.items() if path in both or size > least}
        for side in (before, after)
    )
    return first, second


# -- showing -------------------------------------------------------------------------------


def as_json(difference: Difference) -> dict[str, Any]:
    """The whole difference as plain data."""
    return asdict(difference) | {"equal": difference.equal, "same_image": difference.same_image}


def text(difference: Difference) -> str:
    """The difference for a terminal: everything, but small changes of files and folders."""
    lines = [_title(difference)]
    if verdict := _verdict(difference):
        lines.append(verdict)
    for name, changes in _named(difference):
        lines += ["", name, *(f"  {_mark(one)} {one.name}  {_arrow(one)}" for one in changes)]
    for name, sizes in _sized(difference):
        lines += ["", name, *(f"  {_delta(one.growth):>10}  {one.name}" for one in sizes)]
    if difference.size.growth:
        lines += ["", f"size  {_size_line(difference)}"]
    if difference.unknown:
        lines += ["", _unknown(difference)]
    return "\n".join(lines) + "\n"


def markdown(difference: Difference) -> str:
    """The difference as a changelog: the stack, the kernels and the packages; sizes as one line each."""
    lines = [f"### {_title(difference)}", ""]
    if verdict := _verdict(difference):
        lines += [verdict, ""]
    for name, changes in _named(difference, _worth_telling):
        shown = changes[:CHANGELOG_LINES]
        lines += [f"**{name}**", ""]
        lines += [f"- {_code(one.name)} {_arrow(one, _code)}" for one in shown]
        if len(changes) > len(shown):
            lines.append(f"- and {len(changes) - len(shown)} more")
        lines.append("")
    if difference.size.growth:
        parts = [one for one in difference.folders or difference.layers if abs(one.growth) >= WORTH_A_LINE]
        grown = ", ".join(f"{_code(one.name)} {_delta(one.growth)}" for one in parts[:CHANGELOG_PARTS])
        lines += [f"**Size** {_size_line(difference)}{f': {grown}' if grown else ''}", ""]
    return "\n".join(lines)


def _title(difference: Difference) -> str:
    before, after = difference.before, difference.after
    if before.id == after.id:
        return f"{after.id}: {_day(before)} -> {_day(after)}"
    return f"{before.id} -> {after.id}"


def _day(side: Side) -> str:
    return f"{side.built_at[:10]} ({_short(side.image_id)})"


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:12]


def _verdict(difference: Difference) -> str:
    if difference.same_image:
        return "The same image."
    if difference.equal:
        return "Built again; nothing that is measured differs."
    if not any(_named(difference)) and not any(_sized(difference)):
        return "Built again; only sizes differ, by little."
    return ""


def _named(
    difference: Difference, keep: Callable[[str, Change], bool] = lambda _name, _change: True
) -> Iterator[tuple[str, list[Change]]]:
    """The changes by name that there are, most important first."""
    for title, name in (
        ("Versions", "versions"),
        ("Kernels", "kernels"),
        ("Python packages", "pip"),
        ("Debian packages", "apt"),
        ("Environment", "environment"),
        ("Labels", "labels"),
    ):
        if changes := [one for one in getattr(difference, name) if keep(name, one)]:
            yield title, changes


def _worth_telling(name: str, _change: Change) -> bool:
    """Labels repeat what the other parts say."""
    return name != "labels"


def _sized(difference: Difference) -> Iterator[tuple[str, list[Resized]]]:
    for title, sizes in (
        ("Layers", difference.layers),
        ("Files", difference.files),
        ("Folders", difference.folders),
    ):
        if big := [one for one in sizes if abs(one.growth) >= WORTH_A_LINE]:
            yield title, big


def _mark(change: Change) -> str:
    if change.before is None:
        return "+"
    return "-" if change.after is None else "~"


def _arrow(change: Change, shown: Callable[[str], str] = str) -> str:
    if change.before is None:
        return f"{shown(change.after or '')} (new)"
    if change.after is None:
        return f"{shown(change.before)} (removed)"
    return f"{shown(change.before)} -> {shown(change.after)}"


def _code(text: str) -> str:
    """Inline code; a backtick inside needs a longer fence and spaces."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _size_line(difference: Difference) -> str:
    size = difference.size
    return f"{_bytes(size.before or 0)} -> {_bytes(size.after or 0)} ({_delta(size.growth)})"


def _bytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _delta(count: int) -> str:
    sign = "+" if count >= 0 else "-"
    return f"{sign}{_bytes(abs(count))}"


def _unknown(difference: Difference) -> str:
    words = {"config": "environment and labels", "files": "files and folders"}
    names = ", ".join(words[one] for one in difference.unknown)
    return f"Not compared, since one of the manifests does not hold them: {names}"
