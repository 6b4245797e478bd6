"""A tokenizer with a chat template."""

import json

from tokenizers import normalizers, processors

from tests.bpe import byte_bpe
from tests.records import write_json

PLAIN = """\
{{- bos_token }}
{%- if tools %}
    {{- '<|im_start|>tools\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' and message.content is not string %}{{ raise_exception('no text') }}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {{- message.content }}
        {%- if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- message.content | trim + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
UNMARKED = PLAIN.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
TOOLS = [{"type": "function", "function": {"name": "area", "parameters": {"é": ["<", "number"]}}}]
CALL = {"name": "area", "arguments": {"r": 2}}
CHATS = [
    {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]},
    {
        "messages": [
            {"role": "system", "content": "  Be brief.\n"},
            {"role": "user", "content": "né 漢字?"},
            {"role": "assistant", "content": "  🙂 two  words \n"},
            {"role": "user", "content": "again"},
            {"role": "assistant", "content": "no"},
        ]
    },
    {
        "tools": TOOLS,
        "messages": [
            {"role": "user", "content": "area?", "name": None},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "12.6"},
            {"role": "assistant", "content": "12.6"},
            {"role": "assistant", "content": "<b> indeed </b>"},
        ],
    },
]


def make_tokenizer(path, template, beside=False):
    """A folder with a tokenizer of Qwen's kind and a chat template."""
    parts = {
        "normalizer": normalizers.NFC(),
        "post_processor": processors.ByteLevel(trim_offsets=True),
    }
    special = ["<|bos|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = byte_bpe([json.dumps(CHATS)] * 5, 320, special, **parts)
    path.mkdir(exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "bos_token": "<|bos|>",
        "eos_token": "<|im_end|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if beside:
        (path / "chat_template.jinja").write_text(template)
    elif template is not None:
        settings["chat_template"] = template
    write_json(path / "tokenizer_config.json", settings)
