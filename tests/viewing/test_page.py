"""The page in a real Chromium, over real runs: every view, by mouse and by keyboard. Skipped where there is none."""

import json
import re
import shutil

import pytest
from browser import Browser, find_browser
from cli_fixtures import material  # noqa: F401
from cli_runs import Cli
from hostile_images import encoded
from run_folders import completion, logged, make_folder
from view_process import ViewProcess

from swift.data.images import digest_of
from swift.observability.findings import CAUSES
from swift.observability.jsonl import read_log

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_browser() is None, reason="needs Chromium or Chrome (chromium, google-chrome) on the PATH"),
]
FLAGS = {"beta": 0.04, "record_rollouts": "all", "log_entropy": "true", "num_iterations": 2}
PNG = encoded()
HOSTILE = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script><b id=bold>bold</b>"


@pytest.fixture(scope="module")
def folders(material, tmp_path_factory):  # noqa: F811
    """A run that was resumed, with an alert, and another run."""
    with Cli(*material, tmp_path_factory.mktemp("runs")) as runs:
        first = runs.finish("first", max_steps=4, **FLAGS)
        runs.finish("first", max_steps=6, resume_from_checkpoint="last", **FLAGS)
        second = runs.finish("second", max_steps=4, seed=7, **FLAGS)
        alert = {"attempt": 2, "step": 5, "rule": "kl", "value": 3.0, "sentence": f"kl is 3 {HOSTILE}"}
        (first / "alerts.jsonl").write_text(json.dumps(alert) + "\n")
        yield first, second


@pytest.fixture(scope="module")
def view(folders):
    with ViewProcess(*folders) as process:
        yield process
        assert process.end() == (0, "")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture
def page(browser, view):
    """Opens a fragment in a page that was not there before; no script may fail."""

    def opened(**state):
        browser.open("about:blank")
        browser.open(f"{view.url}#{'&'.join(f'{name}={value}' for name, value in state.items())}")
        ready(browser)
        return browser

    yield opened
    assert browser.errors == []


def ready(browser):
    browser.until("document.querySelector('#main h1') && !document.querySelector('#main[aria-busy]')")


def state(browser):
    return browser.run("Object.fromEntries(new URLSearchParams(location.hash.slice(1)))")


def texts(browser, selector):
    return browser.run(f"[...document.querySelectorAll({selector!r})].map(e => e.innerText)")


def number_of(browser, selector):
    return browser.run(f"document.querySelectorAll({selector!r}).length")


def first_group(folder, **conditions):
    rows = read_log(folder / "completions.jsonl")
    row = next(row for row in rows if all(row[name] == value for name, value in conditions.items()))
    return {"step": row["step"], "group_split": "train", "group_id": row["group_id"]}


def test_curves_of_several_runs_with_marks(page):
    browser = page()
    titles = browser.run("[...document.querySelectorAll('figure')].map(e => e.dataset.title)")
    for title in ("Reward", "Reward by function", "Completion length, tokens", "KL", "Entropy, nats per token"):
        assert title in titles
    for title in ("Clipped share of tokens", "Mismatch: log-prob difference", "Seconds per phase", "Loss"):
        assert title in titles
    assert number_of(browser, "figure[data-title=Reward] path.curve") == 2
    colours = browser.run(
        "[...document.querySelectorAll('figure[data-title=KL] path')].map(p => p.getAttribute('stroke'))"
    )
    assert len(set(colours)) == 2
    for kind in ("restart", "alert", "checkpoint"):
        assert number_of(browser, f"figure[data-title=Reward] line.{kind}") >= 1
    marks = texts(browser, "#marks li")
    assert any("step 4" in mark and "restart: attempt 2" in mark for mark in marks)
    assert any(mark.endswith("alert: kl: kl is 3 " + HOSTILE) for mark in marks)
    browser.click("#run-1")
    browser.until("document.querySelectorAll('figure[data-title=Reward] path.curve').length === 1")
    assert state(browser)["runs"] == "0"


