"""Conversations: transformers' tokens, their weights, in the cache and in streams."""

import io
import json
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from tests.data.conftest import packed
from tests.data.corpus.chat_tokenizer import CALL, CHATS, PLAIN, TOOLS, UNMARKED, make_tokenizer
from tests.records import change_json, read_json, write_json, write_lines, write_table
from tests.refusals import refused
from titan_linear.commands import corpus as tool
from titan_linear.commands import generate as command
from titan_linear.config import check_config, load_config
from titan_linear.data import (
    IGNORE,
    ByteTokenizer,
    Texts,
    build_tokenizer,
    load_corpus,
    open_corpus,
    verify_corpus,
    write_corpus,
)
from titan_linear.data.corpus.chat import Completions, Conversations
from titan_linear.data.corpus.columns import DocumentTokens
from titan_linear.data.corpus.sources import read_documents

MARKED = PLAIN
# Only the last answer keeps its reasoning.
THINKING = UNMARKED.replace(
    "{{- message.content }}", "{{- '<think>' if loop.last }}{{- message.content }}"
)

SAID = [
    f"{answer}<|im_end|>"
    for answer in ("Me.", "  🙂 two  words \n", "no", json.dumps([CALL]), "12.6", "<b> indeed </b>")
]


@pytest.fixture
def folder(tmp_path_factory):
    """folder(template): that of a tokenizer."""

    def make(template=MARKED, beside=False):
        make_tokenizer(path := tmp_path_factory.mktemp("tokenizer"), template, beside)
        return path

    return make


@pytest.fixture
def tokenizer(folder):
    """That of a folder whose template marks answers."""
    return build_tokenizer(str(folder()))


def conversations(path):
    return Conversations(build_tokenizer(str(path)))


def opened(file, tokenizer=None, cache="cache", **options):
    """The corpus of a file of conversations or, with a tokenizer of bytes, of completions."""
    form = "messages" if tokenizer else "completion"
    options = {"dataset_format": form, **options}
    texts = Texts(file.suffix[1:], str(file), tokenizer or ByteTokenizer(), **options)
    corpus = open_corpus(texts, cache_dir=file.parent / cache)
    verify_corpus(corpus)
    return corpus


def equals_transformers(path, records, reader=None):
    """Ours of a folder, and transformers' of the same folder, or of the reader's."""
    theirs = AutoTokenizer.from_pretrained(reader or path)
    for record, (ids, _) in zip(records, conversations(path).encode_batch(records), strict=True):
        variables = record.get("chat_template_kwargs") or {}
        expected = theirs.apply_chat_template(
            record["messages"], tools=record.get("tools"), **variables
        )
        assert ids.tolist() == expected["input_ids"], record


def documents(corpus):
    for begin, end in zip(corpus.offsets[:-1], corpus.offsets[1:]):
        yield DocumentTokens(
            corpus.tokens[begin:end], {"weights": corpus.column("weights", np.arange(begin, end))}
        )


def runs(document):
    """The tokens of each answer."""
    edges = np.flatnonzero(np.diff(document.weights > 0, prepend=False, append=False)).reshape(
        -1, 2
    )
    return [document.tokens[begin:end].tolist() for begin, end in edges]


# --- tokens ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [MARKED, UNMARKED])
@pytest.mark.parametrize("beside", [False, True])
def test_tokens_and_weights_are_those_of_transformers(folder, template, beside):
    path = folder(template, beside=beside)
    ours, theirs = conversations(path), AutoTokenizer.from_pretrained(path)
    said = []
    for chat, document in zip(CHATS, ours.encode_batch(CHATS), strict=True):
        ids, trained = document.tokens, document.weights == 1
        expected = theirs.apply_chat_template(
            chat["messages"],
            tools=chat.get("tools"),
            return_dict=True,
            return_assistant_tokens_mask=template is MARKED,
        )
        assert ids.tolist() == expected["input_ids"] and ids.dtype == np.int64
        if template is MARKED:
            # transformers leaves out all but the first token of an answer's last character
            assert (trained >= np.array(expected["assistant_masks"], dtype=bool)).all()
        said += [theirs.decode(run) for run in runs(document)]
    assert said == SAID  # with the end of the turn, and nothing after it


def page_template():
    """What docs/conversations.md offers."""
    page = (Path(__file__).parents[3] / "docs" / "conversations.md").read_text()
    lines = [line.removeprefix("    ") for line in page.splitlines() if line.startswith("    ")]
    return "\n".join(line for line in lines if line.lstrip().startswith(("{%-", "{{-")))


def export(tokenizer, folder):
    for name, content in tokenizer.hugging_face_files().items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def learnt(path, record):
    """The texts of a record's answers, or what is wrong with it."""
    encoder = conversations(path)
    (found,) = encoder.encode_batch([record])
    if isinstance(found, str):
        return found
    return [
        encoder._tokenizer._tokenizer.decode(run, skip_special_tokens=False) for run in runs(found)
    ]


CITY = {"city": "Åbo", "n": [1, None]}


def calling(arguments, **fields):
    return {
        "role": "assistant",
        **fields,
        "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
    }


