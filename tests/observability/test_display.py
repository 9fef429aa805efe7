"""What people see: progress lines, the bar, plots, the summary, and each process's log file."""

import io
import logging
import time
import warnings

import pytest

from swift.errors import ResourceError, format_seconds
from swift.observability.curves import Curves
from swift.observability.jsonl import JsonlWriter
from swift.observability.plots import Marks, smooth, write_plots
from swift.observability.progress import Progress
from swift.observability.pulse import BAR_S, LINE_S, Pulse
from swift.observability.rank_log import RankLog
from swift.observability.summary import summarise
from swift.startup import hush_libraries

LOGS = {"reward": 0.5, "reward_std": 0.25, "completions/mean_length": 40.0, "tokens_per_s": 123.4, "step_time": 1.5}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def train_rows(steps):
    return [
        {
            "attempt": 1,
            "step": step,
            "max_steps": 30,
            "loss": 0.1,
            "grad_norm": 1.0,
            "kl": 0.01,
            "entropy": 1.0,
            "reward": step / 10,
            "rewards/accuracy/mean": 1.0 - step / 10,
            "completions/mean_length": 30.0,
            "step_time": 2.0,
            "time/generate": 1.0,
            "time/train": 0.5,
            "tokens/trained": 100.0,
        }
        for step in steps
    ]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (185, "3m05s"), (7620, "2h07m"), (273600, "3d04h")]
)
def test_durations_are_readable(seconds, text):
    assert format_seconds(seconds) == text


def test_without_a_terminal_each_log_step_is_one_line():
    stream, clock, recorded = io.StringIO(), Clock(), []
    progress = Progress(100, start_step=10, stream=stream, record=recorded.append, clock=clock)
    progress.line("plan: 1 device")
    clock.now = 20.0
    progress.advance(20)
    progress.log(20, LOGS)
    progress.log(20, {"eval_reward": 0.75})
    progress.warn("look")
    progress.close()
    assert stream.getvalue().splitlines() == [
        "plan: 1 device",
        "step 20/100 | reward 0.500±0.25 | len 40 | 123 tok/s | 1.50 s/step | 2m40s left",
        "step 20/100 | evaluation | reward 0.750",
        "swift: warning: look",
    ]
    assert recorded == stream.getvalue().splitlines()


def test_on_a_terminal_a_bar_shows_the_same_values():
    stream = io.StringIO()
    progress = Progress(100, stream=stream, terminal=True)
    progress.line("plan: [1] device")
    progress.advance(50)
    progress.log(50, LOGS)
    progress.close()
    progress.close()
    shown = stream.getvalue()
    assert "plan: [1] device" in shown
    assert "50/100" in shown
    assert "reward" in shown


def test_a_line_is_cut_to_the_width_of_a_terminal_where_nothing_of_it_is_needed_and_escapes_are_written_out(
    monkeypatch,
):
    monkeypatch.setenv("COLUMNS", "60")
    streams, recorded = (io.StringIO(), io.StringIO()), []
    for stream, terminal in zip(streams, (True, False), strict=True):
        progress = Progress(100, stream=stream, terminal=terminal, record=recorded.append)
        progress.line("sample \x1b[2J" + "x" * 100, cut=True)
        progress.warn("y" * 100)
        progress.close()
    on_terminal, elsewhere = (stream.getvalue() for stream in streams)
    assert "sample \\x1b[2J" in on_terminal and "x" * 100 not in on_terminal and "y" * 100 in on_terminal
    assert "\x1b[2J" not in on_terminal and recorded == elsewhere.splitlines() * 2 and "x" * 100 in elsewhere


def test_a_long_step_is_a_line_now_and_then_where_there_is_no_bar():
    stream, clock, recorded, doing = io.StringIO(), Clock(), [], [""]
    progress = Progress(100, start_step=12, stream=stream, record=recorded.append, clock=clock)
    pulse = Pulse(progress, lambda: doing[0], clock=clock)

    def seconds_with_a_line(until):
        found = []
        while clock.now < until:
            clock.now += 1.0
            size = len(stream.getvalue())
            pulse.look()
            found += [clock.now] * (len(stream.getvalue()) > size)
        return found

    assert seconds_with_a_line(40.0) == [], "between phases there is nothing to tell"
    doing[0] = "sampling 40/64, rewards 12/64"
    assert seconds_with_a_line(250.0) == [41.0, 41.0 + 2 * LINE_S, 41.0 + 6 * LINE_S]
    assert stream.getvalue().splitlines()[0] == "step 13 | sampling 40/64, rewards 12/64 | 41s"
    progress.advance(13)
    progress.log(13, LOGS)
    assert seconds_with_a_line(300.0) == [251.0 + LINE_S], "a line of the run begins a new silence"
    assert stream.getvalue().splitlines()[-1] == "step 14 | sampling 40/64, rewards 12/64 | 30s"
    assert len(recorded) == 1, "the log file has none of them"


