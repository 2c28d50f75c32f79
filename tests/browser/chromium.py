"""One Chromium window, as tests of the catalog use it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from selenium.webdriver import Chrome

SHOTS = Path(__file__).resolve().parents[2] / "out" / "catalog-shots"

Scheme = Literal["light", "dark"]


@dataclass
class Browser:
    """One Chromium window, and what tests do with it."""

    driver: Chrome
    site: Path
    axe: str = field(repr=False)  # axe-core's source

    def open(
        self, page: str = "index", width: int = 1280, scheme: Scheme = "light", site: Path | None = None
    ) -> None:
        """Show a page at this width in CSS pixels; under 500 as a phone does."""
        self.resize(width)
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.driver.get(((site or self.site) / f"{page}.html").as_uri())

    def resize(self, width: int, height: int = 900) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1}
        self.cdp("Emulation.setDeviceMetricsOverride", **size, mobile=width < 500)

    def cdp(self, command: str, **parameters: Any) -> Any:
        return self.driver.execute_cdp_cmd(command, parameters)

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def shoot(self, name: str, width: int) -> Path:
        """Save the whole page, however long it is."""
        SHOTS.mkdir(parents=True, exist_ok=True)
        self.resize(width, min(self.js("return document.documentElement.scrollHeight"), 16000))
        path = SHOTS / f"{name}.png"
        assert self.driver.save_screenshot(str(path))
        self.resize(width)
        return path

    def violations(self) -> list[str]:
        """What axe-core objects to, as one line each.

        Preloading would request the style sheet again, which no page may do from file://.
        """
        self.js(self.axe)
        found = self.driver.execute_async_script(
            "const done = arguments[0];"
            "axe.run(document, {preload: false}).then(done, (error) => done({failed: `${error}`}));"
        )
        assert "failed" not in found, found["failed"]
        assert len(found["passes"]) > 10, "axe-core looked at nothing"
        return [
            f"{one['id']}: {one['help']}: {node['html'][:120]} {node.get('failureSummary', '')}"
            for one in found["violations"]
            for node in one["nodes"]
        ]

    def said(self) -> list[str]:
        """What the console says since the last call."""
        return [f"{one['level']}: {one['message']}" for one in self._log("browser")]

    def requested(self) -> list[str]:
        """Every address that was asked for since the last call."""
        events = [json.loads(one["message"])["message"] for one in self._log("performance")]
        return [
            one["params"]["request"]["url"] for one in events if one["method"] == "Network.requestWillBeSent"
        ]

    def _log(self, name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.driver.get_log(name)  # type: ignore[no-untyped-call]
        return found
