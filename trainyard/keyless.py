"""Signatures without a key that anybody keeps: ``cosign`` makes them, and checks them.

``cosign sign`` makes a key for one run, shows Fulcio an OpenID token that says who the job is, gets a
certificate for both, signs, and has Rekor log it with the time.  Signature, certificate and Rekor's
receipt lie under the tag where a signature by key lies (:mod:`trainyard.signing`).  Who verifies names
the identity and the issuer that must be in the certificate:
https://docs.sigstore.dev/cosign/verifying/verify/.

It is Sigstore's public instance, or the one that cosign's own variables name: cosign takes each option
from ``COSIGN_<OPTION>`` (https://github.com/sigstore/cosign/blob/v2.5.0/cmd/cosign/cli/options/root.go),
so ``COSIGN_FULCIO_URL`` and ``COSIGN_REKOR_URL`` say where, and ``SIGSTORE_ROOT_FILE``,
``SIGSTORE_REKOR_PUBLIC_KEY`` and ``SIGSTORE_CT_LOG_PUBLIC_KEY_FILE`` whom to trust.

No argument of the process holds a secret.  The token comes to cosign by its environment; so does the
folder with the login for the registry, which only we can read and which is gone with the process.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from trainyard.hostenv import ask, find_ca, find_tool, tail
from trainyard.model import InputError, StepFailed
from trainyard.registry import (
    PASSWORD_VARIABLE,
    USER_VARIABLE,
    Credentials,
    Registry,
    find_registry_ca,
)
from trainyard.signing import Finding, Store

NEEDED = "cosign 2.4.3 or newer"
INSTALL = "Install it: https://docs.sigstore.dev/cosign/system_config/installation/"
#: The youngest of the options that we use.  A distribution's cosign may call its version "devel".
YOUNGEST = "--registry-cacert"
#: cosign gives up by itself before this.
SECONDS = 600.0
#: What cosign ends with where it looked, and no signature is as asked for:
#: https://github.com/sigstore/cosign/blob/v2.5.0/cmd/cosign/errors/exit_codes.go
NOT_SIGNED = (10, 12, 13)
#: Ours, that cosign would take for its options, or has no use for.
OURS = (
    "COSIGN_KEY",
    "COSIGN_KEYLESS",
    "COSIGN_PRIVATE_KEY",
    "COSIGN_PUBLIC_KEY",
    "COSIGN_PASSWORD",
    USER_VARIABLE,
    PASSWORD_VARIABLE,
)
#: Options for signing, unless the environment has others: ask no person, and put signatures where cosign
#: 2 and 3 both find them.  3 would store a bundle, which 2 does not look for:
#: https://github.com/sigstore/cosign/blob/v3.1.1/cmd/cosign/cli/options/sign.go
SIGNING = {
    "COSIGN_FULCIO_AUTH_FLOW": "token",
    "COSIGN_NEW_BUNDLE_FORMAT": "false",
    "COSIGN_USE_SIGNING_CONFIG": "false",
}
#: Where cosign finds a token: https://github.com/sigstore/cosign/tree/v2.5.0/pkg/providers
TOKENS = ("SIGSTORE_ID_TOKEN", "COSIGN_IDENTITY_TOKEN")
PROVIDERS = (
    "ACTIONS_ID_TOKEN_REQUEST_TOKEN",
    "BUILDKITE_AGENT_ACCESS_TOKEN",
    "GOOGLE_SERVICE_ACCOUNT_NAME",
    "SPIFFE_ENDPOINT_SOCKET",
    "COSIGN_FULCIO_AUTH_FLOW",
)
PROVIDER_FILES = (Path("/var/run/sigstore/cosign/oidc-token"), Path("/tmp/spire-agent/public/api.sock"))
GOOGLE = Path("/sys/class/dmi/id/product_name")
#: Variables whose values are in no message.
SECRETS = (*TOKENS, "ACTIONS_ID_TOKEN_REQUEST_TOKEN", "BUILDKITE_AGENT_ACCESS_TOKEN", PASSWORD_VARIABLE)
#: The shape of an OpenID token, such as one that cosign fetched itself.
TOKEN = re.compile(r"eyJ[\w-]+\.[\w-]+\.[\w-]*")
DOCKER_HUB = ("docker.io", "index.docker.io")


@dataclass(frozen=True)
class Cosign:
    """The program, for one registry."""

    program: Path
    host: str
    login: Credentials | None = field(default=None, repr=False)  # None: what Docker's config has
    ca: Path | None = None
    plain_http: bool = False

    def run(self, verb: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a verb of cosign.  Raises StepFailed where it cannot be run or does not end."""
        argv = [str(self.program), verb]
        if self.ca:
            argv.append(f"--registry-cacert={self.ca}")
        if self.plain_http:
            argv.append("--allow-http-registry")
        with TemporaryDirectory(prefix="trainyard-cosign-") as folder:
            env = environment(os.environ)
            if verb == "sign":
                env = SIGNING | env
            if self.login:
                _write_login(Path(folder), self.host, self.login)
                env["DOCKER_CONFIG"] = folder
            try:
                return subprocess.run(
                    [*argv, *words],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=SECONDS,
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                raise StepFailed(f"cosign {verb}: no end in {SECONDS:.0f} s") from error
            except OSError as error:
                raise StepFailed(f"{self.program}: {error.strerror}") from error


@dataclass(frozen=True)
class CosignSigner:
    """Signs as the job that this is; a :class:`trainyard.signing.Signer`."""

    cosign: Cosign

    def sign(self, store: Store, digests: Sequence[str]) -> None:
        """Sign manifests, in this order.

        The key is a new one each time, so what was signed before gets one more signature.  Raises
        StepFailed with what cosign says; the rest is then not signed.
        """
        done = self.cosign.run("sign", "--yes", *(f"{store.name}@{digest}" for digest in digests))
        if done.returncode:
            raise StepFailed(f"{store.name}: cosign did not sign: {_reason(done)}")


@dataclass(frozen=True)
class IdentityTrust:
    """Trusts signatures by an identity that an issuer vouched for; a :class:`trainyard.signing.Trust`."""

    cosign: Cosign
    issuer: str
    identity: str = ""
    identity_regexp: str = ""

    @property
    def who(self) -> str:
        shown = self.identity or f"an identity like {self.identity_regexp}"
        return f"{shown}, issued by {self.issuer}"

    def look(self, store: Store, digest: str) -> Finding:
        """Have cosign check the manifest's signatures.

        Raises StepFailed where it cannot: without the registry, or the keys of Fulcio or Rekor.
        """
        done = self.cosign.run(
            "verify",
            # All of them, also empty ones: an option that is given is not taken from the environment.
            "--check-claims=true",
            "--output=json",
            f"--certificate-identity={self.identity}",
            f"--certificate-identity-regexp={self.identity_regexp}",
            f"--certificate-oidc-issuer={self.issuer}",
            "--certificate-oidc-issuer-regexp=",
            f"{store.name}@{digest}",
        )
        if done.returncode in NOT_SIGNED:
            return Finding(False, f"not signed by {self.who}: {_reason(done)}")
        if done.returncode:
            raise StepFailed(f"cosign cannot verify: {_reason(done)}")
        # The certificate's own, which says more than a regular expression.
        subject = _subject(done.stdout)
        return Finding(True, f"by {f'{subject}, issued by {self.issuer}' if subject else self.who}")


def signer(where: Registry, plain_http: bool = False) -> CosignSigner:
    """Sign keyless in this repository.

    Raises InputError where cosign is missing or too old, and where nothing can say who we are: cosign
    would then wait for a person with a browser.
    """
    cosign = find(where, plain_http)
    if not has_identity(os.environ):
        hint = "set SIGSTORE_ID_TOKEN"
        if os.environ.get("GITHUB_ACTIONS") == "true":
            hint = "give the job the permission `id-token: write`"
        raise InputError(f"nothing here can say who signs, as keyless signing needs: {hint}")
    return CosignSigner(cosign)


def trust(
    where: Registry, issuer: str, identity: str, regexp: str, plain_http: bool = False
) -> IdentityTrust:
    """Trust what an identity signed in this repository: one by name, or those like a regular expression.

    Raises InputError where not just one of the two is given, or where cosign is missing or too old.
    """
    if not issuer or bool(identity) == bool(regexp):
        raise InputError("give --issuer, and one of --identity and --identity-regexp")
    return IdentityTrust(find(where, plain_http), issuer, identity, regexp)


def find(where: Registry, plain_http: bool = False) -> Cosign:
    """The program, with this repository's login and CA.

    Raises InputError that says what to install where it is missing, too old or does not run.
    """
    program = find_tool("cosign")
    if program is None:
        raise InputError(f"keyless signatures need {NEEDED}, and there is none\n{INSTALL}")
    asked = ask([str(program), "verify", "--help"], environment(os.environ))
    if asked.returncode:
        said = tail(asked.stdout + asked.stderr, 3)
        raise InputError(f"keyless signatures need {NEEDED}, but {program} does not run: {said}\n{INSTALL}")
    if YOUNGEST not in asked.stdout + asked.stderr:
        raise InputError(f"keyless signatures need {NEEDED}; {program} is too old\n{INSTALL}")
    ours = where.login if where.login and where.login.origin == USER_VARIABLE else None
    host = where.where.host
    return Cosign(program, host, ours, find_registry_ca(host), plain_http)


def has_identity(environ: Mapping[str, str]) -> bool:
    """Whether cosign will find a token, or somebody to ask for one, without a person."""
    if any(environ.get(name) for name in (*TOKENS, *PROVIDERS)):
        return True
    try:
        google = GOOGLE.read_text().startswith("Google")
    except OSError:
        google = False
    return google or any(path.exists() for path in PROVIDER_FILES)


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What cosign gets of our environment: all but our own secrets."""
    # An empty SIGSTORE_ID_TOKEN would be taken for a token.
    empty = [name for name in TOKENS if not environ.get(name)]
    found = {name: value for name, value in environ.items() if name not in (*OURS, *empty)}
    if ca := find_ca():  # for Fulcio, Rekor and the issuer
        found.setdefault("SSL_CERT_FILE", str(ca))
    return found


def _write_login(folder: Path, host: str, login: Credentials) -> None:
    """A config of Docker's with one login.  TemporaryDirectory made the folder for us alone."""
    # https://github.com/google/go-containerregistry/blob/v0.20.3/pkg/authn/keychain.go
    name = "https://index.docker.io/v1/" if host in DOCKER_HUB else host
    auth = base64.b64encode(f"{login.user}:{login.password}".encode()).decode()
    (folder / "config.json").write_text(json.dumps({"auths": {name: {"auth": auth}}}))


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """Why cosign failed, in its words, without secrets."""
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    text = errors[0].removeprefix("Error: ") if errors else tail(done.stderr, 3)
    for name in SECRETS:
        if value := os.environ.get(name):
            text = text.replace(value, "***")
    return TOKEN.sub("***", text) or f"it ended with {done.returncode}"


def _subject(output: str) -> str:
    """The identity in the certificate, from what ``cosign verify`` prints; "" where it is not there."""
    try:
        return str(json.loads(output)[0]["optional"]["Subject"])
    except (ValueError, KeyError, IndexError, TypeError):
        return ""
