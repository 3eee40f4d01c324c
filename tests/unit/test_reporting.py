# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The report of a benchmark: what it reads, what its tables, its pictures and its page say."""

from __future__ import annotations

import base64
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from benchmark_results import FEW, MANY, NETWORKS, SPEEDS, make_case, make_failed_case, make_results

from accelerate_lshdp.cli.bench_output import write
from accelerate_lshdp.comparing.cases import Case
from accelerate_lshdp.comparing.measurement import Measurement
from accelerate_lshdp.comparing.report import gallery, print_results, read_results, write_report, writing
from accelerate_lshdp.comparing.report.comparison import (
    Group,
    describe_fastest,
    group_cases,
    largest_loss_difference,
    own_speeds,
    scaling_efficiency,
)
from accelerate_lshdp.comparing.report.gallery import Picture, draw_pictures
from accelerate_lshdp.comparing.report.markdown import render_markdown
from accelerate_lshdp.comparing.report.numbers import format_number
from accelerate_lshdp.comparing.report.page import render_page
from accelerate_lshdp.comparing.report.results import Results, ResultsError
from accelerate_lshdp.comparing.report.style import Missing
from accelerate_lshdp.comparing.report.tables import detail_table, limits_table, step_table


HOSTILE = "<script>alert('x')</script> & [red]|`_*"


def read_cases(*cases: dict[str, Any]) -> Results:
    return read_results({**make_results(), "cases": list(cases)})


def the_group(*cases: dict[str, Any]) -> Group:
    (group,) = group_cases(read_cases(*cases))
    return group


# ---- reading --------------------------------------------------------------------------------------------------------


def _set(*path: str | int, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_set("version", to=2), "version: found 2, expected 1"),
        (_set("kind", to="profile"), 'kind: found "profile" (a string), expected "benchmark"'),
        (_set("cases", to={}), "cases: found an object, expected a list"),
        (_set("cases", 1, "step_seconds", to="2"), 'cases[1].step_seconds: found "2" (a string), expected a finite'),
        (_set("cases", 1, "step_seconds", to=None), "cases[1].step_seconds: found null, expected a figure"),
        (_set("cases", 1, "spread", to=float("nan")), "cases[1].spread: found nan, expected a finite number"),
        (_set("cases", 1, "colour", to="red"), "cases[1].colour: found an unknown key"),
        (_set("cases", 1, "batch_sizes", to=[32]), "cases[1].batch_sizes: found 1 entries, expected 4, one a rank"),
        (_set("cases", 1, "batch_sizes", to=[8, 8, 8, 9]), "sum to 33, expected total_batch_size, 32"),
        (_set("cases", 1, "formula_bytes", to=[1.0]), "formula_bytes: found 1 entries, expected 4, one a node"),
        (_set("cases", 1, "error", to="died"), "found a list of 4, expected null, as the case has an error"),
        (_set("cases", 1, "label", to="torch_ddp"), 'cases[1].label: found "torch_ddp" (a string) twice'),
        (_set("cases", 1, "timeline", 0, 1, "name", to="sleep"), "cases[1].timeline[0][1].name"),
        (_set("cases", 1, "timeline", 0, 1, "end", to=0.0), "where the event begins"),
        (_set("cases", 1, "losses", 0, to=[1.0]), "cases[1].losses[0]: found a list of 1, expected [seconds, step"),
        (_set("cases", 1, "is_peer", to=0), "cases[1].is_peer: found 0, expected true or false"),
        (_set("limits", 0, "value", to=None), "limits[0].value: found null for a limit that holds"),
        (_set("machine", to={}), "machine.cpu: found nothing under this key"),
    ],
)
def test_malformed_results_are_refused_with_the_place(change: Callable, says: str) -> None:
    document = make_results()
    change(document)
    with pytest.raises(ResultsError, match=re.escape(says)):
        read_results(document)


