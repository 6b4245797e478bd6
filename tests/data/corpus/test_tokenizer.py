import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from tests.bpe import byte_bpe
from tests.records import read_json, write_json
from tests.refusals import refused
from titan_linear.data import ByteTokenizer, Texts, build_tokenizer, open_corpus

TEXT = "def f(x):\n    return 'naïve café', x  # 日本語 <|endoftext|>"


@pytest.fixture
def file(tmp_path):
    """A byte-level BPE with one special token."""
    byte_bpe([TEXT] * 20, 300, ["<|endoftext|>"]).save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_bytes_round_trip():
    tokenizer = build_tokenizer(None)
    assert isinstance(tokenizer, ByteTokenizer) and isinstance(build_tokenizer(""), ByteTokenizer)
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.encode("é").tolist() == [0xC3, 0xA9]
    assert tokenizer.encode("").tolist() == []


def test_bytes_keep_invalid_utf8():
    tokenizer, data = build_tokenizer(None), bytes(range(256)) + b"\xff\xfe\xc3("
    ids = tokenizer.encode(data.decode("utf-8", "surrogateescape"))
    assert ids.tolist() == list(data)
    tokenizer.decode(ids).encode("utf-8")  # printable: no surrogate is left
    # ends of documents and a padded vocabulary's ids
    assert tokenizer.decode([72, 256, 105, 999]) == "Hi"


def test_tokens_are_those_of_the_tokenizers_library(file):
    tokenizer, reference = build_tokenizer(str(file)), tokenizers.Tokenizer.from_file(str(file))
    plain = TEXT.replace("<|endoftext|>", "")
    assert tokenizer.encode(plain).dtype == np.int64
    assert tokenizer.encode(plain).tolist() == reference.encode(plain, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode(plain)) == plain
    assert [ids.tolist() for ids in tokenizer.encode_batch(["a b", ""])] == [
        tokenizer.encode("a b").tolist(),
        [],
    ]
    assert tokenizer.vocab_size == reference.get_vocab_size()
    assert tokenizer.eos_id == reference.token_to_id("<|endoftext|>")
    assert build_tokenizer(str(file.parent)).fingerprint == tokenizer.fingerprint
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode("\udcff")


def test_hugging_face_adds_and_drops_nothing(file):
    reference = tokenizers.Tokenizer.from_file(str(file))
    whole = reference.encode(TEXT).ids
    reference.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A",
        special_tokens=[("<|endoftext|>", reference.token_to_id("<|endoftext|>"))],
    )
    reference.enable_truncation(3)
    reference.enable_padding(length=500)
    reference.model.dropout = 0.5
    reference.save(str(file))
    tokenizer = build_tokenizer(str(file))
    for _ in range(5):  # with dropout each time others
        assert tokenizer.encode(TEXT).tolist() == whole
    off = "truncation, padding, post_processor, dropout"
    assert tokenizer.summary == f"tokenizer: '{file}', 300 tokens; switched off: {off}"
    exported = tokenizers.Tokenizer.from_buffer(tokenizer.hugging_face_files()["tokenizer.json"])
    assert exported.encode(TEXT).ids == whole


def test_a_byte_order_mark(file):
    """Of each file of the folder; what is exported has none."""
    plain, template = build_tokenizer(str(file)), "{{ messages }}"
    file.with_name("chat_template.jinja").write_text(template)
    file.with_name("tokenizer_config.json").write_text('{"eos_token": "x"}')
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        file.with_name(name).write_bytes(b"\xef\xbb\xbf" + file.with_name(name).read_bytes())
    tokenizer = build_tokenizer(str(file))
    assert (
        tokenizer.encode(TEXT).tolist() == plain.encode(TEXT).tolist()
        and tokenizer.eos_id == plain.encode("x")[0]
    )
    assert tokenizer.chat_templates == {"default": template}
    assert not any(
        content.startswith(b"\xef\xbb\xbf") for content in tokenizer.hugging_face_files().values()
    )


LETTERS = {chr(97 + i): i for i in range(26)}
WITHOUT_UNKNOWN = {
    "BPE": models.BPE(LETTERS, [], unk_token="<unk>"),
    "WordLevel": models.WordLevel(LETTERS, unk_token="<unk>"),
    "WordPiece": models.WordPiece(LETTERS, unk_token="<unk>"),
    "Unigram": models.Unigram([(letter, -1.0) for letter in LETTERS], None),
}


@pytest.mark.parametrize("kind", WITHOUT_UNKNOWN)
def test_a_text_that_the_library_refuses(tmp_path, kind):
    """Its token for what it does not know is not in its vocabulary: the document is named."""
    tokenizers.Tokenizer(WITHOUT_UNKNOWN[kind]).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "日本"}\n{"text": "b"}\n')
    tokenizer, cache = build_tokenizer(str(tmp_path)), tmp_path / "cache"
    with refused(r"a\.jsonl, line 2: the tokenizer refuses it: (?i:.*unk)"):
        open_corpus(Texts("jsonl", str(tmp_path), tokenizer), cache_dir=cache)
    texts = Texts("jsonl", str(tmp_path), tokenizer, on_bad_document="skip")
    assert open_corpus(texts, cache_dir=cache).num_documents == 2
    assert "\n" not in tokenizer.summary


