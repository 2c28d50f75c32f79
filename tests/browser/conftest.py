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


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("catalog")
    return build(samples.site(folder), folder / "site").parent


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """axe-core from npm, in the pinned version and with the pinned hash."""
    if not shutil.which("npm"):
        pytest.fail("npm is missing, which fetches axe-core: apt-get install npm", pytrace=False)
    folder = tmp_path_factory.mktemp("axe")
    command = ["npm", "pack", f"axe-core@{AXE}", "--ignore-scripts", "--pack-destination", str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f"axe-core {AXE} could not be fetched from npm: {done.stderr[-500:]}", pytrace=False)
    (archive,) = folder.glob("*.tgz")
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    assert f"sha512-{digest}" == AXE_INTEGRITY, "npm gave another axe-core than the pinned one"
    with tarfile.open(archive) as packed:
        member = packed.extractfile("package/axe.min.js")
        assert member
        return member.read().decode()


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    found = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    if missing := [name for name, path in found.items() if path is None]:
        pytest.fail(
            f"{' and '.join(missing)} missing. Run: apt-get install chromium chromium-driver",
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