def test_nodes_of_a_cluster_do_not_change() -> None:
    other = make_case("lshdp", nodes=[2, 2])
    for key in ("bytes_between_nodes", "formula_bytes", "bytes_inside_nodes", "peak_pss_bytes"):
        other[key] = other[key][:2]
    with pytest.raises(ResultsError, match=r"cases\[1\].nodes: found \[2, 2\], expected \[1, 1, 1, 1\]"):
        read_cases(make_case("torch_ddp"), other)


def test_figures_that_were_not_measured_may_be_missing() -> None:
    case = make_case("lshdp", timeline=None, predicted_seconds=None, peak_pss_bytes=None, compute_seconds=None)
    case["losses"][3][2] = None
    (read,) = read_cases(case).cases
    assert read.timeline is None and read.prediction_error is None and read.losses[3].loss is None


def test_what_the_benchmark_writes_can_be_read() -> None:
    good = Measurement("uneven", "ViT", "1 Gb/s", 1e9, [1, 1], 8, Case("lshdp", batch_sizes="plan"))
    good.parameters, good.micro_batches = 1000, [(5, 1), (3, 1)]
    good.add_turn([[(1.0, 2.0, 5), (1.1, math.nan, 5)], [(1.0, 2.0, 3), (1.1, 1.5, 3)]], [10, 20], None)
    failed = Measurement("uneven", "ViT", "1 Gb/s", 1e9, [1, 1], 8, Case("torch_ddp"), error="died")
    document = {**make_results(), "cases": [case.to_dict() for case in (good, failed)]}
    read, without = read_results(json.loads(json.dumps(document, allow_nan=False))).cases
    assert read.batch_sizes == (5, 3) and read.bytes_between_nodes == (5.0, 10.0)
    assert [point.loss for point in read.losses] == [2.0, None]
    assert (without.error, without.step_seconds, without.losses) == ("died", None, ())


# ---- comparing ------------------------------------------------------------------------------------------------------


def test_time_saved_and_the_fastest() -> None:
    group = the_group(
        make_case("torch_ddp", step_seconds=2.0),
        make_case("lshdp", step_seconds=1.5),
        make_case("lshdp:bf16", step_seconds=1.2),
        make_case("fsdp", step_seconds=3.0),
    )
    peer, exact, lossy, slow = group.cases
    assert [case.time_saved(peer) for case in (exact, lossy, slow)] == pytest.approx([0.25, 0.4, -0.5])
    assert describe_fastest(group, "1 Gb/s") == (
        "1 Gb/s: lshdp bf16 has the shortest step, 1.200 s (40% less than torch_ddp)."
    )


def test_efficiency_is_relative_to_what_ranks_showed_while_computing() -> None:
    slower = make_case("lsdp", compute_seconds=[99.0] * 4)  # says less than another case about every rank
    group = the_group(make_case("torch_ddp"), make_case("hdp"), slower)
    speeds = own_speeds(group)
    assert speeds == pytest.approx(SPEEDS)
    for case in group.cases:
        assert scaling_efficiency(case, speeds) == pytest.approx(32 / case.step_seconds / sum(SPEEDS))
    assert own_speeds(the_group(make_case("torch_ddp"))) is None


def test_losses_are_compared_at_the_same_step() -> None:
    fast = make_case("lshdp", losses=[[1.0, 1, 2.0], [2.0, 2, 1.0]])
    slow = make_case("lsdp", losses=[[5.0, 1, 2.0], [9.0, 2, 1.1], [13.0, 3, 9.9]])
    assert largest_loss_difference(the_group(fast, slow).cases) == pytest.approx(0.1)
    assert largest_loss_difference(the_group(fast).cases) is None


# ---- tables ---------------------------------------------------------------------------------------------------------


