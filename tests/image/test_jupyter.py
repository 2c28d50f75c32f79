"""JupyterLab: who gets in, as whom it runs, what its kernels see; and once through a real browser."""

from __future__ import annotations

import contextlib
import json
import re
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from containers import LABEL, VENV, Container, Image
from docker.models.containers import Container as DockerContainer
from docker.types import Mount
from selenium.common.exceptions import WebDriverException
from selenium.webdriver import ActionChains, ChromeOptions, Keys, Remote
from selenium.webdriver.common.by import By
from selenium.webdriver.common.proxy import Proxy, ProxyType
from selenium.webdriver.remote.client_config import ClientConfig
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.wait import WebDriverWait

from trainyard import suites

pytestmark = pytest.mark.only("has_jupyter")

TOKEN = "9c1185a5c5e9fc54612808977ee8f548"
USERS = ("0", "1000:1000", "12345:12345")
SECONDS = 60  # for JupyterLab, or chromedriver, to answer in
DRIVER = "9515/tcp"
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))

# -- helpers -------------------------------------------------------------------------------

ASK = r"""
import json, sys, time, urllib.error, urllib.request
url, token, patience = sys.argv[1:]
request = urllib.request.Request(url, headers={"Authorization": "token " + token} if token else {})
deadline = time.monotonic() + float(patience)
while True:
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            print(json.dumps([answer.status, answer.geturl(), answer.read().decode()]))
        break
    except urllib.error.HTTPError as error:
        print(json.dumps([error.code, url, error.read().decode()]))
        break
    except OSError:
        if time.monotonic() > deadline:
            raise
        time.sleep(0.1)
"""


def ask(
    container: Container, path: str, token: str = "", port: int = 8888, patience: int = 0
) -> tuple[int, str, str]:
    """GET a page, from within the container: status, the address in the end, the text."""
    url = f"http://127.0.0.1:{port}{path}"
    status, address, text = json.loads(container.python(ASK, url, token, str(patience), timeout=90).ok())
    return status, address, text


@contextmanager
def jupyter(
    image: Image, environment: Mapping[str, str], port: int = 8888, **options: Any
) -> Iterator[Container]:
    """A container whose JupyterLab answers."""
    settings = {"command": [], "environment": dict(environment)} | options
    with image.fresh(**settings) as container:
        status, _, _ = ask(container, "/api", port=port, patience=SECONDS)
        assert status == 200  # the version, which is public
        yield container


def log(container: Container) -> str:
    return str(container.raw.logs().decode())


# -- who gets in -----------------------------------------------------------------------------


@pytest.mark.parametrize("user", USERS)
def test_only_the_token_opens_it(image: Image, user: str) -> None:
    """Also for a uid that has no name, no home, and nothing but /tmp to write to."""
    with jupyter(image, {"JUPYTER_TOKEN": TOKEN}, user=user) as container:
        assert ask(container, "/api/contents")[0] == 403
        assert ask(container, "/api/contents", "wrong")[0] == 403
        assert ask(container, "/api/contents", TOKEN)[0] == 200
        assert ask(container, "/lab", TOKEN)[1].endswith("/lab")
        assert "/login" in ask(container, "/lab")[1]
        state = "/run/trainyard" if user == "0" else f"/tmp/trainyard-{user.split(':')[0]}"
        assert container.exec(["cat", f"{state}/jupyter.port"]).ok() == "8888\n"


def test_it_runs_with_a_read_only_root(image: Image) -> None:
    options: dict[str, Any] = {"read_only": True, "tmpfs": {"/tmp": ""}, "user": "12345:12345"}
    with jupyter(image, {"JUPYTER_TOKEN": TOKEN}, **options) as container:
        assert ask(container, "/api/contents", TOKEN)[0] == 200


