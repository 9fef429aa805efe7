"""Which column is the prompt, which the answer, and what reaches rewards."""

import json

import pytest
from refusals import problems_of
from row_files import settings

from swift.data.loading import PLANS, load_rows
from swift.data.records import RowError


def plan(columns, renames=None, purpose="prompt", chats=()):
    return PLANS[purpose](columns, renames or {}, flag="--dataset", name="d.jsonl", chats=chats)


USER = [{"role": "user", "content": "q"}]
CHAT = [*USER, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize("name", ["query", "prompt", "question", "problem", "instruction"])
def test_each_prompt_column(name):
    messages, columns = plan([name, "answer"]).read({name: "q", "answer": "a"}, None)
    assert messages == USER
    assert columns == {"answer": "a"}


def test_messages_win_and_the_other_candidates_reach_rewards():
    chosen = plan(["problem", "solution", "messages"])
    assert chosen.line == "prompt <- messages; to rewards: problem, solution"
    messages, columns = chosen.read({"problem": "p", "solution": "s", "messages": CHAT}, None)
    assert messages == USER
    assert columns == {"problem": "p", "solution": "s"}


NEARLY = {"systm": "system", "tool": "tools", "histroy": "history"}


@pytest.mark.parametrize("name", [*NEARLY, "answer", "source", "solution"])
def test_a_column_that_is_nearly_called_like_one_that_would_be_read_is_noted(tmp_path, name):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"query": "q", name: "x"}) + "\n")
    notes = load_rows(settings(path), "train", purpose="prompt").report.notes
    right = NEARLY.get(name)
    fix = f"if it is that: --columns '{json.dumps({name: right})}'"
    assert notes == ([f"note: --dataset: {path}: column {name}: not read as {right}; {fix}"] if right else [])
    assert plan(["query", "system", "systems"]).doubts == []


def test_no_column_is_renamed_or_dropped_unasked():
    row = {"query": "q", "answer": "a", "output": "o", "solution": None, "text": "t", "input": "i", "completion": 3}
    _, columns = plan(list(row)).read(row, None)
    assert columns == {name: value for name, value in row.items() if name != "query"}


def test_instruction_takes_input_along():
    chosen = plan(["instruction", "input", "output"])
    assert chosen.line == "prompt <- instruction + input; to rewards: output"
    row = {"instruction": "Add.", "input": "1 2", "output": "3"}
    assert chosen.read(row, None) == ([{"role": "user", "content": "Add.\n1 2"}], {"output": "3"})
    assert chosen.read({**row, "input": None}, None)[0][0]["content"] == "Add."
    assert chosen.read({**row, "input": ""}, None)[0][0]["content"] == "Add."


REFUSED = {
    "prompt and question: each could be the prompt": (["question", "prompt", "answer"], {}, "prompt"),
    """--columns '{"prompt": "query"}' for prompt or --columns '{"question": "query"}' for question""": (
        ["question", "prompt"], {}, "prompt"
    ),
    """'{"query": "query"}' for query or --columns '{"prompt": "prompt"}' for prompt""": (
        ["query", "prompt"], {}, "prompt"
    ),
    "answer and solution of d.jsonl would both be called 'solution'": (
        ["query", "answer", "solution"], {"answer": "solution"}, "prompt"
    ),
    "columns promt, answer: none is a prompt": (["promt", "answer"], {}, "prompt"),
    """--columns '{"promt": "prompt"}'""": (["promt", "answer"], {}, "prompt"),
    """--columns '{"querry": "query"}'""": (["id", "querry"], {}, "chat"),
    """--columns '{"mesages": "messages"}'""": (["id", "mesages"], {}, "chat"),
    """--columns '{"id": "query"}'""": (["id", "solution"], {}, "prompt"),
    """--columns '{"respons": "response"}'""": (["query", "id", "respons"], {}, "chat"),
    """--columns '{"id": "response"}'""": (["responses_create_params", "id"], {}, "chat"),
    """--columns '{"chosn": "chosen"}'""": (["prompt", "id", "chosn", "rejected"], {}, "pair"),
    """--columns '{"rejectd": "rejected"}'""": (["prompt", "id", "chosen", "rejectd"], {}, "label"),
    """--columns '{"labl": "label"}'""": (["prompt", "id", "completion", "labl"], {}, "label"),
    """--columns '{"lables": "labels"}'""": (["prompt", "completions", "lables"], {}, "judged"),
    """--columns '{"txt": "text"}'""": (["id", "txt"], {}, "text"),
    """--columns '{"self": "row_self"}'""": (["query", "self"], {}, "prompt"),
    """--columns '{"prompt_id": "row_prompt_id"}'""": (["query", "prompt_id"], {}, "prompt"),
    "answer and solution: each could be the response": (["query", "answer", "solution"], {}, "chat"),
    """--columns '{"label": "response"}'""": (["query", "label"], {}, "chat"),
    """--columns '{"...": "labels"}'""": (["prompt", "completions"], {}, "steps"),
}  # fmt: skip


