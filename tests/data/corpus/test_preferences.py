"""Preferences: the question stands before both answers, by any usual name and in any usual place, or is refused."""

import numpy as np
import pytest

from tests.bpe import byte_bpe
from tests.keys import argv_of
from tests.records import write_json, write_lines, write_record
from tests.refusals import refused
from titan_linear.config import load_config
from titan_linear.data import ByteTokenizer, Texts, build_tokenizer, open_corpus, write_corpus
from titan_linear.run.preflight import preflight

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant:' }}{% endif %}"
)


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """A tokenizer with a template that writes any role."""
    folder = tmp_path_factory.mktemp("tokenizer")
    special = ["<|im_start|>", "<|im_end|>"]
    byte_bpe(["user assistant"], 300, special).save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    write_json(folder / "tokenizer_config.json", settings)
    return build_tokenizer(str(folder))


def opened(file, tokenizer=None, **options):
    options = {"dataset_format": "preference", **options}
    texts = Texts(file.suffix[1:], str(file), tokenizer or ByteTokenizer(), **options)
    return open_corpus(texts, cache_dir=file.parent / "cache")


def said(corpus, tokenizer):
    """Each document's text, with what is trained on in brackets."""
    found = []
    for begin, end in zip(corpus.offsets[:-1], corpus.offsets[1:]):
        learnt = corpus.column("weights", np.arange(begin, end)) > 0
        cuts = np.flatnonzero(np.diff(learnt)) + 1
        parts = [
            tokenizer.decode(ids, special=True) for ids in np.split(corpus.tokens[begin:end], cuts)
        ]
        found.append("".join(f"[{x}]" if i % 2 != learnt[0] else x for i, x in enumerate(parts)))
    return found


def says(role, content):
    return {"role": role, "content": content}


def answers(chosen="4", rejected="5"):
    return {"chosen": [says("assistant", chosen)], "rejected": [says("assistant", rejected)]}


Q, TEXTS = says("user", "2+2?"), {"chosen": "4", "rejected": "5"}
WHOLE = {"chosen": [Q, says("assistant", "4")], "rejected": [Q, says("assistant", "5")]}
SHARE_GPT = {
    "chosen": {"from": "gpt", "value": "4"},
    "rejected": {"from": "gpt", "value": "5"},
    "conversations": [{"from": "human", "value": "2+2?"}],
}
ULTRAFEEDBACK = WHOLE | {"prompt": "2+2?", "messages": WHOLE["chosen"], "score_chosen": 8.0}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "2+2?", **answers()},
        {"question": "2+2?", **answers()},
        {"instruction": "2+2?", "input": "", **answers()},
        {"prompt": [Q], **answers()},
        {"messages": [Q], **answers()},
        {"messages": [Q], **TEXTS},
        {"conversations": [Q], "prompt": "2+2?", **answers()},
        WHOLE,
        {"prompt": "2+2?", **WHOLE},
        {"prompt": [Q], **WHOLE},
        ULTRAFEEDBACK,
        SHARE_GPT,
    ],
)
def test_questions_before_messages(chat, tmp_path, record, kind):
    file = tmp_path / f"pairs.{kind}"
    write_record(file, record)
    asked = "<|im_start|>user:2+2?<|im_end|><|im_start|>assistant:"
    assert said(opened(file, chat), chat) == [f"{asked}[{n}<|im_end|>]" for n in "45"]


def test_a_system_message_beside_the_messages(chat, tmp_path):
    """It stands first, once."""
    system = says("system", "Be brief.")
    records = [
        {"system": "Be brief.", **WHOLE},
        {"system": "Be brief.", "prompt": [system, Q], **answers()},
    ]
    texts = said(opened(write_lines(tmp_path / "a.jsonl", records), chat), chat)
    assert all(
        text.startswith("<|im_start|>system:Be brief.<|im_end|><|im_start|>user:") for text in texts
    )
    assert all(text.count("system") == 1 for text in texts) and len(texts) == 4
    chats = write_lines(
        tmp_path / "b.jsonl", [{"system": "Be brief.", "messages": WHOLE["chosen"]}]
    )
    (text,) = said(opened(chats, chat, dataset_format="messages"), chat)
    assert text.startswith("<|im_start|>system:Be brief.<|im_end|>")


@pytest.mark.parametrize(
    "name", ["prompt", "question", "instruction", "input", "query", "context", "system"]
)
def test_questions_before_texts(tmp_path, name):
    file = write_lines(
        tmp_path / "a.jsonl",
        [{name: "2+2=", "prompt_id": "x", **TEXTS}, {name: "2+2=", "prompt": "2+2=", **TEXTS}],
    )
    corpus = opened(file)
    weights = corpus.columns["weights"].reshape(4, -1)
    assert (weights == [0, 0, 0, 0, 1, 1]).all()
    texts = [bytes(ids.astype(np.uint8)) for ids in corpus.tokens.reshape(4, -1)[:, :-1]]
    assert texts == [b"2+2=4", b"2+2=5"] * 2