def test_a_token_is_generated_and_told_once(image: Image) -> None:
    with jupyter(image, {"SERVICES": "jupyter"}) as container:
        (token,) = re.findall(r"token=([0-9a-f]{48})\b", log(container))
        assert ask(container, "/api/contents")[0] == 403
        assert ask(container, "/api/contents", token)[0] == 200
        assert ask(container, f"/lab?token={token}")[1].endswith(f"/lab?token={token}")
        assert log(container).count(token) == 1
        assert f"http://127.0.0.1:8888/lab?token={token}" in log(container)


def test_generated_tokens_differ(image: Image) -> None:
    tokens = set()
    for _ in range(2):
        with jupyter(image, {"SERVICES": "jupyter"}) as container:
            tokens.update(re.findall(r"token=(\w+)", log(container)))
    assert len(tokens) == 2


LOGIN = r"""
import http.cookiejar, re, sys, urllib.parse, urllib.request
base, password = sys.argv[1:]
opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))
form = opener.open(base + "/login").read().decode()
xsrf = re.search(r'name="_xsrf" value="([^"]*)"', form)[1]
fields = urllib.parse.urlencode({"_xsrf": xsrf, "password": password}).encode()
try:
    opener.open(base + "/login", fields)
    print(opener.open(base + "/api/contents").status)
except urllib.error.HTTPError as error:
    print(error.code)
"""


@pytest.mark.parametrize("algorithm", ["argon2", "sha1"])
def test_a_hashed_password_opens_it(image: Image, algorithm: str) -> None:
    make = "import sys; from jupyter_server.auth import passwd; print(passwd(sys.argv[1], sys.argv[2]))"
    password_hash = image.python(make, "open sesame", algorithm).ok().strip()
    with jupyter(image, {"JUPYTER_PASSWORD_HASH": password_hash}) as container:
        base = "http://127.0.0.1:8888"
        assert ask(container, "/api/contents")[0] == 403
        assert container.python(LOGIN, base, "open sesame").ok().strip() == "200"
        assert container.python(LOGIN, base, "wrong").ok().strip() in ("401", "403")
        assert "token=" not in log(container)
        assert password_hash not in log(container)


def test_the_token_comes_from_a_file(image: Image, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o444)
    mounted = [Mount("/run/secrets/token", str(path), type="bind", read_only=True)]
    with jupyter(image, {"JUPYTER_TOKEN_FILE": "/run/secrets/token"}, mounts=mounted) as container:
        assert ask(container, "/api/contents")[0] == 403
        assert ask(container, "/api/contents", TOKEN)[0] == 200


# -- what its kernels see ----------------------------------------------------------------------

# Looks at JupyterLab's process and all below it: the kernel, the terminal. Neither the secret, which is
# given backwards, nor JupyterLab's name is in this script's own arguments.
LEAKS = """
import json, pathlib, sys
secret = sys.argv[1][::-1].encode()
parents, argv = {}, {}
for process in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        parents[process.name] = (process / "stat").read_text().rpartition(")")[2].split()[1]
        argv[process.name] = (process / "cmdline").read_bytes()
    except OSError:
        continue
below = [pid for pid, arguments in argv.items() if b"jupyter" + b"-lab" in arguments]
for pid in below:
    below += [child for child, parent in parents.items() if parent == pid]
leaking = [pid for pid in below if secret in pathlib.Path("/proc", pid, "environ").read_bytes()]
leaking += [pid for pid, arguments in argv.items() if secret in arguments]
print(json.dumps([[argv[pid].decode() for pid in below], [argv[pid].decode() for pid in leaking]]))
"""

KERNEL = r"""
import sys, time
from jupyter_client.blocking import BlockingKernelClient
client = BlockingKernelClient(connection_file=sys.argv[1])
client.load_connection_file()
client.start_channels()
deadline = time.monotonic() + 60
while True:
    try:
        client.wait_for_ready(timeout=60)
        break
    except RuntimeError:  # "died": so it is called after one second without an answer
        if time.monotonic() > deadline:
            raise
client.execute_interactive(sys.argv[2], timeout=60)
"""