@pytest.mark.parametrize("said", REFUSED)
def test_columns_that_do_not_fit_are_an_error_that_shows_the_fix(said):
    (line,) = problems_of(plan, *REFUSED[said])
    assert said in line


@pytest.mark.parametrize(
    ("renames", "prompt", "others"),
    [
        ({"question": "query"}, "query", ("prompt",)),
        ({"prompt": "query"}, "query", ("question",)),
        ({"question": "question"}, "question", ("prompt",)),
        ({"prompt": "hint"}, "question", ("hint",)),
    ],
)
def test_columns_decides_between_candidates(renames, prompt, others):
    chosen = plan(["question", "prompt"], renames)
    assert (chosen.prompt, chosen.others) == (prompt, others)


def test_the_fix_is_valid_even_when_query_is_taken():
    assert plan(["query", "prompt"], {"prompt": "prompt"}).prompt == "prompt"


def test_renaming_is_explicit_and_shown():
    chosen = plan(["query", "answer"], {"answer": "solution"})
    assert chosen.line == "prompt <- query; to rewards: solution; renamed: answer -> solution"
    assert chosen.read({"query": "q", "answer": "4"}, None)[1] == {"solution": "4"}


def test_columns_can_swap_names():
    chosen = plan(["query", "a", "b"], {"a": "b", "b": "a"})
    assert chosen.read({"query": "q", "a": 1, "b": 2}, None)[1] == {"b": 1, "a": 2}


def test_a_null_never_hides_a_renamed_value():
    chosen = plan(["query", "answer"], {"answer": "solution"})
    assert chosen.read({"query": "q", "answer": "4", "solution": None}, None)[1] == {"solution": "4"}


@pytest.mark.parametrize("purpose", ["prompt", "chat"])
def test_a_chat_under_another_name_is_advised_as_messages(purpose):
    (line,) = problems_of(plan, ["id", "items"], purpose=purpose, chats=["items"])
    assert """--columns '{"items": "messages"}'""" in line
    assert plan(["id", "items"], {"items": "messages"}, purpose).prompt == "messages"


def test_names_of_reward_keywords_are_reserved():
    assert plan(["query", "prompt_id"], {"prompt_id": "id"}).others == ("id",)
    assert plan(["query", "response", "prompt_id"], purpose="chat").others == ("prompt_id",)


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("query", "response"),
        ("instruction", "output"),
        ("prompt", "completion"),
        ("question", "answer"),
        ("problem", "solution"),
        ("query", "answer"),
    ],
)
def test_supervised_pairs(prompt, answer):
    chosen = plan([prompt, answer], purpose="chat")
    assert chosen.read({prompt: "q", answer: "a"}, None) == (CHAT, {})
    assert chosen.line == f"prompt <- {prompt}; response <- {answer}; other columns: none"


def test_a_partner_is_preferred_and_others_are_ambiguous():
    assert plan(["problem", "answer", "solution"], purpose="chat").answer == "solution"
    assert plan(["query", "answer", "solution"], {"answer": "response"}, "chat").answer == "response"


def test_supervised_messages_keep_the_answer_and_need_one():
    chosen = plan(["messages"], purpose="chat")
    assert chosen.read({"messages": CHAT}, None)[0] == CHAT
    with pytest.raises(RowError, match="no final assistant turn to learn"):
        chosen.read({"messages": USER}, None)


def test_the_system_prompt_is_the_rows_then_the_flags_then_none():
    chosen = plan(["query", "system"])
    assert chosen.line == "prompt <- query; system <- system; to rewards: none"

    def system(row, flag):
        first = chosen.read({"query": "q", **row}, flag)[0][0]
        return first["content"] if first["role"] == "system" else None

    assert system({"system": "row"}, "flag") == "row"
    assert system({"system": ""}, "flag") == "flag"
    assert system({}, "flag") == "flag"
    assert system({}, None) is None