def test_a_tokenizer_that_drops_what_it_does_not_know(tmp_path):
    """A document of which nothing is left is no empty one; that letters vanish from the others is said."""
    tokenizers.Tokenizer(models.BPE(LETTERS, [])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": " "}\n{"text": "日本"}\n')
    tokenizer, cache = build_tokenizer(str(tmp_path)), tmp_path / "cache"
    assert tokenizer.summary.endswith(
        "\nwarning: it drops characters that it does not know: no token stands for them"
    )
    with refused(r"a\.jsonl, line 3: the tokenizer has no token for any of it"):
        open_corpus(Texts("jsonl", str(tmp_path), tokenizer), cache_dir=cache)
    corpus = open_corpus(
        Texts("jsonl", str(tmp_path), tokenizer, on_bad_document="skip"), cache_dir=cache
    )
    assert (
        "1 documents (1 empty texts skipped)" in corpus.summary
        and "1 bad documents" in corpus.summary
    )


def test_a_pattern_that_backtracks(tmp_path):
    tokenizer = tokenizers.Tokenizer(models.BPE(LETTERS, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("(a|aa|a?)+$"), "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with refused(r"the tokenizer refuses it: .*retry-limit"):
        build_tokenizer(str(tmp_path)).encode("a" * 100 + "b")
    tokenizer.pre_tokenizer, pattern = None, tokenizers.Regex("(a|aa|a?)+$")
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace(pattern, "c")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    decoder = build_tokenizer(str(tmp_path))
    with refused(r"the tokenizer refuses it: .*retry-limit"):
        decoder.decode(decoder.encode("a" * 100 + "b"))


TENFOLD = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
TWOFOLD = {"type": "Replace", "pattern": {"Regex": "(?=.)"}, "content": "a"}
AS_LETTERS = {"type": "ByteLevel"}
NESTED = {"type": "Sequence", "normalizers": [TENFOLD] * 5}


@pytest.mark.parametrize("part", [[TENFOLD] * 10, [TWOFOLD] * 30, [AS_LETTERS] * 30, [NESTED]])
def test_parts_that_blow_letters_up(file, part):
    """A letter would become up to 10^10, and take all memory; what real tokenizers do is taken."""
    content = read_json(file)
    write_json(file, content | {"normalizer": {"type": "Sequence", "normalizers": part}})
    with refused(r"model\.tokenizer_path: .*tokenizer\.json may make .* characters of one, which"):
        build_tokenizer(str(file))
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}
    quotes = {"type": "Replace", "pattern": {"String": "``"}, "content": '"'}
    real = [quotes, quotes, {"type": "NFKC"}, spaces, {"type": "Prepend", "prepend": "▁"}]
    write_json(file, content | {"normalizer": {"type": "Sequence", "normalizers": real}})
    assert build_tokenizer(str(file)).vocab_size == 300


def test_vocabulary_with_holes(file):
    content = read_json(file)
    content["model"]["vocab"]["far"] = 1000
    write_json(file, content)
    assert build_tokenizer(str(file)).vocab_size == 1001


@pytest.mark.parametrize("eos", ["x", {"content": "x"}])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_eos_beside_the_file(file, name, eos):
    before = build_tokenizer(str(file)).fingerprint
    write_json(file.with_name(name), {"eos_token": eos})
    tokenizer = build_tokenizer(str(file))
    assert tokenizer.eos_id == tokenizer.encode("x")[0]
    assert tokenizer.fingerprint != before  # documents end in another token


def test_all_tokens_that_end_a_text(file):
    """As transformers finds them beside the tokenizer, and its own."""
    known = {}
    for name, ends, of_all in (
        ("config.json", 7, {0, 7}),
        ("config.json", None, {0}),
        ("config.json", [8, 9], {0, 8, 9}),
        ("generation_config.json", [5, 6], {0, 5, 6}),
        ("generation_config.json", 4, {0, 4}),
    ):
        write_json(file.with_name(name), {"eos_token_id": ends})
        known[name] = build_tokenizer(str(file)).end_ids
        assert known[name] == of_all
    assert ByteTokenizer().end_ids == {256}


def test_a_tokenizer_may_have_no_end_token(file):
    content = read_json(file)
    content["added_tokens"] = []
    write_json(file, content)
    assert build_tokenizer(str(file)).eos_id is None


def test_unusable_tokenizers_are_refused(file, tmp_path):
    with refused(r"model\.tokenizer_path = .*nowhere.* does not exist"):
        build_tokenizer(str(tmp_path / "nowhere"))
    file.with_name("tokenizer_config.json").write_text('{"eos_token": "<gone>"}')
    with refused(r"model\.tokenizer_path: eos_token '<gone>'"):
        build_tokenizer(str(file))
    file.with_name("tokenizer_config.json").write_text("{")
    with refused(r"tokenizer_config\.json' cannot be read \(.*\); correct it there"):
        build_tokenizer(str(file))
    for content in (b"", b"{", b"[]", b'{"model": 3}', b"\xff"):
        file.write_bytes(content)
        with refused(r"model\.tokenizer_path: .* is not a Hugging Face tokenizer"):
            build_tokenizer(str(file))