def test_a_long_step_is_in_the_bar_until_it_ends():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(100, stream=stream, terminal=True, clock=clock)
    pulse = Pulse(progress, lambda: "training 3/8 micro-batches", clock=clock)

    def shown():
        return progress._bar.tasks[0].fields["status"]

    progress.advance(1)
    progress.log(1, LOGS)
    pulse.look()
    for _ in range(int(BAR_S)):
        assert "training" not in shown()
        clock.now += 1.0
        pulse.look()
    assert shown() == "training 3/8 micro-batches | 5s"
    progress.advance(2)
    assert shown().startswith("reward 0.500")
    progress.close()


def test_the_state_is_shown_from_a_thread():
    stream = io.StringIO()
    progress, looked = Progress(100, stream=stream), []
    with Pulse(progress, lambda: looked.append(1) or ""):
        deadline = time.monotonic() + 10
        while not looked and time.monotonic() < deadline:
            time.sleep(0.05)
    assert looked


def test_every_picture_with_values_is_drawn_and_no_other(tmp_path):
    write_plots(train_rows(range(1, 31)), tmp_path / "images")
    written = list((tmp_path / "images").iterdir())
    assert {path.stem for path in written} == {"reward", "length", "policy", "optimization", "time"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    write_plots([{"step": 1, "loss": 1.0}], tmp_path)
    assert [path.name for path in tmp_path.glob("*.png")] == ["optimization.png"]


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draws rows; the panels of all pictures by title."""
    from matplotlib.figure import Figure

    figures = []
    initialise = Figure.__init__
    monkeypatch.setattr(Figure, "__init__", lambda self, *a, **k: (figures.append(self), initialise(self, *a, **k))[1])

    def draw(rows, **marks):
        write_plots(rows, tmp_path, Marks(**marks))
        return {axes.get_title(loc="left"): axes for figure in figures for axes in figure.axes}

    return draw


def test_ticks_are_logged_steps(drawn):
    assert list(drawn(train_rows([1, 10, 20, 30]))["loss"].get_xticks()) == [1, 10, 20, 30]
    ticks = drawn(train_rows(range(3, 901, 3)))["loss"].get_xticks()
    assert 4 < len(ticks) <= 12
    assert {*ticks} <= {*range(3, 901, 3)}


def test_ticks_are_those_of_all_panels_where_one_has_few_values(drawn):
    rows = train_rows([1, 2, 3, 4])
    for row in rows[1:]:
        del row["entropy"]
    panels = drawn(rows)
    assert list(panels["entropy"].get_xticks()) == list(panels["KL to the reference"].get_xticks()) == [1, 2, 3, 4]


def test_one_function_gives_its_panel_the_name_and_several_a_legend(drawn):
    assert "accuracy" in drawn(train_rows([1, 2]))
    rows = [row | {"rewards/format/mean": row["rewards/accuracy/mean"]} for row in train_rows([1, 2])]
    panel = drawn(rows)["per function"]
    assert [text.get_text() for text in panel.get_legend().get_texts()] == ["accuracy", "format"]
    looks = {(line.get_linestyle(), line.get_linewidth()) for line in panel.get_lines()}
    assert len(looks) == 2  # equal curves are both seen


def test_the_share_cut_off_has_the_whole_scale(drawn):
    low, high = drawn([row | {"completions/clipped_ratio": 1.0} for row in train_rows([1, 2])])[
        "share cut off"
    ].get_ylim()
    assert low < 0 < 1 < high < 1.1


def test_time_is_a_bar_over_the_steps_it_is_the_mean_of(drawn):
    bars = drawn(train_rows([1, 5, 10]))["seconds per step, by phase"].patches
    assert [bar.get_label() for bar in bars] == ["generate", "train", "other"]
    heights, edges, below = bars[-1].get_data()
    assert (list(heights), list(edges), list(below)) == ([2.0] * 3, [0.5, 1.5, 5.5, 10.5], [1.5] * 3)


def test_saving_stands_on_the_step_that_was_saved(drawn):
    rows = train_rows([1, 2, 3])
    rows[2]["time/save"] = 3.0  # after step 2 was logged
    (*_, bar) = drawn(rows)["seconds per step, by phase"].patches
    assert (bar.get_x(), bar.get_width(), bar.get_y(), bar.get_height()) == (1.5, 1.0, 2.0, 3.0)


def test_alerts_and_checkpoints_are_marked_beside_the_name_of_the_run(drawn):
    panels = drawn(train_rows(range(1, 31)), name="v0-$run$", alerts=[7, 7, 20, 99], checkpoints=[10, 30])
    for title, axes in panels.items():
        marked = {line.get_gid(): list(line.get_xdata()) for line in axes.lines if line.get_gid()}
        assert marked == {"alerts": [7, 20], "checkpoints": [10, 30]}, title
    names = [axes.get_title(loc="right") for axes in panels.values()]
    assert names.count(r"v0-\$run\$") == 5, "of each picture"


def test_regions_of_causes_are_marked_in_each_panel(drawn):
    panels = drawn(train_rows(range(1, 31)), regions=[("non_finite", 3, 9), ("truncation", 20, 30)])
    for title, axes in panels.items():
        spans = [patch for patch in axes.patches if patch.get_gid() == "region"]
        ends = [(span.get_x(), span.get_x() + span.get_width()) for span in spans]
        assert ends == [(2.5, 9.5), (19.5, 30.5)], title
    texts = [text.get_text() for axes in panels.values() for text in axes.texts]
    assert texts == ["non_finite", "truncation"] * 5, "once in each picture"


def test_the_curves_of_a_run_have_its_alerts_and_checkpoints(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("swift.observability.plots.write_plots", lambda *given: drawn.append(given[-1]))
    JsonlWriter(tmp_path / "logging.jsonl").write(*train_rows([1, 2]))
    JsonlWriter(tmp_path / "alerts.jsonl").write({"attempt": 1, "step": 2})
    for name in ("checkpoint-2", "checkpoint-x"):
        (tmp_path / name).mkdir()
    with Curves(tmp_path):
        pass
    assert drawn == [Marks(tmp_path.name, [2], [2])]


@pytest.mark.parametrize("name", ["$\\frac{1}$", "_hidden", "\x1b[2Jred", "a\nb"])
def test_any_name_of_a_reward_function_can_be_drawn(drawn, name):
    rows = [row | {f"rewards/{name}/mean": 1.0} for row in train_rows([1, 2])]
    texts = drawn(rows)["per function"].get_legend().get_texts()
    assert len(texts) == 2 and "\x1b" not in texts[1].get_text()


def test_values_that_are_no_numbers_make_no_picture(tmp_path):
    write_plots([{"step": 1, "reward": float("nan"), "kl": None, "loss": float("inf")}], tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rows", [train_rows([1]), [{"step": 1, "reward": None, "eval_reward": 0.5}]])
def test_one_point_can_be_drawn(tmp_path, rows):
    write_plots(rows, tmp_path)
    assert (tmp_path / "reward.png").is_file()


def test_curves_are_drawn_at_a_save_and_at_an_end_of_any_kind(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("swift.observability.plots.write_plots", lambda rows, *where: drawn.append(len(rows)))
    log = JsonlWriter(tmp_path / "logging.jsonl")
    log.write(*train_rows([1]))
    with pytest.raises(KeyError), Curves(tmp_path) as curves:
        curves.draw()
        while not drawn:
            time.sleep(0.001)
        log.write(*train_rows([2]))
        raise KeyError
    assert drawn == [1, 2]


def test_curves_that_cannot_be_drawn_do_not_hide_what_ended_the_run(tmp_path):
    JsonlWriter(tmp_path / "logging.jsonl").write(*train_rows([1]))
    (tmp_path / "images").touch()
    with pytest.raises(KeyError), Curves(tmp_path):
        raise KeyError
    with pytest.raises(ResourceError, match="images"), Curves(tmp_path):
        pass


def test_nothing_to_draw_makes_no_folder(tmp_path):
    write_plots([], tmp_path / "images")
    assert list(tmp_path.iterdir()) == []


def test_smoothing_keeps_length_and_constants_and_short_curves():
    assert smooth([1.0, 5.0, 2.0]) == [1.0, 5.0, 2.0]
    assert smooth([2.0] * 50) == [2.0] * 50
    assert smooth([0.0] * 9 + [3.0] + [0.0] * 9)[8:12] == [0.0, 1.5, 1.5, 0.0]
    falling = [50.0 - step for step in range(40)]
    assert smooth(falling)[:2] == [50.0, 49.5], "it begins at the first value, and looks back only"


def test_the_summary_says_what_was_reached_and_where_it_lies(tmp_path):
    (tmp_path / "images").mkdir()
    text = summarise(
        [*train_rows(range(1, 31)), {"attempt": 1, "step": 30, "eval_reward": 0.9}],
        run_dir=tmp_path,
        last_checkpoint=tmp_path / "checkpoint-30",
    )
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "Steps logged: up to 30 of 30" in lines
    assert "reward 0.1000 3.0000 3.0000 (step 30)" in lines
    assert "accuracy 0.9000 -2.0000 0.9000 (step 1)" in lines
    assert "generate 1.000 s 50%" in lines
    assert "other 0.500 s 25%" in lines
    assert "50 trained tokens per second" in lines
    assert "checkpoint-30 last checkpoint" in lines
    assert "images curves" in lines
    assert "completions.jsonl" not in text
    assert summarise([], run_dir=tmp_path).startswith("No step was logged.")


def test_the_summary_says_how_far_sampler_and_trainer_were_apart(tmp_path):
    key = "mismatch/logp_abs_diff_max"
    rows = [{"step": 1, key: 4e-6, "off_policy/max": 0.0}, {"step": 2, key: 1.4e-6}, {"step": 3}]
    assert f"sampler against trainer\n  {key}  4.0e-06\n" in summarise(rows, run_dir=tmp_path)
    rows[1] |= {key: 0.2, "off_policy/max": 1.0, "health/engine_restarts": 1.0}
    text = summarise(rows, run_dir=tmp_path)
    assert f"{key}  2.0e-01  (tokens were up to 1 step old)\n  health/engine_restarts  1\n" in text


def test_the_rank_log_holds_logging_warnings_and_console_lines(tmp_path):
    path = tmp_path / "logs" / "rank-0.log"
    log = RankLog(path)
    logging.getLogger("swift.x").warning("from logging")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)  # pytest shows warnings itself; go through logging here
        logging.captureWarnings(True)
        warnings.warn("from warnings", stacklevel=1)
    log.line("from the console")
    logging.getLogger("swift.x").warning("\x1b[2J\x9b of a %s\nsecond line", "reward")
    log.close()
    logging.getLogger("swift.x").warning("too late")
    text = path.read_text()
    assert "swift.x: \\x1b[2J\\x9b of a reward\nsecond line\n" in text and "\x1b" not in text
    assert all(source in text for source in ("from logging", "from warnings", "from the console"))
    assert "too late" not in text


def test_what_a_library_says_before_there_is_a_log_file_comes_into_it_and_not_onto_the_console(tmp_path, monkeypatch):
    monkeypatch.delenv("SWIFT_DEBUG", raising=False)
    library, console = logging.getLogger("transformers"), io.StringIO()
    before = list(library.handlers)
    library.addHandler(logging.StreamHandler(console))
    try:
        hush_libraries()
        library.warning("LOAD REPORT")
        RankLog(tmp_path / "rank-0.log").close()
        library.warning("afterwards")
    finally:
        library.handlers = before
    assert console.getvalue() == ""
    text = (tmp_path / "rank-0.log").read_text()
    assert text.count("LOAD REPORT") == 1
    assert "afterwards" not in text


def test_a_log_row_weighs_as_many_steps_as_it_stands_for(tmp_path):
    rows = [
        {"step": 1, "max_steps": 5, "step_time": 5.0, "time/train": 4.0, "tokens/trained": 100.0},
        {"step": 5, "max_steps": 5, "step_time": 1.0, "time/train": 0.5, "tokens/trained": 100.0},
    ]
    text = summarise(rows, run_dir=tmp_path)
    assert "all          1.800 s" in text
    assert "train        1.200 s" in text
    assert "56 trained tokens per second" in text