def test_a_drag_zooms_and_keys_do(page):
    browser = page(runs=0)
    x, y = browser.middle("figure[data-title=KL] svg")
    browser.mouse("mousePressed", x - 20, y)
    browser.mouse("mouseMoved", x + 40, y)
    browser.mouse("mouseReleased", x + 40, y)
    browser.until("document.querySelector('#all-steps')")
    ready(browser)
    zoomed = state(browser)
    assert 1 <= int(zoomed["first"]) < int(zoomed["last"]) <= 6
    browser.click("#all-steps")
    browser.until("!document.querySelector('#all-steps')")
    browser.run("document.querySelector('figure[data-title=KL] svg').focus()")
    for key in ("Home", "ArrowRight", "ArrowRight"):
        browser.press(key)
    assert texts(browser, "figure[data-title=KL] .readout")[0].startswith("step 3: kl ")
    browser.press("Enter")
    browser.until("document.querySelector('#filter')")
    assert state(browser) == {"runs": "0", "view": "groups", "first_step": "3", "last_step": "3"}


def test_metrics_are_searched_and_smoothed(page):
    browser = page(runs=0)
    before = number_of(browser, "figure")
    browser.click("#more")
    browser.until(f"document.querySelectorAll('figure').length > {before}")
    browser.choose("#metrics", "rss")
    browser.until("document.querySelectorAll('figure').length === 1")
    browser.choose("#metrics", "rewards/")
    browser.choose("#smooth", "0.5")
    browser.until("location.hash.includes('smooth=0.5') && document.querySelector('figure')")


def test_groups_are_filtered_and_sorted(page, folders):
    browser = page(view="groups")
    rows = read_log(folders[0] / "completions.jsonl")
    assert texts(browser, "#count")[0].startswith(f"{len(rows)} completions in {len(rows) // 4} groups")
    spreads = [float(text) for text in texts(browser, "tbody td:nth-child(4)")]
    assert spreads == sorted(spreads, reverse=True) and len(spreads) == len(rows) // 4
    browser.choose("[name=first_step]", "3")
    browser.choose("[name=finish_reason]", "length")
    expected = [row for row in rows if row["step"] >= 3 and row["finish_reason"] == "length"]
    browser.until(f"document.querySelector('#count').innerText.startsWith('{len(expected)} completions')")
    assert set(texts(browser, "tbody td:first-child")) == {str(row["step"]) for row in expected}
    exported = browser.run("fetch(document.querySelector('#export').href).then(r => r.text())")
    assert [json.loads(line) for line in exported.splitlines()] == expected
    browser.choose("[name=function]", "odd")
    browser.choose("[name=least]", "0.5")
    expected = [row for row in expected if (row["rewards"]["odd"] or 0) >= 0.5]
    browser.until(f"document.querySelector('#count').innerText.startsWith('{len(expected)} completions')")
    browser.choose("[name=text]", "no such text, surely")
    browser.until("document.querySelector('#count').innerText.startsWith('0 completions in 0 groups')")
    browser.choose("[name=text]", "")
    browser.choose("[name=least]", "")
    browser.choose("#run", "1")
    browser.until("document.querySelector('h1').innerText.includes('second')")
    assert state(browser) == {
        "view": "groups",
        "run": "1",
        "first_step": "3",
        "finish_reason": "length",
        "function": "odd",
    }


def test_a_group_side_by_side_and_its_prompt_across_steps(page, folders):
    place = first_group(folders[0], step=1)
    browser = page(view="group", **place)
    rows = [row for row in read_log(folders[0] / "completions.jsonl") if row["group_id"] == place["group_id"]]
    cards = texts(browser, ".side section")
    assert len(cards) == len(rows) == 4
    for card, row in zip(cards, rows, strict=True):
        assert f"{row['completion_tokens']} tokens" in card and row["finish_reason"] in card
    browser.choose("[name=other]", "3")
    browser.click("#compare button")
    browser.until("document.querySelector('#difference')")
    pieces = browser.run("[...document.querySelectorAll('#difference pre > *')].map(e => [e.tagName, e.textContent])")
    for tag, row in (("INS", rows[0]), ("DEL", rows[3])):
        assert "".join(text for kind, text in pieces if kind != tag) == row["completion"]
    browser.click("#across")
    browser.until("document.querySelectorAll('figure').length === 2")
    assert set(texts(browser, "tbody td:first-child")) >= {"1"}
    assert state(browser)["prompt_id"] == rows[0]["prompt_id"]


