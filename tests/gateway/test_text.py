"""Text and tokens: incremental decoding equals decoding as a whole, and templates render as in transformers."""

import json
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from protos import inference_pb2 as api
from protos import mesh_pb2
from services.errors import WeftError
from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.tokenizer import TextModel
from tests.gateway.model import BUNDLE, TOKENIZER

MODEL = TextModel(mesh_pb2.Bundle.FromString(BUNDLE))
any_ids = st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=60)


def fallback_bundle() -> mesh_pb2.Bundle:
    """A tokenizer of the Llama 2 kind: words begin with U+2581, unknown characters fall back to bytes."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ["▁", "a", "b", "▁a", "▁b", "ab", "▁ab"]:
        vocab[piece] = len(vocab)
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return mesh_pb2.Bundle(tokenizer_json=tokenizer.to_str().encode())


FALLBACK_BUNDLE = fallback_bundle()
FALLBACK = TextModel(FALLBACK_BUNDLE)


@settings(deadline=None)
@given(any_ids)
def test_incremental_decoding_equals_decoding_as_a_whole(ids: list[int]) -> None:
    detokenizer = MODEL.detokenizer()
    text = "".join(detokenizer.feed(token) for token in ids) + detokenizer.flush()
    assert text == TOKENIZER.decode(ids, skip_special_tokens=True)


@settings(deadline=None)
@given(st.text("ab 日😀é", max_size=20).map(str.strip))
def test_texts_are_unchanged_by_a_tokenizer_with_byte_fallback(text: str) -> None:
    ids = FALLBACK.encode(api.Prompt(text=text))
    detokenizer = FALLBACK.detokenizer()
    assert "".join(detokenizer.feed(token) for token in ids) + detokenizer.flush() == text


@settings(deadline=None)
@given(st.lists(st.sampled_from([3 + 0x80, 3 + 0xC3, 3 + 0xA9, 3 + 0xFF, 259, 260, 261, 262, 265]), max_size=40))
def test_invalid_bytes_lose_no_word(ids: list[int]) -> None:
    detokenizer = FALLBACK.detokenizer([260])
    text = "".join(detokenizer.feed(token) for token in ids) + detokenizer.flush()
    words = {259: " ", 260: "a", 261: "b", 262: " a", 265: " ab"}
    assert re.sub("[^ab ]", "", text) == "".join(words.get(token, "") for token in ids)


def test_an_answer_that_continues_its_prompt_keeps_its_first_space() -> None:
    for prompt, expected in (([1, 262], " ab a"), ([1], "ab a"), ([], "ab a")):
        detokenizer = FALLBACK.detokenizer(prompt)
        assert "".join(map(detokenizer.feed, [265, 262])) + detokenizer.flush() == expected


def test_endless_broken_bytes_are_decoded_in_bounded_time() -> None:
    detokenizer = MODEL.detokenizer()
    [broken] = [i for i in range(300) if TOKENIZER.id_to_token(i) == "ł"]  # a byte that begins no character
    assert TOKENIZER.decode([broken]) == "\ufffd"
    began = time.perf_counter()
    text = "".join(detokenizer.feed(broken) for _ in range(20_000)) + detokenizer.flush()
    assert text == "\ufffd" * 20_000
    assert time.perf_counter() - began < 2


def test_pieces_are_the_text_of_each_token_alone() -> None:
    assert [MODEL.piece(i) for i in TOKENIZER.encode(" the\n").ids] == ["<s>", " the", "\n"]
    words = FALLBACK.encode(api.Prompt(text="a ab"))
    assert [FALLBACK.piece(i) for i in words] == [" a", " ab"]


def test_a_model_without_a_template_refuses_chat() -> None:
    assert not FALLBACK.chat
    with pytest.raises(WeftError) as caught:
        FALLBACK.encode(api.Prompt(chat=api.Chat(messages=[api.ChatMessage(role="user", content="a")])))
    assert caught.value.reason == "NO_CHAT_TEMPLATE"


CHATML = (
    "{% for message in messages %}\n    {%- if loop.first and message['role'] != 'system' %}\n"
    "        {{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}\n    {%- endif %}\n"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}\n{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}"
    "{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
    "{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LOOPS = (
    "{%- set ns = namespace(n=0) -%}\n{% for m in messages %}\n  {% if m.role == 'system' %}{% continue %}{% endif %}\n"
    "  {% set ns.n = ns.n + 1 %}\n{{ ns.n }}. {{ m | tojson }} {{ m.content | tojson(indent=2) }}\n"
    "  {% if ns.n == 3 %}{% break %}{% endif %}\n{% endfor %}\n{% if tools is not none %}tools{% endif %}"
    "{% generation %}{{ messages[-1].content|upper }}{% endgeneration %}{{ strftime_now('%Y') }}"
    "{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice('ab') }}{{ 'a' ~ 1 ~ 'b' }}{{ 'x' * 3 }}"
)
CHATS = [
    [("user", "  hi <b> & 'you' ")],
    [("system", "be brief"), ("user", "hi\n"), ("assistant", "yes "), ("user", "日本 😀")],
    [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e")],
]


@pytest.mark.parametrize("template", [CHATML, LLAMA2, LOOPS], ids=["chatml", "llama2", "loops"])
@pytest.mark.parametrize("chat", CHATS, ids=["one", "system", "many"])
def test_templates_render_as_in_transformers(template: str, chat: list[tuple[str, str]]) -> None:
    import transformers

    build: Any = transformers.PreTrainedTokenizerFast
    theirs = build(tokenizer_object=TOKENIZER, bos_token="<s>", eos_token="</s>", chat_template=template)
    messages: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in chat]
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    variables = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
    assert ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"}).render(variables) == expected
    bundle = mesh_pb2.Bundle.FromString(BUNDLE)
    bundle.chat_template = template
    prompt = api.Prompt(chat=api.Chat(messages=[api.ChatMessage(**message) for message in messages]))
    ids = theirs.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)["input_ids"]
    assert TextModel(bundle).encode(prompt) == ids


HOSTILE = {
    "raises": "{{ raise_exception(messages[0].content) }}",
    "names what is not there": "{{ nothing.at_all.here }}",
    "no syntax": "{% for %}",
    "escapes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "changes its input": "{{ messages.append(1) }}",
    "for ever": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "for ever over a list": "{% set x = range(99999)|list %}{% for i in x %}{% for j in x %}{% endfor %}{% endfor %}",
    "too much": "{% for i in range(99999) %}{{ messages[0].content * 1000 }}{% endfor %}",
    "multiplies": "{{ 'x' * 99999999999 }}",
    "powers": "{{ 9 ** 999999999 }}",
    "doubles": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "adds": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_fails_in_bounded_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.text.chat_template.MAX_SECONDS", 0.3)
    template = ChatTemplate(HOSTILE[name], {})
    began = time.perf_counter()
    with pytest.raises(WeftError) as caught:
        template.render({"messages": [{"role": "user", "content": "secret"}]})
    assert caught.value.reason == "CHAT_TEMPLATE"
    assert "secret" not in caught.value.message
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    assert time.perf_counter() - began < 2


def test_truncation_and_padding_of_the_tokenizer_file_are_ignored() -> None:
    settings = json.loads(TOKENIZER.to_str())
    settings["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    model = TextModel(mesh_pb2.Bundle(tokenizer_json=json.dumps(settings).encode()))
    assert (
        model.encode(api.Prompt(text="the quick brown fox jumps")) == TOKENIZER.encode("the quick brown fox jumps").ids
    )
