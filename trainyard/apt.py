"""The host's package manager: where its packages come from, and adding some without changing others."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from trainyard.hostenv import Say, find_tool, is_root, os_release, silent, tail
from trainyard.model import InputError, StepFailed

DEBIAN_MIRROR = "http://deb.debian.org/debian"
DEBIAN_SECURITY_MIRROR = "http://deb.debian.org/debian-security"
DEBIAN_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
POLICY_RC_D = Path("/usr/sbin/policy-rc.d")


def has_apt() -> bool:
    """Whether this is Debian, Ubuntu or a relative."""
    return find_tool("apt-get") is not None


# -- sources -------------------------------------------------------------------------------


@dataclass(frozen=True)
class AptSource:
    """One place that the host's apt reads packages from."""

    uri: str
    suites: tuple[str, ...]


def parse_sources(text: str) -> list[AptSource]:
    """The enabled binary sources in a sources.list or a deb822 ``.sources`` file."""
    if re.search(r"^(URIs|Suites):", text, re.MULTILINE | re.IGNORECASE):
        return _parse_deb822(text)
    found = []
    for line in text.splitlines():
        match = re.match(r"\s*deb\s+(?:\[[^\]]*\]\s+)?(\S+)\s+(\S+)", line)
        if match:
            found.append(AptSource(match[1].rstrip("/"), (match[2],)))
    return found


def _parse_deb822(text: str) -> list[AptSource]:
    found = []
    kept = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for stanza in re.split(r"\n\s*\n", kept):
        unfolded = re.sub(r"\n[ \t]+", " ", stanza)
        fields = {
            key.strip().lower(): value.strip()
            for key, colon, value in (line.partition(":") for line in unfolded.splitlines())
            if colon
        }
        if fields.get("enabled", "yes").lower() == "no":
            continue
        if "deb" not in fields.get("types", "").split():
            continue
        suites = tuple(fields.get("suites", "").split())
        found += [AptSource(uri.rstrip("/"), suites) for uri in fields.get("uris", "").split()]
    return found


def _source_files(apt: Path) -> list[Path]:
    listed = sorted((apt / "sources.list.d").glob("*"))
    files = [apt / "sources.list", *(f for f in listed if f.suffix in (".list", ".sources"))]
    return [file for file in files if file.is_file()]


def host_sources(apt: Path = Path("/etc/apt")) -> list[AptSource]:
    """Everything that the host's apt reads from."""
    texts = (file.read_text(encoding="utf-8", errors="replace") for file in _source_files(apt))
    return [source for text in texts for source in parse_sources(text)]


def debian_mirrors(sources: Sequence[AptSource] | None = None) -> tuple[str, str]:
    """The addresses of the Debian archive and of its security archive, for any suite.

    The host's own mirror where the host is Debian, so that what answers is used; otherwise
    (and where the address holds a password, which must not reach an image) Debian's.
    """
    if os_release().get("ID") != "debian" and sources is None:
        return DEBIAN_MIRROR, DEBIAN_SECURITY_MIRROR
    archive, security = DEBIAN_MIRROR, DEBIAN_SECURITY_MIRROR
    for source in reversed(host_sources() if sources is None else sources):
        if not source.uri.startswith(("http://", "https://")) or "@" in source.uri:
            continue
        path = urlsplit(source.uri).path
        if path.endswith("/debian-security"):
            security = source.uri
        elif path.endswith("/debian"):
            archive = source.uri
    return archive, security


def image_sources(suite: str, mirrors: tuple[str, str], components: str = "main") -> list[str]:
    """The lines of an image's sources.list, the three that the official images have too.

    Args:
        suite: ``trixie``.
        mirrors: the addresses of the archive and of the security archive.
        components: separated by blanks.
    """
    archive, security = mirrors
    signed = f"[signed-by={DEBIAN_KEYRING}]"
    return [
        f"deb {signed} {archive} {suite} {components}",
        f"deb {signed} {archive} {suite}-updates {components}",
        f"deb {signed} {security} {suite}-security {components}",
    ]