def test_the_page_has_a_template_to_begin_from(folder):
    """It writes tools and calls, is transformers' too, and ends every turn."""
    path = folder(page_template())
    call = '<tool_call>{"name": "f", "arguments": {"city": "Åbo", "n": [1, null]}}</tool_call>'
    for message, said in (
        (ASSISTANT, "y"),
        (calling(CITY, content=None), call),
        (calling(json.dumps(CITY, ensure_ascii=False), content="so: "), "so: " + call),
        (
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"name": "f", "arguments": CITY}] * 2,
            },
            call * 2,
        ),
        (calling({}), '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
        (calling(""), '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    ):
        for tools in (None, "", [], TOOLS):
            record = {
                "messages": [USER, message, {"role": "tool", "content": "3"}, ASSISTANT],
                "tools": tools,
            }
            assert learnt(path, record) == [f"{said}<|im_end|>", "y<|im_end|>"]
            equals_transformers(path, [record, CHATS[0]])
            ((ids, _),) = conversations(path).encode_batch([record])
            text = AutoTokenizer.from_pretrained(path).decode(ids)
            assert (json.dumps(TOOLS[0], ensure_ascii=False) in text) == bool(tools)
            assert text.startswith("<|im_start|>tools" if tools else "<|im_start|>user")


@pytest.mark.parametrize("template", [MARKED, UNMARKED])
def test_calls_and_tools_that_a_template_does_not_write(folder, template):
    """Learning them would be learning to end the turn at once."""
    calls = [{"name": "f", "arguments": CITY}, {"name": "g", "arguments": {}}]
    record = {
        "messages": [
            USER,
            ASSISTANT,
            USER,
            {"role": "assistant", "content": "", "tool_calls": calls},
        ]
    }
    assert learnt(folder(template), record)[-1].count("arguments") == 2
    problem = (
        "the chat template does not write all 'tool_calls' of message 4; "
        "take one that does (docs/conversations.md has one)"
    )
    first = "{%- if message.tool_calls %}{{ message.tool_calls[0] | tojson }}"
    for writes in (
        "{%- if not true %}",
        first,
        "{%- if message.content and message.tool_calls %}{{ 'called' }}",
    ):
        other = template.replace(
            "{%- if message.tool_calls %}{{ message.tool_calls | tojson }}", writes
        )
        assert other != template and learnt(folder(other), record) == problem
    tools = template.replace("{{ tool | tojson }}", "{{ tool | tojson if loop.first }}")
    assert learnt(folder(tools), CHATS[0] | {"tools": TOOLS}) == ["Me.<|im_end|>"]
    problem = "the chat template does not write all 'tools'; take one that does"
    assert learnt(folder(tools), CHATS[0] | {"tools": TOOLS * 2}).startswith(problem)
    silent = template.replace("{%- if tools %}", "{%- if not true %}")
    assert learnt(folder(silent), CHATS[0] | {"tools": TOOLS}).startswith(problem)


RAW = "{{ c.arguments if c.arguments is string else c.arguments | tojson }}"


@pytest.mark.parametrize(
    "writes, said",
    [
        ("{{ message.tool_calls | tojson }}", None),
        ("{% for c in message.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}", None),
        ("{% for c in message.tool_calls %}{{ c.function | tojson }}{% endfor %}", None),
        (
            "{% for c in message.tool_calls %}{{ c.function.arguments.items() | list }}{% endfor %}",
            None,
        ),
        ("{% for c in message.tool_calls %}{% set c = c.function %}" + RAW + "{% endfor %}", "{}"),
        ("{% for c in message.tool_calls %}{{ '' + c.function.arguments }}{% endfor %}", "{}"),
    ],
)
@pytest.mark.parametrize(
    "arguments", ["{}", ' {\n"city":"\\u00c5bo"}', '{ "a" : [1.0, {"b": "\\""}]}']
)
def test_arguments_that_are_json_text(folder, writes, said, arguments):
    """As objects are written where the template would quote the text; as they are where it takes the text."""
    path = folder(MARKED.replace("{{ message.tool_calls | tojson }}", writes))
    found, objects = (
        learnt(path, {"messages": [USER, calling(a, content="")]})
        for a in (arguments, json.loads(arguments))
    )
    if said is None:
        assert found == objects
    else:
        assert found == [arguments + "<|im_end|>"]


KNOWN_ROLES = "{%- if message.role in ('system', 'user', 'assistant') %}"


@pytest.mark.parametrize("template", [MARKED, UNMARKED])
def test_messages_that_a_template_does_not_write(folder, template):
    """By their role, or by their place."""
    loop = "{%- for message in messages %}"
    knows = template.replace(loop, loop + KNOWN_ROLES).replace(
        "{%- endfor", "{%- endif %}{%- endfor"
    )
    system = {"role": "system", "content": "brief"}
    path = folder(knows)
    assert learnt(path, {"messages": [system, USER, ASSISTANT]}) == ["y<|im_end|>"]
    problem = (
        "the chat template does not write all messages of the role {!r}: message {}; take one that"
    )
    for role, content in (("asistant", "Two."), ("developer", "x"), ("tool", "y"), ("tool", ["y"])):
        other = {"role": role, "content": content}
        found = learnt(path, {"messages": [USER, ASSISTANT, other, USER, ASSISTANT]})
        assert found.startswith(problem.format(role, 3))
    first = folder(
        template.replace(loop, loop + "{%- if loop.first or message.role != 'system' %}").replace(
            "{%- endfor", "{%- endif %}{%- endfor"
        )
    )
    assert learnt(first, {"messages": [system, USER, ASSISTANT]}) == ["y<|im_end|>"]
    found = learnt(
        first, {"messages": [system, USER, {"role": "system", "content": "long"}, ASSISTANT]}
    )
    assert found.startswith(problem.format("system", 3))


@pytest.mark.parametrize("template", [MARKED, UNMARKED])
def test_empty_answers_are_refused(folder, template):
    """They would teach the model to stop at once; as what came before, with weight 0, they may stay."""
    path = folder(template)
    for empty in (
        {"content": ""},
        {"content": " \n"},
        {"content": "", "tool_calls": []},
        {"content": "", "reasoning_content": "Hm."},
        {"content": "<think>\nHm.\n</think>\n\n"},
    ):
        answer = {"role": "assistant", **empty}
        found = learnt(path, {"messages": [USER, answer, USER, ASSISTANT]})
        assert found == "message 2: its answer is empty; write its text, or give it weight 0"
        found = learnt(path, {"messages": [USER, answer | {"weight": 0}, USER, ASSISTANT]})
        assert found == ["y<|im_end|>"]


def test_weights_of_parts_of_an_answer(folder):
    spans = [{"begin_offset": 0, "end_offset": 1, "train": False}]
    found = learnt(folder(), {"messages": [USER, ASSISTANT | {"train_detail": spans}]})
    assert found.startswith("message 2: 'train_detail' is [{") and found.endswith(
        "to 1 for all of it"
    )


@pytest.mark.parametrize("template", [MARKED, UNMARKED])
def test_null_is_no_content(folder, template):
    path = folder(template)
    problem = (
        "message 2: its content is null, and it calls nothing; write its text, or leave it out"
    )
    for message in (
        {"role": "assistant", "content": None},
        {"role": "user"},
        calling([], content=None) | {"tool_calls": []},
    ):
        assert learnt(path, {"messages": [USER, message, ASSISTANT]}) == problem
    record = {"messages": [USER, calling(CITY, content=None)]}
    assert learnt(path, record) == [
        json.dumps(record["messages"][1]["tool_calls"], ensure_ascii=False) + "<|im_end|>"
    ]
    added = folder(template.replace("{{- message.content }}", "{{- message.content + '' }}"))
    found = learnt(added, record)
    assert found.startswith(
        "the chat template refuses it (a message's content is null): UndefinedError"
    )


@pytest.mark.parametrize("template", [MARKED, UNMARKED])
@pytest.mark.parametrize("name", ["weight", "train", "trainable", "loss", "loss_scale"])
def test_answers_of_weight_zero(folder, template, name):
    """Their tokens stay, and are not trained on."""
    path, words = folder(template), ("Me.", "so", "13")
    encoder = conversations(path)

    def record(*weights):
        said = [
            {"role": "assistant", "content": word, name: weight}
            for word, weight in zip(words, weights)
        ]
        return {"messages": [message for each in said for message in (USER | {name: 0}, each)]}

    (every,) = encoder.encode_batch([record(None, None, None)])
    for weights in ((0, 1, None), (False, True, 1.0), (1, 0.0, 0), (None, 1, 0)):
        (some,) = encoder.encode_batch([record(*weights)])
        expected = [
            f"{word}<|im_end|>" for word, weight in zip(words, weights) if weight in (None, 1)
        ]
        assert (
            learnt(path, record(*weights)) == expected
            and some.tokens.tolist() == every.tokens.tolist()
        )
    assert learnt(path, record(0, False, 0.0)).startswith("no answer to learn")
    (some,) = encoder.encode_batch([record(0.5, 0, 0.25)])
    said = [
        encoder._tokenizer.decode(some.tokens[some.weights == weight]) for weight in (0.5, 0.25)
    ]
    assert said == ["Me.", "13"]  # the special token is not written
    for wrong in ("0", "1", "", -1, 2, [0], {}, float("nan")):
        problem = f"message 4: {name!r} is {wrong!r}; give 0 (not trained on) to 1 for all of it"
        assert learnt(path, record(1, wrong, 1)) == problem


def test_a_weight_where_answers_have_several_parts(folder):
    """Which part is whose is not known."""
    twice = MARKED.replace(
        "{{- message.content }}", "{{- message.content }}{% endgeneration %}{% generation %}"
    )
    record = {"messages": [USER, ASSISTANT, USER, ASSISTANT | {"weight": 0}]}
    assert learnt(folder(twice), record).startswith(
        "a weight that is not 1, and no answer for each message of the role 'ass"
    )
    record["messages"][-1]["weight"] = 1
    assert learnt(folder(twice), record) == ["y<|im_end|>"] * 2


def test_variables_of_a_record(folder):
    """As transformers has `chat_template_kwargs`; they may be named as a token is."""
    template = (
        "{{ bos_token }}{{ '(' + mood + ')' if mood }}{% if loud %}{{ loud.by }}{% endif %}"
        + UNMARKED
    )
    path = folder(template)
    variables = (None, "", {}, {"mood": "sad"}, {"loud": {"by": 3}, "bos_token": "b"})
    equals_transformers(path, [CHATS[1] | {"chat_template_kwargs": fields} for fields in variables])
    sad = ({"mood": "sad"}, '{"mood": "sad"}')
    fields, text = conversations(path).encode_batch(
        [CHATS[1] | {"chat_template_kwargs": mood} for mood in sad]
    )
    assert fields.tokens.tolist() == text.tokens.tolist()
    problem = (
        "'chat_template_kwargs' is not an object, or has messages, tools or add_generation_prompt"
    )
    for wrong in ("x", [1], 3, {"tools": []}, {"messages": []}, {"add_generation_prompt": True}):
        assert learnt(path, CHATS[1] | {"chat_template_kwargs": wrong}) == problem


@pytest.mark.parametrize("name", ["messages", "conversations"])
def test_share_gpt_names_are_read(tokenizer, tmp_path, name):
    """`from` and `value` are read as `role` and `content`."""
    roles = {
        "system": "system",
        "human": "user",
        "gpt": "assistant",
        "observation": "tool",
        "user": "user",
    }
    theirs = [{"from": name, "value": f"I am {name}", "weight": None} for name in roles]
    ours = [{"role": role, "content": f"I am {name}"} for name, role in roles.items()]
    want = opened(write_lines(tmp_path / "a.jsonl", [{"messages": ours}]), tokenizer)
    assert (
        opened(write_lines(tmp_path / "b.jsonl", [{name: theirs}]), tokenizer).fingerprint
        == want.fingerprint
    )
    table = write_table(tmp_path / "b.parquet", pa.Table.from_pylist([{name: theirs}]))
    assert opened(table, tokenizer).fingerprint == want.fingerprint
    if name == "conversations":
        apart = {"system": "I am system", name: theirs[1:], "tools": ""}
        found = opened(write_lines(tmp_path / "c.jsonl", [apart]), tokenizer)
        assert found.tokens.tolist() == want.tokens.tolist()


def test_a_token_that_straddles_the_begin_of_an_answer(folder):
    """A space and a quotation mark are one token; the template writes the space. The token is learnt."""
    path = folder(
        "{% for message in messages %}{{ message.role + ':' }}{% if message.role == 'assistant' %}{{ ' ' }}"
        "{% generation %}{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
    )
    tokenizer = build_tokenizer(str(path))
    record = {"messages": [USER, {"role": "assistant", "content": '"z'}]}
    (document,) = Conversations(tokenizer).encode_batch([record])
    equals_transformers(path, [record])
    assert [tokenizer.decode([token]) for token in document.tokens[document.weights == 1]] == [
        ' "',
        "z",
    ]


@pytest.mark.parametrize("beside", [False, True])
def test_several_templates_by_name(folder, tmp_path, beside):
    """In the settings or in files; transformers takes "tool_use" for records with tools. Exports have them all."""
    for_tools = UNMARKED.replace("<|im_start|>tools", "<|im_start|>available")
    path = folder(
        MARKED
        if beside
        else [{"name": "tool_use", "template": for_tools}, {"name": "default", "template": MARKED}],
        beside=beside,
    )
    if beside:
        (path / "additional_chat_templates").mkdir()
        (path / "additional_chat_templates" / "tool_use.jinja").write_text(for_tools)
    tokenizer = build_tokenizer(str(path))
    export(tokenizer, tmp_path)
    assert build_tokenizer(str(tmp_path)).chat_templates == {
        "default": MARKED,
        "tool_use": for_tools,
    }
    for reader in (path, tmp_path):
        equals_transformers(path, CHATS, reader)


def test_templates_that_no_record_takes(folder):
    named = [
        {"name": "default", "template": MARKED},
        {"name": "rag", "template": "{% citations %}"},
    ]
    ours, alone = (conversations(folder(template)) for template in (named, MARKED))
    assert ours.fingerprint == alone.fingerprint
    for a, b in zip(ours.encode_batch(CHATS), alone.encode_batch(CHATS), strict=True):
        assert a[0].tolist() == b[0].tolist()


@pytest.mark.parametrize(
    "settings, beside",
    [
        ({"image_token": "<|im_start|>"}, {}),
        ({"extra_special_tokens": {"image_token": "<|im_start|>"}}, {}),
        ({"model_specific_special_tokens": {"image_token": "<|im_start|>"}}, {}),
        ({"pad_token": "<|bos|>"}, {"pad_token": "<|im_start|>", "eos_token": "<|im_start|>"}),
        (
            {"added_tokens_decoder": {}, "pad_token": "<|bos|>"},
            {"pad_token": "<|im_start|>", "eos_token": "<|bos|>"},
        ),
    ],
)
def test_names_of_tokens(folder, tmp_path, settings, beside):
    """As transformers has them, of a folder and of what it is exported as."""
    path = folder("{{ image_token }}{{ pad_token }}{{ eos_token }}" + MARKED)
    change_json(path / "tokenizer_config.json", settings)
    write_json(path / "special_tokens_map.json", beside)
    tokenizer = build_tokenizer(str(path))
    export(tokenizer, tmp_path)
    for reader in (path, tmp_path):
        assert (
            tokenizer._tokenizer.id_to_token(tokenizer.eos_id)
            == AutoTokenizer.from_pretrained(reader).eos_token
        )
        equals_transformers(path, CHATS, reader)


def test_names_that_are_no_text(folder):
    path = folder()
    change_json(path / "tokenizer_config.json", {"image_token": ["<i>"]})
    assert "image_token" not in json.loads(
        build_tokenizer(str(path)).hugging_face_files()["tokenizer_config.json"]
    )
    change_json(path / "tokenizer_config.json", {"eos_token": ["a"]})
    with refused(r"eos_token = \['a'\] of .*tokenizer_config\.json or .* is not text; correct"):
        build_tokenizer(str(path))


def test_a_word_in_a_comment_marks_nothing(folder):
    path = folder("{# no {% generation %} here #}" + UNMARKED)
    ours = conversations(path).encode_batch(CHATS)
    assert all(document.weights.any() for document in ours)


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("read", ["reasoning_content", "thinking"])
def test_reasoning_by_any_of_its_names(folder, name, read):
    path = folder(
        MARKED.replace(
            "{{- message.content }}", f"{{{{- message.{read} }}}}{{{{- message.content }}}}"
        )
    )
    message = {
        "role": "assistant",
        "content": "Me.",
        "reasoning_content": None,
        name: "Who, indeed?",
    }
    theirs = AutoTokenizer.from_pretrained(path)
    for answer in (message, message | {"thinking": "Hm.", "reasoning": "Or."}):
        ((ids, _),) = conversations(path).encode_batch([{"messages": [USER, answer]}])
        answer = {name: text for name, text in answer.items() if text is not None}
        assert ids.tolist() == theirs.apply_chat_template([USER, answer])["input_ids"]


def test_an_end_token_that_is_not_special(folder):
    """Nothing after it is trained on."""
    path = folder(UNMARKED)
    content = read_json(path / "tokenizer.json")
    for token in content["added_tokens"]:
        token["special"] = token["content"] != "<|im_end|>"
    write_json(path / "tokenizer.json", content)
    end = build_tokenizer(str(path)).eos_id
    for document in conversations(path).encode_batch(CHATS):
        assert all(run[-1] == end for run in runs(document))


def test_a_template_that_writes_answers_otherwise_later(folder):
    encoder = conversations(folder(THINKING))
    first, problem, _ = encoder.encode_batch(CHATS)
    assert encoder._tokenizer.decode(runs(first)[0]) == "<think>Me."
    assert problem.startswith(
        "message 3: the chat template writes this answer otherwise as a prompt, or once the"
    )
    assert "put {% generation %} and {% endgeneration %} around answers" in problem


USER, ASSISTANT = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}


@pytest.mark.parametrize(
    "template, messages, problem",
    [
        (MARKED, "Hi", "'messages' is not a list of objects with a 'role'"),
        (
            MARKED,
            [{"from": "bing", "value": "x"}],
            "'messages' is not a list of objects with a 'role' (or 'from': sys",
        ),
        (
            MARKED,
            [USER, {"role": "assistant", "content": None, "tool_calls": "[]"}],
            "whose 'tool_calls', if any, are",
        ),
        (MARKED, [], "no answer to learn"),
        (MARKED, [USER], "no answer to learn"),
        (UNMARKED, [USER], "no answer to learn"),
        (
            MARKED,
            [{"role": "user", "content": ["x"]}],
            "the chat template refuses it: TemplateError: no text",
        ),
        (
            MARKED,
            [{"role": "user", "content": "a\ufdd0/answer\ufdd1"}, ASSISTANT],
            "noncharacter U+FDD0",
        ),
        (
            "{{ strftime_now('%d') }}",
            [USER, ASSISTANT],
            "refuses it: UndefinedError: 'strftime_now' is undefined",
        ),
        ("{{ messages.append(1) }}", [USER, ASSISTANT], "refuses it: SecurityError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", [USER], "refuses it: SecurityError"),
        ("{{ 1 // 0 }}", [USER], "refuses it: ZeroDivisionError"),
        (
            "{% filter upper %}" + MARKED + "{% endfilter %}",
            [USER, ASSISTANT],
            "changes what it has between {% gen",
        ),
        (
            "{{ messages | length }}{% set c %}{% generation %} y {% endgeneration %}{% endset %}{{ c | trim }}",
            [USER],
            "changes what it has",
        ),
    ],
)
def test_bad_conversations_are_refused(folder, template, messages, problem):
    (found,) = conversations(folder(template)).encode_batch([{"messages": messages}])
    assert problem in found


def test_tools_are_a_list_or_its_json(folder):
    """A list of objects, or the JSON text of one."""
    encoder = conversations(folder())
    deep = '[{"a": ' * 150 + "1" + "}]" * 150
    bad, none, some = (
        (["x"], {"a": 1}, "TOOLS", "[" * 100_000, deep),
        ([], None, "", "[]"),
        (TOOLS, json.dumps(TOOLS)),
    )
    found = encoder.encode_batch([CHATS[0] | {"tools": tools} for tools in (*bad, *none, *some)])
    assert found[:5] == ["'tools' is not a list of objects, nor the JSON text of one"] * 5
    without, *others, listed, text = (document.tokens.tolist() for document in found[5:])
    assert listed == text != without and others == [without] * 3


@pytest.mark.parametrize("template", [MARKED, UNMARKED])
def test_no_tools_and_an_empty_list(folder, template):
    """They are two things to a template, and choose between several, as in transformers."""
    says = "{{ 'none' if tools is none else 'list' }}" + template
    for several in (
        says,
        [{"name": "default", "template": template}, {"name": "tool_use", "template": says}],
    ):
        equals_transformers(
            folder(several), [CHATS[0] | {"tools": tools} for tools in (None, [], "")]
        )


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 9 ** (9 ** 9) }}",  # by jinja2's compiler, in one operation of C
        "{{ 1 | round(1000000000, 'ceil') }}",
        "{% set n = messages | length + 8 %}{{ n ** (n ** n) }}",
    ],
)
def test_a_template_that_does_not_end(folder, tmp_path, monkeypatch, template):
    monkeypatch.setattr("titan_linear.data.corpus.chat.SECONDS", 0.3)
    file = write_lines(tmp_path / "a.jsonl", [{"messages": [ASSISTANT]}])
    with refused("its chat template takes more than 20 s for the text of a conversation"):
        opened(file, build_tokenizer(str(folder(template))))


