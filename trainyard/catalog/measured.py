"""A build's ``manifest.json``, typed.  Manifests of older builds hold less; of newer ones, more."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainyard.model import InputError


class Loose(BaseModel):
    """A part of a manifest: known keys are typed, keys of newer versions are passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Layer(Loose):
    """One layer, as the engine lists it."""

    created_by: str
    size: int  # bytes, uncompressed


class BaseImage(Loose):
    """The image that everything lies on."""

    name: str
    digest: str
    origin: str


class Op(Loose):
    """One op of DeepSpeed, as it was loaded inside the image."""

    loads: bool
    prebuilt: bool = False
    file: str = ""
    elf: list[str] = Field(default_factory=list)
    ptx: list[str] = Field(default_factory=list)
    error: str = ""


class DeepSpeed(Loose):
    """DeepSpeed as installed."""

    version: str
    accelerator: str
    ops: dict[str, Op]


class Torch(Loose):
    """torch as imported."""

    version: str
    local: str
    cuda: str | None
    archs: list[str]
    fsdp: bool
    fsdp2: bool


class Library(Loose):
    """cuDNN or NCCL, as the library itself answers."""

    version: str


class Package(Loose):
    """An installed package with its size."""

    name: str
    version: str
    bytes: int
    licence: str | None = None
    licences: list[str] = Field(default_factory=list)

    @property
    def licence_names(self) -> str:
        return self.licence or ", ".join(self.licences)


class Packages(Loose):
    """Installed packages by their installer."""

    pip: list[Package]
    apt: list[Package]


class Measured(Loose):
    """What the probe saw."""

    os: str
    glibc: str
    python: str
    torch: Torch
    cudnn: Library | None
    nccl: Library | None
    deepspeed: DeepSpeed | None
    compilers: list[str]
    apt: dict[str, str]
    pip: dict[str, str]
    packages: Packages | None = None  # since manifests tell sizes


class Manifest(Loose):
    """One built image."""

    id: str
    image_id: str
    contents_id: str
    built_at: datetime
    build_seconds: float
    base: BaseImage
    size_bytes: int
    layers: list[Layer]
    measured: Measured


def typed(raw: dict[str, Any], path: Path) -> Manifest:
    """The manifest that was read from ``path``; raises InputError that names the first wrong key."""
    try:
        return Manifest.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{path}: {where}: {first['msg']}; build the image again") from error