def test_step_table() -> None:
    group = the_group(
        make_case("torch_ddp", step_seconds=2.0, samples_per_second=16.0),
        make_case(
            "lshdp",
            step_seconds=1.5,
            samples_per_second=21.333,
            predicted_seconds=1.44,
            bytes_between_nodes=[80e6, 86e6, 85e6, 85e6],
            formula_bytes=[85e6] * 4,
            peak_pss_bytes=[900_000_000, 1_100_000_000, 800_000_000, 700_000_000],
            idle_fraction=0.031,
        ),
        make_failed_case("fsdp", "out of memory"),
    )
    table = step_table(group, "1 Gb/s")
    assert table.columns[4] == "less time than torch_ddp"
    assert table.rows[0][:5] == ("torch_ddp", "2.000", "2.0%", "16.0", "–")
    assert table.rows[1] == (
        *("lshdp fp32", "1.500", "2.0%", "21.3", "25%"),
        *("3.1%", "86.0/85.0", "1.10", "-4.0%"),
    )
    assert table.rows[2][:2] == ("fsdp fp32", "failed") and set(table.rows[2][2:]) == {"–"}
    assert table.notes == ("fsdp fp32 failed: out of memory",)
    (_, lshdp) = detail_table(group, "1 Gb/s").rows
    assert lshdp[1] == "13 8 6 5" and lshdp[2] == "1.30 1.29 1.20 1.32" and lshdp[7] == "0.90 1.10 0.80 0.70"


def test_limits_table_says_what_is_broken() -> None:
    document = make_results()
    document["limits"] += [
        {"name": "bytes", "value": 0.034, "limit": 0.02, "holds": False},
        {"name": "memory", "value": None, "limit": 0.75, "holds": False},
    ]
    table = limits_table(read_results(document))
    assert table.alarming == {1, 2}
    assert [row[1:] for row in table.rows] == [
        ("0.31", "0.28", "holds"),
        ("0.034", "0.02", "BROKEN"),
        ("not measured", "0.75", "NOT SHOWN"),
    ]


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.3521, "0.352"), (5, "5.00"), (9.999, "10.0"), (17.12, "17.1"), (99.97, "100"), (12345, "12,345")],
)
def test_numbers_have_three_digits(number: float, text: str) -> None:
    assert format_number(number) == text


def test_terminal_shows_names_and_errors_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    failed = make_failed_case("lsdp", f"boom {HOSTILE}", label="lsdp [bold]")
    print_results({**make_results(MANY), "cases": [*map(make_case, MANY[:-5]), failed]})
    printed = capsys.readouterr().out
    assert "lsdp [bold]" in printed and f"boom {HOSTILE}" in printed
    (row,) = [line for line in printed.splitlines() if line.lstrip().startswith("hdp fp32")]
    assert len(row.split()) == 12, "every figure stands on the row, however narrow the terminal"


# ---- Markdown -------------------------------------------------------------------------------------------------------


def test_markdown_tables_are_whole() -> None:
    document = make_results(MANY, tuple(NETWORKS))
    document["cases"][4] = make_failed_case("hdp", f"two\nlines {HOSTILE}")
    document["command"] = "bench `x`"
    results = read_results(document)
    text = render_markdown(results, [Picture("Throughput", "what is seen", Path("somewhere", "picture.png"))])
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("| ")]
    assert len(blocks) == 2 + 1 + 2  # steps, limits, details
    for lines in blocks:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
    assert len(blocks[0]) == 2 + len(MANY)
    assert r"hdp fp32 failed: two lines \<script\>" in text and "<script>" not in text
    assert "`` bench `x` ``" in text
    assert "![Throughput](picture.png)" in text


# ---- pictures -------------------------------------------------------------------------------------------------------


def _texts_outside(figure: Any) -> list[str]:
    """Texts of which some part is outside of the figure."""
    from matplotlib.text import Text

    figure.canvas.draw()
    ticks = [
        (tick, axis.get_view_interval())
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in axis.get_major_ticks()
    ]
    undrawn = {id(tick.label1) for tick, view in ticks if not min(view) <= tick.get_loc() <= max(view)}
    outside = []
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text().strip() and id(text) not in undrawn:
            box = text.get_window_extent()
            if min(box.x0, box.y0) < -1 or box.x1 > figure.bbox.width + 1 or box.y1 > figure.bbox.height + 1:
                outside.append(text.get_text())
    return outside