def test_tokens_are_coloured_by_what_is_on_record(page, folders):
    browser = page(view="completion", index=0, **first_group(folders[0], step=1))
    names = browser.run("[...document.querySelector('#colour').options].map(o => o.value)")
    assert {"policy_logprobs", "sampler_logprobs", "ref_logprobs", "mismatch", "reference", "version", "mask"} <= set(
        names
    )
    tokens = number_of(browser, "#tokens span")
    row = read_log(folders[0] / "completions.jsonl")[0]
    assert tokens == row["completion_tokens"]
    for name in names:
        browser.choose("#colour", name)
        browser.until(f"new URLSearchParams(location.hash.slice(1)).get('colour') === {name!r}")
        ready(browser)
        browser.until(f"document.querySelector('#colour').value === {name!r}")
        if name in ("policy_logprobs", "version", "mask"):
            assert browser.run("[...document.querySelectorAll('#tokens span')].some(e => e.style.backgroundColor)")
    browser.run("document.querySelector('#tokens').focus()")
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    (readout,) = texts(browser, "#token")
    assert re.match(r'Token 2 of \d+: id \d+ ".*"; log-prob, policy -', readout), readout
    assert "policy version 0" in readout and "loss mask 1" in readout
    assert number_of(browser, "#pass option") == 2
    browser.choose("#pass", "2")
    browser.until("location.hash.includes('pass=2')")
    browser.click("#group")
    browser.until("document.querySelector('.side')")


def test_all_of_it_is_reached_by_keyboard(page):
    browser = page()
    seen = []
    for _ in range(400):
        browser.press("Tab")
        focus = browser.run(
            "(e => [e.tagName, e.id || e.textContent.slice(0, 20), e.matches(':focus-visible'),"
            " getComputedStyle(e).outlineStyle])(document.activeElement)"
        )
        if focus[0] == "BODY":
            break
        assert focus[2] and focus[3] != "none", focus
        seen.append(focus[1] if focus[0] != "svg" else "svg")
    assert {"view-curves", "view-groups", "run-0", "run-1", "smooth", "metrics", "more", "svg"} <= set(seen)
    browser.run("[...document.querySelectorAll('#views a')].at(-1).focus()")
    browser.press("Enter")
    browser.until("document.querySelector('#filter')")
    ready(browser)
    for selector, following in (("tbody a", ".side"), (".side a", "#tokens")):
        for _ in range(60):
            if browser.run(f"document.activeElement.matches({selector!r})"):
                break
            browser.press("Tab")
        browser.press("Enter")
        browser.until(f"document.querySelector({following!r})")
        ready(browser)
    browser.run("history.back()")
    browser.until("document.querySelector('.side')")


def test_a_live_run_grows_on_the_page_and_html_in_it_is_text(page, folders):
    browser = page(view="groups", text="window.hacked")
    assert texts(browser, "#count")[0].startswith("0 completions")
    file = folders[0] / "completions.jsonl"
    saved = file.with_suffix(".saved")
    shutil.copy(file, saved)
    call = {"type": "function", "function": {"name": HOSTILE, "arguments": {"x": HOSTILE}}}
    turns = [
        {"role": "assistant", "content": HOSTILE, "tool_calls": [call], "reward": 1.0},
        {
            "role": "tool",
            "name": HOSTILE,
            "content": [{"type": "text", "text": HOSTILE}, {"type": "image", "image": HOSTILE}],
        },
    ]
    row = read_log(file)[0] | {"prompt": HOSTILE, "completion": HOSTILE, "group_id": HOSTILE, "prompt_id": HOSTILE}
    row |= {"finish_reason": HOSTILE, "excluded": HOSTILE, "rewards": {HOSTILE: 1.0}, "columns": {HOSTILE: HOSTILE}}
    row |= {"attempt": 2, "step": 7}
    try:
        with file.open("a") as appended:
            appended.write("".join(json.dumps(one) + "\n" for one in (row, row | {"index": 1, "turns": turns})))
        browser.until("document.querySelector('#count').innerText.startsWith('2 completions in 1 groups')")
        browser.click("tbody a")
        browser.until("document.querySelector('.side')")
        ready(browser)
        assert texts(browser, ".side > section:first-child > pre") == [HOSTILE]
        assert [text.count(HOSTILE) for text in texts(browser, ".side > section:last-child .turn")] == [3, 3]
        browser.click("#compare button")
        browser.until("document.querySelector('#difference')")
        for selector in (".side a", "#group", "#across"):
            browser.click(selector)
            ready(browser)
            browser.until("!document.querySelector('#main[aria-busy]')")
            assert number_of(browser, "main img, main script, #bold") == 0
        assert browser.run("window.hacked") is None
    finally:
        file.unlink()
        saved.rename(file)


