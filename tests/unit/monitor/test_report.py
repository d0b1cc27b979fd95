"""``hvkit report``: what it reads, prints and draws."""

import json
import os
import re
import shutil
import signal
import subprocess

import pytest
from PIL import Image
from rich.console import Console

from hvkit.cli import main
from hvkit.errors import HvkitError
from hvkit.monitor import terminal_report
from hvkit.monitor.recorded_run import read
from hvkit.monitor.report_page import page

HOSTS = ["node1", "node1", "node2", "node2"]


def start(step=0, **more):
    return {"start": {"time": 1e9 + step, "step": step, "hosts": HOSTS, **more}}


def record(step, loss=1.0, ranks=4, **more):
    return {
        "step": step,
        "time": 1e9 + step,
        "loss": loss,
        "steps": 10,
        "samples_per_second": 100.0 * ranks,
        "ranks": {"samples_per_second": [100.0] * ranks, "last": [1, 1, 1, 7][:ranks]},
        "seconds": {"step": 0.1, "data": 0.01, "compute": 0.05, "waiting": 0.03, "allreduce": 0.01},
        "sent": {"gradients": 2e6},
        "host": {"node1": {"cpu": 50.0}, "node2": {"cpu": 60.0}},
        **more,
    }


@pytest.fixture
def folder(tmp_path):
    def write(*lines):
        text = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines)
        (tmp_path / "metrics.jsonl").write_text(text + "\n")
        return tmp_path

    return write


def test_the_records_are_read(folder):
    run = read(folder(start(), record(10, 2.0), record(20, 1.0), {"end": {}}))
    assert run.curves["loss"] == [(10, 2.0), (20, 1.0)]
    assert run.steps == 20
    assert run.busy() == pytest.approx(0.6)
    assert run.last()[0] == (3, 0.7)
    assert run.sent() == {"gradients": 2e6}


def test_steps_that_a_restart_repeats_count_once(folder):
    lines = [
        start(),
        record(10, 3.0),
        {"step": 20, "time": 1e9, "logged": {"val_loss": 9.0}},
        record(20, 9.0),
        start(10, restart=1, reason="rank 3 on node2 was killed"),
        record(20, 2.0),
    ]
    run = read(folder(*lines))
    assert run.curves["loss"] == [(10, 3.0), (20, 2.0)]
    assert run.curves["val_loss"] == []
    assert run.starts[1].lost == 10
    assert run.starts[1].reason == "rank 3 on node2 was killed"


def test_a_new_run_in_the_same_folder_takes_the_place_of_the_one_before(folder):
    run = read(folder(start(), record(10, 3.0), record(20), start(), record(10, 2.0)))
    assert run.curves["loss"] == [(10, 2.0)]
    assert [each.lost for each in run.starts] == [0]


def test_what_a_reader_must_know_comes_with_the_numbers(folder):
    lines = [
        *(start(), record(10), record(30), {"end": {}}),
        start(),
        record(10, skipped=2),
        record(20, None),
        {"step": 20, "time": 1e9, "logged": {"val_loss": None}},
        {"end": {"error": "ValueError: <boom>"}},
    ]
    run = read(folder(*lines))
    assert terminal_report.troubles(run) == [
        "the run ended with ValueError: <boom>",
        "val_loss was NaN or infinite in 1 record, at step 20 first",
        "loss was NaN or infinite in 1 record, at step 20 first",
        "2 steps were skipped: NaN or infinite gradients",
        "an earlier run of 30 steps in this folder is not shown",
    ]
    assert "<p>The run ended with ValueError: &lt;boom&gt;.</p>" in page(run)
    console = Console(record=True, width=120, file=open(os.devnull, "w"))  # noqa: SIM115
    terminal_report.show(run, console)
    assert "the run ended with ValueError: <boom>" in console.export_text()


def shown(run):
    console = Console(record=True, width=120, file=open(os.devnull, "w"))  # noqa: SIM115
    terminal_report.show(run, console)
    return console.export_text()


