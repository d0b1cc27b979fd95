"""The page of ``hvkit report``: its charts, and what text in it may not do."""

import json
import os
import re
import shutil
import signal
import subprocess

import pytest
from PIL import Image
from recorded_lines import end, logged, record, start, write

from hvkit.cli import main
from hvkit.monitor import terminal_report
from hvkit.monitor.recorded_run import read
from hvkit.monitor.report_page import page


@pytest.fixture
def page_of(tmp_path):
    """``page_of(*lines)``: the page of a run with these lines."""
    return lambda *lines: page(read(write(tmp_path, *lines)))


def contents_of(html):
    """What the page's script draws."""
    (data,) = re.findall(r'id="data">(.*?)</script>', html)
    return json.loads(data)


def cards_of(html):
    """By the title of their section, its cards."""
    return {each["title"]: each["cards"] for each in contents_of(html)["sections"]}


def charts_of(html):
    """By title: the legend's names, and each line's points."""
    cards = [card for some in cards_of(html).values() for card in some if "lines" in card]
    return {
        card["title"]: {
            line["name"]: list(zip(line["steps"], line["values"], strict=True))
            for line in card["lines"]
        }
        for card in cards
    }


def test_the_page_is_there_also_if_nobody_reads_the_text_to_its_end(tmp_path, monkeypatch):
    def closed(*_):
        raise BrokenPipeError

    monkeypatch.setattr(terminal_report, "show", closed)
    write(tmp_path, start(), record(10), end(10, error="no \udcff"))
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path)])
    assert ended.value.code == 128 + signal.SIGPIPE
    html = (tmp_path / "report.html").read_text()
    assert charts_of(html)["loss"] == {"loss": [(10, 1)]}
    assert contents_of(html)["notes"] == ["The run ended with no \udcff."]


def test_text_from_the_run_is_no_markup(page_of):
    bad = "<script>alert(1)</script>"
    lines = [record(10, **{bad: 1.0}), start(10, reason=bad, hosts=[bad]), record(20)]
    html = page_of(start(), *lines, end(error=bad))
    assert contents_of(html)["notes"] == [f"The run ended with {bad}."]
    assert bad not in html
    code = "<script>"  # uPlot's, and the page's own
    assert re.findall("<script[^>]*>", html) == [
        '<script type="application/json" id="data">',
        code,
        code,
    ]


def test_a_long_run_is_a_small_page_that_needs_no_network(page_of):
    hosts = [f"node{i // 8}" for i in range(512)]
    names = {f"metric{i}": 1.0 / (i + 1) for i in range(40)}
    loads = {host: {"cpu": 50.0, "memory": 2.0, "sent_mb_s": 3.0} for host in sorted(set(hosts))}
    ranks = {"samples_per_second": [100.0] * 512, "last": [1] * 512}
    lines = [
        record(n, n / 7, ranks=4, **names) | {"host": loads, "ranks": ranks} for n in range(1, 901)
    ]
    html = page_of({"start": {"time": 0, "step": 0, "hosts": hosts}}, *lines)
    assert len(html.encode()) < 300_000
    assert not re.search(r"(src|href|url|import|http)[=(:]", html)
    # Nor would a browser let it load anything.
    assert "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'" in html


def test_training_and_validation_are_on_one_chart(page_of):
    charts = charts_of(
        page_of(
            start(),
            record(10, 3.0, accuracy=0.1, test_accuracy=0.3),
            record(20, 2.0, accuracy=0.2, gradient_norm=4.0, applied_gradient_norm=1.0),
            logged(20, epoch_loss=2.5, epoch_val_loss=2.75),
            logged(20, epoch_loss_of_rows=1.0),
        )
    )
    assert charts["loss"] == {
        "training": [(20, 2.5)],
        "validation": [(20, 2.75)],
        "batches": [(10, 3), (20, 2)],
    }
    assert {*charts["accuracy"]} == {"training", "test"}
    assert {*charts["gradient_norm"]} == {"averaged", "applied"}
    # A metric that has a chart for itself has its own name.
    assert charts["epoch_loss_of_rows"] == {"epoch_loss_of_rows": [(20, 1)]}


def test_metrics_of_the_same_data_on_one_chart_are_all_there(page_of):
    html = page_of(start(), record(10, val_loss=1.0, eval_loss=2.0))
    (chart, *_) = cards_of(html)["Metrics over steps"]
    assert [(line["name"], line["values"]) for line in chart["lines"]] == [
        ("training", [1]),
        ("validation", [1]),
        ("validation", [2]),
    ]


def test_charts_have_all_steps_and_mark_where_the_run_began_again(page_of):
    lines = [start(), record(40), start(30), record(80), logged(60, late=2.0), end()]
    contents = contents_of(page_of(*lines))
    assert (contents["first"], contents["last"], contents["marks"]) == (0, 80, [30])


def two_runs(tmp_path, *names, ranks=(1, 2)):
    """Two runs whose losses and speeds are proportional to their number of ranks."""
    for name, size in zip(names, ranks, strict=True):
        validation = {"epoch_val_loss": 0.5 * size} if size > 1 else {"val_loss": 0.25}
        records = [record(step, size / step, ranks=size) for step in (10, 20)]
        hosts = ["node1", "node1", "node2", "node2"][:size]
        write(tmp_path / name, start(hosts=hosts), *records, logged(20, **validation), end())
    return [str(tmp_path / name) for name in names]


