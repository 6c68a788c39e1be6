from __future__ import annotations

import json

import pytest

from qwen35mm.assets import demo_model_path
from qwen35mm.errors import CheckpointError, PromptError
from qwen35mm.prompt import ChatTemplate

HELLO = [{"role": "user", "content": "Hello"}]


def render(source: str, messages=HELLO, **options) -> str:
    options = {"enable_thinking": False, "add_generation_prompt": True, **options}
    return ChatTemplate(source).render(messages, **options)


def test_default_thinking_is_read_from_the_template(template, thinking_template):
    assert template.default_enable_thinking is False
    assert thinking_template.default_enable_thinking is True
    # As the family's larger checkpoints ask for it.
    off = "{% if enable_thinking is defined and enable_thinking is false %}"
    asked = off + "<think>\n\n</think>{% else %}<think>\n{% endif %}"
    assert ChatTemplate(asked).default_enable_thinking is True


@pytest.mark.parametrize(
    ("source", "expected"), [("<|im_start|>assistant\n<think>\n", True), ("<|im_start|>assistant\n", False)]
)
def test_default_thinking_of_a_template_without_a_switch(source, expected):
    assert ChatTemplate(source).default_enable_thinking is expected


def test_thinking_is_always_passed():
    source = "{{ enable_thinking }} {{ add_generation_prompt }} {{ tools is none }}"
    assert render(source, enable_thinking=True, add_generation_prompt=False) == "True False True"
    assert render(source, enable_thinking=False, tools=[{"a": 1}]) == "False True False"


def test_a_template_states_its_own_reason(template):
    with pytest.raises(PromptError, match="refuses these messages: The system message must be the first"):
        render(template.source, [*HELLO, {"role": "system", "content": "x"}])


@pytest.mark.parametrize(
    "failure",
    [
        "{{ messages[1].content.missing }}",
        "{{ 'a' + 1 }}",
        "{{ 1 // 0 }}",
        "{{ messages[9].role.x }}",
        "{{ nothing() }}",
    ],
)
def test_a_failing_template_gives_words_and_no_library_message(failure):
    source = "{% if messages[0].content == 'fail' %}" + failure + "{% endif %}"
    with pytest.raises(PromptError, match=r"^The model's chat template fails on these messages \(\w+\)\.$"):
        render(source, [{"role": "user", "content": "fail"}])


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("{% if %}", "syntax error in line 1"),
        ("a\n\n{{ a b }}", "syntax error in line 3"),
        ("{% include '/etc/passwd' %}", "can't render 'Hello'"),
        ("{{ raise_exception('no') }}", "can't render 'Hello'"),
    ],
)
def test_unusable_templates_are_refused(source, error):
    with pytest.raises(CheckpointError, match=error):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['__builtins__']['open']('SECRET').read() }}",
        "{{ cycler.__init__.__globals__.os.popen('cat SECRET').read() }}",
        "{{ lipsum.__globals__['os'].popen('cat SECRET').read() }}",
        "{{ self._TemplateReference__context.eval_ctx.environment.from_string }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ ('%s' | attr('format')).__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{% import 'SECRET' as stolen %}{{ stolen }}",
        "{% include 'SECRET' %}",
        "{% set _ = messages.append({'role': 'system', 'content': 'x'}) %}{{ messages | length }}",
        "{{ range(1000000000) | list | length }}",
    ],
)
def test_a_malicious_template_reaches_nothing(tmp_path, attack):
    secret = tmp_path / "secret.txt"
    secret.write_text("the-secret", encoding="utf-8")
    try:
        rendered = render(attack.replace("SECRET", str(secret)))
    except CheckpointError:
        return
    assert rendered == "", "the sandbox gives undefined values for what it forbids"


def test_where_templates_are_found(tmp_path):
    def default_of(folder):
        return ChatTemplate.from_pretrained(folder).source

    with pytest.raises(CheckpointError, match="no chat template"):
        default_of(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": ["default"]}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="no chat template"):
        default_of(tmp_path)
    named = [{"name": "other", "template": "other"}, {"name": "default", "template": "named"}]
    config.write_text(json.dumps({"chat_template": named}), encoding="utf-8")
    assert default_of(tmp_path) == "named"
    config.write_text(json.dumps({"chat_template": "config"}), encoding="utf-8")
    assert default_of(tmp_path) == "config"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}', encoding="utf-8")
    assert default_of(tmp_path) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja", encoding="utf-8")
    assert default_of(tmp_path) == "jinja"


@pytest.mark.parametrize("name", ["chat_template.json", "tokenizer_config.json"])
def test_damaged_files_are_named(tmp_path, name):
    (tmp_path / name).write_text("[", encoding="utf-8")
    with pytest.raises(CheckpointError, match=name):
        ChatTemplate.from_pretrained(tmp_path)


def test_templates_see_the_tokens_that_transformers_hands_them(oracle, tmp_path):
    names = sorted(oracle.special_tokens_map)
    assert "eos_token" in names
    source = "".join("{{ " + name + " }}\n" for name in names)
    config = json.loads((demo_model_path() / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["eos_token"] = {"content": config["eos_token"], "special": True}  # the older form
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "chat_template.jinja").write_text(source, encoding="utf-8")
    ours = ChatTemplate.from_pretrained(tmp_path).render(HELLO, enable_thinking=False, add_generation_prompt=True)
    assert ours == oracle.apply_chat_template(HELLO, chat_template=source, tokenize=False)