@pytest.mark.parametrize(
    "template, problem",
    [
        ("{{ messages | nothing }}", "No filter"),
        ("{{ 2**100000 }}", "Exceeds the limit"),
        ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "it is nested 9,999 deep"),
    ],
)
def test_a_template_that_cannot_be_compiled(folder, template, problem):
    """An unknown filter, a constant of too many digits, parentheses in parentheses."""
    with refused(r"model\.tokenizer_path: its chat template 'default' is not one: " + problem):
        conversations(folder(template)).encode_batch(CHATS[:1])


@pytest.mark.parametrize("template", [UNMARKED, MARKED])
def test_turns_of_a_terminal(folder, template, monkeypatch, capsys):
    """A model sees transformers' tokens at each turn, of those before too; the template may refuse one."""
    path, seen, said = folder(template), [], ["Me.", " 漢字\n", ""]
    theirs, ours = AutoTokenizer.from_pretrained(path), build_tokenizer(str(path))

    def answer(model, prompts, **options):
        seen.append(prompts[0])
        return [ours.encode(said[len(seen) - 1]).tolist()]

    monkeypatch.setattr(command, "load", lambda *_: (Mock(), ours))
    monkeypatch.setattr("titan_linear.run.generate.generate_tokens", answer)
    monkeypatch.setattr("sys.stdin", io.StringIO("né 漢字?\nagain\n"))
    assert command.main([str(path), "--chat", "--prompt", "Who?"]) == 0
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in said)
    messages = []
    for ids, question, text in zip(seen, ("Who?", "né 漢字?", "again"), said, strict=True):
        messages.append({"role": "user", "content": question})
        assert ids == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        messages.append({"role": "assistant", "content": text})


