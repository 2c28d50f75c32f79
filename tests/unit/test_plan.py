"""Why an image is built again: the reason names what changed."""

from __future__ import annotations

import pytest

from trainyard.plan import _changes

BEFORE = {"base": "1", "images/x/Dockerfile": "2", "rootfs/launch/usr/local/bin/launch": "3"}


@pytest.mark.parametrize(
    ("now", "said"),
    {
        "the base": (BEFORE | {"base": "9"}, "changed: the base image"),
        "a script": (
            BEFORE | {"rootfs/launch/usr/local/bin/launch": "9"},
            "changed: rootfs/launch/usr/local/bin/launch",
        ),
        "a new file": (BEFORE | {"rootfs/common/new": "4"}, "changed: rootfs/common/new (new)"),
        "a file less": (
            {name: digest for name, digest in BEFORE.items() if "Dockerfile" not in name},
            "changed: images/x/Dockerfile (removed)",
        ),
        "two": (
            BEFORE | {"base": "9", "images/x/Dockerfile": "9"},
            "changed: the base image, images/x/Dockerfile",
        ),
        "many": (
            BEFORE | {f"kernels/{n}": "9" for n in range(5)},
            "changed: kernels/0 (new), kernels/1 (new), kernels/2 (new) and 2 more",
        ),
    }.values(),
)
def test_the_reason_names_the_inputs_that_changed(now: dict[str, str], said: str) -> None:
    assert _changes(BEFORE, now) == said


def test_without_a_record_of_the_inputs_it_only_says_that_they_changed() -> None:
    assert _changes({}, BEFORE) == "its inputs changed"
