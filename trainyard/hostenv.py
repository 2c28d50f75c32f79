"""What the host offers: its tools, its CA bundle, its wheelhouses, its proxies.

Only questions; nothing here changes the host, talks to Docker or prints.  What a module has to
show goes through a ``say`` callback (:data:`Say`).
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

Say = Callable[[str], None]

CA_VARIABLES = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
SYSTEM_CA_BUNDLES = (
    Path("/etc/ssl/certs/ca-certificates.crt"),  # Debian, Ubuntu, Alpine, Arch
    Path("/etc/pki/tls/certs/ca-bundle.crt"),  # Fedora, RHEL
    Path("/etc/ssl/ca-bundle.pem"),  # openSUSE
)
ASK_SECONDS = 20.0  # for one question to a tool


def silent(_message: str) -> None:
    """A ``say`` that says nothing."""


# -- tools ---------------------------------------------------------------------------------


def find_tool(name: str) -> Path | None:
    """A program on PATH or in the ``sbin`` folders, which a user's PATH often lacks."""
    path = os.environ.get("PATH", os.defpath) + ":/usr/local/sbin:/usr/sbin:/sbin"
    found = shutil.which(name, path=path)
    return Path(found) if found else None


def ask(argv: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a short question; a hang or a missing program is a return code of 124 or 127."""
    try:
        return subprocess.run(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ASK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 124, "", f"no answer in {ASK_SECONDS:.0f} s")
    except OSError as error:
        return subprocess.CompletedProcess(argv, 127, "", str(error))


def tail(text: str, lines: int = 20) -> str:
    """The last lines of a tool's output."""
    return "\n".join(text.rstrip().splitlines()[-lines:])


def is_root() -> bool:
    """Whether this process may install packages and start an engine."""
    return os.geteuid() == 0


# -- the distribution ----------------------------------------------------------------------


def os_release(path: Path = Path("/etc/os-release")) -> dict[str, str]:
    """The fields of os-release(5); empty where the file is missing."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return {}
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals and not key.startswith("#"):
            fields[key.strip()] = "".join(shlex.split(value))
    return fields


def host_arch() -> str:
    """The CPU architecture of this host as Debian and Docker call it: ``amd64``, ``arm64``."""
    machine = platform.machine()
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)


# -- certificates, wheels, proxies ---------------------------------------------------------


def find_ca() -> Path | None:
    """The CA bundle that this host's Python tools trust, or None where there is none.

    The first of the variables in :data:`CA_VARIABLES` that names an existing file wins, then
    the system store.  A variable that names a missing file is passed over.
    """
    named = (Path(value) for name in CA_VARIABLES if (value := os.environ.get(name)))
    for path in (*named, *SYSTEM_CA_BUNDLES):
        if path.is_file():
            return path.resolve()
    return None


def wheelhouse_dirs() -> tuple[Path, ...]:
    """The local folders in ``PIP_FIND_LINKS`` (pip separates the entries by white space).

    ``file://`` entries count; web addresses and folders that do not exist do not.
    """
    found: dict[Path, None] = {}
    for entry in os.environ.get("PIP_FIND_LINKS", "").split():
        parts = urlsplit(entry)
        if parts.scheme not in ("", "file"):
            continue
        path = Path(unquote(parts.path) if parts.scheme else entry).expanduser()
        if path.is_dir():
            found.setdefault(path.resolve())
    return tuple(found)


def torch_wheels(version: str, python: str, folders: Sequence[Path] | None = None) -> list[Path]:
    """The wheels of ``torch==VERSION`` (``2.6.0+cu124``) for a Python (``3.13``) in local folders."""
    wanted = f"torch-{version}-cp{python.replace('.', '')}-"
    return [
        path
        for folder in (wheelhouse_dirs() if folders is None else folders)
        for path in sorted(folder.glob("torch-*.whl"))
        if path.name.replace("%2B", "+").startswith(wanted)
    ]


def proxies(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The proxy variables that are set, by lower-case name, without user names and passwords."""
    env = os.environ if environ is None else environ
    found = {}
    for name in ("http_proxy", "https_proxy", "no_proxy"):
        value = env.get(name) or env.get(name.upper())
        if value:
            found[name] = value if name == "no_proxy" else re.sub(r"^([a-z0-9+.-]+://)?.*@", r"\1", value)
    return found
