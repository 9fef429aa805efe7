"""Datasets that plugins register under ms-swift's names."""

import pytest

from swift.arguments import parse
from swift.data.loading import load_rows
from swift.plugin import load_external_plugins

PLUGIN = """
from typing import Any, Dict, Optional

from swift.dataset import DatasetMeta, ResponsePreprocessor, load_dataset, register_dataset


class Scores(ResponsePreprocessor):
    def preprocess(self, row: Dict[str, Any]) -> Optional[Dict[str, Any]]:
        return super().preprocess({"query": f"{row['first']} like {row['second']}?", "response": f"{row['label']:.1f}"})


register_dataset(DatasetMeta(ms_dataset_id="swift/scores", dataset_path=SCORES, preprocess_func=Scores()))
register_dataset(DatasetMeta(dataset_path=CHATS, preprocess_func=ResponsePreprocessor(columns={"asked": "query"})))

if __name__ == "__main__":
    print(load_dataset(["swift/scores"])[0])
"""


@pytest.mark.parametrize(
    ("name", "row", "chat"),
    [
        ("scores", '{"first": "a", "second": "b", "label": 3}', [("user", "a like b?"), ("assistant", "3.0")]),
        (
            "chats",
            '{"asked": "c", "answers": ["d", "e"], "system_prompt": "s", "history": [["a", "b"]], "level": 1}',
            [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")],
        ),
        (
            "chats",
            '{"asked": "c", "Problem": "not this", "Answer": "d", "history": "[[\'a\', \'b\']]"}',
            [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")],
        ),
    ],
)
def test_rows_with_a_question_and_an_answer_become_chats(tmp_path, name, row, chat):
    files = {one: tmp_path / f"{one}.jsonl" for one in ("scores", "chats")}
    files[name].write_text(row + "\n")
    plugin = tmp_path / f"plugin_{name}.py"
    plugin.write_text(PLUGIN.replace("SCORES", repr(str(files["scores"]))).replace("CHATS", repr(str(files["chats"]))))
    load_external_plugins([str(plugin)])
    args = parse("sft", ["--model", "m", "--dataset", str(files[name])], {}).args
    (example,) = load_rows(args, "train", purpose="chat").examples
    assert [(turn["role"], turn["content"]) for turn in example.messages] == chat
