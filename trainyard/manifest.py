"""The manifest: what was measured inside a built image.  Nothing in it comes from the matrix."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainyard import fatbin, probe
from trainyard.engine import Engine
from trainyard.model import StepFailed

FILE = "manifest.json"


@dataclass(frozen=True)
class Origin:
    """Where an image comes from: the part of the manifest that only the builder knows."""

    id: str
    contents_id: str
    inputs: dict[str, str]  # what the image was made from: name -> digest
    base: dict[str, str]  # name, digest, origin (registry or bootstrap)
    build_seconds: float


def measure(engine: Engine, image_id: str, origin: Origin) -> dict[str, Any]:
    """Run the probe inside the image and describe it.

    Raises StepFailed where the probe itself cannot run, for example because torch does not import.
    """
    source = inspect.getsource(fatbin).replace("from __future__ import annotations\n", "", 1)
    script = "from __future__ import annotations\n" + source
    script += inspect.getsource(probe).replace("from __future__ import annotations\n", "", 1)
    printed = engine.run_python(image_id, script)
    try:
        measured = json.loads(printed.splitlines()[-1])
    except (IndexError, ValueError) as error:
        raise StepFailed(f"measuring {origin.id} printed no manifest: {printed[-300:]}") from error
    layers = engine.layers(image_id)
    image = engine.image(image_id)
    if image is None:
        raise StepFailed(f"{origin.id}: the image {image_id} went away while it was measured")
    return {
        "id": origin.id,
        "image_id": image_id,
        "contents_id": origin.contents_id,
        "inputs": origin.inputs,
        "built_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "build_seconds": round(origin.build_seconds, 1),
        "platform": f"{image.attrs['Os']}/{image.attrs['Architecture']}",
        "base": origin.base,
        "size_bytes": sum(layer["size"] for layer in layers),
        "layers": layers,
        "config": image.attrs["Config"],  # environment, labels, entrypoint: what every container gets
        "measured": measured,
    }


def write(manifest: dict[str, Any], folder: Path) -> Path:
    """Write ``manifest.json`` into the folder, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{FILE}.part"
    part.write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
    return part.rename(folder / FILE)


def read(path: Path) -> dict[str, Any] | None:
    """The manifest in a file or a folder; None where there is none that can be read."""
    try:
        found = json.loads((path / FILE if path.is_dir() else path).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
