"""Keys, tokens and passwords: in no file of a run, on no stream, and not lost to the command that a run prints."""

import json

import pytest
from cli_runs import error_lines, printed_command, terminate

pytestmark = pytest.mark.slow

CONFIG = """# OPENAI_API_KEY: hunter2-a
ENV: {HF_TOKEN: hunter2-b, db_password: hunter2-c, PGPASSWORD: hunter2-k, MONGO: hunter2-l}
chat_template_kwargs: {apiKey: hunter2-d, nested: [{access_secret: hunter2-e}]}
generation_kwargs: {}
"""
URL = "https://me:hunter2-f@host/x?token=hunter2-g"


def test_a_run_shows_no_secret_and_its_printed_command_works(cli):
    config = cli.folder / "run.yaml"
    config.write_text(CONFIG)
    given = json.dumps({"hub_token": "hunter2-i", "url": URL})
    flags = {"max_steps": 60, "save_steps": 100, "vllm_server_api_key": "hunter2-h", "vllm_engine_kwargs": given}
    run = cli.start("hidden", config=config, **flags)
    run.reach(1)
    terminate(run)
    code, out, err = run.wait()
    assert code == 75, err
    files = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    assert [path.name for path, content in files.items() if b"hunter2" in content] == []
    assert "hunter2" not in out + err
    masked = {path.name for path, content in files.items() if b"***" in content}
    assert {"run.yaml", "args.json", "attempts.jsonl"} <= masked
    printed, _, hint = printed_command(err).partition(" # ")
    assert "SWIFT_API_KEY" in hint
    err = cli.start_printed(printed, "hidden").ends(2)
    assert [line.split(": ")[2] for line in error_lines(err)] == ["--vllm_server_api_key", "--vllm_engine_kwargs"]
    known = printed.replace('{"hub_token": "***", "url": "https://me:***@host/x?token=***"}', given)
    variables = {"SWIFT_API_KEY": "hunter2-h"}
    err = cli.start_printed(f"{known} --max_steps 10", "hidden", variables=variables).ends(0)