def test_a_system_turn_of_the_row_beats_the_flag_and_must_be_the_only_one():
    chosen = plan(["messages", "system"])
    messages = [{"role": "system", "content": "own"}, *USER]
    assert chosen.read({"messages": messages}, "flag")[0] == messages
    assert chosen.read({"messages": messages, "system": "own"}, None)[0] == messages
    with pytest.raises(RowError, match="keep one of them"):
        chosen.read({"messages": messages, "system": "other"}, None)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "no messages"),
        ([], "messages is empty"),
        ({"role": "user"}, "must be a list of"),
        ("hello", "must be a list of"),
        ("[1", "text that is not JSON"),
        ([{"role": "user"}], "turn 1: must be an object with role and content"),
        (["x"], "turn 1: must be an object with role and content, not text"),
        ([{"from": "human", "text": "x"}], "not an object with from, text"),
        ([{"role": "user", "content": "q", "loss": True}], "turn 1: loss is true in a user turn"),
        ([{**USER[0], "loss": "no"}], "turn 1: loss must be true or false"),
        ([{"role": "user", "content": "q", "weight": 1}], "turn 1: weight is 1 in a user turn"),
        ([*USER, {**CHAT[-1], "weight": 0.5}], "turn [0-9]+: weight must be 0 or 1, not 0.5"),
        ([*USER, {"role": "assistant", "content": "x", "weight": 0, "loss": True}], "loss and weight contradict"),
        ([*USER, {"role": "assistant", "content": None, "tool_calls": [{}]}], "turn 2: a tool call needs a function"),
        ([*USER, {"role": "tool_call", "content": "add(2)"}], "turn 2: a tool_call turn holds the call as JSON"),
        ([{"role": "usr", "content": "x"}], "turn 1: unknown role 'usr'; nearest: user"),
        ([{"role": "user", "content": [{"type": "image"}]}], "turn 1: a part of type image: images, video and audio"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "turn 1: a part of type image_url"),
        ([{"role": "user", "content": ["x"]}], "turn 1: content must be text, not a list"),
        ([{"role": "user", "content": None}], "turn 1: content must be text, not null"),
        ([{"role": "user", "content": "\ud800"}], "not valid Unicode"),
        ([*USER, {"role": "system", "content": "x"}], "turn 2: a system turn must be the first"),
        ([{"role": "assistant", "content": "x"}], "no user turn"),
        ([{"role": "system", "content": "x"}], "no user turn"),
        ([*CHAT, {"role": "assistant", "content": "x"}], "end with a assistant turn"),
    ],
)
def test_bad_messages(value, reason):
    with pytest.raises(RowError, match=reason):
        plan(["messages"]).read({"messages": value}, None)


@pytest.mark.parametrize(
    ("value", "reason"),
    [(None, "no query"), ("  ", "query is empty"), (3, "query must be text, not int"), ("\udc00", "valid Unicode")],
)
def test_bad_prompts(value, reason):
    with pytest.raises(RowError, match=reason):
        plan(["query"]).read({"query": value}, None)


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}


@pytest.mark.parametrize(
    "made",
    [
        [{"role": "assistant", "content": None, "tool_calls": [CALL]}],
        [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "add", "arguments": '{"a": 2}'}}]}],
        [{"role": "tool_call", "content": '{"name": "add", "arguments": {"a": 2}}'}],
        [{"from": "function_call", "value": '{"name": "add", "arguments": "{\\"a\\": 2}"}'}],
    ],
)
def test_tool_calls_of_every_format_are_one(made):
    result = {"role": "tool_response", "content": "2"}
    chosen = plan(["messages"], purpose="chat")
    messages, _ = chosen.read({"messages": [*USER, *made, result, CHAT[1]]}, None)
    assert messages == [
        *USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "2"}, CHAT[1],
    ]  # fmt: skip


def test_calls_that_follow_each_other_are_made_at_once():
    call = {"role": "tool_call", "content": '{"name": "add", "arguments": {"a": 2}}'}
    messages, _ = plan(["messages"]).read({"messages": [*USER, call, call, {"role": "tool", "content": "2"}]}, None)
    assert messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]} and len(messages) == 3


def test_history_comes_before_the_query():
    chosen = plan(["query", "response", "history"], purpose="chat")
    assert chosen.line == "prompt <- history + query; response <- response; other columns: none"
    row = {"query": "q", "response": "a", "history": [["q0", "a0"]]}
    earlier = [{"role": "user", "content": "q0"}, {"role": "assistant", "content": "a0"}]
    assert chosen.read(row, None) == ([*earlier, *CHAT], {})
    assert chosen.read({**row, "history": '[["q0", "a0"]]'}, None) == ([*earlier, *CHAT], {})
    assert chosen.read({**row, "history": None}, None) == (CHAT, {})
    with pytest.raises(RowError, match=r"history, exchange 1: must be \[query, response\]"):
        chosen.read({**row, "history": ["q0"]}, None)


def test_tools_are_schemas_and_stay_a_column():
    tool = {"type": "function", "function": {"name": "add"}}
    chosen = plan(["messages", "tools"])
    for given in ([tool], json.dumps([tool])):
        assert chosen.read({"messages": USER, "tools": given}, None) == (USER, {"tools": [tool]})
    with pytest.raises(RowError, match="tools must be a list of function schemas"):
        chosen.read({"messages": USER, "tools": ["add"]}, None)


def test_messages_in_a_csv_cell_and_extra_keys_of_turns():
    chosen = plan(["messages"])
    text = '[{"role": "user", "content": "q", "name": "Ada", "tool_calls": null}]'
    assert chosen.read({"messages": text}, None)[0] == [{"role": "user", "content": "q", "name": "Ada"}]


def test_text_parts_of_openai_are_one_text():
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "3?"}]
    chat = [{"role": "user", "content": parts}]
    assert plan(["messages"]).read({"messages": chat}, None)[0] == [{"role": "user", "content": "2+3?"}]