def test_troubles_come_before_the_numbers(folder):
    text = shown(read(folder(start(), record(10), {"end": {"error": "KeyError: 'x'"}})))
    assert text.index("the run ended with KeyError: 'x'") < text.index("metric")


def test_leaving_after_sigterm_is_no_error(folder):
    run = read(folder(start(), record(10), {"end": {"left": True}}))
    assert terminal_report.troubles(run) == ["the run left after SIGTERM, with a checkpoint"]


def test_a_run_that_failed_before_its_first_record_says_how(folder):
    with pytest.raises(HvkitError, match="no record of all ranks; it ended with ValueError: boom"):
        read(folder(start(), {"end": {"error": "ValueError: boom"}}))


def test_a_later_run_without_a_record_hides_no_earlier_one(folder):
    lines = [start(), record(10), record(30), {"end": {}}, start(), {"end": {"error": "E: x"}}]
    run = read(folder(*lines))
    assert run.steps == 30
    said = "a later run in this folder has no record of all ranks; it ended with E: x"
    assert terminal_report.troubles(run) == [said]


def test_text_of_a_run_commands_no_terminal(folder):
    bad = "\x1b]0;owned\x07"
    end = {"end": {"error": bad, "last": {"reason": bad}}}
    lines = [start(hosts=[bad] * 4), record(10, **{bad: 1.0}), end]
    for each in (lines, [*lines, start(), {"end": {"error": bad}}]):
        assert "\x1b" not in shown(read(folder(*each)))


def test_smallest_largest_and_last_value_of_a_metric(folder):
    run = read(folder(start(), record(10, 3.0), record(20, 1.0), record(30, 2.0)))
    assert re.search(r"loss +3 +1 +3 +2 *\n", shown(run))
    run = read(folder(start(), record(10, 3.0), record(20, 1.0), record(30, None)))
    assert re.search(r"loss +3 +1 +3 +nan *\n", shown(run))


def test_steps_lost_are_those_that_ranks_had_begun(folder):
    lines = [start(), record(10), start(10, reason="rank 1 was killed", reached=17), record(20)]
    assert [each.lost for each in read(folder(*lines)).starts] == [0, 7]


def test_steps_without_a_record_before_an_error_count_and_show_a_nan(folder):
    logged = {"step": 14, "time": 1e9 + 14, "logged": {"loss": None}}
    end = {"end": {"time": 1e9 + 14, "step": 14, "error": "FloatingPointError: NaN"}}
    run = read(folder(start(), record(10), logged, end))
    assert (run.steps, run.seconds) == (14, 14.0)
    assert "loss was NaN or infinite in 1 record, at step 14 first" in terminal_report.troubles(run)
    run = read(folder(start(), record(10), logged, end, start(10, reason="x"), record(20)))
    assert (run.steps, run.seconds, run.starts[1].lost) == (20, 20.0, 4)


def test_a_run_that_was_resumed_shows_its_starts(folder):
    run = read(folder(start(), record(10), start(10), record(20)))
    assert [each.reason for each in run.starts] == ["", "resumed"]
    assert re.search(r" resumed *\n", shown(run))
    assert "<td>resumed</td>" in page(run)


def test_with_a_parameter_server_the_report_is_about_rank_0(folder):
    lines = [start(hosts=["node1"], size=4), record(10, ranks=1), {"end": {}}]
    run = read(folder(*lines))
    assert terminal_report.headline(run) == (
        "10 steps in 10 s on rank 0 of 4 ranks; 100 samples a second; busy 60%"
    )


def test_steps_before_a_monitor_joined_do_not_count(folder):
    run = read(folder(start(300), record(310)))
    assert terminal_report.headline(run).startswith("10 steps, up to step 310, in 10 s")
    assert "<b>10</b><span>steps in 10 s</span>" in page(run)


def test_a_run_that_ended_well_has_no_troubles(folder):
    run = read(folder(start(), record(10), {"end": {}}))
    assert terminal_report.troubles(run) == []
    assert 'class="card note"' not in page(run)


