"""The shipped example plugin works as its comments say."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGIN = str(ROOT / "examples" / "train" / "grpo" / "plugin" / "plugin.py")


@pytest.fixture
def rewards(arguments):
    from swift.rewards import RewardPipeline

    built = []

    def build(*names):
        args = arguments(reward_funcs=list(names), external_plugins=[PLUGIN])
        built.append(RewardPipeline(args, seed=1, max_completion_length=10))
        return built[-1]

    yield build
    for pipeline in built:
        pipeline.close()


def test_length_rewards(rewards, group, progress):
    asked = group(["a b", "x" * 1025])
    (scores,) = rewards("dummy", "short_answer").score([asked], progress)
    assert scores.values == [[0.0, 0.8], [1.0, 0.9]]


def test_formatted_accuracy_pays_little_for_the_form_alone(rewards, group, progress):
    texts = ["<think>a</think><answer>4</answer>", "<think>a</think><answer>5</answer>", r"\boxed{4}"]
    (scores,) = rewards("formatted_accuracy").score([group(texts, solution="4")], progress)
    assert scores.values == [[1.0], [0.1], [0.0]]


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("(25 - 5) * 3", 1.0),
        ("3 * (25 - 5) = 60", 1.0),
        ("25 * 3 - 15", 0.1),
        ("60", 0.1),
        ("25 / (5 - 5)", 0.0),
        ("__import__('os')", 0.0),
        ("2 ** 99", 0.0),
        ("(" * 500, 0.0),
    ],
)
def test_countdown(rewards, group, progress, answer, score):
    asked = group([f"<answer>{answer}</answer>"], target=60, nums=[3, 5, 25])
    assert rewards("countdown").score([asked], progress)[0].values == [[score]]


def test_countdown_does_not_apply_to_rows_of_other_tasks(rewards, group, progress):
    asked = group(["<answer>1</answer>"], target=None, nums=None)
    assert rewards("countdown").score([asked], progress)[0].values == [[None]]


def test_diversity_is_the_share_of_words_of_ones_own(rewards, group, progress):
    (scores,) = rewards("diversity").score([group(["a b", "a c d e", ""])], progress)
    assert scores.values == [[0.5], [0.75], [0.0]]


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        grade = "8" if "good" in body["messages"][0]["content"].rpartition("Answer:")[2] else "no idea"
        reply = json.dumps({"choices": [{"message": {"content": grade}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *args):
        pass


def test_the_judge_grades_over_http(rewards, group, progress, monkeypatch):
    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_port}/v1")
    try:
        (scores,) = rewards("judge").score([group(["good one", "bad one"])], progress)
    finally:
        server.shutdown()
        server.server_close()
    assert scores.values == [[0.8], [None]]


def test_the_judge_does_not_apply_without_a_server(rewards, group, progress, monkeypatch):
    monkeypatch.delenv("JUDGE_URL", raising=False)
    (scores,) = rewards("judge").score([group(["a"])], progress)
    assert scores.excluded == ["no_reward"]


def test_the_system_prompt_asks_for_the_tags_that_format_rewards():
    text = (ROOT / "examples" / "train" / "grpo" / "prompt.txt").read_text(encoding="utf-8")
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        assert tag in text
