"""The catalog tells what was built and tested, and never more than that."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import catalog_site as samples
import pytest
from catalog_site import BY_ID, REAL, ROWS, TONIGHT, YESTERDAY, manifest, put, report

from trainyard.catalog import Sources, build, data, driver, inside, measured, picture
from trainyard.catalog.report import read as read_report
from trainyard.model import InputError, Row

ROW = BY_ID["cu121-pt29"]
LATER = TONIGHT + timedelta(minutes=1)


class Page(HTMLParser):
    """What tests ask of a page: its links, its ids, its rectangles and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.links: list[str] = []
        self.ids: list[str] = []
        self.rects: list[dict[str, str]] = []
        self.words: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.links += [found[name] for name in ("href", "src") if name in found]
        self.ids += [found["id"]] if "id" in found else []
        if tag == "rect" and found.get("class") == "bar":
            self.rects.append(found)

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample site: two nights of history, every status."""
    folder = tmp_path_factory.mktemp("catalog")
    return build(samples.site(folder), folder / "site").parent


def page(site: Path, id_: str) -> Page:
    return Page(site / "images" / f"{id_}.html")


def line(site: Path, id_: str) -> str:
    """One line of the table as text."""
    html = (site / "index.html").read_text()
    (found,) = re.findall(rf'<tr [^>]*>\s*<th scope="row"><a href="images/{id_}\.html">.*?</tr>', html, re.S)
    return " ".join(re.sub(r"<[^>]+>", " ", found).split())


def bare(tmp_path: Path, rows: tuple[Row, ...] = (ROW,)) -> Sources:
    return Sources(rows, tmp_path / "out", tmp_path / "images")


def judged(tmp_path: Path, tests: str | None, row: Row = ROW) -> data.Status:
    """The status of a build of ROW with this test report."""
    put(tmp_path / "out" / row.id, manifest(row, TONIGHT), tests)
    (entry,) = data.entries(bare(tmp_path, (row,)))
    return entry.status


# -- status --------------------------------------------------------------------------------


def test_a_real_build_with_its_real_report_is_tested(site: Path) -> None:
    assert line(site, REAL).startswith("cpu-pt213 tested 60 passed CPU none 2.13.0 cpu 0.19.8 none")
    assert line(site, REAL).endswith("1.35 GB 2026-11-30")


def test_a_real_cuda_build_with_its_real_report_is_tested() -> None:
    sources = Sources((ROW,), samples.DATA, samples.ROOT / "images")
    (entry,) = data.entries(sources)
    assert (entry.status.kind, entry.status.passed) == ("tested", 65)


def test_an_image_that_was_not_built_claims_nothing(site: Path) -> None:
    found = line(site, "cu130-pt213-devel")
    assert found.startswith("cu130-pt213-devel not built 13.0 ≥ 580")
    assert found.endswith("- -")
    text = page(site, "cu130-pt213-devel").text
    assert "nothing here was measured" in text
    assert "make test MATRIX=cu130-pt213-devel" in text
    assert "docker pull" not in text


def test_a_build_without_a_report_is_built_only(site: Path) -> None:
    assert "built only" in line(site, "cu124-pt26")
    assert "there is no test report" in page(site, "cu124-pt26").text


def test_a_report_older_than_the_build_does_not_count(site: Path) -> None:
    assert "built only" in line(site, "cu124-pt26-base")
    assert "its test report is older than the build" in page(site, "cu124-pt26-base").text


def test_a_failed_test_is_named_and_the_older_image_stays_the_one_to_pull(site: Path) -> None:
    assert "failed 1 failed, 2 passed" in line(site, "cu121-pt29")
    text = page(site, "cu121-pt29").text
    assert "training: trains with torchrun" in text
    assert "NCCL error: unhandled system error" in text
    assert "Pull the build of 2026-11-29, the newest that passed" in text
    assert f"docker pull {samples.REGISTRY}:cu121-pt29-20261129-{'a1' * 8}" in text
    assert "cu121-pt29-20261130" not in text  # what failed has no tag
    assert "none, contents 57eb776de5326282 failed" in text


def test_a_build_that_is_not_what_its_row_says_now_differs_though_its_tests_passed(site: Path) -> None:
    assert "differs 2 passed" in line(site, "cu130-pt213")
    assert "DeepSpeed: the row says 0.19.8, the image has 0.19.7" in page(site, "cu130-pt213").text


STATUSES: dict[str, tuple[str | None, str]] = {
    "passed": (report(ROW, LATER), "tested"),
    "passed and skipped": (report(ROW, LATER, {"a.test_x": "", "a.test_y": "skipped"}), "tested"),
    "failed and passed": (report(ROW, LATER, {"a.test_x": "", "a.test_y": "no"}), "failed"),
    "only skipped": (report(ROW, LATER, {"a.test_y": "skipped"}), "built"),
    "no test ran": (report(ROW, LATER, {}), "built"),
    "no report": (None, "built"),
    "report of the build before": (report(ROW, YESTERDAY), "built"),
    "failed in the build before": (report(ROW, YESTERDAY, {"a.test_y": "no"}), "built"),
    "a report that does not say when": (re.sub(r'timestamp="[^"]*"', "", report(ROW, LATER)), "built"),
    "an error in a fixture": (report(ROW, LATER, {"a.test_x": "x"}).replace("failure", "error"), "failed"),
}


@pytest.mark.parametrize("case", STATUSES)
def test_status_follows_from_the_report(case: str, tmp_path: Path) -> None:
    tests, kind = STATUSES[case]
    assert judged(tmp_path, tests).kind == kind


def test_a_failure_is_not_covered_up_by_a_teardown_that_skips(tmp_path: Path) -> None:
    tests = report(ROW, LATER, {"a.test_x": "broken"}).replace("</testcase>", "<skipped/></testcase>")
    assert judged(tmp_path, tests).kind == "failed"


def test_every_status_is_explained_on_the_index(site: Path) -> None:
    text = Page(site / "index.html").text
    assert all(short in text for short in data.SHORT.values())
    assert "12 in all 1 tested 2 built only 1 failed 1 differs 7 not built" in text


# -- contents ------------------------------------------------------------------------------


def test_contents_show_the_row_beside_what_was_measured(tmp_path: Path) -> None:
    put(tmp_path / "out" / ROW.id, manifest(ROW, TONIGHT))
    (entry,) = data.entries(bare(tmp_path))
    lines = {one.name: one for one in inside.contents(entry)}
    assert (lines["cuDNN"].wanted, lines["cuDNN"].got) == ("9.10.2.21", "9.10.2")
    assert lines["torch's CUDA"].got == "12.8"
    assert {one.agrees for one in lines.values()} == {True, None}


DIFFERENT: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "operating system": ("operating system", lambda m: m.update(os="debian-12")),
    "python": ("Python", lambda m: m.update(python="3.12.1")),
    "torch": ("torch", lambda m: m["torch"].update(version="2.9.0")),
    "torch's code": ("GPU code in torch", lambda m: m["torch"].update(archs=["sm_90"])),
    "torch's build": ("torch's build", lambda m: m["torch"].update(local="cu126")),
    "torch's cuda": ("torch's CUDA", lambda m: m["torch"].update(cuda="12.6")),
    "cudnn": ("cuDNN", lambda m: m["cudnn"].update(version="9.1.0")),
    "cudnn twice": ("cuDNN", lambda m: m["cudnn"].update(files=["a", "b"])),
    "nccl": ("NCCL", lambda m: m["nccl"].update(version="2.1.0")),
    "deepspeed": ("DeepSpeed", lambda m: m["deepspeed"].update(version="0.18.8")),
    "compilers": ("compilers", lambda m: m.update(compilers=["gcc"])),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_just_the_line_that_the_gate_objects_to_is_marked(case: str, tmp_path: Path) -> None:
    name, change = DIFFERENT[case]
    found = manifest(ROW, TONIGHT)
    change(found["measured"])
    put(tmp_path / "out" / ROW.id, found, report(ROW, LATER))
    (entry,) = data.entries(bare(tmp_path))
    assert entry.status.kind == "differs"
    assert [one.name for one in inside.contents(entry) if one.agrees is False] == [name]


def test_code_and_links_of_a_note_are_shown_as_such(tmp_path: Path) -> None:
    row = replace(ROW, notes=("Use `a < b` (https://x.example/a#b), or https://x.example/c.",))
    html = (build(bare(tmp_path, (row,)), tmp_path / "site").parent / "images" / f"{row.id}.html").read_text()
    assert "Use <code>a &lt; b</code> (" in html
    assert '(<a href="https://x.example/a#b">x.example/a#b</a>), or <a href="https://x.example/c">' in html


def test_kernels_show_the_architectures_that_are_in_each_library(tmp_path: Path) -> None:
    found = manifest(ROW, TONIGHT)
    found["measured"]["deepspeed"]["ops"]["fused_adam"] |= {"elf": ["sm_80", "sm_86"], "ptx": ["sm_75"]}
    put(tmp_path / "out" / ROW.id, found)
    html = (build(bare(tmp_path), tmp_path / "site").parent / "images" / f"{ROW.id}.html").read_text()
    assert re.search(r"fused_adam</code></th><td>.*prebuilt.*</td><td>sm_80 sm_86</td><td>sm_75</td>", html)
    assert re.search(r"async_io</code></th><td>.*prebuilt.*</td><td>no GPU code</td><td>-</td>", html)


def test_kernels_of_a_real_cuda_image(site: Path) -> None:
    text = page(site, "cu121-pt29").text
    assert "fused_adam prebuilt sm_80 sm_86 sm_90 sm_90 fused_adam_op.cpython-313" in text
    assert "cpu_adam prebuilt no GPU code - cpu_adam_op.cpython-313" in text
    assert (
        "GPU code in torch sm_80, sm_86, sm_90 sm_70, sm_75, sm_80, sm_86, sm_90, sm_100, sm_120 yes" in text
    )


def test_an_op_that_does_not_load_says_why(tmp_path: Path) -> None:
    found = manifest(ROW, TONIGHT)
    found["measured"]["deepspeed"]["ops"]["async_io"] = {"loads": False, "error": "libaio.so.1: not found"}
    put(tmp_path / "out" / ROW.id, found)
    text = page(build(bare(tmp_path), tmp_path / "site").parent, ROW.id).text
    assert "no : libaio.so.1: not found" in text


def test_tests_are_grouped_and_lose_the_image_s_id(tmp_path: Path) -> None:
    folder = samples.DATA / REAL
    found = read_report(folder / "tests.xml", REAL)
    assert {group: len(cases) for group, cases in found.groups.items()} == {
        "contract": 34,
        "kernels": 15,
        "training": 11,
    }
    named = {(case.name, case.parameter) for case in found.cases}
    assert ("op loads prebuilt", "async_io") in named
    assert ("trains in bf16", "") in named
    assert not any(REAL in case.parameter for case in found.cases)


def test_the_biggest_packages_of_both_kinds_come_in_one_list(tmp_path: Path) -> None:
    put(tmp_path / "out" / ROW.id, manifest(ROW, TONIGHT))
    (entry,) = data.entries(bare(tmp_path))
    assert entry.build
    found = inside.biggest(entry.build)
    assert [(kind, one.name) for kind, one in found] == [
        ("Python", "torch"),
        ("Python", "numpy"),
        ("Debian", "libc6"),
    ]
    assert found[2][1].licence_names == "LGPL-2.1+"


def test_a_manifest_that_tells_no_sizes_of_packages_shows_none(site: Path) -> None:
    assert "Biggest packages" not in page(site, REAL).text


# -- history -------------------------------------------------------------------------------


def test_nights_are_listed_newest_first_with_their_change_in_size(site: Path) -> None:
    text = page(site, REAL).text
    assert text.index("cpu-pt213-20261130-5ca5906e4c99d6ed") < text.index(
        "cpu-pt213-20261129-41d0b2a7c9e35f68"
    )
    assert "1.35 GB +18 MB" in text


def test_a_changelog_is_shown_as_html_below_the_page_s_headings(site: Path) -> None:
    html = (site / "images" / f"{REAL}.html").read_text()
    assert "<h4>cpu-pt213</h4>" in html
    assert "<td>0.19.7</td>" in html


def test_without_a_written_changelog_the_manifests_are_compared(tmp_path: Path) -> None:
    found, tests = samples.real()
    before, tests_before = samples.real_yesterday()
    put(tmp_path / "history" / REAL / f"20261129-{before['contents_id']}", before, tests_before)
    put(tmp_path / "history" / REAL / f"20261130-{found['contents_id']}", found, tests)
    sources = replace(bare(tmp_path, (BY_ID[REAL],)), history=tmp_path / "history")
    (entry,) = data.entries(sources)
    assert [night.changelog is None for night in entry.nights] == [False, True]
    assert "Changes of 2026-11-30" in page(build(sources, tmp_path / "site").parent, REAL).text
    assert "0.19.7" in page(tmp_path / "site", REAL).text


def test_the_newest_build_is_shown_wherever_it_lies(tmp_path: Path) -> None:
    put(tmp_path / "out" / ROW.id, manifest(ROW, YESTERDAY, "a1" * 8))
    put(tmp_path / "history" / ROW.id / f"20261130-{'b2' * 8}", manifest(ROW, TONIGHT, "b2" * 8))
    (entry,) = data.entries(replace(bare(tmp_path), history=tmp_path / "history"))
    assert entry.build
    assert entry.build.manifest.contents_id == "b2" * 8
    assert entry.current


def test_two_builds_of_one_day_are_in_the_order_of_their_time(tmp_path: Path) -> None:
    for contents, minutes in (("f1" * 8, 0), ("a2" * 8, 30), ("c3" * 8, 60)):
        built = TONIGHT + timedelta(minutes=minutes)
        put(tmp_path / "history" / ROW.id / f"20261130-{contents}", manifest(ROW, built, contents))
    (entry,) = data.entries(replace(bare(tmp_path), history=tmp_path / "history"))
    assert [night.contents_id[:2] for night in entry.nights] == ["c3", "a2", "f1"]
    times = [(TONIGHT + timedelta(minutes=minutes)).strftime("%Y-%m-%d %H:%M") for minutes in (60, 30, 0)]
    assert [night.date for night in entry.nights] == times  # the day alone would not tell them apart


def test_a_long_history_is_cut_and_says_so(tmp_path: Path) -> None:
    for day in range(data.NIGHTS + 5):
        when = TONIGHT - timedelta(days=day)
        folder = tmp_path / "history" / ROW.id / f"{when:%Y%m%d}-{day:016x}"
        put(folder, manifest(ROW, when, f"{day:016x}"), changelog_md="- nothing")
    sources = replace(bare(tmp_path), history=tmp_path / "history")
    (entry,) = data.entries(sources)
    assert (len(entry.nights), entry.older_nights) == (data.NIGHTS, 5)
    assert "5 older ones are not listed" in page(build(sources, tmp_path / "site").parent, ROW.id).text


def test_an_unfinished_download_is_no_night_and_a_stranger_is_refused(tmp_path: Path) -> None:
    history = tmp_path / "history" / ROW.id
    put(history / f"20261130-{'b2' * 8}", manifest(ROW, TONIGHT))
    (history / "20261201-cafe.part").mkdir()
    sources = replace(bare(tmp_path), history=tmp_path / "history")
    (entry,) = data.entries(sources)
    assert len(entry.nights) == 1
    (history / "notes").mkdir()
    with pytest.raises(InputError, match="notes: not the name of a night"):
        list(data.entries(sources))


# -- wrong input ---------------------------------------------------------------------------

WRONG = {
    "cut manifest": ("manifest.json", '{"id": "cu', "manifest.json: not JSON"),
    "list": ("manifest.json", "[]", "manifest.json: not a JSON object"),
    "empty manifest": ("manifest.json", "{}", "manifest.json: id: Field required; build the image again"),
    "other image": (
        "manifest.json",
        json.dumps(manifest(BY_ID[REAL], TONIGHT)),
        "the manifest of cpu-pt213, in the folder of cu121-pt29",
    ),
    "cut report": ("tests.xml", "<testsuites>", "tests.xml: no JUnit report"),
    "odd time": ("tests.xml", '<a><testsuite timestamp="now"/></a>', '"now" is no time'),
    "odd seconds": ("tests.xml", '<a><testcase name="x" time="1,5"/></a>', "time of x is no number"),
    "other sbom": ("sbom.json", '{"spdxVersion": "2.3"}', "sbom.json: not a CycloneDX SBOM"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_that_cannot_be_used_is_named_and_nothing_is_written(case: str, tmp_path: Path) -> None:
    name, text, message = WRONG[case]
    folder = put(tmp_path / "out" / ROW.id, manifest(ROW, TONIGHT), report(ROW, LATER))
    (folder / name).write_text(text)
    with pytest.raises(InputError, match=re.escape(message)):
        build(bare(tmp_path), tmp_path / "site")
    assert not (tmp_path / "site").exists()
    assert not list(tmp_path.glob(".site*"))


def test_a_failed_build_leaves_the_site_that_is_there(tmp_path: Path) -> None:
    index = build(bare(tmp_path), tmp_path / "site")
    before = index.read_bytes()
    (put(tmp_path / "out" / ROW.id, manifest(ROW, TONIGHT)) / "manifest.json").write_text("{")
    with pytest.raises(InputError):
        build(bare(tmp_path), tmp_path / "site")
    assert index.read_bytes() == before


def test_a_folder_that_is_no_catalog_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match="mine: there, and not a catalog"):
        build(bare(tmp_path), tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").exists()


def test_an_older_catalog_is_replaced_with_all_its_pages(tmp_path: Path) -> None:
    build(bare(tmp_path, ROWS), tmp_path / "site")
    build(bare(tmp_path), tmp_path / "site")
    assert [path.name for path in (tmp_path / "site" / "images").glob("*.html")] == [f"{ROW.id}.html"]


# -- the driver question -------------------------------------------------------------------


@pytest.mark.parametrize("case", samples.CASES, ids=[case[0] for case in samples.CASES])
def test_the_driver_question(case: tuple[str, str, str, str]) -> None:
    text, *answers = case
    asked = driver.parse(text)
    assert [driver.answer(BY_ID[id_], asked) for id_ in samples.ANSWERING] == answers
    assert driver.answer(BY_ID[REAL], asked) == "runs"


@pytest.mark.parametrize("text", samples.NONSENSE)
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"no CUDA version like 12\.2"):
        driver.parse(text)


def test_the_index_answers_for_each_level_and_floor_without_a_script(site: Path) -> None:
    text = Page(site / "index.html").text
    assert "nothing: no NVIDIA driver 3 - 2.13.0 in cpu-pt213" in text
    assert "CUDA Version: 12.1 6 3 2.9.1 in cu121-pt29" in text
    assert "CUDA Version: 13.0 12 - 2.13.0 in cu130-pt213" in text
    assert "Driver Version: 525.60.13 9 - 2.9.1 in cu121-pt29" in text


# -- pictures ------------------------------------------------------------------------------


def test_the_layers_of_the_picture_sum_to_the_size(site: Path) -> None:
    rects = page(site, REAL).rects
    size = samples.real()[0]["size_bytes"]
    assert sum(int(rect["data-bytes"]) for rect in rects) == size
    assert sum(float(rect["width"].removesuffix("%")) for rect in rects) == pytest.approx(100, abs=0.01)
    for rect in rects:
        share = 100 * int(rect["data-bytes"]) / size
        assert float(rect["width"].removesuffix("%")) == pytest.approx(share, abs=0.001)


def test_the_picture_has_a_text_alternative_and_a_table_with_the_same_numbers(site: Path) -> None:
    html = (site / "images" / f"{REAL}.html").read_text()
    assert '<title id="layers">Size by layer: the numbers are in the table below</title>' in html
    for layer in samples.real()[0]["layers"]:
        assert f"{layer['size']:,}" in html


def test_labels_in_pictures_are_escaped() -> None:
    assert "<script>" not in picture.bars([picture.Bar("<script>", 1)], "<b>", "x")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (20182, "20 kB"), (47_717_932, "48 MB"), (1345402320, "1.35 GB")],
)
def test_sizes_are_decimal(count: int, text: str) -> None:
    assert picture.size(count) == text


def test_a_picture_of_nothing_and_of_one_point_can_be_drawn() -> None:
    assert "<svg" in picture.bars([picture.Bar("empty", 0)], "t", "n")
    assert "<svg" in picture.chart([picture.Point("2026-11-30", 0, "x")], "t", "n")


@pytest.mark.parametrize(
    ("made_by", "name"),
    [
        ("", "base: debian:trixie-slim"),
        ("COPY rootfs / # buildkit", "COPY rootfs /"),
        (
            "RUN /bin/sh -c apt-get install -y --no-install-recommends tini python3; rm x",
            "apt-get install, 2 packages",
        ),
        ("RUN |1 A= /bin/sh -c /opt/uv/bin/uv pip install -r x", "Python packages of the lock"),
        ("RUN echo   one", "RUN echo one"),
    ],
)
def test_layers_have_short_names(made_by: str, name: str) -> None:
    base = measured.BaseImage(name="debian:trixie-slim", digest="sha256:0", origin="registry")
    assert inside.layer_name(measured.Layer(created_by=made_by, size=1), base) == name


# -- the whole site ------------------------------------------------------------------------


def test_every_link_leads_to_something(site: Path) -> None:
    checked = 0
    for path in site.rglob("*.html"):
        found = Page(path)
        for link in found.links:
            if link.startswith("https://"):
                continue
            address, _, fragment = link.partition("#")
            target = (path.parent / unquote(address)).resolve() if address else path
            assert target.is_file(), f"{path.name}: {link}"
            assert target.is_relative_to(site.resolve()), f"{path.name}: {link}"
            if fragment:
                assert fragment in Page(target).ids, f"{path.name}: {link}"
            checked += 1
    assert checked > 100


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    for path in site.rglob("*.html"):
        loads = re.findall(r'<(?:link|script|img|iframe|source)[^>]*(?:href|src)="([^"]*)"', path.read_text())
        assert loads
        assert not [one for one in loads if re.match(r"(\w+:)?//|data:", one)], path.name
    for path in (site / "assets").iterdir():
        assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|import\(", path.read_text()), path.name


def test_ids_are_unique_and_every_page_has_its_own_title(site: Path) -> None:
    titles = []
    for path in site.rglob("*.html"):
        found = Page(path)
        assert len(found.ids) == len(set(found.ids)), path.name
        titles += re.findall(r"<title>([^<]*) - Trainyard catalog</title>", path.read_text())
    assert len(titles) == len(set(titles)) == len(ROWS) + 1


EVIL = '<script>alert(1)</script>"onload=&'


def test_nothing_that_is_shown_becomes_markup(tmp_path: Path) -> None:
    row = replace(ROW, summary=EVIL, notes=(f"{EVIL} `{EVIL}` https://x.example/{EVIL}",))
    found = manifest(row, TONIGHT)
    found["layers"][1]["created_by"] = EVIL
    found["base"]["name"] = EVIL
    found["measured"]["glibc"] = EVIL
    found["measured"]["packages"]["pip"][0] |= {"name": EVIL, "licence": EVIL}
    found["measured"]["deepspeed"]["ops"]["async_io"] = {"loads": False, "error": EVIL}
    tests = report(row, LATER, {"contract.test_x": EVIL})
    put(tmp_path / "out" / row.id, found, tests)
    markdown = f"# {EVIL}\n\n{EVIL}\n\n[x](javascript:alert(1)) ![x](https://x.example/x.png)\n"
    put(tmp_path / "history" / row.id / f"20261130-{'b2' * 8}", found, tests, changelog_md=markdown)
    sources = replace(bare(tmp_path, (row,)), history=tmp_path / "history")
    site = build(sources, tmp_path / "site").parent
    for path in site.rglob("*.html"):
        html = path.read_text()
        assert "<script>" not in html
        assert 'href="javascript:' not in html
        assert "<img" not in html
        assert '"onload' not in re.sub(r">[^<]*<", "><", html)
    assert EVIL in page(site, row.id).text


def test_the_same_sources_give_the_same_bytes(site: Path, tmp_path: Path) -> None:
    again = build(samples.site(tmp_path), tmp_path / "again").parent
    assert digests(again) == digests(site)


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_without_a_registry_images_are_run_and_checked_where_they_were_built(tmp_path: Path) -> None:
    sources = samples.site(tmp_path, registry=None)
    text = page(build(sources, tmp_path / "site").parent, REAL).text
    assert "docker run --rm -it trainyard:cpu-pt213" in text
    assert "docker pull" not in text
    assert "build.py verify" not in text
    assert samples.real()[0]["image_id"] in text


def test_with_a_registry_but_no_night_nothing_is_pulled(site: Path) -> None:
    text = page(site, "cu124-pt26").text
    assert "docker run --rm -it --gpus all trainyard:cu124-pt26" in text
    assert "docker pull" not in text


def test_dockerfiles_and_locks_are_copied_or_linked(site: Path, tmp_path: Path) -> None:
    copied = (site / "images" / REAL / "Dockerfile.txt").read_bytes()
    assert copied == (samples.ROOT / "images" / REAL / "Dockerfile").read_bytes()
    sources = replace(samples.site(tmp_path), source_url="https://git.example.org/trainyard/")
    linked = build(sources, tmp_path / "site").parent
    assert f"https://git.example.org/trainyard/images/{REAL}/requirements.lock" in page(linked, REAL).links
    assert not (linked / "images" / REAL / "Dockerfile.txt").exists()
    assert (linked / "images" / REAL / "manifest.json").exists()


def test_a_thousand_images_are_written_in_seconds_and_stay_one_light_page(tmp_path: Path) -> None:
    sources = samples.many(tmp_path, 1000)
    began = time.process_time()
    index = build(sources, tmp_path / "site")
    assert time.process_time() - began < 60  # about 10 s on one core of 2020
    assert index.stat().st_size < 1_500_000
    assert len(list((tmp_path / "site" / "images").glob("*.html"))) == 1000
    assert "1000 in all" in Page(index).text
