"""Write the site: one table of everything, one page per image, and the files they link to."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup, escape

from trainyard.catalog import data, driver, inside, picture
from trainyard.catalog.data import Entry, Night, Sources
from trainyard.facts import parts
from trainyard.model import InputError, Row
from trainyard.plan import CONTENTS_LABEL

HERE = Path(__file__).parent
#: Says that a folder is a catalog, so that replacing it loses nothing else.
MARK = ".trainyard-catalog"
COMPATIBILITY = "https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html"


@dataclass(frozen=True)
class Command:
    """Something to paste into a shell, and what it is for."""

    what: str
    text: str


@dataclass(frozen=True)
class Listed:
    """One line of the table: all that is kept of an entry while the other pages are written."""

    row: Row
    status: data.Status
    size_bytes: int | None
    built: str  # YYYY-MM-DD; empty where it is not built
    nightly: str  # the same of the newest night


@dataclass(frozen=True)
class Host:
    """Which images run on hosts of one kind."""

    says: str
    runs: int
    with_floor: int
    newest: Row | None  # the newest torch among those that run


def build(sources: Sources, to: Path) -> Path:
    """Write the catalog into the folder ``to``, whole or not at all; the path of its index.html.

    The same sources give the same bytes: no page tells when it was written.

    Raises:
        InputError: a source cannot be used, or ``to`` has something else than a catalog in it.
    """
    if to.exists() and not (to / MARK).exists() and (not to.is_dir() or any(to.iterdir())):
        raise InputError(f"{to}: there, and not a catalog; name a folder that is new or empty")
    part = to.with_name(f".{to.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        (part / "images").mkdir(parents=True)
        (part / MARK).write_text("")
        shutil.copytree(HERE / "assets", part / "assets")
        _write(sources, part)
        shutil.rmtree(to, ignore_errors=True)
        part.rename(to)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return to / "index.html"


def _write(sources: Sources, folder: Path) -> None:
    pages = _environment()
    image = pages.get_template("image.html.j2")
    ids = {row.id for row in sources.rows}
    lines = []
    for entry in data.entries(sources):
        page = image.render(**_page(entry, sources, ids, folder))
        (folder / "images" / f"{entry.row.id}.html").write_text(page, encoding="utf-8")
        lines.append(_listed(entry))
    index = pages.get_template("index.html.j2").render(**_index(lines))
    (folder / "index.html").write_text(index, encoding="utf-8")


def _environment() -> Environment:
    found = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    found.filters.update(
        size=picture.size, change=picture.change, url=partial(quote, safe=""), sentence=_sentence
    )
    found.globals.update(labels=data.LABELS, shorts=data.SHORT, compatibility=COMPATIBILITY)
    found.globals["order"] = {kind: index for index, kind in enumerate(data.SHORT)}
    return found


# -- the table -----------------------------------------------------------------------------


def _listed(entry: Entry) -> Listed:
    manifest = entry.build.manifest if entry.build else None
    return Listed(
        row=entry.row,
        status=entry.status,
        size_bytes=manifest.size_bytes if manifest else None,
        built=manifest.built_at.date().isoformat() if manifest else "",
        nightly=entry.nights[0].date if entry.nights else "",
    )


def _index(lines: Sequence[Listed]) -> dict[str, Any]:
    counted = [(kind, sum(line.status.kind == kind for line in lines)) for kind in data.SHORT]
    return {
        "lines": lines,
        "counted": [(kind, count) for kind, count in counted if count],
        "variants": list(dict.fromkeys(line.row.variant for line in lines)),
        "levels": _levels(line.row for line in lines),
        "any_cpu": any(line.row.is_cpu for line in lines),
        "hosts": _hosts([line.row for line in lines]),
        "as_of": max((line.built for line in lines), default=""),
    }


def _levels(rows: Iterable[Row]) -> list[str]:
    return sorted({row.cuda_level for row in rows if row.cuda_level}, key=parts)


def _hosts(rows: Sequence[Row]) -> list[Host]:
    """The driver question, answered for each CUDA level and driver floor that some row has."""
    floors = sorted({row.driver_floor for row in rows if row.driver_floor}, key=parts)
    asked = [(f"CUDA Version: {level}", level) for level in _levels(rows)]
    asked += [(f"Driver Version: {floor}", floor) for floor in floors]
    hosts = [_host(says, driver.parse(version), rows) for says, version in asked]
    cpu = [row for row in rows if row.is_cpu]
    return [Host("nothing: no NVIDIA driver", len(cpu), 0, _newest(cpu)), *hosts] if cpu else hosts


def _host(says: str, asked: driver.Asked, rows: Sequence[Row]) -> Host:
    answers = [driver.answer(row, asked) for row in rows]
    runs = [row for row, answer in zip(rows, answers, strict=True) if answer == "runs"]
    return Host(says, len(runs), answers.count("floor"), _newest([r for r in runs if not r.is_cpu]))


def _newest(rows: Sequence[Row]) -> Row | None:
    """The first of the newest torch: the default variant comes first in the matrix."""
    return max(rows, key=lambda row: parts(row.torch.version), default=None)


# -- one image -----------------------------------------------------------------------------


def _page(entry: Entry, sources: Sources, ids: set[str], folder: Path) -> dict[str, Any]:
    row, build = entry.row, entry.build
    siblings = [one for one in sources.rows if one.stack == row.stack and one.id in ids]
    page: dict[str, Any] = {
        "entry": entry,
        "row": row,
        "build": build,
        "manifest": build.manifest if build else None,
        "report": build.report if build else None,
        "siblings": siblings,
        "contents": inside.contents(entry),
        "get": _get(entry, sources),
        "verify": _verify(entry, sources),
        "files": _files(entry, sources, folder),
        "history": _history(entry, sources),
        "size_chart": _size_chart(entry),
        "layers": [],
        "layer_chart": None,
        "biggest": (),
        "components": None,
    }
    if build:
        manifest = build.manifest
        layers = [(inside.layer_name(layer, manifest.base), layer) for layer in manifest.layers]
        bars = [picture.Bar(name, layer.size) for name, layer in layers]
        biggest = inside.biggest(build)
        page |= {
            "layers": layers,
            "layer_chart": picture.bars(bars, "Size by layer: the numbers are in the table below", "layers"),
            "biggest": biggest,
            "components": build.components,
        }
    return page


def _history(entry: Entry, sources: Sources) -> list[tuple[Night, str | None, int | None, Markup | None]]:
    """Each night with its tag, its growth in bytes and its changes.

    Only what passed its tests has a tag, and only where there is a registry.
    """
    return [
        (
            night,
            night.tag if sources.registry and night.status.kind == "tested" else None,
            night.size_bytes - older.size_bytes if older else None,
            _markdown(night.changelog),
        )
        for night, older in zip(entry.nights, [*entry.nights[1:], None], strict=False)
    ]


def _size_chart(entry: Entry) -> Markup | None:
    nights = list(reversed(entry.nights))
    if len(nights) < 2:
        return None
    points = [picture.Point(night.date, night.size_bytes, night.contents_id) for night in nights]
    return picture.chart(points, "Size over time: the numbers are in the table of builds below", "sizes")


def _get(entry: Entry, sources: Sources) -> list[Command]:
    """How to get the image, as far as it can be had."""
    row, published = entry.row, _published(entry, sources)
    gpus = "" if row.is_cpu else "--gpus all "
    if published:
        shown = published is entry.current
        which = "this build" if shown else f"the build of {published.date}, the newest that passed"
        return [
            Command(f"Pull {which}", f"docker pull {sources.registry}:{row.id}"),
            Command("Run it", f"docker run --rm -it {gpus}{sources.registry}:{row.id}"),
            Command("By a tag that never moves", f"docker pull {sources.registry}:{published.tag}"),
        ]
    run = f"docker run --rm -it {gpus}{sources.repository}:{row.id}"
    if entry.build:
        return [Command("Run it on the machine that built it", run)]
    return [Command("Build and test it", f"make test MATRIX={row.id}"), Command("Then run it", run)]


def _published(entry: Entry, sources: Sources) -> Night | None:
    return entry.published if sources.registry else None


def _verify(entry: Entry, sources: Sources) -> list[Command]:
    """How to check that an image is the one that can be had."""
    if entry.build is None:
        return []
    published = _published(entry, sources)
    of = published or entry.build.manifest
    reference = f"{sources.registry if published else sources.repository}:{entry.row.id}"
    label = f'{{{{index .Config.Labels "{CONTENTS_LABEL}"}}}}'
    signed = Command(
        "Signature, digest, SBOM and manifest, as the registry has them; where it was signed keyless, "
        "--issuer and --identity instead of --key",
        f"python build.py verify {reference} --key cosign.pub",
    )
    return [
        *([signed] if published else []),
        Command(
            f"The image id: prints {of.image_id}",
            f"docker image inspect --format '{{{{.Id}}}}' {reference}",
        ),
        Command(
            f"The contents id, a hash of all inputs: prints {of.contents_id}",
            f"docker image inspect --format '{label}' {reference}",
        ),
        Command("The tests, on this machine", f"make test MATRIX={entry.row.id}"),
    ]


def _files(entry: Entry, sources: Sources, folder: Path) -> list[tuple[str, str]]:
    """Links, as (address from the page, text); what is not on the web is copied beside the page."""
    row, found = entry.row, []
    for name, text in (("Dockerfile", "Dockerfile"), ("requirements.lock", "lock of every Python package")):
        path = sources.images / row.id / name
        if not path.exists():
            continue
        if sources.source_url:
            found.append((f"{sources.source_url.rstrip('/')}/images/{quote(row.id)}/{name}", text))
        else:
            # With .txt a browser shows it instead of downloading it.
            found.append((_copy(path, row.id, f"{name}.txt", folder), text))
    if entry.build:
        there = [name for name in data.FILES if (entry.build.folder / name).exists()]
        found += [
            (_copy(entry.build.folder / name, row.id, name, folder), data.FILES[name]) for name in there
        ]
    return found


def _copy(path: Path, id_: str, name: str, folder: Path) -> str:
    target = folder / "images" / id_ / name
    target.parent.mkdir(exist_ok=True)
    shutil.copyfile(path, target)
    return f"{quote(id_)}/{quote(name)}"


def _sentence(text: str) -> Markup:
    """A sentence of the matrix or of the compatibility facts: its code and its links are shown as such."""
    coded = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    linked = re.sub(r"https://([^\s)<&]+[^\s).,:;<&])", r'<a href="\g<0>">\1</a>', coded)
    return Markup(linked)


def _markdown(text: str | None) -> Markup | None:
    """A changelog as HTML.  HTML in it stays text, and its headings go below those of the page."""
    if text is None:
        return None
    parser = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    tokens = parser.parse(text)
    headings = [token for token in tokens if token.type in ("heading_open", "heading_close")]
    top = min((int(token.tag[1]) for token in headings), default=1)
    for token in headings:
        token.tag = f"h{min(int(token.tag[1]) - top + 4, 6)}"
    return Markup(parser.renderer.render(tokens, parser.options, {}))
