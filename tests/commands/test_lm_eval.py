"""What lm-eval's tasks get: tokens of texts, where texts begin and end, conversations, refusals."""

import string
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest
import tokenizers
from tokenizers import processors

from tests.bpe import byte_bpe
from tests.records import write_json
from tests.refusals import is_refused, refused
from titan_linear.commands import lm_eval
from titan_linear.config import Config
from titan_linear.data import ByteTokenizer, build_tokenizer
from titan_linear.run.generate import Sampling
from titan_linear.run.origin import Origin

BOS, EOS, END = range(3)
TEMPLATE = (
    "<s>{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class TemplateLM:
    """lm_eval's class, as far as it is used."""

    def _encode_pair(self, context, continuation):
        begun = self.tok_encode(context)
        return begun, self.tok_encode(context + continuation)[len(begun) :]


@pytest.fixture
def folder(tmp_path):
    """A tokenizer with a token before texts, which it does not write by itself."""
    byte_bpe([string.printable], 300, ["<s>", "</s>", "<|end|>"]).save(
        str(tmp_path / "tokenizer.json")
    )
    write_json(tmp_path / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"})
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


@pytest.fixture
def model_of(monkeypatch):
    """A function from a tokenizer to the model that lm_eval gets."""
    module = ModuleType("lm_eval.api.model")
    module.TemplateLM = TemplateLM
    for name in ("lm_eval", "lm_eval.api"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", module)

    def build(tokenizer):
        reader = SimpleNamespace(
            config=Config(),
            tokenizer=tokenizer,
            session=SimpleNamespace(model=None, precision=nullcontext()),
        )
        return lm_eval.adapted(reader)()

    return build


@pytest.fixture
def scored(monkeypatch):
    """Requests for log-probabilities, as they come to be scored."""
    requests = []

    def note(some, reader):
        requests.extend(some)
        return [(float(-len(tokens)), True) for tokens, _ in some]

    monkeypatch.setattr(lm_eval, "likelihoods", note)
    return requests


def requested(*args):
    return [SimpleNamespace(args=args)]


def test_texts_without_context_follow_the_token_that_begins_texts(folder, model_of, scored):
    tokenizer = build_tokenizer(str(folder))
    model, ids = model_of(tokenizer), tokenizer.encode("ba").tolist()
    for context, text in (("", "ba"), ("", "<s>ba"), ("", "")):
        model.loglikelihood(requested(context, text))
    model.loglikelihood(requested("b", "a"))
    assert model.loglikelihood_rolling(requested("ba")) == [-len(ids) - 1.0]
    model.loglikelihood_rolling(requested(""))
    begun = ([BOS, *ids], 1)
    assert scored == [begun, begun, ([BOS], 1), (ids, 1), begun, ([BOS], 1)]
    write_json(folder / "tokenizer_config.json", {"eos_token": "</s>"})
    assert model_of(build_tokenizer(str(folder))).prefix_token_id == EOS
    assert model_of(ByteTokenizer()).prefix_token_id == 256


def test_a_tokenizer_that_begins_texts_does_so_once(folder, model_of, scored):
    """Also after a template that has; a continuation without context begins with what precedes it."""
    file = str(folder / "tokenizer.json")
    changed = tokenizers.Tokenizer.from_file(file)
    changed.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    changed.save(file)
    tokenizer = build_tokenizer(str(folder))
    model, ids = model_of(tokenizer), tokenizer.encode("ba").tolist()
    assert tokenizer.first_ids == [BOS]
    assert model.tok_encode("ba") == model.tok_encode("<s>ba") == [BOS, *ids]
    assert model.tok_encode("ba", add_special_tokens=False) == ids
    model.loglikelihood(requested("", "ba"))
    model.loglikelihood(requested("b", "a"))
    model.loglikelihood_rolling(requested("ba"))
    assert scored == [([BOS, *ids], 1), ([BOS, *ids], 2), ([BOS, BOS, *ids], 1)]


def written(monkeypatch, model, text, prompt="q", **options):
    """What is generated, and how, if the model would write this text for ever."""
    tokens, asked = model.tok_encode(text) * 256, {}

    def write(_, tokenizer, prompts, *, max_new_tokens, stops, **how):
        asked.update(how, prompts=prompts, most=max_new_tokens)
        new = []
        while len(new) < max_new_tokens and not stops(new):
            new.append(tokens[len(new)])
        asked["read"] = len(new)
        return [new]

    monkeypatch.setattr(lm_eval, "continuations", write)
    (answer,) = model.generate_until(requested(prompt, options))
    return answer, SimpleNamespace(**asked)


def test_texts_end_where_a_task_says(folder, model_of, monkeypatch):
    """At special tokens, which are not written, and across tokens; at no more tokens than are wanted."""
    model = model_of(build_tokenizer(str(folder)))
    text = "4 2<|end|>uxux</s>"
    for until, answer, read in (
        (["Question:", "<|end|>"], "4 2", 4),
        ("<|end|>", "4 2", 4),
        (["ux", ""], "4 2", 6),
        (["x", " "], "4", 2),
        (None, "4 2uxux4 2", 12),
    ):
        answered, asked = written(monkeypatch, model, text, until=until, max_gen_toks=12)
        assert (answered, asked.read) == (answer, read), until
    for length, most in (
        ({"max_new_tokens": 5}, 5),
        ({"max_tokens": 6}, 6),
        ({"max_completion_tokens": 7}, 7),
        ({"max_new_tokens": 5, "max_gen_toks": 4}, 4),
        ({"max_length": 9}, 8),
        ({"max_length": 1}, 0),
        ({}, 256),
    ):
        assert written(monkeypatch, model, text, **length)[1].most == most
    assert written(monkeypatch, model, text, "")[1].prompts == [[BOS]]


def test_texts_are_drawn_if_a_task_says_so(folder, model_of, monkeypatch):
    model = model_of(build_tokenizer(str(folder)))
    seed = Config().debug.seed
    for options, temperature in (
        ({}, 0.0),
        ({"do_sample": False, "temperature": 0.7, "num_beams": 1}, 0.0),
        ({"do_sample": True, "temperature": 0.7}, 0.7),
        ({"do_sample": True}, 1.0),
        ({"temperature": 0.5}, 0.5),
        ({"temperature": 0.0}, 0.0),
    ):
        drawn = written(monkeypatch, model, "a", **options, top_p=0.5)[1].sampling
        assert drawn == Sampling(temperature, 0.5, seed)
    seeds = []
    monkeypatch.setattr(
        lm_eval, "continuations", lambda *_, sampling, **__: seeds.append(sampling) or [[]]
    )
    model.generate_until(2 * requested("q", {"do_sample": True}))
    assert seeds[0] != seeds[1]
    with refused("generation_kwargs: num_beams is not used here"):
        model.generate_until(requested("q", {"num_beams": 10}))


def test_conversations_are_written_by_the_folders_template(folder, model_of):
    model = model_of(build_tokenizer(str(folder)))
    asked = [{"role": "user", "content": "hi"}]
    assert model.apply_chat_template(asked) == "<s>user: hi<|end|>assistant: "
    begun = [*asked, {"role": "assistant", "content": "It is"}]
    continued = model.apply_chat_template(begun, add_generation_prompt=False)
    assert continued == "<s>user: hi<|end|>assistant: It is"
    assert (model.chat_template(True), model.chat_template()) == (TEMPLATE, None)
    assert isinstance(model.tokenizer_name, str)
    with refused("--apply_chat_template takes a chat template, and the tokenizer has none"):
        model_of(ByteTokenizer()).apply_chat_template(asked)


def test_what_is_not_used_is_refused_before_processes_start(monkeypatch, capsys):
    monkeypatch.setattr(lm_eval, "find_spec", lambda name: True)
    origin = Origin.of(Config())
    monkeypatch.setattr(lm_eval, "checked", lambda path, keys: (origin, None))
    for option, said in (
        ("--apply_chat_template", "--apply_chat_template takes a chat template"),
        ("--model_args=dtype=float32", "--model_args: PATH and keys say what is evaluated"),
    ):
        assert is_refused(lm_eval.main, ["PATH", "--tasks", "x", option], capsys).startswith(said)