@pytest.mark.parametrize(
    "template, argv, problem",
    [
        (
            None,
            ["--chat"],
            "--chat takes a chat template, and the tokenizer has none; set model.tokenizer_path",
        ),
        (
            "{{ raise_exception('no') }}",
            ["--chat", "--prompt", "a"],
            "the chat template refuses it: TemplateError: no",
        ),
        (MARKED, [], "--prompt is missing: give a text to continue, or --chat"),
    ],
)
def test_turns_that_cannot_be_had(folder, template, argv, problem, monkeypatch, capsys):
    path = folder(template)
    monkeypatch.setattr(command, "load", lambda *_: (Mock(), build_tokenizer(str(path))))
    assert command.main([str(path), *argv]) == 2
    assert capsys.readouterr().err.startswith(f"error: {problem}")


def test_tokenizers_without_a_template(folder):
    for tokenizer in (ByteTokenizer(), build_tokenizer(str(folder(None)))):
        with refused(
            r"dataset_format = 'messages' takes a chat template.*or train on 'completion'"
        ):
            Conversations(tokenizer)
    with refused(r"model\.tokenizer_path: its chat template 'default' is not one: .*; repair"):
        conversations(folder("{% if %}"))
    path = folder(MARKED, beside=True)
    path.joinpath("chat_template.jinja").write_bytes(b"\xff" + MARKED.encode())
    with refused(r"chat_template\.jinja is not UTF-8: .*; write it anew"):
        conversations(path)


