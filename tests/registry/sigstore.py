"""What keyless signing asks of the world outside, on this machine: an OpenID issuer, Fulcio and Rekor.

Each does what cosign checks and no more.  The issuer gives a job its token as GitHub does.  Fulcio reads
the token, has the caller prove that it holds the key, and issues a certificate that lasts ten minutes and
holds a certificate timestamp (RFC 6962).  Rekor signs an entry and the time at which it came.
https://github.com/sigstore/fulcio/blob/main/docs/certificate-specification.md
https://github.com/sigstore/rekor/blob/main/openapi.yaml
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import threading
import time
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

P256 = ec.ECDSA(hashes.SHA256())
#: What a job shows the issuer for a token; as secret as the token.
REQUEST_TOKEN = "the-request-token-of-this-job"
AUDIENCE = "sigstore"
ISSUER_OLD = x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.1")
ISSUER_NEW = x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.8")
TIMESTAMPS = x509.ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")
LIFE = timedelta(minutes=10)


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def der(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def pem(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def octets(data: bytes) -> bytes:
    """DER's OCTET STRING, of less than 64 kB."""
    size = len(data)
    head = bytes([size]) if size < 128 else b"\x82" + struct.pack(">H", size)
    return b"\x04" + head + data


def base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def unbase64url(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


class Issuer:
    """Tokens that say who a job is: https://docs.github.com/en/actions/reference/security/oidc."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.key = new_key()

    def token(self, identity: str, audience: str = AUDIENCE) -> str:
        claims = {
            "iss": self.url,
            "sub": identity,
            "aud": audience,
            "iat": int(time.time()),
            "exp": int(time.time()) + 300,
        }
        parts = [json.dumps(part).encode() for part in ({"alg": "ES256", "typ": "JWT"}, claims)]
        signed = ".".join(map(base64url, parts))
        numbers = decode_dss_signature(self.key.sign(signed.encode(), P256))
        return f"{signed}.{base64url(b''.join(number.to_bytes(32, 'big') for number in numbers))}"

    def read(self, token: str) -> dict[str, Any]:
        """The claims of a token of ours.  Raises InvalidSignature or ValueError for any other."""
        signed, _, signature = token.rpartition(".")
        raw = unbase64url(signature)
        value = encode_dss_signature(int.from_bytes(raw[:32], "big"), int.from_bytes(raw[32:], "big"))
        self.key.public_key().verify(value, signed.encode(), P256)
        claims: dict[str, Any] = json.loads(unbase64url(signed.partition(".")[2]))
        if claims["aud"] != AUDIENCE or claims["exp"] < time.time():
            raise ValueError("not for us, or too old")
        return claims


class Fulcio:
    """Certificates for a token, from a CA of its own, with the timestamp of a log of its own."""

    def __init__(self, issuer: Issuer) -> None:
        self.issuer = issuer
        self.key, self.log = new_key(), new_key()
        self.name = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "the tests' Fulcio")])
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        self.root = (
            self._builder(self.key.public_key(), self.name, timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self.key.public_key()), critical=False)
            .sign(self.key, hashes.SHA256())
        )

    def _builder(
        self, key: ec.EllipticCurvePublicKey, subject: x509.Name, life: timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder(self.name, subject, key, x509.random_serial_number())
            .not_valid_before(now - timedelta(seconds=5))
            .not_valid_after(now + life)
        )

    def certify(self, token: str, public: bytes, proof: bytes) -> list[str]:
        """The certificate and its CA, in PEM; the proof is the subject, signed with the key."""
        claims = self.issuer.read(token)
        key = serialization.load_pem_public_key(public)
        assert isinstance(key, ec.EllipticCurvePublicKey)
        key.verify(proof, claims["sub"].encode(), P256)
        issuer = claims["iss"].encode()
        usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
        builder = (
            self._builder(key, x509.Name([]), LIFE)
            .add_extension(usage, critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False
            )
            .add_extension(
                x509.SubjectAlternativeName([x509.UniformResourceIdentifier(claims["sub"])]), critical=True
            )
            .add_extension(x509.UnrecognizedExtension(ISSUER_OLD, issuer), critical=False)
            .add_extension(
                x509.UnrecognizedExtension(ISSUER_NEW, b"\x0c" + bytes([len(issuer)]) + issuer),
                critical=False,
            )
        )
        first = builder.sign(self.key, hashes.SHA256())
        timestamps = x509.UnrecognizedExtension(TIMESTAMPS, self._timestamps(first.tbs_certificate_bytes))
        made = builder.add_extension(timestamps, critical=False).sign(self.key, hashes.SHA256())
        return [one.public_bytes(serialization.Encoding.PEM).decode() for one in (made, self.root)]

    def version1(self, token: str, wanted: dict[str, Any]) -> bytes:
        """What cosign 2 asks for."""
        public, proof = wanted["publicKey"]["content"], wanted["signedEmailAddress"]
        return "".join(self.certify(token, base64.b64decode(public), base64.b64decode(proof))).encode()

    def version2(self, token: str, wanted: dict[str, Any]) -> bytes:
        """What cosign 3 asks for."""
        asked = wanted["publicKeyRequest"]
        proof = base64.b64decode(asked["proofOfPossession"])
        chain = {"certificates": self.certify(token, asked["publicKey"]["content"].encode(), proof)}
        return json.dumps({"signedCertificateEmbeddedSct": {"chain": chain}}).encode()

    def _timestamps(self, certificate: bytes) -> bytes:
        """The log's promise about a certificate: https://www.rfc-editor.org/rfc/rfc6962#section-3.2."""
        when = struct.pack(">Q", int(time.time() * 1000))
        ours = hashlib.sha256(der(self.key.public_key())).digest()
        size = struct.pack(">I", len(certificate))[1:]
        value = self.log.sign(
            b"\0\0" + when + struct.pack(">H", 1) + ours + size + certificate + b"\0\0", P256
        )
        log = hashlib.sha256(der(self.log.public_key())).digest()
        one = b"\0" + log + when + b"\0\0" + b"\x04\x03" + struct.pack(">H", len(value)) + value
        listed = struct.pack(">H", len(one)) + one
        return octets(struct.pack(">H", len(listed)) + listed)


class Rekor:
    """A log of signatures; what it signs is that an entry came, and when.

    Each entry is a tree of its own, of one leaf, whose hash is the root's.
    """

    def __init__(self) -> None:
        self.key = new_key()
        self.entries: list[dict[str, Any]] = []

    def add(self, entry: dict[str, Any]) -> dict[str, Any]:
        self.entries.append(entry)
        leaf = hashlib.sha256(b"\0" + _canonical(entry)).digest()
        log = hashlib.sha256(der(self.key.public_key())).digest()
        noted: dict[str, Any] = {
            "body": base64.b64encode(_canonical(entry)).decode(),
            "integratedTime": int(time.time()),
            "logID": log.hex(),
            "logIndex": 0,
        }
        proof = {
            "checkpoint": self._checkpoint(log, leaf),
            "hashes": [],
            "logIndex": 0,
            "rootHash": leaf.hex(),
            "treeSize": 1,
        }
        signature = base64.b64encode(self.key.sign(_canonical(noted), P256)).decode()
        verification = {"inclusionProof": proof, "signedEntryTimestamp": signature}
        return {leaf.hex(): noted | {"verification": verification}}

    def _checkpoint(self, log: bytes, root: bytes) -> str:
        """A signed note: https://github.com/C2SP/C2SP/blob/main/tlog-checkpoint.md."""
        text = f"the-tests-log - 1\n1\n{base64.b64encode(root).decode()}\n"
        signature = base64.b64encode(log[:4] + self.key.sign(text.encode(), P256)).decode()
        return f"{text}\n\u2014 the-tests-log {signature}\n"


def _canonical(document: dict[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


class Sigstore:
    """All three, on one port."""

    def __init__(self, folder: Path) -> None:
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self.issuer = Issuer(self.url)
        self.fulcio = Fulcio(self.issuer)
        self.rekor = Rekor()
        #: Whose token the issuer gives to a job that asks.
        self.identity = "https://git.example/acme/trainyard/.github/workflows/nightly.yml@refs/heads/main"
        self.tokens: list[str] = []
        folder.mkdir()
        root = self.fulcio.root.public_bytes(serialization.Encoding.PEM)
        (folder / "root.pem").write_bytes(root)
        (folder / "rekor.pub").write_bytes(pem(self.rekor.key.public_key()))
        (folder / "log.pub").write_bytes(pem(self.fulcio.log.public_key()))
        #: What tells cosign of this Sigstore; the same as for any private one.
        self.environ = {
            "COSIGN_FULCIO_URL": self.url,
            "COSIGN_REKOR_URL": self.url,
            "SIGSTORE_ROOT_FILE": str(folder / "root.pem"),
            "SIGSTORE_REKOR_PUBLIC_KEY": str(folder / "rekor.pub"),
            "SIGSTORE_CT_LOG_PUBLIC_KEY_FILE": str(folder / "log.pub"),
        }
        #: What a job gets that may ask for a token.
        self.job = {
            "ACTIONS_ID_TOKEN_REQUEST_URL": f"{self.url}/token?job=1",
            "ACTIONS_ID_TOKEN_REQUEST_TOKEN": REQUEST_TOKEN,
        }
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def give(self) -> str:
        """A token for the job, remembered to be looked for where no token may be."""
        self.tokens.append(self.issuer.token(self.identity))
        return self.tokens[-1]

    def _handler(sigstore) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_args: object) -> None:
                pass

            def do_GET(self) -> None:
                asked = f"bearer {REQUEST_TOKEN}" == self.headers.get("Authorization")
                if not asked or not self.path.endswith(f"&audience={AUDIENCE}"):
                    self._answer(401, b"{}")
                    return
                self._answer(200, json.dumps({"value": sigstore.give()}).encode())

            def do_POST(self) -> None:
                wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                token = self.headers.get("Authorization", "").removeprefix("Bearer ")
                try:
                    if self.path == "/api/v1/log/entries":
                        added = sigstore.rekor.add(wanted)
                        self._answer(201, json.dumps(added).encode(), next(iter(added)))
                    elif self.path == "/api/v1/signingCert":
                        self._answer(201, sigstore.fulcio.version1(token, wanted))
                    elif self.path == "/api/v2/signingCert":
                        self._answer(200, sigstore.fulcio.version2(token, wanted))
                    else:
                        self._answer(404, b"{}")
                except Exception as error:  # whatever is wrong, cosign is to get an answer
                    self._answer(400, json.dumps({"code": 400, "message": repr(error)}).encode())

            def _answer(self, status: int, body: bytes, tag: str = "") -> None:
                kind = "application/pem-certificate-chain" if body.startswith(b"--") else "application/json"
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", tag)
                self.end_headers()
                self.wfile.write(body)

        return Handler
