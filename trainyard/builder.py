"""Build one row: image, measurement, gate, and only then the tag."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from trainyard import bases, gate, manifest, mirrors
from trainyard.engine import BuildRequest, Engine
from trainyard.hostenv import find_ca, host_arch, torch_wheels
from trainyard.model import Arch, Row, StepFailed
from trainyard.plan import CONTENTS_LABEL, Item

#: Where an image waits for its gate; never a name that anybody pulls.
CANDIDATE = "trainyard-candidate"


def need_bytes(row: Row) -> int:
    """Disk that building the row from nothing takes at its peak, caches included; measured."""
    if row.is_cpu:
        return 5 * 10**9
    return (22 if row.has_deepspeed else 15) * 10**9


def build(
    item: Item,
    root: Path,
    engine: Engine,
    on_step: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Build, measure and gate; move the row's tag; return the manifest.

    Raises StepFailed where any of them fails; the row's tag and its old manifest stay as they were.
    """
    row = item.row
    out = root / "out" / row.id
    candidate = f"{CANDIDATE}:{row.id}"
    started = time.monotonic()
    try:
        with _secrets(row) as secrets:
            request = _request(item, root, out / "build.log", secrets, tag=candidate)
            image_id = engine.build(request, on_step)
        on_step("measuring")
        origin = manifest.Origin(
            row.id, item.contents_id, item.inputs, _base_facts(item), build_seconds=time.monotonic() - started
        )
        found = manifest.measure(engine, image_id, origin)
        if different := gate.differences(row, found):
            rejected = manifest.write(found, out / "rejected")
            raise StepFailed(
                f"{row.id}: the image is not what the row says; its tag stays where it was\n"
                + "\n".join(f"  - {one}" for one in different)
                + f"\nMeasured: {rejected}"
            )
        before = engine.image(item.reference)
        engine.tag(image_id, "trainyard", row.id)
        manifest.write(found, out)
        if before and before.id and before.id != image_id and engine.address.private:
            engine.discard(before.id)
        return found
    finally:
        engine.untag(candidate)


def build_twin(item: Item, root: Path, engine: Engine, on_step: Callable[[str], None]) -> Path:
    """Build the CPU twin of a CUDA row and unpack it to ``out/<id>/twin``; return the folder."""
    out = root / "out" / item.row.id
    fresh = out / "twin.part"
    shutil.rmtree(fresh, ignore_errors=True)
    with _secrets(item.row) as secrets:
        request = _request(item, root, out / "twin.log", secrets, target="twin", unpack_to=fresh)
        engine.build(request, on_step)
    fresh.chmod(0o755)  # BuildKit makes it for root alone, and tests also run as other users
    shutil.rmtree(out / "twin", ignore_errors=True)
    return fresh.rename(out / "twin")


def build_chromium(
    item: Item, root: Path, recipe: Path, tag: str, engine: Engine, on_step: Callable[[str], None]
) -> None:
    """Build the image with the browser of the tests, on the item's base but for this host's CPU."""
    base = item.base
    if item.row.base.arch != host_arch():
        native = replace(item.row.base, arch=cast(Arch, host_arch()))
        base = bases.resolve_base(native, "auto", engine, on_step)
    with _secrets(item.row) as secrets:
        engine.build(
            BuildRequest(
                dockerfile=recipe,
                context=recipe.parent,
                log=root / "out" / item.row.id / "chromium.log",
                args={"BASE": base.ref},
                secrets=secrets,
                tag=tag,
            ),
            on_step,
        )


def _request(
    item: Item,
    root: Path,
    log: Path,
    secrets: dict[str, Path],
    tag: str | None = None,
    target: str | None = None,
    unpack_to: Path | None = None,
) -> BuildRequest:
    row = item.row
    contexts = _wheelhouse(row, root)
    args = {"BASE": item.base.ref}
    if target is None:
        args["CONTENTS"] = item.contents_id
    if contexts or (not row.torch.on_pypi and mirrors.configured().pytorch):
        args["TORCH_INDEX"] = ""  # the wheelhouse has it, or the site's index, which is a secret
    return BuildRequest(
        dockerfile=root / "images" / row.id / "Dockerfile",
        context=root,
        log=log,
        args=args,
        labels={} if target else _labels(item),
        secrets=secrets,
        contexts=contexts,
        platform=row.platform,
        target=target,
        tag=tag,
        unpack_to=unpack_to,
    )


@contextmanager
def _secrets(row: Row) -> Iterator[dict[str, Path]]:
    """What a build may see and an image must not hold: the host's CA, and where its mirrors are."""
    ca = find_ca()
    texts = mirrors.secrets(mirrors.configured(), row, ca)
    with tempfile.TemporaryDirectory(prefix="trainyard-secrets-") as folder:
        yield ({"ca": ca} if ca else {}) | mirrors.write(texts, Path(folder))


def _base_facts(item: Item) -> dict[str, str]:
    base = item.base
    return {"name": item.row.base.image, "ref": base.ref, "digest": base.digest, "origin": base.origin}


def _labels(item: Item) -> dict[str, str]:
    """What is known only now: everything else is in the Dockerfile."""
    return {
        CONTENTS_LABEL: item.contents_id,
        "org.opencontainers.image.base.digest": item.base.digest,
        "dev.trainyard.base.origin": item.base.origin,
    }


def _wheelhouse(row: Row, root: Path) -> dict[str, Path]:
    """The host's wheels that the row's lock names, in a folder of their own.

    Only those: a wheelhouse can hold hundreds of gigabytes that no build needs.
    """
    if row.torch.on_pypi:
        return {}
    found = torch_wheels(f"{row.torch.version}+{row.torch.build}", row.python)
    if not found:
        return {}
    picked = root / "out" / row.id / "wheelhouse"
    shutil.rmtree(picked, ignore_errors=True)
    picked.mkdir(parents=True)
    for path in found:
        shutil.copy2(path, picked)
    return {"wheelhouse": picked}