def test_a_run_without_an_end_says_so_until_it_has_one(folder):
    lines = [start(), record(10), {"end": {}}, start(10, reason="rank 1 was killed"), record(20)]
    (said,) = terminal_report.troubles(read(folder(*lines)))
    assert said.startswith("no end is recorded")
    assert terminal_report.troubles(read(folder(*lines, {"end": {}}))) == []


def test_what_a_restart_repeats_was_not_nan(folder):
    lines = [start(), record(20, None), start(10, reason="rank 1 left"), record(20), {"end": {}}]
    assert terminal_report.troubles(read(folder(*lines))) == []


def test_a_metric_without_any_value_is_no_error_of_the_report(folder):
    logged = {"step": 20, "time": 1e9, "logged": {"val_loss": 9.0}}
    run = read(folder(start(), record(10), logged, start(10, reason="x"), record(20)))
    console = Console(record=True, width=120, file=open(os.devnull, "w"))  # noqa: SIM115
    terminal_report.show(run, console)
    assert "val_loss" not in console.export_text()


@pytest.mark.parametrize("value", [None, "x", [], {}, 0, -1, "NaN", "Infinity", "1" * 400])
def test_no_value_of_a_record_breaks_the_report(folder, value):
    raw = value if isinstance(value, str) and value != "x" else json.dumps(value)
    for name in ("step", "time", "loss", "steps", "samples_per_second", "ranks", "seconds", "host"):
        line = json.dumps(record(20) | {name: "HERE"}).replace('"HERE"', raw)
        run = read(folder(start(), record(10), line, record(30), {"end": {}}))
        shown(run)
        page(run)
        assert run.steps >= 30


def test_a_run_without_a_record_of_all_ranks_says_what_there_is(folder):
    logged = {"step": 3, "time": 1e9, "logged": {"loss": None}}
    end = {"end": {"time": 1e9, "step": 3, "error": "E: \x1b[31mx"}}
    with pytest.raises(HvkitError) as error:
        read(folder(start(), logged, end))
    said = "no record of all ranks; it ended after 3 steps with E: "
    assert said in str(error.value)
    assert str(error.value).endswith("; loss NaN or infinite")
    assert "\x1b" not in str(error.value)


def test_lines_that_are_no_records_are_left_out_and_counted(folder):
    broken = ['{"step": 3', "[]", '"x"', '{"step": "a", "time": 1}', '{"start": {}}', "\x00"]
    run = read(folder(start(), record(10), *broken))
    assert run.unreadable == len(broken)
    assert len(run.records) == 1


def test_a_speed_by_number_of_ranks_follows_restarts_on_fewer(folder):
    run = read(folder(start(), record(10), start(10), record(20, ranks=2)))
    assert run.scaling() == {2: 200.0, 4: 400.0}
    assert "scaling" in page(run)


@pytest.mark.parametrize("text", [None, "", "{}", "no json"])
def test_a_folder_without_a_record_is_an_error_that_says_so(tmp_path, text, capsys):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(HvkitError, match=r"metrics\.jsonl"):
        read(tmp_path)
    assert main(["report", str(tmp_path)]) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_the_page_is_there_also_if_nobody_reads_the_text_to_its_end(folder, monkeypatch):
    place = folder(start(), record(10))

    def closed(*_):
        raise BrokenPipeError

    monkeypatch.setattr(terminal_report, "show", closed)
    with pytest.raises(SystemExit) as end:
        main(["report", str(place)])
    assert end.value.code == 128 + signal.SIGPIPE
    assert "<svg" in (place / "report.html").read_text()


def test_text_that_is_no_utf_8_is_shown(folder):
    place = folder(start(), record(10), {"end": {"time": 1e9 + 10, "error": "no \udcff"}})
    assert main(["report", str(place)]) == 0
    assert "no \\udcff" in (place / "report.html").read_text()