@pytest.fixture
def sick(browser, tmp_path):
    """The page of a run that is sick from step 4 to 8, and whose prompts have images."""
    folder = make_folder(tmp_path / "sick")
    folder.write("logging.jsonl", *(logged(step, loss=None if 4 <= step <= 8 else 0.5) for step in range(1, 21)))
    image = {"digest": digest_of(PNG), "path": str(tmp_path / "a.png")}
    (tmp_path / "a.png").write_bytes(PNG)
    prompt = f"[user]\n<image {digest_of(PNG)}>What is <image {'0' * 32}>?"
    turns = [{"role": "tool", "content": [{"type": "image", "image": digest_of(PNG)}]}]
    folder.completions(*(completion(5, index=index, prompt=prompt, images=[image], turns=turns) for index in (0, 1)))
    with ViewProcess(folder.path) as process:
        browser.open("about:blank")
        browser.open(process.url)
        browser.until("document.querySelector('#cause-0-non_finite')")
        yield browser
        browser.open("about:blank")  # which asks for nothing more
        assert browser.errors == []


def test_regions_of_a_cause_are_marks_that_are_chosen_by_key_and_by_mouse(sick):
    browser = sick
    chosen = "#region-Reward-0-non_finite"
    (label,) = browser.run(f"[document.querySelector('{chosen}').getAttribute('aria-label')]")
    assert label == f"non_finite (95 %), steps 4 to 8: {CAUSES['non_finite']}"
    browser.run("document.querySelector('figure[data-title=Reward] svg').focus()")
    browser.press("Tab")
    assert browser.run(f"document.activeElement.matches('{chosen}')")
    browser.press("Enter")
    browser.until("document.querySelector('#cause')")
    ready(browser)
    (shown,) = texts(browser, "#cause")
    assert CAUSES["non_finite"] in shown and "the loss is not finite at steps 4 to 8" in shown and "Fix: " in shown
    assert state(browser) == {"cause": "0-non_finite"}
    assert browser.run(f"document.activeElement.matches('{chosen}.chosen')")
    browser.run("location.hash = ''")
    browser.until("!document.querySelector('#cause')")
    ready(browser)
    browser.click(f"{chosen} rect")
    browser.until("document.querySelector('#cause')")
    browser.click("#cause a")
    browser.until("document.querySelector('#filter')")
    assert state(browser) == {"view": "groups", "run": "0", "first_step": "4", "last_step": "8"}


def test_a_prompt_is_shown_with_its_images(sick):
    browser = sick
    browser.run("location.hash = 'view=completion&step=5&group_split=train&group_id=p0-5&index=0'")
    loaded = "[...document.querySelectorAll('main img')].filter(e => e.complete && e.naturalWidth).length"
    browser.until(f"{loaded} === 2")  # in the prompt, and in the turn
    assert texts(browser, "#prompt")[0].endswith(f"What is <image {'0' * 32}>?")
    browser.run("location.hash = 'view=group&step=5&group_split=train&group_id=p0-5'")
    browser.until(f"{loaded} === 3")


def test_a_link_to_what_is_not_there_is_told(page, browser):
    page(view="group", step=99, group_split="train", group_id="absent")
    assert texts(browser, "#problem") == ["group absent of step 99: not in completions.jsonl, or not read yet"]
    assert browser.errors and all("404" in error for error in browser.errors)
    browser.errors.clear()
