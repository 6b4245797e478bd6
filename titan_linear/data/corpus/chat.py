"""Conversations: a record's tokens, and the weight of each.

`training.dataset_format` is one of

    messages     `messages`, a list of {"role", "content"}, or ShareGPT's `conversations`, and
                 `tools` if any, as the chat template of the tokenizer's folder writes them. Answers
                 are trained on: the messages of the role "assistant", each token with the message's
                 `weight`, `train`, `trainable`, `loss` or `loss_scale`, 0 to 1
    completion   `prompt` and `completion`, two texts, each tokenised separately, without a space
                 that the tokenizer puts before texts, and the end token; what follows the prompt is
                 trained on
    tokens       `tokens`, a list of ids, all of which are trained on
    preference   `chosen` and `rejected`, two documents: texts or messages after a question. Only
                 answers that the other document lacks count

A chat template is a jinja2 program from elsewhere. It runs in jinja2's sandbox, in a
separate process, which ends if one text takes SECONDS. It sees only the record and the
names of special tokens, and not a clock either (`strftime_now` is not defined), so that the
same record always gives the same tokens. These equal the tokens of transformers'
`apply_chat_template`: of several templates, "tool_use" writes records with tools and
"default" the others, `chat_template_kwargs` are variables of the template, and a message's
reasoning has the names that templates read. Arguments of calls that are JSON text are
parsed where the template would quote the text. A record with a tool, a call or a message
that the template does not write is a bad document.

An answer is the text that the template has between {% generation %} and
{% endgeneration %}. Without these marks, the conversation is rendered twice for each answer: up to it, as a
prompt, and including it. If the second text begins with the first, and the whole
conversation with the second, the answer is what the second adds to the first, up to the
special token that ends it. A template that writes an answer differently in a longer
conversation (drops its reasoning, for example) gives no such texts: the document is a bad
one.
"""

from __future__ import annotations

import hashlib
import json
import re
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import accumulate, compress
from os.path import commonprefix
from typing import Any, NamedTuple, TypeGuard

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from numpy import ndarray

from titan_linear.config.nesting import check_nesting
from titan_linear.data.corpus.columns import WEIGHTS, DocumentTokens, Problem
from titan_linear.data.corpus.tokenizer import NAMED_TOKENS, HuggingFaceTokenizer, Tokenizer
from titan_linear.storage.files import parse_json

Record = Mapping[str, Any]
Messages = list[Record]
Ranges = list[tuple[int, int]]
# Ranges of answers, with their weights.
Answers = list[tuple[int, int, float]]
ANSWERER = "assistant"
# Marks around answers. A text that contains them is refused.
_BEGIN = "\ufdd0answer\ufdd1"
_END = "\ufdd0/answer\ufdd1"
# Limit of a process's time for one text.
SECONDS = 20.0
# The first of these fields in a message is its reasoning.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Roles by the `from` field of messages.
_SHARE_GPT = {name: name for name in ("system", "user", ANSWERER, "tool")}
_SHARE_GPT |= {"human": "user", "gpt": ANSWERER, "observation": "tool"}
# Fields that scale the loss of an answer's tokens. axolotl's train_detail, a list, is
# refused because it is not a number.
ANSWER_WEIGHTS = ("weight", "train", "trainable", "loss", "loss_scale", "train_detail")
# Usual names of fields that stand before the answers of a preference.
QUESTIONS = ("prompt", "question", "instruction", "input", "query", "context", "history")
QUESTIONS += ("messages", "conversations", "conversation", "trajectory")
# The JSON text of an object, quoted as a JSON string.
_QUOTED = re.compile(r'"(\s|\\[nrt])*\{(\s|\\[nrt])*(\\"|\})')
_ONE_QUESTION = "give all that stands before the answers once, as 'prompt'"
_REMEDY = "put {% generation %} and {% endgeneration %} around answers in the chat template (docs/conversations.md)"


class RecordEncoder(ABC):
    """Encoder of records.

    Attributes:
        fingerprint: changes whenever the tokens of some record may change for a reason
            other than the tokenizer.
    """

    fingerprint: str

    @abstractmethod
    def encode(self, record: Record) -> Any:
        """Return a record's `DocumentTokens`, or a list of two.

        Raises:
            Problem: the record has no tokens.
        """

    def encode_batch(self, records: Sequence[Record]) -> list[Any]:
        """Return the tokens of each record, or its problem as text."""
        encoded = []
        for record in records:
            try:
                encoded.append(self.encode(record))
            except Problem as problem:
                encoded.append(str(problem))
        return encoded