def test_the_terminal_shows_speed_parts_and_restarts(folder):
    run = read(folder(start(), record(10), start(5, reason="rank 1 [x] left"), record(20)))
    console = Console(record=True, width=120, file=open(os.devnull, "w"))  # noqa: SIM115
    terminal_report.show(run, console)
    text = console.export_text()
    assert "20 steps in 20 s on 4 ranks of 2 hosts" in text
    assert "400 samples a second; ranks busy 60%\n" in text
    assert re.search(r"waiting +30.00 +30%", text)
    assert "rank 3 on node2 was last in 70% of steps" in text
    assert "rank 1 [x] left" in text
    assert "a rank sends 2 MB a step: gradients" in text


def test_text_from_the_run_is_no_markup(folder):
    bad = "<script>alert(1)</script>"
    lines = [start(), record(10, **{bad: 1.0}), start(10, reason=bad, hosts=[bad]), record(20)]
    html = page(read(folder(*lines)))
    assert bad not in html
    assert re.findall("<script[^>]*>", html) == [
        '<script type="application/json" id="data">',
        "<script>",
    ]
    assert "&lt;script&gt;" in html


def test_a_long_run_is_a_small_page_that_needs_no_network(folder):
    hosts = [f"node{i // 8}" for i in range(512)]
    names = {f"metric{i}": 1.0 / (i + 1) for i in range(40)}
    loads = {host: {"cpu": 50.0, "memory": 2.0, "sent_mb_s": 3.0} for host in sorted(set(hosts))}
    ranks = {"samples_per_second": [100.0] * 512, "last": [1] * 512}
    lines = [
        record(n, n / 7, ranks=4, **names) | {"host": loads, "ranks": ranks} for n in range(1, 901)
    ]
    html = page(read(folder({"start": {"time": 0, "step": 0, "hosts": hosts}}, *lines)))
    assert len(html.encode()) < 300_000
    assert not re.search(r"(src|href|url|import|http)[=(:]", html)


def charts_of(html):
    """By title: the legend's names, and each line's points."""
    (data,) = re.findall(r'id="data">(.*?)</script>', html)
    numbers = iter(json.loads(data)["charts"])
    found = {}
    for each in re.findall(r'<div class="card"><h3>(.*?)</h3>(.*?)</svg>', html):
        names = re.findall(r'<span class="key"[^>]*>(.*?) <b>', each[1])
        lines = [list(zip(line[::2], line[1::2], strict=True)) for line in next(numbers)]
        found[each[0]] = dict(zip(names, lines, strict=True))
    return found


def logged(step, **values):
    return {"step": step, "time": 1e9 + step, "logged": values}


def test_training_and_validation_are_on_one_chart(folder):
    lines = [
        start(),
        record(10, 3.0, accuracy=0.1, test_accuracy=0.3),
        record(20, 2.0, accuracy=0.2, gradient_norm=4.0, applied_gradient_norm=1.0),
        logged(20, epoch_loss=2.5, epoch_val_loss=2.75),
        logged(20, epoch_loss_of_rows=1.0),
    ]
    charts = charts_of(page(read(folder(*lines))))
    assert charts["loss"] == {
        "training": [(20, 2.5)],
        "validation": [(20, 2.75)],
        "batches": [(10, 3), (20, 2)],
    }
    assert {*charts["accuracy"]} == {"training", "test"}
    assert {*charts["gradient_norm"]} == {"averaged", "applied"}
    # A metric that has a chart for itself has its own name.
    assert charts["epoch_loss_of_rows"] == {"": [(20, 1)]}


def test_all_charts_of_a_page_have_one_range_of_steps(folder):
    lines = [start(), record(40), record(80), logged(60, val_loss=1.0, late=2.0), {"end": {}}]
    html = page(read(folder(*lines)))
    assert '"first":0,"last":80,' in html

    def places(title):
        (chart,) = re.findall(f"<h3>{title}</h3>.*?</svg>", html)
        lines = re.findall(r'points="(.*?)"', chart)
        return [[float(point.split(",")[0]) for point in line.split()] for line in lines]

    validation, training = places("loss")
    left = 2 * training[0] - training[1]
    at_60 = left + 0.75 * (training[1] - left)
    assert places("late") == [validation] == [[pytest.approx(at_60, abs=0.1)]]
    assert places("samples a second, all ranks") == [training]


