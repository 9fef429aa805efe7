"""Templates of a model folder compute what a chat takes, and no more."""

import shutil
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from swift.cli.main import main
from swift.models import rendering
from swift.models.rendering import RenderLimit, render
from swift.models.templates import TEMPLATES

GROWING = "{% set ns = namespace(x='aaaaaaaa') %}{% for _ in range(60) %}{% set ns.x = EACH %}{% endfor %}{{ ns.x }}"
LONG = "{% set s = 'a' * 9999999 %}"
MUCH = "99999999999"
NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"

HOSTILE = {
    "doubled with ~": GROWING.replace("EACH", "ns.x ~ ns.x"),
    "doubled with +": GROWING.replace("EACH", "ns.x + ns.x"),
    "doubled list": GROWING.replace("'aaaaaaaa'", "[1]").replace("EACH", "ns.x + ns.x"),
    "squared": GROWING.replace("'aaaaaaaa'", "9").replace("EACH", "ns.x * ns.x"),
    "power": "{{ 9 ** 9999999 }}",
    "repeated": f"{{{{ 'a' * {MUCH} }}}}",
    "repeated list": f"{{% set x = ['a'] * {MUCH} %}}",
    "padded by a filter": f"{{{{ 'a'|center({MUCH}) }}}}",
    "padded by a method": f"{{{{ 'a'.ljust({MUCH}) }}}}",
    "padded by %": f"{{{{ '%{MUCH}d' % 1 }}}}",
    "padded by a width of %": f"{{{{ '%*d' % ({MUCH}, 1) }}}}",
    "padded by format": f"{{{{ '{{:>{MUCH}}}'.format(1) }}}}",
    "padded by a width of format": f"{{{{ '{{:>{{}}}}'.format(1, {MUCH}) }}}}",
    "joined": LONG + "{{ s.join(range(99999)|map('string')) }}",
    "joined by a filter": LONG + "{{ range(99999)|join(s) }}",
    "replaced": LONG + "{{ s.replace('a', s) }}",
    "indented": f"{{{{ [[1]]|tojson(indent={MUCH}) }}}}",
    "written often": LONG + NESTED.replace("BODY", "{{ s }}"),
    "long text written often": NESTED.replace("BODY", "x" * 5000),
    "block": GROWING.replace("{% set ns.x = EACH %}", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    "filter block": f"{{% filter center({MUCH}) %}}a{{% endfilter %}}",
    "nested loops": NESTED.replace("BODY", ""),
    "recursive loop": "{% for a in range(90000) recursive %}{{ loop(range(90000)) if loop.depth < 9 }}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "work in each turn": "{% for i in range(99999) %}{% set x = range(99999)|list|sort %}{% endfor %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_that_computes_without_bound_ends(name, monkeypatch):
    monkeypatch.setattr(rendering, "RENDER_S", 0.5)
    began = time.monotonic()
    with pytest.raises(RenderLimit, match=r"it (takes over 0.5 s|makes over 128 million|pads|computes)"):
        render(HOSTILE[name], {"messages": []}, marks=False)
    assert time.monotonic() - began < 30


def test_what_chats_are_made_of_is_not_limited():
    text = "50% of {1234567} is 99999999 \n" * 30_000  # 900 kB
    jinja = "{% for m in messages %}{{ m.content.replace('a', 'bcd')|trim|indent(4) ~ '\n' + m.role }}{% endfor %}"
    messages = [{"role": "user", "content": text}] * 4
    assert len(render(jinja, {"messages": messages}, marks=False)[0]) > 4 * len(text) - 99


def test_a_long_text_may_be_taken_out_of_a_longer_one():
    variables = {"thought": "x" * 20_000, "text": "x" * 20_000 + "5"}
    for jinja in ("{{ text.replace(thought, '') }}", "{{ text|replace(thought, '') }}"):
        assert render(jinja, variables, marks=False)[0] == "5"


CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "2 + 3"},
    {"role": "assistant", "content": "<think>\na\n</think>\n\n5"},
    {"role": "user", "content": "4"},
    {"role": "assistant", "content": "4"},
]
OF_TRL = sorted(Path(find_spec("trl").submodule_search_locations[0], "chat_templates").glob("*.jinja"))
ALL = {**TEMPLATES, **{one.stem: one.read_text() for one in OF_TRL}}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f", "parameters": {}}}]])
def test_renderings_are_those_of_transformers(name, tools):
    jinja = ALL[name]
    variables = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<p>"}
    marks = "generation %}" in jinja.replace("generation -%}", "generation %}")
    expected = outcome(
        lambda: render_jinja_template(
            conversations=[CHAT], tools=tools, chat_template=jinja, return_assistant_tokens_mask=marks, **variables
        )
    )
    variables |= {"messages": CHAT, "tools": tools, "documents": None, "add_generation_prompt": False}
    ours = outcome(lambda: render(jinja, variables, marks=marks))
    if isinstance(expected, tuple):
        expected = expected[0][0], expected[1][0] if marks else []
    assert ours == expected


def outcome(action):
    """What it returns, or how it fails."""
    try:
        return action()
    except Exception as error:
        return str(error)


def test_a_hostile_template_of_a_model_is_refused_at_the_start(qwen2, tmp_path, capfd):
    folder = shutil.copytree(qwen2, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(HOSTILE["doubled with ~"])
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"query": "hello"}\n')
    words = ["infer", "--model", str(folder), "--dataset", str(rows)]
    assert main(words) == 2, capfd.readouterr().err
    err = capfd.readouterr().err
    assert "it makes over 128 million characters" in err
    assert "Traceback" not in err