# --- on disk -----------------------------------------------------------------------------------------------------


def test_completions_of_bytes(tmp_path):
    pairs = [{"prompt": "2+2=", "completion": "4"}, {"prompt": "", "completion": "é"}]
    file = write_lines(
        tmp_path / "a.jsonl",
        [*pairs, {"prompt": "x", "completion": ""}, {"prompt": 3, "completion": "x"}],
    )
    with refused(r"line 3: no answer to learn: 'completion' is empty; training.on_bad_doc"):
        opened(file)
    corpus = opened(file, on_bad_document="skip")
    first, second = documents(corpus)
    assert (
        bytes(first[0][:-1].astype(np.uint8)) == b"2+2=4"
        and first.weights.tolist() == [0] * 4 + [1] * 2
    )
    assert second[0].tolist() == [0xC3, 0xA9, 256] and second.weights.all()
    line, warning = corpus.summary.splitlines()
    assert "2 documents, 9 tokens, 5 of them in answers, in " in line
    assert "2 bad documents skipped" in warning and "line 4: 'prompt' is int, not text" in warning


LETTERS = ["▁", *"24+=abc ", "▁4", "▁2", "Ġ", "Ġ4", "<0x0A>", "</s>", "<unk>"]
SPACING = {
    "prepend": {
        "normalizer": normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    },
    "metaspace, always": {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="always")},
    "metaspace, first": {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="first")},
    "metaspace, in a sequence": {
        "normalizer": normalizers.Strip(left=True, right=False),
        "pre_tokenizer": pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(), pre_tokenizers.Metaspace("▁", "first", False)]
        ),
    },
    "bytes": {
        "pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True),
        "decoder": decoders.ByteLevel(),
    },
    "bytes, no prefix": {
        "pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "decoder": decoders.ByteLevel(),
    },
}


