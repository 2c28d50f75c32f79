"""Signing keys: read from a file or the environment, in PEM or in cosign's encrypted form.

``cosign generate-key-pair`` encrypts a PKCS #8 key with scrypt and NaCl's secretbox and writes the parts as
JSON into a PEM block: https://github.com/sigstore/cosign/blob/main/specs/SIGNATURE_SPEC.md and
https://github.com/secure-systems-lab/go-securesystemslib/blob/main/encrypted/encrypted.go.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from nacl.exceptions import CryptoError
from nacl.secret import SecretBox
from nacl.utils import random

from trainyard.model import InputError

PASSWORD_VARIABLE = "COSIGN_PASSWORD"
#: What cosign names a variable with, where others name a file.
ENVIRONMENT = "env://"
COSIGN_TYPE = "ENCRYPTED SIGSTORE PRIVATE KEY"
#: The name before cosign 2.
OLD_COSIGN_TYPE = "ENCRYPTED COSIGN PRIVATE KEY"
#: scrypt's N (with r=8, p=1) of new keys; reading also takes half and twice of it, as cosign does.
SCRYPT_N = 2**16
SCRYPT_COSTS = (2**15, 2**16, 2**17)
PEM = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----\s(.*?)-----END \1-----", re.S)


def private_key(where: str, environ: Mapping[str, str]) -> ec.EllipticCurvePrivateKey:
    """The private key in a file, or in the variable of ``env://NAME``.

    Where it is encrypted the password is in COSIGN_PASSWORD.  Raises InputError that says what is
    wrong; no message holds any part of the key or of the password.
    """
    return read_private(_text(where, environ), environ.get(PASSWORD_VARIABLE), where)


def public_key(where: str, environ: Mapping[str, str]) -> ec.EllipticCurvePublicKey:
    """The public key in a file, or in the variable of ``env://NAME``."""
    try:
        key = serialization.load_pem_public_key(_text(where, environ))
    except ValueError as error:
        raise InputError(f"{where}: not a public key in PEM; cosign.pub looks like one") from error
    if isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1):
        return key
    raise _not_p256(where)


def _text(where: str, environ: Mapping[str, str]) -> bytes:
    if where.startswith(ENVIRONMENT):
        name = where.removeprefix(ENVIRONMENT)
        if not environ.get(name):
            raise InputError(f"{where}: the variable {name} is not set")
        return environ[name].encode()
    try:
        return Path(where).read_bytes()
    except OSError as error:
        raise InputError(f"{where}: cannot read the key: {error.strerror}") from error


def read_private(pem: bytes, password: str | None, where: str = "key") -> ec.EllipticCurvePrivateKey:
    """The private key in a PEM text; ``where`` is what messages call it."""
    block = PEM.search(pem)
    if not block:
        raise InputError(f"{where}: not a private key in PEM")
    try:
        if block[1].decode() in (COSIGN_TYPE, OLD_COSIGN_TYPE):
            der = decrypt(base64.b64decode(block[2]), (password or "").encode())
            key: object = serialization.load_der_private_key(der, None)
        else:
            needed = password.encode() if password and b"ENCRYPTED" in pem else None
            key = serialization.load_pem_private_key(pem, needed)
    except TypeError as error:  # what cryptography raises where a password is missing
        raise InputError(f"{where}: the key is encrypted; set {PASSWORD_VARIABLE}") from error
    except CryptoError as error:
        if password is None:
            raise InputError(f"{where}: the key is encrypted; set {PASSWORD_VARIABLE}") from error
        raise InputError(f"{where}: the password in {PASSWORD_VARIABLE} does not open the key") from error
    except (ValueError, KeyError) as error:
        raise InputError(
            f"{where}: the key cannot be read: it is damaged, or {PASSWORD_VARIABLE} is not its password"
        ) from error
    if isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, ec.SECP256R1):
        return key
    raise _not_p256(where)


def _not_p256(where: str) -> InputError:
    return InputError(f"{where}: not an ECDSA P-256 key\nMake one: cosign generate-key-pair")


def generate(password: str) -> tuple[bytes, bytes]:
    """A new pair as ``cosign generate-key-pair`` makes it: encrypted private key and public key, PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    der = key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    body = base64.encodebytes(encrypt(der, password.encode())).decode()
    private = f"-----BEGIN {COSIGN_TYPE}-----\n{_wrapped(body)}-----END {COSIGN_TYPE}-----\n"
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return private.encode(), public


def _wrapped(text: str) -> str:
    """base64 in lines of 64 characters, as PEM has it."""
    flat = "".join(text.split())
    return "".join(f"{flat[start : start + 64]}\n" for start in range(0, len(flat), 64))


def encrypt(plain: bytes, password: bytes) -> bytes:
    """Encrypt as go-securesystemslib does; the JSON says how."""
    salt, nonce = random(32), random(SecretBox.NONCE_SIZE)
    box = SecretBox(_derive(password, salt, SCRYPT_N)).encrypt(plain, nonce)
    return json.dumps(
        {
            "kdf": {"name": "scrypt", "params": {"N": SCRYPT_N, "r": 8, "p": 1}, "salt": _base64(salt)},
            "cipher": {"name": "nacl/secretbox", "nonce": _base64(nonce)},
            "ciphertext": _base64(box.ciphertext),
        },
        separators=(",", ":"),
    ).encode()


def decrypt(sealed: bytes, password: bytes) -> bytes:
    """Decrypt what :func:`encrypt` or cosign wrote.

    Raises CryptoError where the password is wrong, ValueError or KeyError where it is something else.
    """
    whole = json.loads(sealed)
    kdf, cipher = whole["kdf"], whole["cipher"]
    if (kdf["name"], cipher["name"]) != ("scrypt", "nacl/secretbox"):
        raise ValueError("unknown encryption")
    cost = kdf["params"]["N"]
    # A file must not choose how much memory we use.
    if kdf["params"] != {"N": cost, "r": 8, "p": 1} or cost not in SCRYPT_COSTS:
        raise ValueError("unexpected scrypt parameters")
    box = SecretBox(_derive(password, base64.b64decode(kdf["salt"]), cost))
    return bytes(box.decrypt(base64.b64decode(whole["ciphertext"]), base64.b64decode(cipher["nonce"])))


def _derive(password: bytes, salt: bytes, cost: int) -> bytes:
    return Scrypt(salt=salt, length=SecretBox.KEY_SIZE, n=cost, r=8, p=1).derive(password)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