def _labels_that_overlap(figure: Any) -> list[str]:
    """Names of rows that run into the name below."""
    overlapping = []
    for axes in figure.axes:
        labels = [label for label in axes.get_yticklabels() if label.get_visible() and label.get_text()]
        boxes = sorted((label.get_window_extent().y0, label.get_window_extent().y1) for label in labels)
        overlapping += [
            axes.get_title() for one, other in zip(boxes, boxes[1:], strict=False) if one[1] > other[0] + 1
        ]
    return overlapping


@pytest.mark.parametrize("kind", list(gallery._KINDS))
@pytest.mark.parametrize(
    ("strategies", "networks"),
    [(("lshdp",), ("1 Gb/s",)), ((*MANY, "lsdp:bf16", "lsdp:int8"), tuple(NETWORKS))],
    ids=["1 case", "16 cases x 2 networks"],
)
def test_every_text_of_a_picture_can_be_read(
    kind: str, strategies: tuple[str, ...], networks: tuple[str, ...]
) -> None:
    document = make_results(strategies, networks)
    for case in document["cases"]:
        case["model"] = "a model with a name that is rather long, as some are"
    (group,) = group_cases(read_results(document))
    drawing = gallery._KINDS[kind](group)
    assert _texts_outside(drawing.figure) == [] and _labels_that_overlap(drawing.figure) == []
    assert [axes.get_title() for axes in drawing.figure.axes] == list(networks)


def test_bars_show_the_figures() -> None:
    group = the_group(make_case("torch_ddp"), make_case("lshdp"), make_failed_case("fsdp", "out of memory"))
    (axes,) = gallery._KINDS["Throughput"](group).figure.axes
    widths = [patch.get_width() for patch in axes.patches]
    assert widths == pytest.approx([case.samples_per_second for case in group.cases[:2]])
    assert "failed" in [text.get_text() for text in axes.texts]
    (axes,) = gallery._KINDS["Bytes between nodes"](group).figure.axes
    assert [patch.get_width() for patch in axes.patches] == pytest.approx(
        [max(case.bytes_between_nodes) / 1e6 for case in group.cases[:2]]
    )


def test_timeline_has_every_event_of_every_rank() -> None:
    group = the_group(make_case("lshdp"))
    (axes,) = gallery._KINDS["Timeline of a step"](group).figure.axes
    spans = [path.get_extents() for bars in axes.collections for path in bars.get_paths()]
    events = [event for rank in group.cases[0].timeline for event in rank]
    assert sorted(span.width for span in spans) == pytest.approx(sorted(e.end - e.begin for e in events))
    assert len({round(span.y0, 3) for span in spans}) == 4 and min(span.x0 for span in spans) == pytest.approx(0.0)


def test_pictures_without_figures_say_so(tmp_path: Path) -> None:
    case = make_case("lshdp", losses=[], timeline=None, compute_seconds=None, peak_pss_bytes=None)
    results = read_cases(case)
    pictures = draw_pictures(results, tmp_path)
    drawn = {picture.title.split(",")[0] for picture in pictures if picture.path is not None}
    assert drawn == {"Throughput", "Bytes between nodes"}
    assert all("not drawn: no case has" in picture.caption for picture in pictures if picture.path is None)
    write_report(results, tmp_path)
    for name in ("results.md", "report.html"):
        assert "no case has losses" in (tmp_path / name).read_text()


def test_only_failed_cases_still_give_a_report(tmp_path: Path) -> None:
    group = the_group(make_failed_case("lshdp", "boom"))
    assert all(isinstance(draw(group), Missing) for draw in gallery._KINDS.values())
    write_report({**make_results(), "cases": [make_failed_case("lshdp", "boom")]}, tmp_path)
    assert "lshdp fp32 failed: boom" in (tmp_path / "report.html").read_text()


def test_the_command_fails_if_all_cases_have(tmp_path: Path) -> None:
    good, failed = make_case("ddp"), make_failed_case("lshdp", "boom")
    codes = [write({**make_results(), "cases": cases}, tmp_path) for cases in ([failed], [good, failed])]
    assert codes == [1, 0]