def two_runs(tmp_path, *names, ranks=(1, 2)):
    for name, size in zip(names, ranks, strict=True):
        (tmp_path / name).mkdir(parents=True)
        lines = [
            start(hosts=HOSTS[:size]),
            *(record(step, size / step, ranks=size) for step in (10, 20)),
            logged(20, epoch_val_loss=0.5 * size) if size > 1 else logged(20, val_loss=0.25),
            {"end": {}},
        ]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return [str(tmp_path / name) for name in names]


def test_runs_are_compared_side_by_side(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report", *two_runs(tmp_path, "alone", "both")]) == 0
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
    assert '<td>speedup over alone</td><td class="n">1.00x</td><td class="n">2.00x</td>' in html


def test_a_speedup_that_more_ranks_do_not_explain_has_a_remark(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    alone, both = two_runs(tmp_path, "alone", "both")
    file = tmp_path / "alone" / "metrics.jsonl"
    single = re.sub(r'"ranks": {.*?}, ', "", file.read_text())  # as a single rank writes it
    file.write_text(single)
    file = tmp_path / "both" / "metrics.jsonl"
    text = file.read_text()
    faster = text.replace(": 200.0,", ": 430.0,").replace("[100.0, 100.0]", "[215.0, 215.0]")
    file.write_text(faster)
    assert main(["report", alone, both]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "both: a speedup of 4.30x is more than 2 ranks explain: alone was measured" in said
    assert "both: a rank takes 21.5 samples a step, in alone 10: the speedup compares" in said
    assert "<p>Both: a speedup of 4.30x" in (tmp_path / "comparison.html").read_text()
    file.write_text(text)
    assert main(["report", alone, both]) == 0
    assert "a rank takes" not in capsys.readouterr().out


def test_files_beside_the_folders_of_runs_are_no_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    two_runs(tmp_path, "alone", "both")
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


def test_values_that_do_not_change_or_are_missing_have_a_chart(folder):
    run = read(folder(start(), record(10, 0.0), record(20, None)))
    assert "<svg" in page(run)


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(
    BROWSER is None and "HVKIT_REQUIRE_CLUSTER" not in os.environ, reason="needs Chromium"
)
def test_a_browser_shows_the_page(folder, tmp_path):
    lines = [record(n, 100.0 / n) for n in range(10, 500, 10)]
    assert main(["report", str(folder(start(), *lines))]) == 0
    picture = tmp_path / "page.png"
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,1600"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    page_url = (tmp_path / "report.html").as_uri()
    subprocess.run(
        [*command, profile, f"--screenshot={picture}", page_url],
        check=True,
        capture_output=True,
        timeout=90,
    )
    # The script, under a pointer.
    hover = (
        "<script>const at = charts[0].drawn, box2 = at.getBoundingClientRect();"
        "at.dispatchEvent(new PointerEvent('pointermove',"
        "{clientX: box2.left + box2.width * 300 / 560}))</script></body>"
    )
    moved = tmp_path / "moved.html"
    moved.write_text((tmp_path / "report.html").read_text().replace("</body>", hover))
    dumped = subprocess.run(
        [*command, profile, "--dump-dom", moved.as_uri()],
        check=True,
        capture_output=True,
        text=True,
        timeout=90,
    ).stdout
    assert '<div id="step">step 244</div>' in dumped
    assert "<b>0.4167</b>" in dumped  # the loss at step 240
    assert dumped.count('visibility="visible"') == len(charts_of(page(read(tmp_path))))
    image = Image.open(picture).convert("RGB")
    counts = {colour: count for count, colour in image.getcolors(1 << 24)}
    # The bar with the parts of a step: half of it is compute, a tenth each data and allreduce.
    bar = {"compute": (42, 157, 111), "waiting": (214, 69, 80), "data": (224, 160, 48)}
    shown = {name: counts.get(colour, 0) for name, colour in bar.items()}
    assert shown["compute"] > shown["waiting"] > shown["data"] > 1000
