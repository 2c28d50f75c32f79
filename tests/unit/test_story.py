"""BuildKit's progress becomes a log for people, live steps, and one message on failure."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

from trainyard.engine import TAIL_LINES, Story

STARTED = "2026-11-30T18:00:00.000000001Z"
ENDED = "2026-11-30T18:00:09.000000001Z"
KERNELS = "[kernels 1/1] RUN --mount=type=bind,source=kernels,target=/kernels     set -eu;     build_wheel.py"


class Told:
    """A story with what it wrote and said."""

    def __init__(self) -> None:
        self.file = io.StringIO()
        self.steps: list[str] = []
        self.story = Story(self.file, self.steps.append)

    def hear(self, *statuses: dict[str, Any] | str) -> Told:
        for status in statuses:
            self.story.hear(status if isinstance(status, str) else json.dumps(status) + "\n")
        return self

    @property
    def log(self) -> str:
        return self.file.getvalue()


def vertex(digest: str, name: str, **more: object) -> dict[str, Any]:
    return {"vertexes": [{"digest": f"sha256:{digest}", "name": name, **more}]}


def output(digest: str, text: str | bytes, stream: int = 1) -> dict[str, Any]:
    data = text.encode() if isinstance(text, str) else text
    encoded = base64.b64encode(data).decode()
    entry = {"vertex": f"sha256:{digest}", "stream": stream, "data": encoded, "timestamp": STARTED}
    return {"logs": [entry]}


def failed(digest: str, name: str, error: str) -> dict[str, Any]:
    return vertex(digest, name, started=STARTED, completed=ENDED, error=error)


# -- the log -------------------------------------------------------------------------------


def test_the_log_has_each_step_and_its_output_below() -> None:
    told = Told().hear(
        vertex("a", "[base 1/2] FROM docker.io/library/debian:trixie-slim"),
        vertex("a", "[base 1/2] FROM docker.io/library/debian:trixie-slim", started=STARTED),
        vertex("b", "[base 2/2] RUN apt-get update", started=STARTED),
        output("b", "Get:1 trixie InRelease\nReading package lists...\n"),
        vertex("b", "[base 2/2] RUN apt-get update", started=STARTED, completed=ENDED),
    )
    assert told.log == (
        "==> [base 1/2] FROM docker.io/library/debian:trixie-slim\n"
        "==> [base 2/2] RUN apt-get update\n"
        "    Get:1 trixie InRelease\n"
        "    Reading package lists...\n"
    )


def test_a_name_over_many_lines_is_told_on_one() -> None:
    told = Told().hear(vertex("a", "[python 1/1] RUN set -eux;     uv venv;\n   uv pip", started=STARTED))
    assert told.steps == ["[python 1/1] RUN set -eux; uv venv; uv pip"]
    assert told.log == "==> [python 1/1] RUN set -eux; uv venv; uv pip\n"


def test_each_step_is_announced_once_however_often_it_is_reported() -> None:
    told = Told()
    for _ in range(3):
        told.hear(vertex("a", "[base 2/2] RUN apt-get update", started=STARTED))
    told.hear(vertex("a", "[base 2/2] RUN apt-get update", started=STARTED, completed=ENDED))
    assert told.steps == ["[base 2/2] RUN apt-get update"]
    assert told.log.count("==>") == 1


def test_a_step_that_waits_is_not_announced() -> None:
    assert Told().hear(vertex("a", "[base 2/2] RUN apt-get update")).steps == []


def test_cached_internal_and_exporting_steps_are_in_the_log_but_not_announced() -> None:
    told = Told().hear(
        vertex("a", "[internal] load build definition from Dockerfile", started=STARTED),
        vertex("b", "[base 2/2] RUN apt-get update", started=STARTED, completed=ENDED, cached=True),
        vertex("c", "exporting to image", started=STARTED),
    )
    assert told.steps == []
    assert "==> [base 2/2] RUN apt-get update (cached)\n" in told.log
    assert "==> exporting to image\n" in told.log


def test_a_line_split_over_chunks_is_written_whole() -> None:
    told = Told().hear(
        vertex("a", "[k 1/1] RUN make", started=STARTED),
        output("a", "building 'fused_"),
        output("a", "adam_op' exten"),
        output("a", "sion\nnext"),
    )
    assert told.log.splitlines()[1:] == ["    building 'fused_adam_op' extension"]


def test_lines_of_steps_that_run_side_by_side_are_not_mixed() -> None:
    told = Told().hear(
        output("a", "one "), output("b", "three "), output("a", "two\n"), output("b", "four\n")
    )
    assert told.log == "    one two\n    three four\n"


def test_the_end_of_the_output_is_in_the_log_also_without_a_line_break() -> None:
    told = Told().hear(vertex("a", "[k 1/1] RUN make", started=STARTED), output("a", "Killed"))
    assert "Killed" not in told.log
    told.hear(vertex("a", "[k 1/1] RUN make", started=STARTED, completed=ENDED))
    assert told.log.endswith("    Killed\n")


def test_output_reported_together_with_the_end_of_its_step_is_in_the_log_once() -> None:
    status = vertex("a", "[k 1/1] RUN make", started=STARTED, completed=ENDED) | output("a", "one\ntwo")
    again = vertex("a", "[k 1/1] RUN make", started=STARTED, completed=ENDED)
    assert Told().hear(status, again).log == "==> [k 1/1] RUN make\n    one\n    two\n"


def test_a_character_split_over_chunks_stays_one() -> None:
    data = "«größer» was not declared\n".encode()
    told = Told()
    for at in range(len(data)):
        told.hear(output("a", data[at : at + 1]))
    assert told.log == "    «größer» was not declared\n"


def test_bytes_that_are_no_text_do_not_stop_the_story() -> None:
    assert Told().hear(output("a", b"\xff\xfe binary\n")).log == "    �� binary\n"


def test_a_progress_bar_leaves_its_last_state() -> None:
    told = Told().hear(output("a", "\r 10%\r 60%"), output("a", "\r100%\nnext\n"))
    assert told.log == "    100%\n    next\n"


def test_windows_line_breaks_do_not_eat_the_line() -> None:
    assert Told().hear(output("a", "10%\r100%\r\nplain\r\n")).log == "    100%\n    plain\n"


def test_each_op_is_announced_as_its_compilation_starts() -> None:
    told = Told().hear(
        output("a", "building 'deepspeed.ops.adam.fused_adam_op' extension\nx\n"),
        output("a", "building 'deepspeed.ops.aio.async_io_op' extension\n"),
    )
    assert told.steps == ["compiling fused_adam", "compiling async_io"]


def test_lines_that_are_no_json_go_to_the_log_as_they_are() -> None:
    told = Told().hear("WARNING: buildx is old\n", vertex("a", "[k 1/1] RUN make", started=STARTED))
    assert told.log == "WARNING: buildx is old\n==> [k 1/1] RUN make\n"


def test_json_of_another_shape_is_passed_over() -> None:
    told = Told().hear("[]\n", "17\n", "null\n", "{}\n", '{"vertexes": null, "logs": null, "statuses": []}\n')
    assert (told.log, told.steps) == ("", [])


# -- the failure ---------------------------------------------------------------------------


def test_our_own_verdict_is_the_whole_message() -> None:
    told = Told().hear(
        vertex("a", KERNELS, started=STARTED),
        output("a", "building 'deepspeed.ops.adam.fused_adam_op' extension\nx.cu(3): error: no\n"),
        output("a", "kernels: FAILED: op fused_adam did not compile: x.cu(3): error: no\n", stream=2),
        failed("a", KERNELS, 'process "/bin/sh -c set -eu;" did not complete successfully: exit code: 1'),
    )
    assert told.story.failure() == "kernels: op fused_adam did not compile: x.cu(3): error: no"


def test_our_verdict_is_found_without_a_line_break_at_its_end() -> None:
    told = Told().hear(output("a", "kernels: FAILED: op x is missing"), failed("a", KERNELS, "exit code: 1"))
    assert told.story.failure() == "kernels: op x is missing"


def test_our_verdict_is_found_above_a_long_end_of_output() -> None:
    lines = "".join(f"noise {n}\n" for n in range(5 * TAIL_LINES))
    told = Told().hear(
        output("a", f"kernels: FAILED: op x is missing\n{lines}"), failed("a", KERNELS, "exit 1")
    )
    assert told.story.failure() == "kernels: op x is missing"


def test_otherwise_the_step_the_end_of_its_output_and_the_error_are_told() -> None:
    name = "[base 2/2] RUN apt-get install tini"
    lines = [f"line {n}" for n in range(3 * TAIL_LINES)]
    told = Told().hear(
        vertex("a", name, started=STARTED),
        output("a", "\n".join([*lines, "E: Unable to locate package tini", ""])),
        failed("a", name, "process did not complete successfully: exit code: 100"),
    )
    message = told.story.failure().splitlines()
    assert message[0] == name
    assert message[-2] == "E: Unable to locate package tini"
    assert message[-1] == "process did not complete successfully: exit code: 100"
    assert len(message) <= TAIL_LINES + 2
    assert lines[0] not in message


def test_a_progress_bar_does_not_fill_the_message() -> None:
    told = Told().hear(
        output("a", "\r".join(f"{n}%" for n in range(100))), failed("a", "[x 1/1] RUN", "exit 1")
    )
    assert told.story.failure() == "[x 1/1] RUN\n99%\nexit 1"


def test_the_first_failure_counts_and_not_what_it_cancelled() -> None:
    told = Told().hear(
        failed("a", "[x 1/1] RUN sleep", "context canceled"),
        failed("b", "[y 1/1] RUN false", "exit code: 1"),
        failed("c", "[z 1/1] RUN sleep", "exit code: 137"),
    )
    assert told.story.failure() == "[y 1/1] RUN false\n\nexit code: 1"


def test_output_of_other_steps_is_not_in_the_message() -> None:
    told = Told().hear(
        output("a", "fine here\n"), output("b", "broken here\n"), failed("b", "[y 1/1] RUN", "exit 1")
    )
    assert "fine here" not in told.story.failure()
    assert "broken here" in told.story.failure()


def test_without_a_failed_step_the_client_s_own_words_are_the_message() -> None:
    told = Told().hear("ERROR: failed to connect: no such host\n")
    assert told.story.failure() == "ERROR: failed to connect: no such host"


def test_a_build_that_ends_without_a_word_says_so() -> None:
    assert Told().story.failure() == "the build ended without a word"


def test_a_very_long_error_is_cut() -> None:
    told = Told().hear(failed("a", f"[x 1/1] RUN {'x' * 3000}", "y" * 3000))
    assert len(told.story.failure()) < 1000


def test_a_status_spread_over_many_lines_is_read_as_one() -> None:
    """buildx 0.13 prints its JSON indented, though it calls it one status a line."""
    told = Told()
    status = vertex("a", "[base 1/1] RUN true", started=STARTED) | output("a", "all's } well\n")
    for line in (json.dumps(status, indent=2) + "\n").splitlines(keepends=True):
        told.story.hear(line)
    assert told.log == "==> [base 1/1] RUN true\n    all's } well\n"
