"""`swift infer` with images: answers of a dataset and of a chat are those of a plain forward pass."""

import base64
import io
import json

import pytest
import vlms
from image_rows import Plain, data_url, turn
from trl_runs import written

from swift.arguments import parse
from swift.cli.main import main
from swift.rollout.infer import Chat, load_engine
from swift.types import SamplingParams

ROWS = [
    {"messages": [turn("user", "<image>What?")], "images": [data_url(0)]},
    {"messages": [turn("user", "<image>What?")], "images": [data_url(2)]},
    {"messages": [turn("user", "Nothing")], "images": []},
    {"messages": [turn("user", "<image>or <image>?")], "images": [data_url(1), data_url(2)]},
]


@pytest.mark.parametrize("family", vlms.FAMILIES)
def test_greedy_answers_are_those_of_plain_rows(family, vlm_folders, tmp_path):
    folder = vlm_folders(family)
    (tmp_path / "0.png").write_bytes(base64.b64decode(data_url(0).partition(",")[2]))
    data = written(tmp_path / "rows.jsonl", [{**ROWS[0], "images": ["0.png"]}, *ROWS[1:]])
    result = tmp_path / "answers.jsonl"
    words = ["infer", "--model", folder, "--val_dataset", data, "--result_path", result, "--temperature", "0"]
    assert main([*map(str, words), "--max_new_tokens", "4"]) == 0
    found = [json.loads(line) for line in result.read_text().splitlines()]
    plain = Plain(folder)
    for row, line in zip(ROWS, found, strict=True):
        text = plain.text(row["messages"], add_generation_prompt=True)
        assert line["response"] == plain.likeliest(text, row["images"], 4)
    shown = found[0]["messages"][0]["content"][0]
    assert shown["path"].endswith("0.png") and len(shown["digest"]) == 32
    assert "path" not in found[1]["messages"][0]["content"][0]
    assert len({line["prompt_id"] for line in found}) == len(ROWS)


@pytest.mark.long
def test_vllm_answers_as_transformers_does(tmp_path):
    pytest.importorskip("torchvision", reason="vLLM needs torchvision for models that see", exc_type=Exception)
    folder = tmp_path / "model"
    vlms.build_vlm(folder, "qwen3_vl", **vlms.VLLM)
    data = written(tmp_path / "rows.jsonl", ROWS)
    words = ["infer", "--model", folder, "--val_dataset", data, "--temperature", "0", "--max_new_tokens", "8"]
    words += ["--torch_dtype", "float32", "--max_pixels", "6400"]
    found = {}
    for name, more in (("transformers", ()), ("vllm", ("--infer_backend", "vllm", "--vllm_max_model_len", "256"))):
        result = tmp_path / f"{name}.jsonl"
        assert main([*map(str, words), *more, "--result_path", str(result)]) == 0
        found[name] = [json.loads(line) for line in result.read_text().splitlines()]
    assert found["vllm"] == found["transformers"]
    assert len({line["response"] for line in found["vllm"]}) > 1


def test_a_chat_shows_images(vlm_folders, tmp_path):
    (tmp_path / "0.png").write_bytes(base64.b64decode(data_url(0).partition(",")[2]))
    (tmp_path / "no.png").write_text("no image")
    template, engine = load_engine(parse("infer", ["--model", str(vlm_folders("qwen3_vl"))], {}).args)
    chat = Chat(template, engine, SamplingParams(max_new_tokens=4, temperature=0.0))
    lines = f"/image {tmp_path / 'no.png'}\n/image {tmp_path / '0.png'}\nWhat?\nAnd now?\n/picture\n"
    out = io.StringIO()
    assert chat.loop(io.StringIO(lines), out) == 0
    assert "no image of a format that is read" in out.getvalue()
    assert "comes before the next message" in out.getvalue() and "/image PATH" in out.getvalue()
    first, answer, second, _ = chat.history
    assert [part["type"] for part in first["content"]] == ["image", "text"]
    assert isinstance(second["content"], str)
    plain = Plain(vlm_folders("qwen3_vl"))
    text = plain.text(ROWS[0]["messages"], add_generation_prompt=True)
    assert answer["content"] == plain.likeliest(text, [data_url(0)], 4)


def test_max_pixels_is_that_of_training(vlm_folders, tmp_path, capsys):
    from shutil import copytree

    folder = copytree(vlm_folders("qwen3_vl"), tmp_path / "trained")
    (folder / "args.json").write_text(json.dumps({"max_pixels": 2048}))
    data = written(tmp_path / "rows.jsonl", ROWS)

    def tokens(*more):
        result = tmp_path / "answers.jsonl"
        words = ["infer", "--model", folder, "--val_dataset", data, "--result_path", result, "--max_new_tokens", "1"]
        assert main([*map(str, words), *more]) == 0
        lines = [json.loads(line) for line in result.read_text().splitlines()]
        result.unlink()
        return lines[0]["prompt_tokens"]

    assert tokens() < tokens("--max_pixels", "100000")
    assert "max_pixels 2048" in capsys.readouterr().err
