"""Where a site keeps its copies of what builds download: base images, Debian, PyPI, PyTorch's index.

One file, named by ``TRAINYARD_MIRRORS``, serves locking, bootstrapping and every build::

    base: registry.example/docker-hub/library
    apt: {debian: "https://mirror.example/debian", debian-security: "https://mirror.example/debian-security"}
    pypi: https://mirror.example/pypi/simple
    pytorch: https://mirror.example/pytorch/whl

A build sees them as BuildKit secrets, which are in no layer, history or cache key: the image is the
same image, whatever mirror its packages came from.  What came is checked as always, by hash
(Python), signature (apt) and digest (base).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from trainyard import apt, yamlfile
from trainyard.model import Base, Row

VARIABLE = "TRAINYARD_MIRRORS"
PYTORCH = "https://download.pytorch.org/whl"
#: Where a build finds its secrets.
SECRETS = "/run/secrets"


def _web(value: str) -> str:
    if urlsplit(value).scheme not in ("http", "https") or not urlsplit(value).hostname:
        raise ValueError("is no address; accepted is https://HOST/PATH or http://HOST/PATH")
    if re.search(r"[\s\"'\\\[\]]", value):
        raise ValueError("holds a blank, quote or bracket, which no address has")
    return value.rstrip("/")


def _open_web(value: str) -> str:
    if "@" in urlsplit(value).netloc:
        raise ValueError(
            "holds a user name; apt would print it, and a bootstrapped base would keep it. "
            "Accepted is an address that needs none"
        )
    return _web(value)


def _repository(value: str) -> str:
    if not re.fullmatch(r"[a-z0-9.-]+(:[0-9]+)?(/[a-z0-9._-]+)*", value) or not re.search(
        r"^[^/]*[.:]|^localhost(/|$)", value
    ):
        raise ValueError("is no registry; accepted is HOST[:PORT]/PATH, without https:// and without a tag")
    return value


Web = Annotated[str, AfterValidator(_web)]
OpenWeb = Annotated[str, AfterValidator(_open_web)]


class Apt(yamlfile.Strict):
    """The two archives that an image's packages come from."""

    debian: OpenWeb
    debian_security: OpenWeb = Field(alias="debian-security")


class Mirrors(yamlfile.Strict):
    """A site's mirrors; None where there is none and the public place is asked."""

    base: Annotated[str, AfterValidator(_repository)] | None = None
    apt: Apt | None = None
    pypi: Web | None = None
    pytorch: Web | None = None

    def image(self, base: Base) -> str:
        """Where a base image is pulled from: ``registry.example/docker-hub/library/debian:trixie-slim``."""
        return f"{self.base}/{base.image}" if self.base else base.image

    def pytorch_index(self, build: str) -> str:
        """The index of one of PyTorch's builds, such as ``cpu``."""
        return f"{self.pytorch or PYTORCH}/{build}"


def configured() -> Mirrors:
    """The mirrors that ``TRAINYARD_MIRRORS`` names; none where it is not set.

    Raises:
        InputError: the file is missing or wrong; the message has its line.
    """
    named = os.environ.get(VARIABLE)
    return _read(Path(named)) if named else Mirrors()


@cache
def _read(path: Path) -> Mirrors:
    document = yamlfile.read(path)
    return yamlfile.validate(document, Mirrors)


def secrets(mirrors: Mirrors, row: Row, ca: Path | None) -> dict[str, str]:
    """What a row's build is told, as texts by the name of a secret; empty without mirrors.

    ``ca`` is the host's CA bundle, where the build has it as secret ``ca``.
    """
    found: dict[str, str] = {}
    if mirrors.apt:
        found["apt.list"] = _apt_list(mirrors.apt, row.base)
        found["apt.conf"] = _apt_conf(ca is not None)
    if mirrors.pypi or mirrors.pytorch:
        found["pip.conf"] = _pip_conf(mirrors.pypi)
        found["uv.toml"] = _uv_toml(mirrors, None if row.torch.on_pypi else row.torch.build)
    return found


def write(texts: Mapping[str, str], folder: Path) -> dict[str, Path]:
    """Write secrets to a folder that only this user can read; return their paths by name."""
    if not texts:
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    found = {name: folder / name for name in texts}
    for name, path in found.items():
        path.write_text(texts[name])
    return found


def _apt_list(site: Apt, base: Base) -> str:
    # contrib and non-free have the CUDA toolkit of rows that compile with Debian's
    lines = apt.image_sources(base.suite, (site.debian, site.debian_security), "main contrib non-free")
    return "\n".join(lines) + "\n"


def _apt_conf(with_ca: bool) -> str:
    lines = [f'Dir::Etc::SourceList "{SECRETS}/apt.list";', 'Dir::Etc::SourceParts "/dev/null";']
    if with_ca:
        lines.append(f'Acquire::https::CaInfo "{SECRETS}/ca";')
    return "\n".join(lines) + "\n"


def _pip_conf(index: str | None) -> str:
    if not index:
        return "[global]\n"
    text = f"[global]\nindex-url = {index}\n"
    if index.startswith("http://"):  # as the file says; what comes is checked by hash
        text += f"trusted-host = {urlsplit(index).netloc.rpartition('@')[2]}\n"
    return text


def _uv_toml(mirrors: Mirrors, build: str | None) -> str:
    blocks = []
    if build and mirrors.pytorch:
        blocks.append(f'[[index]]\nurl = "{mirrors.pytorch_index(build)}"\n')
    if mirrors.pypi:
        blocks.append(f'[[index]]\nurl = "{mirrors.pypi}"\ndefault = true\n')
    return "\n".join(blocks) or "# no index of the site's\n"


def uv_variables(mirrors: Mirrors) -> Mapping[str, str]:
    """What uv on this host is told to lock from the mirrors; in no argument list.

    https://docs.astral.sh/uv/reference/environment/#uv_default_index
    """
    return {"UV_DEFAULT_INDEX": mirrors.pypi} if mirrors.pypi else {}