class Completions(RecordEncoder):
    """Encoder of `prompt` and `completion`, two texts."""

    fingerprint = "completion-3"

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._continuing = tokenizer.continuing()

    def encode(self, record: Record) -> DocumentTokens:
        for name in ("prompt", "completion"):
            if not isinstance(record[name], str):
                raise Problem(f"{name!r} is {type(record[name]).__name__}, not text")
        prompt = record["prompt"]
        completion = record["completion"]
        if not completion.strip():
            raise Problem("no answer to learn: 'completion' is empty")
        before = self._tokenizer.encode(prompt)
        after = (self._continuing if prompt else self._tokenizer).encode(completion)
        ids = np.concatenate([before, after, np.array(self._tokenizer.eos, dtype=np.int64)])
        answered = np.arange(len(ids)) >= len(before)
        return _with_answer(ids, answered, "'completion' is the document's first token alone")


class Ids(RecordEncoder):
    """Encoder of `tokens`, a list of ids."""

    fingerprint = "tokens-1"

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def encode(self, record: Record) -> DocumentTokens:
        tokens = record["tokens"]
        size = self._tokenizer.vocab_size
        listed = isinstance(tokens, list) and tokens
        if not listed or not all(type(x) is int and 0 <= x < size for x in tokens):
            raise Problem(
                f"'tokens' is not a list of numbers from 0 to {size - 1}, those of the tokenizer's tokens"
            )
        return DocumentTokens(np.array(tokens))