START = r"""
import json, sys, urllib.request
for kind in ("terminals", "kernels"):
    request = urllib.request.Request("http://127.0.0.1:8888/api/" + kind, b"{}",
                                     {"Authorization": "token " + sys.argv[1]})
    started = json.load(urllib.request.urlopen(request))
print(started["id"])
"""
SEE = "import json, os, sys, torch; print(json.dumps([sys.prefix, torch.__version__, dict(os.environ)]))"


@pytest.mark.parametrize("user", USERS)
def test_a_kernel_is_the_images_environment_without_the_secret(image: Image, user: str) -> None:
    given = {"JUPYTER_TOKEN": TOKEN, "NCCL_DEBUG": "INFO"}
    with jupyter(image, given, user=user) as container:
        kernel = container.python(START, TOKEN).ok().strip()
        state = "/run/trainyard" if user == "0" else f"/tmp/trainyard-{user.split(':')[0]}"
        connection = f"{state}/jupyter/runtime/kernel-{kernel}.json"
        printed = container.python(KERNEL, connection, SEE, timeout=120).ok()
        prefix, version, environ = json.loads(printed.strip().splitlines()[-1])
        assert prefix == VENV
        assert version.partition("+")[0] == image.row.torch.version
        assert environ["NCCL_DEBUG"] == "INFO"
        assert environ["PATH"] == image.env["PATH"]
        assert not {
            n for n in environ if n in ("JUPYTER_TOKEN", "JUPYTER_TOKEN_FILE", "JUPYTER_PASSWORD_HASH")
        }
        assert TOKEN not in json.dumps(environ)
        seen, leaking = json.loads(container.python(LEAKS, TOKEN[::-1], user=user).ok())
        assert any("ipykernel" in argv for argv in seen), seen
        assert any("bash" in argv or "/bin/sh" in argv for argv in seen), seen
        assert not leaking, leaking
        assert TOKEN not in log(container)
        # the folder keeps out everybody else, whatever Jupyter writes into it
        modes = container.exec(f"stat -c %a {state}/jupyter {state}/jupyter/server.json")
        assert modes.ok().split() == ["700", "600"]


# -- wrong input -----------------------------------------------------------------------------


def refused(image: Image, environment: Mapping[str, str], **options: Any) -> str:
    """Start Jupyter with wrong input, through the entrypoint; returns the one message."""
    with image.fresh(command=[], environment={"SERVICES": "jupyter", **environment}, **options) as container:
        assert container.raw.wait(timeout=SECONDS)["StatusCode"] == 2
        (message,) = log(container).splitlines()
    assert message.startswith("start-jupyter: ")
    return message


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"JUPYTER_TOKEN": ""}, "everybody who reaches the port runs commands"),
        ({"JUPYTER_TOKEN": "  "}, "everybody who reaches the port runs commands"),
        ({"JUPYTER_TOKEN": "a b"}, "letters and digits"),
        ({"JUPYTER_TOKEN_FILE": "/nowhere"}, "/nowhere (JUPYTER_TOKEN_FILE) cannot be read"),
        ({"JUPYTER_TOKEN_FILE": "/dev/null"}, "everybody who reaches the port runs commands"),
        ({"JUPYTER_TOKEN_FILE": "/etc/hostname", "JUPYTER_TOKEN": "x"}, "Give one"),
        ({"JUPYTER_PASSWORD_HASH": ""}, "argon2:"),
        ({"JUPYTER_PASSWORD_HASH": "open sesame"}, "argon2:"),
        ({"JUPYTER_PASSWORD_HASH": "argon2:=19=10240,t=10,p=8"}, "$$ for each $"),  # $ eaten by a shell
        ({"JUPYTER_PORT": "http"}, "a number from 1 to 65535"),
        ({"JUPYTER_IP": "192.0.2.1"}, "no address of this container"),
        ({"JUPYTER_DIR": "/nowhere"}, "/nowhere is not a folder"),
    ],
)
def test_a_wrong_setting_is_told(image: Image, environment: dict[str, str], told: str) -> None:
    message = refused(image, environment)
    assert told in message
    assert next(iter(environment)) in message
    assert "open sesame" not in message


