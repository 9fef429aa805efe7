"""The shipped example plugin works as its comments say."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLUGIN = str(ROOT / "examples" / "train" / "grpo" / "plugin" / "plugin.py")


COUNTDOWN = {
    "(25 - 5) * 3": 1.0,
    "3 * (25 - 5) = 60": 1.0,
    "25 * 3 - 15": 0.1,
    "60": 0.1,
    "25 / (5 - 5)": 0.0,
    "__import__('os')": 0.0,
    "2 ** 99": 0.0,
    "(" * 500: 0.0,
}


def test_the_examples_pay_what_their_comments_say(pipeline, group, progress):
    names = ["dummy", "short_answer", "formatted_accuracy", "countdown", "diversity"]
    rewards = pipeline(names, plugins=[PLUGIN], max_completion_length=10)
    columns = {"solution": None, "target": None, "nums": None}

    def score(name, texts, **values):
        [scores] = rewards.score([group(texts, **{**columns, **values})], progress)
        return [row[names.index(name)] for row in scores.values]

    texts = ["a b", "x" * 1025]
    assert (score("dummy", texts), score("short_answer", texts)) == ([0.0, 1.0], [0.8, 0.9])
    assert score("diversity", ["a b", "a c d e", ""]) == [0.5, 0.75, 0.0]
    form = "<think>a</think><answer>{}</answer>"
    assert score("formatted_accuracy", [form.format(4), form.format(5), r"\boxed{4}"], solution="4") == [1.0, 0.1, 0.0]
    texts = [f"<answer>{answer}</answer>" for answer in COUNTDOWN]
    assert score("countdown", texts, target=60, nums=[3, 5, 25]) == list(COUNTDOWN.values())
    assert score("countdown", texts[:1]) == [None]  # a row of another task


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


def test_the_judge_grades_over_http_and_does_not_apply_without_a_server(pipeline, group, progress, monkeypatch):
    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_port}/v1")
    try:
        (scores,) = pipeline(["judge"], plugins=[PLUGIN]).score([group(["good one", "bad one"])], progress)
    finally:
        server.shutdown()
        server.server_close()
    assert scores.values == [[0.8], [None]]
    monkeypatch.delenv("JUDGE_URL")
    (scores,) = pipeline(["judge"], plugins=[PLUGIN]).score([group(["a"])], progress)
    assert scores.excluded == ["no_reward"]
