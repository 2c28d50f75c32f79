"""A bake file: what is shared is built once, and nothing in it is true of this machine only."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from shipped import BY_ID, ROOT, ROWS

from trainyard.bake import Options, bake

DIGEST = "sha256:" + "1" * 64
OPTIONS = Options("registry.example/org/trainyard")


def baked(*ids: str, options: Options = OPTIONS) -> dict[str, Any]:
    return bake([BY_ID[one] for one in ids], ROOT, options)


def test_every_row_is_a_target_of_the_default_group() -> None:
    found = bake(ROWS, ROOT, OPTIONS)
    assert found["group"]["default"]["targets"] == [row.id for row in ROWS]
    for row in ROWS:
        target = found["target"][row.id]
        assert (ROOT / target["dockerfile"]).exists()
        (tag,) = target["tags"]  # never the floating one: nobody has tested what comes out of it
        untested = f"registry\\.example/org/trainyard:{re.escape(row.id)}-untested-[0-9a-f]{{16}}"
        assert re.fullmatch(untested, tag)


def test_variants_of_a_stack_share_one_target_of_kernels() -> None:
    found = baked("cu121-pt29", "cu121-pt29-devel")["target"]
    assert found["cu121-pt29"]["contexts"] == {"kernels": "target:kernels-cu121-pt29"}
    assert found["cu121-pt29-devel"]["contexts"] == found["cu121-pt29"]["contexts"]
    assert found["kernels-cu121-pt29"]["target"] == "kernels"
    assert len(found) == 3


def test_an_image_without_deepspeed_waits_for_no_kernels() -> None:
    assert set(baked("cu121-pt29-base")["target"]) == {"cu121-pt29-base"}
    assert "contexts" not in baked("cu121-pt29-base")["target"]["cu121-pt29-base"]


def test_caches_go_to_the_registry_and_their_loss_fails_nothing() -> None:
    found = baked("cpu-pt213", options=Options("r.example/t", cache="r.example/cache"))["target"]
    for target in found.values():
        (to,) = target["cache-to"]
        assert to.startswith("type=registry,ref=r.example/cache:cpu-pt213")
        assert to.endswith(",mode=max,ignore-error=true")
        assert target["cache-from"] == [to.removesuffix(",mode=max,ignore-error=true")]
    assert len({target["cache-to"][0] for target in found.values()}) == len(found)


def test_the_base_is_the_official_one_by_digest_where_it_is_known() -> None:
    image = BY_ID["cpu-pt213"].base.image
    assert baked("cpu-pt213")["target"]["cpu-pt213"]["args"]["BASE"] == image
    pinned = baked("cpu-pt213", options=Options("r.example/t", digests={image: DIGEST}))["target"]
    for target in pinned.values():
        assert target["args"]["BASE"] == f"{image}@{DIGEST}"
    assert pinned["cpu-pt213"]["labels"]["org.opencontainers.image.base.digest"] == DIGEST


def test_a_bundle_of_certificates_is_a_secret_and_no_argument() -> None:
    target = baked("cpu-pt213", options=Options("r.example/t", ca=Path("/etc/ca.crt")))["target"]["cpu-pt213"]
    assert target["secret"] == ["id=ca,src=/etc/ca.crt"]
    assert "/etc/ca.crt" not in json.dumps({k: v for k, v in target.items() if k != "secret"})