def test_a_token_alone_asks_for_jupyter(image: Image) -> None:
    """Also an empty one: it is refused, and not taken for "no Jupyter"."""
    with image.fresh(command=[], environment={"JUPYTER_TOKEN": ""}) as container:
        assert container.raw.wait(timeout=SECONDS)["StatusCode"] == 2
        assert "JUPYTER_TOKEN is empty" in log(container)


def test_a_port_that_cannot_be_had_is_told(image: Image) -> None:
    with jupyter(image, {"JUPYTER_TOKEN": TOKEN}) as container:
        again = container.exec(["start-jupyter"], timeout=20)
        assert (again.rc, again.out) == (2, "")
        assert "port 8888 is taken" in again.err
        assert "JUPYTER_PORT" in again.err
        assert ask(container, "/api/contents", TOKEN)[0] == 200  # the running one is not harmed
    closed = {"net.ipv4.ip_unprivileged_port_start": "1024"}
    message = refused(image, {"JUPYTER_PORT": "80"}, user="12345:12345", sysctls=closed)
    assert "uid 12345 may not use port 80" in message


def test_address_port_and_folder_can_be_chosen(image: Image) -> None:
    chosen = {"JUPYTER_IP": "127.0.0.1", "JUPYTER_PORT": "9999", "JUPYTER_DIR": "/opt/trainyard"}
    with jupyter(image, {**chosen, "JUPYTER_TOKEN": TOKEN}, port=9999) as container:
        listed = json.loads(ask(container, "/api/contents", TOKEN, port=9999)[2])
        assert "examples" in [entry["name"] for entry in listed["content"]]
        outside = f"http://{container.exec('hostname -i').ok().strip()}:9999/api"
        assert "refused" in container.python(ASK, outside, "", "0").err


def test_it_starts_as_a_kubernetes_command(image: Image) -> None:
    with jupyter(image, {"JUPYTER_TOKEN": TOKEN}, entrypoint=["start-jupyter"]) as container:
        assert ask(container, "/api/contents", TOKEN)[0] == 200


def test_help_names_every_setting(image: Image) -> None:
    text = image.exec(["start-jupyter", "--help"]).ok()
    for name in ("JUPYTER_TOKEN", "JUPYTER_TOKEN_FILE", "JUPYTER_PASSWORD_HASH", "JUPYTER_IP", "JUPYTER_PORT",
                 "JUPYTER_DIR"):  # fmt: skip
        assert name in text


# -- in a browser ------------------------------------------------------------------------------

CELL = """
import torch
layer = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
x, y = torch.ones(4, 8), torch.zeros(4, 1)
losses = []
for _ in range(2):
    loss = torch.nn.functional.mse_loss(layer(x), y)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    losses.append(loss.item())
print("torch", torch.__version__, "trained" if losses[1] < losses[0] else "did not train")
"""


@pytest.fixture
def browser(image: Image, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WebDriver]:
    """Chromium in a container of its own, so that no host needs one."""
    reference = suites.chromium_reference(request.config.rootpath)
    if not image.client.images.list(reference):
        pytest.fail(f"no browser: `python build.py test {image.row.id}` builds {reference}", pytrace=False)
    options = ChromeOptions()
    for argument in (
        "--headless=new",
        "--window-size=1280,900",
        "--no-sandbox",  # see chromium.Dockerfile
        "--no-proxy-server",  # containers are not behind the host's proxy
    ):
        options.add_argument(argument)
    raw = image.client.containers.run(
        reference,
        detach=True,
        labels={LABEL: "1"},
        ports={DRIVER: ("127.0.0.1", 0)},  # a free one
        shm_size="512m",
    )
    try:
        address = _driver_address(raw)
        direct = ClientConfig(address, proxy=Proxy({"proxyType": ProxyType.DIRECT}))
        try:
            chrome = Remote(address, options=options, client_config=direct)
        except WebDriverException as error:
            log = raw.logs().decode()
            pytest.fail(f"Chromium does not start in {reference}: {error.msg}\n{log}", pytrace=False)
        yield chrome
        chrome.save_screenshot(str(tmp_path / "last.png"))  # what it showed in the end, for a failure
        chrome.quit()
    finally:
        raw.remove(force=True, v=True)