# -- installing ----------------------------------------------------------------------------


@dataclass(frozen=True)
class AptPlan:
    """What ``apt-get -s install`` says it would do; each a tuple of package names."""

    new: tuple[str, ...]
    upgraded: tuple[str, ...]
    removed: tuple[str, ...]


def parse_simulation(output: str) -> AptPlan:
    """Read the ``Inst``/``Remv`` lines of ``apt-get -s``.

    ``Inst name (version ...)`` is new; ``Inst name [old] (version ...)`` replaces an installed
    package.
    """
    new, upgraded, removed = [], [], []
    for line in output.splitlines():
        match = re.match(r"(Inst|Remv) (\S+) (\[[^\]]*\] )?", line + " ")
        if not match:
            continue
        if match[1] == "Remv":
            removed.append(match[2])
        elif match[3]:
            upgraded.append(match[2])
        else:
            new.append(match[2])
    return AptPlan(tuple(new), tuple(upgraded), tuple(removed))


@dataclass(frozen=True)
class BorrowedSuite:
    """A newer Debian suite from which exactly the named packages may come."""

    suite: str
    uri: str
    packages: tuple[str, ...]

    def sources(self) -> str:
        """A deb822 source."""
        return (
            f"Types: deb\nURIs: {self.uri}\nSuites: {self.suite}\nComponents: main\n"
            f"Signed-By: {DEBIAN_KEYRING}\n"
        )

    def preferences(self) -> str:
        """Pins that keep every other package of the suite away (see apt_preferences(5))."""
        names = " ".join(self.packages)
        return (
            f"Package: *\nPin: release n={self.suite}\nPin-Priority: 50\n\n"
            f"Package: {names}\nPin: release n={self.suite}\nPin-Priority: 990\n"
        )


class Apt:
    """apt-get with source lists and package lists of its own, so that the host's stay as they are.

    Use as a context manager; the folder is removed at the end.  ``borrowed`` adds packages of a
    newer suite.  Without the pins that this writes, apt would satisfy *other* missing packages
    from the newer suite too, and replace the host's libc6 on the way.
    """

    def __init__(self, say: Say = silent) -> None:
        self._say = say
        self._problems = ""
        self._stack = contextlib.ExitStack()
        self._env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}

    def __enter__(self) -> Apt:
        """Make the folder."""
        temporary = tempfile.TemporaryDirectory(prefix="trainyard-apt-")
        self._dir = Path(self._stack.enter_context(temporary))
        for name in ("parts", "lists/partial"):
            (self._dir / name).mkdir(parents=True)
        for file in _source_files(Path("/etc/apt")):
            name = "host-sources.list" if file.name == "sources.list" else file.name
            shutil.copyfile(file, self._dir / "parts" / name)
        self._set_preferences("")
        return self

    def __exit__(self, *_exc: object) -> None:
        """Remove the folder."""
        self._stack.close()

    def _set_preferences(self, extra: str) -> None:
        host = Path("/etc/apt/preferences")
        text = host.read_text(encoding="utf-8") if host.is_file() else ""
        (self._dir / "preferences").write_text(f"{text}\n\n{extra}".strip() + "\n")

    def _options(self) -> list[str]:
        options = {
            "Dir::Etc::SourceList": "/dev/null",
            "Dir::Etc::SourceParts": f"{self._dir}/parts",
            "Dir::Etc::Preferences": f"{self._dir}/preferences",
            "Dir::State::Lists": f"{self._dir}/lists",
            "Dir::Cache::pkgcache": "",
            "Dir::Cache::srcpkgcache": "",
            "APT::Sandbox::User": "root",  # the folder above is for root only
            "Acquire::Languages": "none",
            "Acquire::Retries": "3",
            "DPkg::Lock::Timeout": "120",
        }
        return [word for key, value in options.items() for word in ("-o", f"{key}={value}")]

    def _run(self, tool: str, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [tool, *self._options(), *args],
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )

    def borrow(self, borrowed: BorrowedSuite) -> None:
        """Also offer ``borrowed.packages``; call :meth:`update` afterwards."""
        (self._dir / "parts" / "trainyard-borrowed.sources").write_text(borrowed.sources())
        self._set_preferences(borrowed.preferences())

    def update(self) -> None:
        """Fetch the package lists.

        A source that fails does not stop this, since a host may have broken ones that do not
        matter here; :meth:`install` reports them if it fails.
        """
        done = self._run("apt-get", "-q", "update")
        wrong = [line for line in done.stdout.splitlines() if line.startswith(("E:", "W:"))]
        self._problems = "\n".join(wrong)

    def offers(self, package: str) -> bool:
        """Whether a package of this very name can be installed."""
        done = self._run("apt-cache", "policy", package)
        match = re.search(r"^\s+Candidate: (\S+)", done.stdout, re.MULTILINE)
        return bool(match) and match is not None and match[1] != "(none)"

    def install(self, packages: Sequence[str]) -> tuple[str, ...]:
        """Install packages without touching any that is there; returns the new ones.

        Raises:
            InputError: it would upgrade or remove an installed package; names which.
            StepFailed: apt-get failed, with the end of its output.
        """
        words = ["install", "-y", "--no-install-recommends", *packages]
        simulated = self._run("apt-get", "-q", "-s", *words)
        plan = parse_simulation(simulated.stdout)
        if plan.upgraded or plan.removed:
            raise InputError(refusal(packages, plan))
        if simulated.returncode:
            output = f"{self._problems}\n{tail(simulated.stdout)}".strip()
            raise StepFailed(f"apt-get cannot install {' '.join(packages)}:\n{output}")
        if plan.new:
            self._say(f"Installing {' '.join(plan.new)} (nothing else on this host changes)")
            with no_services():
                done = self._run("apt-get", "-q", "--no-remove", "--no-upgrade", *words)
            if done.returncode:
                raise StepFailed(f"apt-get install failed:\n{tail(done.stdout)}")
        return plan.new