class Preferences(RecordEncoder):
    """Encoder of `chosen` and `rejected`, texts or messages.

    The question before them has one of the names in QUESTIONS. A question that the messages
    already contain, repeated in a field, is not written again.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._texts = Completions(tokenizer)
        self._chats = Conversations(tokenizer) if _has_template(tokenizer) else None
        self.fingerprint = f"preference-2 {self._chats.fingerprint if self._chats else ''}"

    def encode(self, record: Record) -> list[DocumentTokens]:
        # Encode both answers, as texts or as messages.
        answers = [record["chosen"], record["rejected"]]
        asked = {name: record[name] for name in QUESTIONS if record.get(name)}
        if all(isinstance(text, str) for text in (*answers, *asked.values())):
            asked["system"] = record.get("system") or ""
            texts = _completions(answers, {*asked.values()} - {""})
            pair = [self._texts.encode(text) for text in texts]
        elif self._chats is None:
            raise Problem(
                "'chosen' and 'rejected' are no two texts, nor messages for a tokenizer with a chat template"
            )
        else:
            chats = _conversations(answers, asked)
            pair = [self._chats.encode({**record, "messages": chat}) for chat in chats]
        if np.array_equal(pair[0].tokens, pair[1].tokens):
            raise Problem(
                "'chosen' and 'rejected' are equal, and nothing is learnt of them; correct one"
            )
        return pair


def _completions(answers: list[str], asked: set[str]) -> Messages:
    """Return two texts as completions.

    Without a question, they are dialogues that share their beginning, up to some line.
    """
    if len(asked) > 1:
        raise Problem(f"there are several questions; {_ONE_QUESTION}")
    prompt = "".join(asked)
    if not asked:
        shared = commonprefix(answers)  # noqa: RUF071 (of texts, not of paths)
        prompt = "".join(shared.rpartition("\n")[:2])
        answers = [answer.removeprefix(prompt) for answer in answers]
    return [{"prompt": prompt, "completion": answer} for answer in answers]


def _conversations(answers: list[Any], asked: Record) -> list[Messages]:
    """Return two answers after the question, unless they already contain it.

    The messages with which both begin get weight 0.
    """
    chats = [_as_messages(answer, ANSWERER) for answer in answers]
    for name, value in asked.items():
        question = _as_messages(value, "user")
        chosen, rejected = chats
        repeated = all(message in chosen and message in rejected for message in question)
        if value in answers or repeated:
            continue
        if any(chat[0].get("role") != ANSWERER for chat in chats):
            raise Problem(f"no answer follows the question {name!r}; {_ONE_QUESTION}")
        chats = [question + chat for chat in chats]
    for i, (message, other) in enumerate(zip(*chats)):
        if message != other:
            break
        chats[0][i] = chats[1][i] = {**message, "weight": 0}
    return chats


def _as_messages(value: Any, role: str) -> Messages:
    """Return a list of messages, from a list, one message, or a text by this role."""
    if isinstance(value, str):
        value = {"role": role, "content": value}
    messages = value if isinstance(value, list) else [value]
    if not messages or not _are_objects(messages):
        raise Problem(f"{value!r} is neither text nor messages; give one of these")
    return [_as_templates_know_it(message) for message in messages]


class Conversations(RecordEncoder):
    """Encoder of `messages`, by the tokenizer's chat template.

    Args:
        asked: the key that needs the template, for the error.

    Raises:
        ValueError: the tokenizer has no template, or an invalid one.
    """

    fingerprint: str

    def __init__(self, tokenizer: Tokenizer, asked: str = "training.dataset_format = 'messages'"):
        if not _has_template(tokenizer):
            raise ValueError(
                f"{asked} takes a chat template, and the tokenizer has none; set model.tokenizer_path to a folder with "
                "one (chat_template in tokenizer_config.json, or a chat_template.jinja beside tokenizer.json: "
                "docs/conversations.md has an example), or train on 'completion'"
            )
        self._tokenizer = tokenizer
        sources = tokenizer.chat_templates
        self.source = sources["default"]
        sources = {name: sources[name] for name in ("default", "tool_use") if name in sources}
        self._templates = {name: _Template(name, source) for name, source in sources.items()}
        # Names of special tokens that templates mention. The fingerprint covers all that is
        # rendered.
        mentioned = set().union(*(template.names for template in self._templates.values()))
        names = [*NAMED_TOKENS, *sorted(mentioned - {*NAMED_TOKENS})]
        tokens = tokenizer.token_names
        self._names = {name: tokens[name] for name in names if name in tokens}
        content = json.dumps([sources, self._names, tokenizer.special_tokens]).encode(
            "utf-8", "surrogatepass"
        )
        self.fingerprint = "messages-5-" + hashlib.sha256(content).hexdigest()[:32]

    def prompt(self, messages: Messages) -> list[int]:
        """Return the tokens of `text`."""
        return self._tokenizer.encode(self.text(messages)).tolist()

    def text(self, messages: Messages, answered: bool = True) -> str:
        """Return the text after which an answer follows.

        If not `answered`, more of the last message follows instead.

        Raises:
            ValueError: the template refuses the messages.
        """
        if not answered:
            *earlier, last = messages
            messages = [*earlier, {**last, "content": last["content"] + _END}]
        written = _messages({"messages": messages})
        text = self._writer({})(written, add_generation_prompt=answered)
        return text.partition(_END)[0]

    def encode(self, record: Record) -> DocumentTokens:
        messages = _messages(record)
        weights = [_weight(i, message) for i, message in enumerate(messages, 1)]
        text, answers = self._rendered(self._writer(record), messages, weights)
        # Places [n, 2]: the characters of each token.
        ids, places = self._tokenizer.encode_with_places(text)
        of_tokens = np.zeros(len(ids))
        for begin, end, weight in answers:
            of_tokens[(places[:, 0] < end) & (begin < places[:, 1])] = weight
        return _with_answer(ids, of_tokens, f"no message of the role {ANSWERER!r} is trained on")

    def _writer(self, record: Record) -> _Writer:
        # Some tables hold tools and variables as JSON text.
        tools = [] if record.get("tools") == "" else _parsed(record.get("tools"))
        if not _are_objects(tools or []):
            raise Problem("'tools' is not a list of objects, nor the JSON text of one")
        variables = _parsed(record.get("chat_template_kwargs") or {})
        reserved = {"messages", "tools", "add_generation_prompt"}
        if not isinstance(variables, dict) or reserved & variables.keys():
            raise Problem(
                "'chat_template_kwargs' is not an object, or has messages, tools or add_generation_prompt"
            )
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        variables = {"documents": None, **self._names, **variables, "tools": tools}
        return _Writer(self._templates[name].programs, variables)

    def _rendered(
        self,
        write: _Writer,
        messages: Messages,
        weights: list[float | None],
    ) -> tuple[str, Answers]:
        """Return a conversation's text, and its ranges to train on with their weights.

        Ranges are of characters.
        """
        messages, whole = _with_arguments(write, messages)
        _check_all_written(write, messages, whole)
        # The template marks answers.
        if write.programs.marked is not None:
            plain, places = _cut_marks(write(messages, write.programs.marked))
            if plain != whole:
                raise Problem(
                    "the chat template changes what it has between {% generation %} and {% endgeneration %}; have it "
                    "change that inside of them"
                )
            said = [weight for weight in weights if weight is not None]
            if len(places) != len(said):
                if set(said) != {1}:
                    raise Problem(
                        f"a weight that is not 1, and no answer for each message of the role {ANSWERER!r}; {_REMEDY}"
                    )
                said = [1.0] * len(places)
            return whole, [(*place, weight) for place, weight in zip(places, said) if weight]
        # Otherwise, compare the text before and after each answer.
        answers: Answers = []
        for i in compress(range(len(weights)), weights):
            prompt = write(messages[:i], add_generation_prompt=True)
            answered = write(messages[: i + 1])
            if not (answered.startswith(prompt) and whole.startswith(answered)):
                raise Problem(
                    f"message {i + 1}: the chat template writes this answer otherwise as a prompt, or once the "
                    f"conversation goes on; {_REMEDY}, or let conversations end in such an answer"
                )
            # Text after the end of the turn does not belong to the answer.
            closed = answered.rstrip()
            end = len(closed if closed.endswith(self._tokenizer.special_tokens) else answered)
            answers.append((len(prompt), end, weights[i]))
        return whole, answers


def _has_template(tokenizer: Tokenizer) -> TypeGuard[HuggingFaceTokenizer]:
    return isinstance(tokenizer, HuggingFaceTokenizer) and "default" in tokenizer.chat_templates


class _Writer(NamedTuple):
    """A chat template, and the variables that a record gives it besides its messages."""

    programs: _Programs
    variables: dict[str, Any]

    def __call__(
        self,
        messages: Messages,
        program: jinja2.Template | None = None,
        **variables: Any,
    ) -> str:
        defaults = {"add_generation_prompt": False}
        values = {**defaults, **self.variables, **variables, "messages": messages}
        try:
            with _in_time():
                return (program or self.programs.plain).render(values)
        except Exception as error:
            # Whatever the template raises.
            complete = all("content" in message for message in messages)
            null = "" if complete else " (a message's content is null)"
            raise Problem(
                f"the chat template refuses it{null}: {type(error).__name__}: {error}"
            ) from error


def _with_arguments(write: _Writer, messages: Messages) -> tuple[Messages, str]:
    """Return the messages and their text.

    Arguments of calls that are JSON text become objects if the template quotes or refuses
    the text.
    """
    objects = json.loads(json.dumps(messages), object_hook=_with_object)
    try:
        whole = write(messages)
        if not _QUOTED.search(whole):
            return messages, whole
    except Problem:
        if objects == messages:
            raise
    return objects, write(objects)


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    return {name: _parsed(value) if name == "arguments" else value for name, value in call.items()}


def _check_all_written(write: _Writer, messages: Messages, whole: str) -> None:
    """Raise Problem if the text omits a tool, a call or a message, or contains marks.

    Something is omitted if the text is the same without it.
    """

    def same(messages: Messages, **variables: Any) -> bool:
        with suppress(Problem):
            return write(messages, **variables) == whole
        return False

    if _BEGIN[0] in whole:
        raise Problem(
            "a message holds the noncharacter U+FDD0, which marks answers here; remove it"
        )
    tools = write.variables["tools"]
    roles = [message["role"] for message in messages]
    unwritten = ["'tools'"] if tools and same(messages, tools=tools[:-1]) else []
    for i, message in enumerate(messages):
        fewer = {**message, "tool_calls": message.get("tool_calls", [])[:-1]}
        if message.get("tool_calls") and same([*messages[:i], fewer, *messages[i + 1 :]]):
            unwritten.append(f"'tool_calls' of message {i + 1}")
        # The first message of each role shows whether the role is written.
        found = str(message.get("content")).strip() in whole and roles.index(roles[i]) < i
        if message.get("content") and not found and same([*messages[:i], *messages[i + 1 :]]):
            unwritten.append(f"messages of the role {roles[i]!r}: message {i + 1}")
    if unwritten:
        raise Problem(
            f"the chat template does not write all {unwritten[0]}; take one that does (docs/conversations.md has one)"
        )


@contextmanager
def _in_time() -> Iterator[None]:
    """End this process by SIGVTALRM if the code inside `with` takes SECONDS.

    A single operation may keep C busy forever, so that no handler in Python would run.
    """
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


class _Programs(NamedTuple):
    plain: jinja2.Template
    # The same with marks around answers, if the template says where they are.
    marked: jinja2.Template | None


class _Template:
    """A chat template.

    Attributes:
        names: the variables in it.

    Raises:
        ValueError: it is not a valid template.
    """

    def __init__(self, name: str, source: str):
        self._name = name
        self._source = source
        environment = _environment(_BEGIN, _END)
        with self._refusing():
            code = environment.lex(source)
            check_nesting("".join(text for _, kind, text in code if kind == "operator"))
            self._tree = environment.parse(source)
        self.names = {node.name for node in self._tree.find_all(nodes.Name)}

    @cached_property
    def programs(self) -> _Programs:
        """Return the programs, compiled where they run.

        jinja2 computes constants when it compiles.
        """
        marks = any(text.data == _BEGIN for text in self._tree.find_all(nodes.TemplateData))
        with self._refusing(), _in_time():
            marked = _environment(_BEGIN, _END).from_string(self._source) if marks else None
            return _Programs(_environment().from_string(self._source), marked)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of jinja2, or of a constant that is computed
            raise ValueError(
                f"model.tokenizer_path: its chat template {self._name!r} is not one: {error}; repair it"
            ) from error


def _parsed(value: object) -> object:
    """Return the value of a field, parsed if it is JSON text.

    Some tables hold JSON text, since each row has different fields there.
    """
    try:
        return parse_json(value, Any) if isinstance(value, str) else value
    except ValueError:
        return value


def _are_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(element, dict) for element in value)


def _messages(record: Record) -> Messages:
    """Return a record's messages, as templates know them."""
    messages = record.get("messages")
    if messages is None:
        messages = record.get("conversations")
    if not _are_objects(messages):
        messages = [{}]
    messages = [_as_templates_know_it(message) for message in messages]
    # Prepend the record's system message, and check all messages.
    system = {"role": "system", "content": record.get("system")}
    if system["content"] and not any(system.items() <= message.items() for message in messages):
        messages = [system, *messages]
    for i, message in enumerate(messages, 1):
        has_role = isinstance(message.get("role"), str)
        if not has_role or not _are_objects(message.get("tool_calls", [])):
            raise Problem(
                f"'messages' is not a list of objects with a 'role' (or 'from': {', '.join(_SHARE_GPT)}), whose "
                "'tool_calls', if any, are objects"
            )
        if "content" not in message and not any(map(message.get, ("tool_calls", *_REASONING))):
            raise Problem(
                f"message {i}: its content is null, and it calls nothing; write its text, or leave it out"
            )
    return messages