@pytest.fixture
def alone_and_both(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return two_runs(tmp_path, "alone", "both")


def test_runs_are_compared_side_by_side(alone_and_both, tmp_path, capsys):
    assert main(["report", *alone_and_both]) == 0
    text = capsys.readouterr().out
    assert re.search(r"ranks +1 +2\n", text)
    assert re.search(r"speedup over alone +1.00x +2.00x\n", text)
    assert re.search(r"last loss +0.05 +0.1\n", text)
    assert "wrote comparison.html" in text
    html = (tmp_path / "comparison.html").read_text()
    charts = charts_of(html)
    assert charts["loss"] == {"alone": [(10, 0.1), (20, 0.05)], "both": [(10, 0.2), (20, 0.1)]}
    # Under whatever names the scripts record it.
    assert charts["val_loss"] == {"alone": [(20, 0.25)], "both": [(20, 1)]}
    (numbers,) = cards_of(html)["Numbers"]
    assert ["speedup over alone", "1.00x", "2.00x"] in numbers["rows"]


def test_a_speedup_that_more_ranks_do_not_explain_has_a_remark(alone_and_both, tmp_path, capsys):
    file = tmp_path / "alone" / "metrics.jsonl"
    file.write_text(re.sub(r'"ranks": {.*?}, ', "", file.read_text()))  # as a single rank writes it
    file = tmp_path / "both" / "metrics.jsonl"
    text = file.read_text()
    faster = text.replace(": 200.0,", ": 430.0,").replace("[100.0, 100.0]", "[215.0, 215.0]")
    file.write_text(faster)
    assert main(["report", *alone_and_both]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "both: a speedup of 4.30x is more than 2 ranks explain: alone was measured" in said
    assert "both: a rank takes 21.5 samples a step, in alone 10: the speedup compares" in said
    notes = contents_of((tmp_path / "comparison.html").read_text())["notes"]
    assert any(note.startswith("Both: a speedup of 4.30x") for note in notes)
    file.write_text(text)
    assert main(["report", *alone_and_both]) == 0
    assert "a rank takes" not in capsys.readouterr().out


def test_files_beside_the_folders_of_runs_are_no_runs(alone_and_both, tmp_path, capsys):
    for _ in range(2):
        assert main(["report", *sorted(each.name for each in tmp_path.iterdir())]) == 0
    with pytest.raises(SystemExit, match="2"):
        main(["report", "comparison.html"])
    assert "comparison.html is not a folder" in capsys.readouterr().err


def test_without_a_run_of_one_rank_there_is_no_speedup(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report", *two_runs(tmp_path, "few", "many", ranks=(2, 4))]) == 0
    assert "speedup" not in capsys.readouterr().out
    assert "speedup" not in (tmp_path / "comparison.html").read_text()


def test_folders_of_one_name_are_told_apart_and_one_named_twice_is_an_error(tmp_path, capsys):
    folders = two_runs(tmp_path, "a/run", "b/run")
    out = ["--html", str(tmp_path / "page.html")]
    assert main(["report", *folders, *out]) == 0
    assert re.search(r"speedup over a/run +1.00x +2.00x\n", capsys.readouterr().out)
    with pytest.raises(SystemExit, match="2"):
        main(["report", folders[0], folders[0], *out])
    assert "is named twice: name each run once" in capsys.readouterr().err


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
# Moves the pointer over the first chart.
HOVER = (
    "<script>const {over} = charts[0], corner = over.getBoundingClientRect();"
    "over.dispatchEvent(new MouseEvent('mousemove', {"
    "clientX: corner.left + charts[0].valToPos(244, 'x'), clientY: corner.top + 9}))"
    "</script></body>"
)


@pytest.mark.skipif(
    BROWSER is None and "HVKIT_REQUIRE_CLUSTER" not in os.environ, reason="needs Chromium"
)
def test_a_browser_shows_the_page(tmp_path):
    write(tmp_path, start(), *(record(n, 100.0 / n) for n in range(10, 500, 10)))
    assert main(["report", str(tmp_path)]) == 0
    html = (tmp_path / "report.html").read_text()

    def browser(*options):
        command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu"]
        options = f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1200,1600", *options
        done = subprocess.run(
            [*command, *options], check=True, capture_output=True, text=True, timeout=90
        )
        return done.stdout

    picture = tmp_path / "page.png"
    browser(f"--screenshot={picture}", (tmp_path / "report.html").as_uri())
    moved = tmp_path / "moved.html"
    moved.write_text(html.replace("</body>", HOVER))
    dumped = browser("--dump-dom", moved.as_uri())
    # The legends of all charts show the values of the same step.
    legends = re.findall(r'<tr class="u-series">.*?</tr>', dumped)
    shown = [re.sub("<.*?>", " ", each).split() for each in legends]
    assert shown.count(["step", "240"]) == len(charts_of(html)) > 3
    assert ["loss", "0.4167"] in shown
    image = Image.open(picture).convert("RGB")
    counts = {colour: count for count, colour in image.getcolors(1 << 24)}
    # The bar with the parts of a step: half of it is compute, a tenth each data and allreduce.
    bar = {"compute": (42, 157, 111), "waiting": (214, 69, 80), "data": (224, 160, 48)}
    shown = {name: counts.get(colour, 0) for name, colour in bar.items()}
    assert shown["compute"] > shown["waiting"] > shown["data"] > 1000