@pytest.mark.parametrize("spacing", SPACING)
@pytest.mark.parametrize(
    "prompt, completion",
    [("2+2=", "4"), ("2+2= ", "4 a"), ("2+2=", " 4"), ("a\n", "b c"), ("", "4 b")],
)
def test_completions_go_on_from_their_prompts(tmp_path, spacing, prompt, completion):
    """What tokenizers put before a text is not put between the two; a completion alone is a text."""
    byte_bpe = {letter: i for i, letter in enumerate(dict.fromkeys([*LETTERS, "Ċ", "\n"]))}
    merges = [("▁", "4"), ("▁", "2"), ("Ġ", "4")]
    whole = Tokenizer(models.BPE(byte_bpe, merges, unk_token="<unk>"))
    whole.decoder = decoders.Replace("▁", " ")
    for part, value in SPACING[spacing].items():
        setattr(whole, part, value)
    whole.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer(str(tmp_path))
    (document,) = Completions(tokenizer).encode_batch(
        [{"prompt": prompt, "completion": completion}]
    )
    ids, trained = document.tokens, document.weights == 1
    assert whole.decode(ids.tolist()).lstrip(" ") == prompt + completion
    assert ids[~trained].tolist() == whole.encode(prompt).ids
    if prompt:
        assert whole.decode(ids[trained].tolist()) == completion
    else:
        assert ids.tolist() == whole.encode(completion).ids


def test_completions_by_words(tmp_path):
    whole = Tokenizer(models.BPE({"▁": 0, "a": 1}, []))
    whole.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    whole.save(str(tmp_path / "tokenizer.json"))
    with refused(r"dataset_format = 'completion': .* puts a space before every text"):
        Completions(build_tokenizer(str(tmp_path)))


@pytest.mark.parametrize("workers", [0, 2])
def test_records_that_cannot_be_read(tmp_path, monkeypatch, workers):
    """Lines that are no JSON stop the run, or are skipped, in the midst of others."""
    monkeypatch.setattr("titan_linear.data.corpus.cache.worker_count", lambda _: workers)
    file, pairs = tmp_path / "a.jsonl", [{"prompt": "2+2=", "completion": str(i)} for i in range(3)]
    first, second, third = map(json.dumps, pairs)
    file.write_text(f'{first}\n{{"prompt": \n{second}\n{{"prompt": "x"}}\n{third}\n')
    with refused(r"line 2: not JSON .*training\.on_bad_document"):
        opened(file)
    corpus = opened(file, on_bad_document="skip")
    assert [bytes(ids[:-1].astype(np.uint8)) for ids, _ in documents(corpus)] == [
        b"2+2=0",
        b"2+2=1",
        b"2+2=2",
    ]
    assert "2 bad documents skipped" in corpus.summary


def test_records_of_each_kind(folder, tokenizer, tmp_path):
    """The same corpus; and with another template another one, though no token differs."""
    lines = write_lines(tmp_path / "a.jsonl", CHATS)
    arguments = [
        chat | {"messages": [m | {"tool_calls": None} for m in chat["messages"]]}
        for chat in CHATS[:2]
    ]
    tables = [
        write_table(tmp_path / name, pa.Table.from_pylist(arguments))
        for name in ("a.parquet", "a.arrow")
    ]
    corpus = opened(lines, tokenizer)
    decode = partial(tokenizer._tokenizer.decode, skip_special_tokens=False)
    assert [decode(answer) for document in documents(corpus) for answer in runs(document)] == SAID
    assert {opened(table, tokenizer).fingerprint for table in tables} == {
        opened(write_lines(tmp_path / "b.jsonl", CHATS[:2]), tokenizer).fingerprint
    }
    with refused(r"no column 'prompt' \(it has: 'messages'\); rename the field, or set training.d"):
        opened(tmp_path / "a.parquet", tokenizer, dataset_format="completion")
    short = build_tokenizer(
        str(
            folder(
                MARKED.replace(
                    "{{- '<|im_end|>' }}\n        {%- endgeneration %}",
                    "{%- endgeneration %}{{- '<|im_end|>' }}",
                )
            )
        )
    )
    other = opened(write_lines(tmp_path / "c.jsonl", CHATS[2:]), short, on_bad_document="skip")
    assert (
        other.num_tokens == len(list(documents(corpus))[2][0])
        and "no answer ends in the tokenizer's end token" in (other.summary.splitlines()[1])
    )
    whole = opened(write_lines(tmp_path / "c.jsonl", CHATS[2:]), tokenizer)
    assert np.array_equal(whole.tokens, other.tokens) and np.array_equal(whole.hashes, other.hashes)
    assert whole.fingerprint != other.fingerprint and whole.folder != other.folder