def refusal(packages: Sequence[str], plan: AptPlan) -> str:
    """The message for an installation that would change what is already on the host."""
    lines = [f"Installing {' '.join(packages)} would change packages that this host already has:"]
    if plan.upgraded:
        lines.append(f"  upgraded: {' '.join(plan.upgraded)}")
    if plan.removed:
        lines.append(f"  removed:  {' '.join(plan.removed)}")
    lines.append("Trainyard leaves that to you. Install or upgrade them yourself, then try again.")
    return "\n".join(lines)


@contextlib.contextmanager
def no_services() -> Iterator[None]:
    """Keep package scripts from starting services, except where systemd runs and manages them.

    See https://people.debian.org/~hmh/invokerc.d-policyrc.d-specification.txt: exit status 101
    forbids the action.  A policy that is already there is left as it is.
    """
    if systemd_runs() or os.path.lexists(POLICY_RC_D):
        yield
        return
    POLICY_RC_D.write_text("#!/bin/sh\n# Trainyard is installing packages\nexit 101\n")
    POLICY_RC_D.chmod(0o755)
    try:
        yield
    finally:
        POLICY_RC_D.unlink(missing_ok=True)


def systemd_runs() -> bool:
    """Whether systemd is the init, see sd_booted(3)."""
    return Path("/run/systemd/system").is_dir()


def install(packages: Sequence[str], say: Say = silent) -> tuple[str, ...]:
    """Install packages from the host's own distribution.

    Raises:
        InputError: not root, no apt-get, or the host's own packages would change.
        StepFailed: apt-get failed.
    """
    names = " ".join(packages)
    if not has_apt():
        raise InputError(f"Please install {names}: this host has no apt-get.")
    if not is_root():
        raise InputError(f"Please install {names} (as root: apt-get install {names}).")
    with Apt(say) as apt:
        apt.update()
        return apt.install(packages)