def test_clusters_and_models_have_pictures_of_their_own(tmp_path: Path) -> None:
    models = ("ViT 14 M", "../vit/14 m")
    cases = [make_case("lshdp", model=model) for model in models]
    written = write_report({**make_results(), "cases": cases}, tmp_path)
    pictures = [path for path in written if path.suffix == ".png"]
    assert len(set(pictures)) == len(pictures) == len(models) * len(gallery._KINDS)
    assert all(path.parent == tmp_path and path.is_file() for path in pictures)


# ---- the page -------------------------------------------------------------------------------------------------------


class _Page(HTMLParser):
    """Tags with their attributes, and text by the innermost tag; fails on tags that do not match."""

    VOID = ("meta", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.texts.setdefault(self.open[-1], []).append(data)

    def attributes(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_page_needs_nothing_beside_it(tmp_path: Path) -> None:
    document = make_results(FEW, tuple(NETWORKS))
    written = write_report(document, tmp_path)
    page = _Page((tmp_path / "report.html").read_text())
    pictures = [path for path in written if path.suffix == ".png"]
    images = [image["src"] for image in page.attributes("img")]
    assert len(pictures) == 6
    assert [base64.b64decode(image.removeprefix("data:image/png;base64,")) for image in images] == [
        path.read_bytes() for path in pictures
    ]
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "iframe", "object"}
    targets = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    assert {link["href"].removeprefix("#") for link in page.attributes("a")} == targets
    assert len(page.texts["figcaption"]) == 6 and all(len(text) > 60 for text in page.texts["figcaption"])
    assert len(page.attributes("table")) == 2 + 1 + 2
    whole = (tmp_path / "report.html").read_text()
    for said in ("Some CPU, 2 cores, 16.0 GB", "torch 2.13.0", document["command"], "total: 32", "All limits hold."):
        assert said in whole


def test_page_escapes_everything() -> None:
    document = make_results()
    names = {"cluster": HOSTILE, "model": HOSTILE}
    document["cases"] = [
        {**make_case("lshdp"), **names, "network": HOSTILE, "label": HOSTILE},
        {**make_failed_case("fsdp", HOSTILE), **names},
    ]
    document["machine"] = {**document["machine"], "cpu": HOSTILE, "kernel": HOSTILE}
    document.update(created=HOSTILE, command=HOSTILE, versions={HOSTILE: HOSTILE}, config={HOSTILE: [HOSTILE]})
    document["limits"] = [{"name": HOSTILE, "value": 2.0, "limit": 1.0, "holds": False}]
    text = render_page(read_results(document), [])
    page = _Page(text)
    assert "script" not in {tag for tag, _ in page.tags} and "<script" not in text
    assert HOSTILE in "".join(page.texts["code"]) and HOSTILE in "".join(page.texts["pre"])
    assert "Limits that do not hold" in text


# ---- what it needs --------------------------------------------------------------------------------------------------


def test_without_matplotlib_tables_are_written_and_the_page_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gallery, "find_spec", lambda name: None)
    written = write_report(make_results(), tmp_path)
    assert [path.name for path in written] == ["results.md", "report.html"]
    for path in written:
        assert "matplotlib is not installed; pip install" in path.read_text()


def test_without_jinja2_there_is_no_page_and_the_tables_say_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "find_spec", lambda name: None)
    written = write_report(make_results(), tmp_path)
    assert "report.html" not in [path.name for path in written] and not (tmp_path / "report.html").exists()
    assert "jinja2 is not installed; pip install" in (tmp_path / "results.md").read_text()


def test_needs_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from accelerate_lshdp.comparing.report import write_report\n"
        "from benchmark_results import make_results\n"
        "write_report(make_results(), sys.argv[1])\n"
        "assert not {'torch', 'accelerate', 'matplotlib.pyplot'} & set(sys.modules)\n"
    )
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), str(Path(__file__).parents[1])], check=True, timeout=60
    )
    assert len(list(tmp_path.glob("*.png"))) == 6


def test_in_process_emulation_is_named() -> None:
    document = make_results(FEW)
    document["config"]["in_process"] = True
    results = read_results(document)
    assert all("the network is NOT emulated" in render(results, []) for render in (render_markdown, render_page))