def called(name, arguments):
    """A conversation whose answer calls a tool."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    return {"messages": [{"role": "user", "content": "?"}, answer], "tools": [call]}


def as_table(records, kind):
    """A table of these records, of which tools and tool calls are structs, or of the type `kind`, texts of JSON."""
    table = pa.Table.from_pylist(records)
    if kind is None:
        return table

    def texts(calls):
        written = pa.ExtensionArray.from_storage(
            kind, pa.array([json.dumps(call) for each in calls for call in each])
        )
        return pa.ListArray.from_arrays(
            pa.array(np.cumsum([0, *map(len, calls)]), pa.int32()), written
        )

    said = [message for record in records for message in record["messages"]]
    fields = {name: pa.array([message[name] for message in said]) for name in ("role", "content")}
    fields["tool_calls"] = texts([message.get("tool_calls", []) for message in said])
    ends = pa.array(np.cumsum([0, *(len(record["messages"]) for record in records)]), pa.int32())
    messages = pa.ListArray.from_arrays(
        ends, pa.StructArray.from_arrays(list(fields.values()), names=list(fields))
    )
    return pa.table({"messages": messages, "tools": texts([record["tools"] for record in records])})


def test_tables_hold_what_lines_do(tokenizer, tmp_path):
    """Their structs have the fields of all rows, null where a row has none of its own; `datasets` writes JSON texts."""
    records = [
        called("weather", {"city": "Oslo"}),
        called("add", {"a": 1, "b": [None, {"c": 2}]}),
        called("now", {}),
    ]
    want = opened(write_lines(tmp_path / "a.jsonl", records), tokenizer)
    for name, kind in (("structs", None), ("json", pa.json_())):
        for source in ("parquet", "arrow"):
            table = write_table(tmp_path / f"{name}.{source}", as_table(records, kind))
            assert opened(table, tokenizer).fingerprint == want.fingerprint, (name, source)


STRINGS = pa.map_(pa.string(), pa.string())
CALL_OF = pa.struct([("function", pa.struct([("name", pa.binary()), ("arguments", STRINGS)]))])
DEEP = pa.map_(
    pa.binary(),
    pa.struct([("a", pa.list_(STRINGS)), ("b", pa.large_list(pa.map_(pa.string(), STRINGS)))]),
)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_maps_are_objects_and_bytes_are_texts(tokenizer, tmp_path, kind):
    """At any depth of a record: maps of maps, in lists and structs, and bytes as values, roles and keys."""
    call = {"function": {"name": "f", "arguments": {"city": "Åbo", "day": None}}}
    tools = {"x": {"a": [{"k": "v"}, {}], "b": [{"m": {"n": "o"}, "p": {}}]}, "y": {"a": []}}
    messages = [USER, {"role": "assistant", "content": "né", "tool_calls": [call]}]
    want = opened(
        write_lines(tmp_path / "a.jsonl", [{"messages": messages, "tools": [tools]}]), tokenizer
    )

    def pairs(value):
        return [(key, pairs(x)) for key, x in value.items()] if isinstance(value, dict) else value

    call = {"function": {"name": b"f", "arguments": pairs(call["function"]["arguments"])}}
    message = [
        ("role", pa.binary()),
        ("content", pa.large_binary()),
        ("tool_calls", pa.list_(CALL_OF)),
    ]
    rows = [
        {"role": b"user", "content": b"x"},
        {"role": b"assistant", "content": "né".encode(), "tool_calls": [call]},
    ]
    x = {"a": [[("k", "v")], []], "b": [[("m", [("n", "o")]), ("p", [])]]}
    table = pa.table(
        {
            "messages": pa.array([rows], pa.list_(pa.struct(message))),
            "tools": pa.array([[[(b"x", x), (b"y", {"a": []})]]], pa.list_(DEEP)),
        }
    )
    assert (
        opened(write_table(tmp_path / f"a.{kind}", table), tokenizer).fingerprint
        == want.fingerprint
    )


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_map_that_is_not_utf8_spoils_its_row_alone(tmp_path, kind):
    arguments = pa.array([[("city", "Oslo")], [("city", "abcd")]], STRINGS)
    messages = pa.array([[USER, ASSISTANT]] * 2)
    for name, column in (
        ("text", arguments),
        ("bytes", arguments.view(pa.map_(pa.binary(), pa.binary()))),
    ):
        plain = dict(
            compression="none", use_dictionary=False, write_statistics=False, store_schema=True
        )
        table = {"messages": messages, "chat_template_kwargs": column}
        file = write_table(tmp_path / f"{name}.{kind}", table, **plain)
        file.write_bytes(file.read_bytes().replace(b"abcd", b"abc\xff"))
        first, second = read_documents(kind, file, "text", "messages")
        assert first.content["chat_template_kwargs"] == {
            "city": "Oslo"
        } and second.problem.startswith("not UTF-8")


def test_what_json_does_not_have(tokenizer, tmp_path):
    """A moment would be written as Python has it."""
    day = pa.array(
        [[{"role": "assistant", "content": 0}]],
        pa.list_(pa.struct([("role", pa.string()), ("content", pa.date32())])),
    )
    file = write_table(tmp_path / "a.parquet", {"messages": day})
    with refused(r"row 1: cannot be read \(JSON has no date32\[day\]; cast it to text or a number"):
        opened(file, tokenizer)


def test_nulls_of_json_are_kept(tokenizer, tmp_path):
    """Where a person wrote them, in lines or in texts of JSON."""
    records = [called("find", {"near": None})]
    table = write_table(tmp_path / "a.parquet", as_table(records, pa.json_()))
    for file in (write_lines(tmp_path / "a.jsonl", records), table):
        assert '{"near": null}' in tokenizer.decode(opened(file, tokenizer).tokens)


def test_a_row_whose_json_is_damaged(tokenizer, tmp_path):
    tools = pa.ExtensionArray.from_storage(pa.json_(), pa.array(["[]", "[", "[]"]))
    messages = pa.array([CHATS[0]["messages"]] * 3)
    file = write_table(tmp_path / "a.parquet", {"messages": messages, "tools": tools})
    with refused(r"a\.parquet, row 2: cannot be read \(Expecting value"):
        opened(file, tokenizer)
    assert opened(file, tokenizer, on_bad_document="skip").num_documents == 2


def test_stopped_and_by_several_processes(tmp_path, monkeypatch):
    monkeypatch.setattr("titan_linear.data.corpus.tokenise.BLOCK_DOCUMENTS", 10)
    monkeypatch.setattr("titan_linear.data.corpus.writing.JOURNAL_SECONDS", 0)
    pairs = [{"prompt": "a" * (i % 7), "completion": f"answer {i}"} for i in range(30)]
    file = write_lines(tmp_path / "a.jsonl", pairs)
    whole = opened(file)

    class Interrupted(ByteTokenizer):
        left = 30  # texts of 15 records

        def encode(self, text):
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
            return super().encode(text)

    cache = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        opened(file, Interrupted(), "stopped", dataset_format="completion")
    (temporary,) = cache.glob("*.tmp")
    assert read_json(temporary / "journal.json")["num_documents"] == 10
    with (temporary / "column-weights.bin").open("ab") as torn:
        torn.write(b"torn")
    assert opened(file, cache="stopped").info == whole.info
    monkeypatch.setattr("titan_linear.data.corpus.cache.worker_count", lambda _: 2)
    assert opened(file, cache="two").info == whole.info


def test_the_tool_and_a_corpus_of_tokens(tmp_path, capsys):
    file = write_lines(tmp_path / "a.jsonl", [{"prompt": "2+2=", "completion": "4"}])
    argv = [
        "write",
        str(tmp_path / "tokens"),
        "--path",
        str(file),
        "--format",
        "completion",
        "--dataset",
    ]
    assert (
        tool.main([*argv, "text"]) == 2 and "--format completion is for" in capsys.readouterr().err
    )
    assert tool.main([*argv, "jsonl"]) == 0 and "2 of them in answers" in capsys.readouterr().out
    corpus = open_corpus(Texts("tokens", str(tmp_path / "tokens"), ByteTokenizer()))
    assert corpus.fingerprint == opened(file).fingerprint
    weights = tmp_path / "tokens" / "column-weights.bin"
    weights.write_bytes(weights.read_bytes()[:-4])
    with refused(r"column-weights\.bin .*restore it from a copy"):
        load_corpus(tmp_path / "tokens")


def test_own_tokens_with_weights(tmp_path):
    ids, weights = np.arange(5), np.array([0, 0.5, 1, 0, 1])
    kinds = {"columns": {"weights": "<f4"}}
    write_corpus(
        tmp_path / "c",
        [(ids, {"weights": w}) for w in (weights, weights == 0)],
        ByteTokenizer(),
        **kinds,
    )
    corpus = load_corpus(tmp_path / "c")
    assert corpus.columns["weights"].tolist() == [0, 0.5, 1, 0, 1, 1, 0, 0, 1, 0]
    assert corpus.info["num_answer_tokens"] == 5 and corpus.info["num_ended"] == 0
    for wrong, said in (
        (np.ones(4), "its column 'weights' has 4 rows, and the document 5 tokens"),
        (
            np.ones((5, 1)),
            "its column 'weights' has 1 numbers for a token, and 0 in documents before",
        ),
        (np.array([-100, 1, 2, -100, 4]), "its column 'weights' must have .* weights 0 or more"),
        (np.array([0, 1, np.nan, 0, 1]), "its column 'weights' must have finite numbers"),
    ):
        with refused(f"document 1:? {said}"):
            documents = [(ids, {"weights": w}) for w in (weights, wrong)]
            write_corpus(tmp_path / "d", documents, ByteTokenizer(), **kinds)


# --- in streams ------------------------------------------------------------------------------------------------------


def test_streams_have_labels_of_answers_only(tmp_path):
    """Those of the same tokens, all trained on, but for labels of tokens that are not."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 257, n) for n in (1, 7, 30, 2, 64, 5)]
    masks = [rng.random(len(d)) < 0.4 for d in ids]
    for mask in masks:
        mask[-1] = True
    write_corpus(tmp_path / "all", ids, ByteTokenizer())
    weighted = [(d, {"weights": mask}) for d, mask in zip(ids, masks, strict=True)]
    write_corpus(tmp_path / "answers", weighted, ByteTokenizer(), columns={"weights": "<f4"})
    # the same once more, each token's place in the vocabulary saying whether it is trained on
    write_corpus(tmp_path / "marks", [m.astype(int) for m in masks], ByteTokenizer())
    every, some, marks = (
        packed(load_corpus(tmp_path / name), seq_len=20, seed=1)
        for name in ("all", "answers", "marks")
    )
    for i in range(20):
        for name in ("tokens", "cu_seqlens", "position_ids"):
            assert np.array_equal(getattr(some[i], name), getattr(every[i], name))
        assert np.array_equal(
            some[i].labels, np.where(marks[i].labels == 1, every[i].labels, IGNORE)
        )


@pytest.mark.parametrize(
    "keys, message",
    [
        (
            {"training.dataset_format": "messages"},
            r"dataset_format = 'messages' is for training\.dataset = jsonl,",
        ),
        (
            {
                "training.dataset": "tokens",
                "training.dataset_path": "x",
                "training.dataset_format": "completion",
            },
            r"it is 'tokens'; remove the format \(a corpus of tokens knows its answers\)",
        ),
        (
            {
                "training.dataset": "jsonl",
                "training.dataset_path": "x",
                "training.dataset_format": "messages",
                "training.dataset_text_field": "body",
            },
            r"dataset_text_field = 'body' is not used by training\.",
        ),
        (
            {"training.dataset_text_field": "body"},
            r"text_field = 'body' is not used by training\.dataset = 'stdlib'",
        ),
        (
            {"training.mixture_from_step": "4"},
            r"mixture_from_step = 4 is the step from which training.mixture holds",
        ),
    ],
)
def test_keys_that_contradict(keys, message):
    with refused(message):
        check_config(load_config([f"--{key}={value}" for key, value in keys.items()]), 1)
