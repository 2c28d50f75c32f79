"""Write a selection as a ``docker-bake.json``, for builders that are not on this machine.

``docker buildx bake`` hands it to any BuildKit: remote, in Kubernetes, in the cloud.  We plan, they
schedule.  What several images share is one target that the others take as a named context, so
kernels are compiled once however many variants a stack has.
https://docs.docker.com/build/bake/reference/
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainyard import render
from trainyard.mirrors import Mirrors
from trainyard.model import Base, Row, arch_suffix
from trainyard.plan import CONTENTS_LABEL


@dataclass(frozen=True)
class Options:
    """Where a bake puts its images and its caches."""

    repository: str  # registry.example/org/trainyard; the tag is the id
    cache: str | None = None  # repository for build caches; None: the builder's own cache only
    ca: Path | None = None  # a CA bundle that builds need for PyPI, given as a secret
    mirrors: Mirrors = field(default_factory=Mirrors)  # the base comes from there; the rest is in `secrets`
    secrets: Mapping[str, Mapping[str, Path]] = field(default_factory=dict)  # more of them, by row
    digests: Mapping[str, str] = field(default_factory=dict)  # official base image -> its digest


def bake(rows: Sequence[Row], root: Path, options: Options) -> dict[str, Any]:
    """The bake file: one target an image, one for each set of kernels, a group of all images.

    Images stand on the official base, by digest where it is known: another builder does not have
    one that was bootstrapped here.
    """
    targets: dict[str, Any] = {}
    kernels: dict[str, str] = {}  # key of a wheel -> the target that compiles it
    for row in rows:
        target = _image(row, root, options)
        key = render.kernels_key(row, root, row.accelerator, row.ops)
        if key:
            if key not in kernels:
                kernels[key] = f"kernels-{_name(row.stack)}{arch_suffix(row.arch)}"
                targets[kernels[key]] = _kernels(row, options)
            target["contexts"] = {"kernels": f"target:{kernels[key]}"}
        targets[_name(row.id)] = target
    images = [_name(row.id) for row in rows]
    return {"group": {"default": {"targets": images}}, "target": targets}


def _name(image_id: str) -> str:
    """A bake target's name: an image id may hold a dot, which bake takes for an attribute."""
    return image_id.replace(".", "_")


def _image(row: Row, root: Path, options: Options) -> dict[str, Any]:
    digest = options.digests.get(row.base.image)
    contents = render.contents_id(render.input_digests(row, root, digest or row.base.image))
    labels = {CONTENTS_LABEL: contents, "dev.trainyard.base.origin": "registry"}
    if digest:
        labels["org.opencontainers.image.base.digest"] = digest
    return {
        **_common(row, options, cache=row.id),
        "args": {**_args(row, options), "CONTENTS": contents},
        "labels": labels,
        # Never the floating tag: nobody has measured or tested what comes out of this build.
        "tags": [f"{options.repository}:{row.id}-untested-{contents}"],
        "attest": ["type=provenance,mode=max", "type=sbom"],
    }


def _kernels(row: Row, options: Options) -> dict[str, Any]:
    return {
        **_common(row, options, cache=f"{row.stack}{arch_suffix(row.arch)}-kernels"),
        "args": _args(row, options),
        "target": "kernels",
        "output": ["type=cacheonly"],
    }


def _args(row: Row, options: Options) -> dict[str, str]:
    found = {"BASE": _base(row.base, options)}
    if options.mirrors.pytorch and not row.torch.on_pypi:
        found["TORCH_INDEX"] = ""  # the secret uv.toml has the site's
    return found


def _base(base: Base, options: Options) -> str:
    digest = options.digests.get(base.image)
    image = options.mirrors.image(base)
    return f"{image}@{digest}" if digest else image


def _common(row: Row, options: Options, cache: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "context": ".",
        "dockerfile": f"images/{row.id}/Dockerfile",
        "platforms": [row.platform],
    }
    secrets = ({"ca": options.ca} if options.ca else {}) | dict(options.secrets.get(row.id, {}))
    if secrets:
        found["secret"] = [f"id={name},src={path}" for name, path in secrets.items()]
    if options.cache:
        ref = f"type=registry,ref={options.cache}:{cache}"
        found["cache-from"] = [ref]
        # An image that was built is not lost because a cache could not be written.
        found["cache-to"] = [f"{ref},mode=max,ignore-error=true"]
    return found