def _driver_address(raw: DockerContainer) -> str:
    """Where chromedriver answers, once it does."""
    for _ in range(SECONDS * 5):
        raw.reload()
        assert raw.status in ("created", "running"), raw.logs().decode()
        for published in (raw.attrs["NetworkSettings"]["Ports"] or {}).get(DRIVER) or ():
            address = f"http://127.0.0.1:{published['HostPort']}"
            with contextlib.suppress(OSError, ValueError):
                status = json.load(NO_PROXY.open(f"{address}/status", timeout=5))
                if status["value"]["ready"]:
                    return address
        time.sleep(0.2)
    pytest.fail(f"chromedriver does not answer: {raw.logs().decode()}", pytrace=False)


def address_of(container: Container) -> str:
    """The container's address, as this host reaches it."""
    container.raw.reload()
    networks = container.raw.attrs["NetworkSettings"]["Networks"].values()
    return f"http://{next(network['IPAddress'] for network in networks)}:8888"


def click(wait: WebDriverWait[WebDriver], selector: str) -> None:
    """Click on what comes, once it can be: JupyterLab builds its page piece by piece."""

    def clicked(browser: WebDriver) -> bool:
        try:
            browser.find_element(By.CSS_SELECTOR, selector).click()
        except WebDriverException:  # not there yet, hidden, covered, or just replaced
            return False
        return True

    wait.until(clicked, f"nothing to click on: {selector}")


def test_a_notebook_trains_in_a_browser(
    image: Image, browser: WebDriver, request: pytest.FixtureRequest
) -> None:
    """Shut out without the token; in with it; a notebook, a cell, its output. Keeps out/<id>/jupyter.png."""
    wait = WebDriverWait(browser, 180)  # a cold disk and a busy host have taken more than 90
    environment = {"JUPYTER_TOKEN": TOKEN, "JUPYTER_DIR": "/home/trainyard"}
    with jupyter(image, environment, user="1000:1000") as container:
        base = address_of(container)
        browser.get(f"{base}/api/contents")
        assert "Forbidden" in browser.page_source
        browser.get(f"{base}/lab")
        assert "/login" in browser.current_url

        browser.find_element(By.ID, "password_input").send_keys(TOKEN, Keys.ENTER)
        wait.until(lambda b: b.current_url.startswith(f"{base}/lab"), "no way past the login")
        click(wait, ".jp-LauncherCard[data-category='Notebook']")
        # The notebook's own indicator says idle while the kernel is still being connected, and a cell that
        # is run by then may never come back; the status bar tells.
        wait.until(lambda b: "| Idle" in b.find_element(By.ID, "jp-main-statusbar").text, "no kernel")
        click(wait, ".jp-Notebook .jp-CodeCell .cm-content")
        # as a paste would: keys one by one get the editor's own indentation on top
        paste = {"cmd": "Input.insertText", "params": {"text": CELL.strip()}}
        browser.execute("executeCdpCommand", paste)
        ActionChains(browser).key_down(Keys.SHIFT).send_keys(Keys.ENTER).key_up(Keys.SHIFT).perform()
        printed = wait.until(
            lambda b: [e.text for e in b.find_elements(By.CSS_SELECTOR, ".jp-OutputArea-output") if e.text],
            "the cell printed nothing",
        )
        time.sleep(0.5)  # for the picture: the page is still being painted
        picture = request.config.rootpath / "out" / image.row.id / "jupyter.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        assert browser.save_screenshot(str(picture))
        assert "Jupyter news" not in browser.page_source
    assert printed[0].startswith(f"torch {image.row.torch.version}")
    assert printed[0].endswith(" trained")
    image.note(f"JupyterLab in Chromium {browser.capabilities['browserVersion']}: {printed[0]}")
