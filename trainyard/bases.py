"""Where the base image comes from: its registry, or the distribution's mirror.

The official image is used where its registry answers.  Where it does not, the same suite is put
together with mmdebstrap, slimmed as Debian's own ``-slim`` images are, and imported under a name
of our own, so that it can never be taken for the official one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol

import docker
from docker.errors import APIError, DockerException, ImageNotFound

from trainyard import apt, mirrors
from trainyard.hostenv import Say, find_tool, host_arch, silent, tail
from trainyard.model import Arch, Base, StepFailed, arch_suffix

Mode = Literal["auto", "registry", "bootstrap"]
Origin = Literal["registry", "bootstrap"]

ANSWER_SECONDS = 20.0  # for one question to the registry
RATE_LIMIT_WAITS = (2.0, 5.0, 10.0)  # seconds before each new try after "too many requests"
REMEMBER_SECONDS = 300.0  # how long a registry that did not answer is not asked again
REUSE_DAYS = 30
REPOSITORY = "trainyard-base"
LABEL = "dev.trainyard.base"

# What debuerreotype leaves out of debian:*-slim; see
# https://github.com/debuerreotype/debuerreotype/blob/master/scripts/.slimify-excludes
SLIM = (
    "path-exclude=/usr/share/doc/*",
    "path-exclude=/usr/share/groff/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/linda/*",
    "path-exclude=/usr/share/lintian/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/man/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-include=/usr/share/locale/locale.alias",
)
APT = (
    'Acquire::Languages "none"',
    'Acquire::GzipIndexes "true"',
    'Apt::AutoRemove::SuggestsImportant "false"',
)
HOOKS = (
    # mmdebstrap copies these two from the host
    'rm -f "$1/etc/hostname"; : >"$1/etc/resolv.conf"',
    # no package may start a service while an image is built
    'printf "#!/bin/sh\\nexit 101\\n" >"$1/usr/sbin/policy-rc.d"; chmod 755 "$1/usr/sbin/policy-rc.d"',
    'rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/*.bin "$1"/var/log/*.log "$1"/var/log/apt/*',
)


class Engine(Protocol):
    """What this module needs of the engine."""

    @property
    def client(self) -> docker.DockerClient: ...

    def cli(self, *args: str) -> subprocess.CompletedProcess[str]: ...


@dataclass(frozen=True)
class BaseImage:
    """A base that ``FROM`` can use."""

    ref: str  # debian:trixie-slim@sha256:... or trainyard-base:trixie-1a2b3c4d5e6f
    digest: str  # of the registry's manifest; of the only layer where bootstrapped
    origin: Origin
    note: str  # one sentence for logs, labels and the manifest


class NoAnswer(Exception):
    """The registry cannot be used now; ``str()`` is why."""


def resolve_base(
    base: Base,
    mode: Mode,
    engine: Engine,
    say: Say = silent,
    *,
    refresh: bool = False,
    cache: Path | None = None,
) -> BaseImage:
    """Find the image to build on, and make it where there is none.

    Args:
        base: which operating system.
        mode: ``registry`` and ``bootstrap`` force the origin; ``auto`` prefers the registry.
        engine: asks the registry and holds the image.
        say: told when the fallback is used and when something long begins.
        refresh: ask the registry again and bootstrap anew, whatever is remembered.
        cache: folder in which "the registry did not answer" is kept for 5 minutes; by default
            ``$XDG_CACHE_HOME/trainyard``.

    Raises:
        StepFailed: the origin that was asked for cannot be used.
        InputError: mmdebstrap is missing and may not be installed from here.
    """
    if mode == "bootstrap":
        return _bootstrapped(base, engine, say, refresh, "asked for")
    image = mirrors.configured().image(base)
    memory = _Memory(image, cache or _cache_folder(), engine)
    try:
        return _from_registry(image, engine, memory, refresh or mode == "registry")
    except NoAnswer as error:
        reason = str(error)
    local = _pulled_before(image, engine, reason)
    if local is not None:
        say(f"{image}: {local.note}")
        return local
    if mode == "registry":
        raise StepFailed(f"The registry of {image} cannot be used: {reason}")
    return _bootstrapped(base, engine, say, refresh, f"the registry cannot be used: {reason}")


# -- the registry --------------------------------------------------------------------------


def _cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "trainyard"


class _Memory:
    """Remembers, across processes, that a registry did not answer."""

    def __init__(self, image: str, folder: Path, engine: Engine) -> None:
        key = f"{image} {engine.client.api.base_url}"
        self._file = folder / f"no-answer-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"

    def reason(self) -> str | None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            kept = json.loads(self._file.read_text(encoding="utf-8"))
            age = time.time() - float(kept["time"])
            if 0 <= age < REMEMBER_SECONDS:
                return f"{kept['reason']} ({age:.0f} s ago)"
        return None

    def keep(self, reason: str) -> None:
        text = json.dumps({"time": time.time(), "reason": reason})
        with contextlib.suppress(OSError):  # only a convenience
            self._file.parent.mkdir(parents=True, exist_ok=True)
            part = self._file.with_suffix(f".{os.getpid()}.part")
            part.write_text(text, encoding="utf-8")
            part.replace(self._file)

    def forget(self) -> None:
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)


def _from_registry(image: str, engine: Engine, memory: _Memory, ask_anyway: bool) -> BaseImage:
    remembered = None if ask_anyway else memory.reason()
    if remembered:
        raise NoAnswer(remembered)
    try:
        digest = registry_digest(image, engine)
    except NoAnswer as error:
        memory.keep(str(error))
        raise
    memory.forget()
    return BaseImage(f"{image}@{digest}", digest, "registry", f"{image} from its registry")


def registry_digest(image: str, engine: Engine, *, sleep: Callable[[float], None] = time.sleep) -> str:
    """The digest that a registry has for an image now; asked through the engine.

    "Too many requests" is tried again after 2, 5 and 10 s.  (The engine does not hand on the
    registry's Retry-After.)

    Raises:
        NoAnswer: no connection, no answer in 20 s, no right to pull, or still too many requests.
        StepFailed: the registry answers that it has no such image.
    """
    for wait in (*RATE_LIMIT_WAITS, None):
        try:
            data = _within(ANSWER_SECONDS, lambda: engine.client.images.get_registry_data(image))
            return str(data.id)
        except (APIError, ImageNotFound) as error:
            reason = str(error.explanation or error)
            kind = classify_refusal(reason)
        except (DockerException, OSError) as error:
            reason, kind = str(error), "unreachable"
        if kind == "missing":
            raise StepFailed(f"The registry has no image {image}: {reason}")
        if kind != "busy" or wait is None:
            raise NoAnswer(reason)
        sleep(wait)
    raise AssertionError("unreachable")


def classify_refusal(reason: str) -> Literal["busy", "missing", "unreachable"]:
    """What a registry's refusal, as the engine words it, means."""
    text = reason.lower()
    if "toomanyrequests" in text or "too many requests" in text or "429" in text.split():
        return "busy"
    if "manifest unknown" in text or "name unknown" in text:
        return "missing"
    return "unreachable"


def _within(seconds: float, ask: Callable[[], Any]) -> Any:
    """Call something that has no timeout of its own; its thread is left behind if it hangs."""
    answers: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((True, ask()))
        except Exception as error:  # handed to the caller below
            answers.put((False, error))

    threading.Thread(target=run, daemon=True, name="ask-registry").start()
    try:
        fine, answer = answers.get(timeout=seconds)
    except queue.Empty:
        raise NoAnswer(f"no answer in {seconds:.0f} s") from None
    if not fine:
        raise answer
    return answer


def _pulled_before(image: str, engine: Engine, reason: str) -> BaseImage | None:
    """The official image, if the engine has it from an earlier pull."""
    try:
        pulled = engine.client.images.get(image)
    except DockerException:
        return None
    digests = pulled.attrs.get("RepoDigests") or []
    digest = next((entry.partition("@")[2] for entry in digests), None)
    if digest is None:
        return None
    note = f"the copy pulled earlier is used, since the registry cannot be: {reason}"
    return BaseImage(f"{image}@{digest}", digest, "registry", note)


# -- the distribution's mirror -------------------------------------------------------------


def bootstrap_command(suite: str, arch: Arch, mirrors: tuple[str, str], target: Path) -> list[str]:
    """The mmdebstrap command line."""
    words = ["mmdebstrap", "--quiet", "--variant=minbase", "--format=tar", f"--architectures={arch}"]
    words += [f"--dpkgopt={option}" for option in SLIM]
    words += [f"--aptopt={option}" for option in APT]
    words += [f"--customize-hook={hook}" for hook in HOOKS]
    return [*words, suite, str(target), *apt.image_sources(suite, mirrors)]


def _archives() -> tuple[str, str]:
    """The archive and the security archive: the site's mirror, or what the host's apt reads."""
    mirror = mirrors.configured().apt
    return (mirror.debian, mirror.debian_security) if mirror else apt.debian_mirrors()


def _recipe(base: Base) -> str:
    command = bootstrap_command(base.suite, base.arch, _archives(), Path("-"))
    return hashlib.sha256("\0".join(command).encode()).hexdigest()[:16]


_BOOTSTRAP_LOCK = threading.Lock()  # many rows ask at once; one bootstrap serves them all


def _bootstrapped(base: Base, engine: Engine, say: Say, refresh: bool, reason: str) -> BaseImage:
    note = f"{base.suite} put together by mmdebstrap from the distribution's mirror; {reason}"
    with _BOOTSTRAP_LOCK:
        kept = None if refresh else _kept(base, engine)
        if kept is None:
            what = f"{base.suite}{arch_suffix(base.arch)}"
            say(f"NOT the official {base.image}: bootstrapping {what} ({reason})")
            kept = _bootstrap(base, engine, say)
        else:
            say(f"NOT the official {base.image}: using {kept[0]} ({reason})")
    ref, digest = kept
    return BaseImage(ref, digest, "bootstrap", note)


def _kept(base: Base, engine: Engine) -> tuple[str, str] | None:
    """An import that is young enough and was made by the same recipe."""
    labels = [f"{LABEL}.suite={base.suite}", f"{LABEL}.recipe={_recipe(base)}"]
    images = engine.client.images.list(REPOSITORY, filters={"label": labels})
    young = []
    for image in images:
        made = float((image.labels or {}).get(f"{LABEL}.created", "0"))
        if image.tags and 0 <= time.time() - made < REUSE_DAYS * 86400:
            young.append((made, image.tags[0], str(image.attrs["RootFS"]["Layers"][0])))
    return max(young)[1:] if young else None


def _bootstrap(base: Base, engine: Engine, say: Say) -> tuple[str, str]:
    needed = [] if find_tool("mmdebstrap") else ["mmdebstrap"]
    if not apt.DEBIAN_KEYRING.exists():  # Ubuntu
        needed.append("debian-archive-keyring")
    if base.arch != host_arch() and not find_tool("arch-test"):  # mmdebstrap asks it for emulation
        needed.append("arch-test")
    if needed:
        apt.install(needed, say)
    with tempfile.TemporaryDirectory(prefix="trainyard-base-") as folder:
        tar = Path(folder) / "base.tar"
        _run_mmdebstrap(base, tar)
        return _import(base, tar, engine)


def _run_mmdebstrap(base: Base, tar: Path) -> None:
    command = bootstrap_command(base.suite, base.arch, _archives(), tar)
    # a fixed date makes equal packages equal layers: the layer's digest is part of contents ids
    env = {**os.environ, "SOURCE_DATE_EPOCH": "1735689600", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise StepFailed(f"mmdebstrap {base.suite} ({base.arch}) failed:\n{tail(done.stderr)}")


def _import(base: Base, tar: Path, engine: Engine) -> tuple[str, str]:
    with tar.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    suite = base.suite
    ref = f"{REPOSITORY}:{suite}{arch_suffix(base.arch)}-{digest[:12]}"
    now = datetime.now(UTC)
    labels = {
        f"{LABEL}.suite": suite,
        f"{LABEL}.origin": "bootstrap",
        f"{LABEL}.recipe": _recipe(base),
        f"{LABEL}.created": f"{now.timestamp():.0f}",
    }
    words = [word for key, value in labels.items() for word in ("-c", f"LABEL {key}={value}")]
    words += ["-c", 'CMD ["bash"]', "-c", "ENV PATH=" + _PATH]
    done = engine.cli(
        "import", "--platform", f"linux/{base.arch}", "-m", f"mmdebstrap {suite}", *words, str(tar), ref
    )
    if done.returncode:
        raise StepFailed(f"docker import of {ref} failed:\n{tail(done.stderr)}")
    layers = engine.client.images.get(ref).attrs["RootFS"]["Layers"]
    return ref, str(layers[0])


_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
