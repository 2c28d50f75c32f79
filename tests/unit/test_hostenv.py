"""What the host offers: certificates, wheels, proxies."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainyard import hostenv


def test_the_first_existing_bundle_of_certificates_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.touch()
    monkeypatch.setenv("PIP_CERT", str(tmp_path / "missing.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
    assert hostenv.find_ca() == bundle.resolve()


def test_find_links_may_hold_folders_file_addresses_and_web_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = tmp_path / "one", tmp_path / "two 2"
    one.mkdir()
    two.mkdir()
    address = two.as_uri()
    monkeypatch.setenv("PIP_FIND_LINKS", f"{one} {address} https://x.example/ {one} /nowhere")
    assert hostenv.wheelhouse_dirs() == (one.resolve(), two.resolve())


def test_passwords_of_proxies_are_not_shown() -> None:
    env = {"HTTPS_PROXY": "http://me:secret@proxy:3128", "no_proxy": "localhost"}
    assert hostenv.proxies(env) == {"https_proxy": "http://proxy:3128", "no_proxy": "localhost"}
    assert hostenv.proxies({"http_proxy": "me:secret@proxy:3128"}) == {"http_proxy": "proxy:3128"}
    assert hostenv.proxies({"http_proxy": "http://me:sec@ret/@proxy:3128"}) == {
        "http_proxy": "http://proxy:3128"
    }
