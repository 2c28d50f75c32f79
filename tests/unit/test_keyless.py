"""Keyless signing: what is wrong is said at once, and what cosign is told holds no secret.

cosign is outside: here it is a shell script.  The real one runs in tests/registry.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from test_cli import Done, Run, run
from test_signing import DIGEST, KEY, Memory

from trainyard import cli_publish, keyless, nightly, signing
from trainyard.model import StepFailed
from trainyard.registry import Credentials, Reference, Registry, connect

__all__ = ["run"]
REPOSITORY = "registry.example/acme/trainyard"
IDENTITY, ISSUER = "ci@acme.example", "https://accounts.acme.example"
TOKEN = "eyJhbGciOiJFUzI1NiJ9.eyJzdWIiOiJjaSJ9.c2ln"
HELP = 'if [ "$2" = --help ]; then echo --registry-cacert; exit; fi\n'
#: Fake: a body of the script, after what --help answers.
Fake = Callable[..., Path]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No cosign, no job and no login, whatever this machine has."""
    for name in (*keyless.OURS, *keyless.TOKENS, *keyless.PROVIDERS, "GITHUB_ACTIONS", "REGISTRY_CA"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(keyless, "PROVIDER_FILES", ())
    monkeypatch.setattr(keyless, "GOOGLE", tmp_path / "product_name")


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    def make(body: str, about: str = HELP) -> Path:
        script = tmp_path / "bin/cosign"
        script.write_text(f"#!/bin/sh\n{about}{body}\n")
        script.chmod(0o755)
        return script

    return make


@pytest.fixture
def nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a command goes on to the engine."""

    def reached(*_args: object) -> None:
        raise AssertionError("asked for an engine")

    monkeypatch.setattr(cli_publish, "connect", reached)
    monkeypatch.setattr(cli_publish, "prepare", reached)


def opened() -> Registry:
    return connect(REPOSITORY)


# -- wrong input: exit code 2, one message, nothing begun ------------------------------------

VERBS = pytest.mark.parametrize("verb", ["push", "nightly"])


@VERBS
@pytest.mark.usefixtures("nothing_else")
def test_a_key_and_keyless_are_refused(verb: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSIGN_KEYLESS", "1")
    done = run(verb, "cpu-pt213", "-r", REPOSITORY, "--key", "cosign.key")
    assert done.code == 2
    assert done.error == ("--key (COSIGN_KEY) and --keyless (COSIGN_KEYLESS) are two ways to sign; give one")


@VERBS
@pytest.mark.usefixtures("nothing_else")
def test_without_cosign_the_message_says_what_to_install(verb: str, run: Run) -> None:
    done = run(verb, "cpu-pt213", "-r", REPOSITORY, "--keyless")
    assert done.code == 2
    assert done.error.startswith(
        "keyless signatures need cosign 2.4.3 or newer, and there is none\nInstall it:"
    )


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ("echo --certificate-identity\n", "is too old"),
        ("echo 'no such verb' >&2; exit 1\n", "does not run: no such verb"),
    ],
)
@pytest.mark.usefixtures("nothing_else")
def test_a_cosign_that_will_not_do_is_named(about: str, said: str, run: Run, fake: Fake) -> None:
    program = fake("", about)
    done = run("push", "cpu-pt213", "-r", REPOSITORY, "--keyless")
    assert done.code == 2
    assert said in done.error
    assert str(program) in done.error
    assert keyless.INSTALL in done.error


@pytest.mark.parametrize(
    ("environ", "hint"), [({}, "SIGSTORE_ID_TOKEN"), ({"GITHUB_ACTIONS": "true"}, "id-token: write")]
)
@pytest.mark.usefixtures("nothing_else")
def test_where_nobody_says_who_signs_cosign_is_not_left_to_ask(
    environ: dict[str, str], hint: str, run: Run, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake("exit 0")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    done = run("push", "cpu-pt213", "-r", REPOSITORY, "--keyless")
    assert done.code == 2
    assert hint in done.error


def test_nobody_needs_cosign_to_see_what_a_night_would_do(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_publish, "prepare", lambda *_args: (None, ()))
    monkeypatch.setattr(nightly, "plan", lambda *_args: ())
    assert run("nightly", "-r", REPOSITORY, "--keyless", "--dry-run") == Done(0, "", "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "whose signature counts? Give --key, or --identity and --issuer"),
        (("--key", "cosign.pub", "--identity", IDENTITY, "--issuer", ISSUER), "two ways to verify; give one"),
        (("--key", "cosign.pub", "--issuer", ISSUER), "two ways to verify; give one"),
        (("--identity", IDENTITY), "give --issuer, and one of --identity and --identity-regexp"),
        (("--issuer", ISSUER), "give --issuer, and one of --identity and --identity-regexp"),
        (
            ("--identity", IDENTITY, "--identity-regexp", "x", "--issuer", ISSUER),
            "give --issuer, and one of --identity and --identity-regexp",
        ),
        (("--identity", IDENTITY, "--issuer", ISSUER), "keyless signatures need cosign"),
    ],
)
def test_verifying_needs_one_way_and_all_of_it(words: tuple[str, ...], said: str, run: Run) -> None:
    done = run("verify", f"{REPOSITORY}:cpu-pt213", *words)
    assert done.code == 2
    assert said in done.error


# -- what cosign is told ---------------------------------------------------------------------


def test_the_image_is_last_and_the_login_is_in_no_argument(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(f'printf "%s\\n" "$@" > {tmp_path}/argv; /bin/cp "$DOCKER_CONFIG/config.json" {tmp_path}')
    monkeypatch.setenv("TRAINYARD_REGISTRY_USER", "me")
    monkeypatch.setenv("TRAINYARD_REGISTRY_PASSWORD", "s3cret")
    monkeypatch.setenv("SIGSTORE_ID_TOKEN", TOKEN)
    (tmp_path / "ca.pem").touch()
    monkeypatch.setenv("REGISTRY_CA", str(tmp_path / "ca.pem"))
    digests = ["sha256:" + "1" * 64, DIGEST]
    keyless.signer(opened()).sign(Memory(), digests)
    assert (tmp_path / "argv").read_text().splitlines() == [
        "sign",
        f"--registry-cacert={tmp_path}/ca.pem",
        "--yes",
        *(f"{REPOSITORY}@{digest}" for digest in digests),
    ]
    login = {"registry.example": {"auth": "bWU6czNjcmV0"}}
    assert json.loads((tmp_path / "config.json").read_text()) == {"auths": login}


def test_docker_hub_has_another_name_in_a_config_of_dockers(fake: Fake, tmp_path: Path) -> None:
    program = fake(f'/bin/cp "$DOCKER_CONFIG/config.json" {tmp_path}')
    login = Credentials("me", "s3cret", "TRAINYARD_REGISTRY_USER")
    keyless.Cosign(program, "docker.io", login).run("sign")
    assert list(json.loads((tmp_path / "config.json").read_text())["auths"]) == [
        "https://index.docker.io/v1/"
    ]


def test_plain_http_is_passed_on(fake: Fake, tmp_path: Path) -> None:
    fake(f'echo "$*" > {tmp_path}/argv')
    where = Registry(Reference("localhost:5000", "t"), plain_http=True)
    keyless.trust(where, ISSUER, IDENTITY, "", plain_http=True).look(Memory(), DIGEST)
    assert " --allow-http-registry " in (tmp_path / "argv").read_text()


def test_of_our_environment_only_what_is_cosigns_is_passed_on() -> None:
    given = {name: "x" for name in keyless.OURS} | {
        "PATH": "/bin",
        "SIGSTORE_ID_TOKEN": "",
        "COSIGN_FULCIO_URL": "https://fulcio.acme.example",
        "SSL_CERT_FILE": "/ca.pem",
    }
    assert keyless.environment(given) == {
        "PATH": "/bin",
        "COSIGN_FULCIO_URL": "https://fulcio.acme.example",
        "SSL_CERT_FILE": "/ca.pem",
    }


def test_our_options_for_signing_give_way_to_those_of_the_environment(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = fake(f"/usr/bin/env > {tmp_path}/environ")
    monkeypatch.setenv("COSIGN_NEW_BUNDLE_FORMAT", "true")
    keyless.Cosign(program, "registry.example").run("sign")
    told = (tmp_path / "environ").read_text().splitlines()
    assert {"COSIGN_FULCIO_AUTH_FLOW=token", "COSIGN_NEW_BUNDLE_FORMAT=true"} < set(told)
    keyless.Cosign(program, "registry.example").run("verify")
    assert "COSIGN_FULCIO_AUTH_FLOW" not in (tmp_path / "environ").read_text()


def test_verifying_takes_whom_to_trust_from_the_arguments_alone(fake: Fake, tmp_path: Path) -> None:
    fake(f'printf "%s\\n" "$@" > {tmp_path}/argv')
    keyless.trust(opened(), ISSUER, "", "^ci@", plain_http=False).look(Memory(), DIGEST)
    told = (tmp_path / "argv").read_text().splitlines()
    assert told[0] == "verify"
    assert told[-1] == f"{REPOSITORY}@{DIGEST}"
    assert {
        "--check-claims=true",
        "--certificate-identity=",
        "--certificate-identity-regexp=^ci@",
        f"--certificate-oidc-issuer={ISSUER}",
        "--certificate-oidc-issuer-regexp=",
    } < set(told)


# -- what cosign says ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "finding"),
    [
        (
            """echo '[{"optional": {"Subject": "ci-7@acme.example"}}]'""",
            signing.Finding(True, f"by ci-7@acme.example, issued by {ISSUER}"),
        ),
        ("echo '[]'", signing.Finding(True, f"by {IDENTITY}, issued by {ISSUER}")),
        (
            "echo 'Error: no signatures found' >&2; exit 10",
            signing.Finding(False, f"not signed by {IDENTITY}, issued by {ISSUER}: no signatures found"),
        ),
        (
            "exit 12",
            signing.Finding(False, f"not signed by {IDENTITY}, issued by {ISSUER}: it ended with 12"),
        ),
    ],
)
def test_a_finding_is_in_cosigns_words(body: str, finding: signing.Finding, fake: Fake) -> None:
    fake(body)
    assert keyless.trust(opened(), ISSUER, IDENTITY, "").look(Memory(), DIGEST) == finding


def test_where_cosign_could_not_look_it_is_no_finding(fake: Fake) -> None:
    fake("echo 'Error: getting Rekor public keys: no route' >&2; exit 1")
    with pytest.raises(StepFailed, match="cosign cannot verify: getting Rekor public keys: no route"):
        keyless.trust(opened(), ISSUER, IDENTITY, "").look(Memory(), DIGEST)


def test_no_message_has_a_token_or_a_password(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = TOKEN.replace("c2ln", "b3RoZXI")
    fake(f"echo 'Error: s3cret {TOKEN} plain-token {fetched}' >&2; exit 1")
    monkeypatch.setenv("TRAINYARD_REGISTRY_USER", "me")
    monkeypatch.setenv("TRAINYARD_REGISTRY_PASSWORD", "s3cret")
    monkeypatch.setenv("SIGSTORE_ID_TOKEN", TOKEN)
    monkeypatch.setenv("ACTIONS_ID_TOKEN_REQUEST_TOKEN", "plain-token")
    with pytest.raises(StepFailed) as failed:
        keyless.signer(opened()).sign(Memory(), [DIGEST])
    assert str(failed.value) == f"{REPOSITORY}: cosign did not sign: *** *** *** ***"
    assert "s3cret" not in repr(keyless.find(opened()))


def test_a_cosign_that_hangs_is_ended(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyless, "SECONDS", 0.2)
    monkeypatch.setenv("SIGSTORE_ID_TOKEN", TOKEN)
    fake("exec /bin/sleep 60")
    with pytest.raises(StepFailed, match="cosign sign: no end in"):
        keyless.signer(opened()).sign(Memory(), [DIGEST])


def test_a_cosign_that_is_gone_meanwhile_is_named(fake: Fake) -> None:
    program = fake("")
    trust = keyless.trust(opened(), ISSUER, IDENTITY, "")
    program.unlink()
    with pytest.raises(StepFailed, match="bin/cosign: No such file"):
        trust.look(Memory(), DIGEST)


@pytest.mark.parametrize("name", [*keyless.TOKENS, *keyless.PROVIDERS])
def test_each_of_cosigns_sources_of_a_token_is_known(name: str) -> None:
    assert keyless.has_identity({name: "x"})
    assert not keyless.has_identity({name: ""})


def test_a_machine_of_google_has_a_token() -> None:
    keyless.GOOGLE.write_text("Google Compute Engine\n")
    assert keyless.has_identity({})


def test_a_key_is_the_other_way_to_sign_and_to_trust(tmp_path: Path) -> None:
    memory = Memory()
    trust = signing.KeyTrust(KEY.public_key())
    assert trust.look(memory, DIGEST).detail.startswith("not signed")
    signing.KeySigner(KEY).sign(memory, [DIGEST])
    assert trust.look(memory, DIGEST) == signing.Finding(True, f"by {trust.who}")


def conforms(
    key: signing.KeySigner, cosign: keyless.CosignSigner, trust: keyless.IdentityTrust
) -> tuple[signing.Signer, signing.Signer, signing.Trust]:
    """For mypy: both ways are what publishing and verifying ask for."""
    return key, cosign, trust