def test_what_two_dialogues_begin_with_is_not_learnt(tmp_path):
    """As of HH-RLHF: what both begin with, up to a line, is not learnt."""
    asked = "\n\nHuman: 2+2?\n\nAssistant: no\n\nHuman: yes\n\n"
    record = {"chosen": asked + "Assistant: 4", "rejected": asked + "Assistant: 5"}
    corpus = opened(write_lines(tmp_path / "a.jsonl", [record]))
    weights = corpus.columns["weights"].reshape(2, -1)
    assert weights[:, : len(asked)].sum() == 0 and weights[:, len(asked) :].all()
    assert bytes(corpus.tokens[: len(asked)].astype(np.uint8)).decode() == asked


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"prompt": "a", "question": "b", **TEXTS}, "there are several questions; give all that"),
        ({"system": "a", "question": "b", **TEXTS}, "there are several questions"),
        (
            {"prompt": "a", "question": "b", **answers()},
            "no answer follows the question 'question'",
        ),
        (
            {"prompt": "another", **WHOLE},
            "no answer follows the question 'prompt'; give all that stands",
        ),
        ({"history": [["a", "b"]], **TEXTS}, "is neither text nor messages; give one of these"),
        ({"prompt": 3, **TEXTS}, "3 is neither text nor messages"),
        ({"prompt": "a", **answers(), "rejected": []}, r"\[\] is neither text nor messages"),
        (
            {"prompt": "a", "chosen": "4", "rejected": "4"},
            "'chosen' and 'rejected' are equal, and nothing",
        ),
        ({"prompt": "a", **answers("4", "4")}, "no answer to learn"),
        (
            {"prompt": "a", **answers("4", "4"), "rejected": [says("assistant", "4") | {"id": 1}]},
            "are equal",
        ),
        (
            {"prompt": "a", "chosen": "4", "rejected": " \n"},
            "no answer to learn: 'completion' is empty",
        ),
        ({"prompt": "a", **answers("4", "")}, "message 2: its answer is empty; write its text"),
    ],
)
def test_pairs_that_are_refused(chat, tmp_path, record, problem):
    file = write_lines(tmp_path / "a.jsonl", [{"prompt": "good", **TEXTS}, record])
    with refused(rf"a\.jsonl, line 2: .*{problem}"):
        opened(file, chat)
    corpus = opened(file, chat, on_bad_document="skip")
    assert corpus.num_documents == 2 and corpus.info["source"]["skipped_bad"] == 1


# --- what must lie in one stream -------------------------------------------------------------------------------------


def keys_of(folder, **keys):
    given = {
        "model.name": "gdn",
        "model.flavor": "debug",
        "training.dataset": "jsonl",
        "training.dataset_path": folder / "a.jsonl",
        "training.seq_len": 128,
        "training.global_batch_size": 1,
        "job.dump_folder": folder / "run",
        "lr_scheduler.warmup_steps": 0,
        **keys,
    }
    return load_config(argv_of(given))


DPO = {"loss.name": "dpo", "dpo.reference_free": "true"}
PREFERENCES = DPO | {"training.dataset_format": "preference"}
POLICY = {
    "training.dataset_format": "tokens",
    "training.dataset_columns": '["advantages", "behaviour"]',
    "loss.name": "policy",
}
SHARED = {"training.share_prefixes": "true"}


def pair(length):
    """Two documents of length + 2 tokens each, with their ends."""
    return {"prompt": "x" * length, "chosen": "4", "rejected": "5"}


def rolled_out(length):
    return {"tokens": [1] * length, "advantages": 1.0, "behaviour": [-1.0] * length}


def tree(length):
    """Two paths of length + 2 tokens each, with their ends."""
    return {"text": "x" * length, "children": [{"text": "4"}, {"text": "5"}]}


@pytest.mark.parametrize(
    ("make", "fits", "tokens", "keys"),
    [
        (pair, 62, 2, PREFERENCES),
        (pair, 64, 70, PREFERENCES | SHARED),
        (rolled_out, 128, 1, POLICY),
        (rolled_out, 128, 1, POLICY | SHARED),
        (tree, 126, 1, {"training.dataset_format": "tree"}),
    ],
)
def test_what_is_longer_than_a_stream(make, fits, tokens, keys, tmp_path, capsys):
    """It is found before anything starts, by file and line, and may be skipped."""
    longer = make(fits + tokens)
    write_lines(tmp_path / "a.jsonl", [*[make(fits)] * 20, longer, make(fits)])
    with refused(
        r"a\.jsonl, line 21: \d+ tokens that must lie in one stream, and training\.seq_len = 128"
    ):
        preflight(keys_of(tmp_path, **keys), world_size=1)
    preflight(keys_of(tmp_path, **keys, **{"training.on_bad_document": "skip"}), world_size=1)
    assert "warning: 1 bad documents skipped: " in capsys.readouterr().out


def test_own_tokens_that_are_longer_than_a_stream(tmp_path):
    write_corpus(tmp_path / "a.jsonl", [np.arange(100)] * 2, ByteTokenizer(), pairs=True)
    keys = DPO | {"training.dataset": "tokens"}
    with refused(
        r"training\.seq_len = 128: document 0 of .*a\.jsonl has 200 tokens with its other one"
    ):
        preflight(keys_of(tmp_path, **keys), world_size=1)