def _as_templates_know_it(message: Record) -> Record:
    """Return the message without null fields, and with common names.

    Saved tables give every message the fields of all, null where it lacks them. Its
    reasoning is under the name that most templates read, and under gpt-oss's.
    """
    if message.get("role") is None:
        role = _SHARE_GPT.get(str(message.get("from")))
        message = {**message, "role": role, "content": message.get("value", message.get("content"))}
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _weight(i: int, message: Record) -> float | None:
    """Return the weight of an answer's tokens; None if the message is not an answer."""
    weight = 1.0
    for name in ANSWER_WEIGHTS:
        factor = message.get(name, 1)
        if not (isinstance(factor, int | float) and 0 <= factor <= 1):
            raise Problem(
                f"message {i}: {name!r} is {factor!r}; give 0 (not trained on) to 1 for all of it"
            )
        weight *= factor
    if message["role"] != ANSWERER:
        return None
    said = str(message.get("content", "")).rpartition("</think>")[2].strip()
    if weight and not (said or message.get("tool_calls")):
        raise Problem(f"message {i}: its answer is empty; write its text, or give it weight 0")
    return weight


def _with_answer(tokens: ndarray, weights: ndarray, lacking: str) -> DocumentTokens:
    """Return a document.

    The first token is never predicted.

    Raises:
        Problem: the document has nothing to learn.
    """
    if not weights[1:].any():
        raise Problem(f"no answer to learn: {lacking}")
    return DocumentTokens(tokens, {WEIGHTS: weights.astype(np.float32)})


def _cut_marks(text: str) -> tuple[str, Ranges]:
    """Return a text without its marks, and the ranges that were between them."""
    # Parts are outside and inside in turn.
    parts = re.split(f"{_BEGIN}|{_END}", text)
    ends = list(accumulate(map(len, parts)))
    return "".join(parts), list(zip(ends[::2], ends[1::2]))


# --- jinja2 ----------------------------------------------------------------------------------------------------------


def _environment(*marks: str) -> ImmutableSandboxedEnvironment:
    """Return the environment for which chat templates are written.

    It is the environment of transformers without the clock.

    Args:
        marks: texts to put around answers.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.extend(marks=marks)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment


class _Generation(Extension):
    """The tag {% generation %} … {% endgeneration %}.

    The text between is written, with the environment's marks around it.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        if marks := vars(self.environment)["marks"]:
            begin, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in marks)
            body = [begin, *body, end]
        return nodes.Scope(body).set_lineno(line)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`. jinja2's own escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
