"""Records of the trials in docs/losses.md, and what comes of them.

python records.py               writes pairs, chats and texts
python records.py FILE          reads samples, prints their mean reward, and writes them with their advantages
python records.py loss FOLDER   prints the mean loss of texts that were scored
python records.py stdlib        writes the standard library's texts in pieces, of which 300 and 100 are set aside
"""

import json
import random
import sys
import sysconfig
from pathlib import Path
from string import ascii_lowercase as LETTERS

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

rng = random.Random(0)
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
VOWELS = "aeiou"


def walk(step: int, n: int = 16) -> str:
    """Letters each of which is one to five after (before) the last."""
    at = [rng.randrange(26)]
    while len(at) < n:
        at.append((at[-1] + step * rng.randint(1, 5)) % 26)
    return "".join(LETTERS[i] for i in at)


def write(name: str, records: list[dict]) -> None:
    Path(name).write_text("".join(json.dumps(record) + "\n" for record in records))


def chat(good: tuple[bool, ...], weighted: bool = True) -> dict:
    """Questions of four letters; a good answer shouts them, another one is letters too, and has weight 0."""
    messages = []
    for right in good:
        asked, other = ("".join(rng.choices(LETTERS, k=4)) for _ in range(2))
        answer = {"role": "assistant", "content": asked.upper() if right else other}
        messages += [
            {"role": "user", "content": asked},
            answer | ({"weight": float(right)} if weighted else {}),
        ]
    return {"messages": messages}


def tokenizer() -> None:
    """Bytes, with a chat template."""
    alphabet = {
        letter: i
        for i, letter in enumerate(["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    of_bytes = Tokenizer(models.BPE(alphabet, []))
    of_bytes.pre_tokenizer, of_bytes.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    Path("chat").mkdir(exist_ok=True)
    of_bytes.save("chat/tokenizer.json")
    Path("chat/tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<end>", "chat_template": TEMPLATE})
    )


def mean_loss(folder: str) -> None:
    """Of what titan-linear score wrote."""
    scored = np.fromfile(f"{folder}/column-reference.bin", "<f4")
    print(f"{folder}: {-scored[scored != 0].mean():.4f}")


def stdlib() -> None:
    root, skipped = (
        Path(sysconfig.get_paths()["stdlib"]),
        {"site-packages", "dist-packages", "test", "tests", "idle_test"},
    )
    files = sorted(file for file in root.rglob("*.py") if not skipped & {*file.parts})
    rng.shuffle(files)
    for name, most in (("held_out", 100), ("taught", 300), ("teaching", 10**9)):
        pieces = []
        while files and len(pieces) < most:
            text = files.pop().read_text("utf-8", "replace")
            pieces += [{"text": text[i : i + 4000]} for i in range(0, len(text), 4000)]
        write(f"stdlib_{name}.jsonl", pieces[:most])


def advantages(file: str) -> None:
    """Of samples of the prompt `x:`: the share of vowels, less the mean, by its deviation."""
    samples = [
        line[2:] for line in sys.stdin.read().splitlines() if line.startswith("x:") and line[2:]
    ]
    rewards = [sum(c in VOWELS for c in sample) / len(sample) for sample in samples]
    mean = sum(rewards) / len(rewards)
    deviation = (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5 + 1e-3
    write(
        file,
        [
            {"prompt": "x:", "completion": sample, "advantages": (r - mean) / deviation}
            for sample, r in zip(samples, rewards)
        ],
    )
    print(f"{mean:.3f}")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        mean_loss(sys.argv[2])
    elif sys.argv[1:] == ["stdlib"]:
        stdlib()
    elif len(sys.argv) > 1:
        advantages(sys.argv[1])
    else:
        for name, n in (("pairs", 200), ("held_out_pairs", 100)):
            write(
                f"{name}.jsonl",
                [{"prompt": "", "chosen": walk(1), "rejected": walk(-1)} for _ in range(n)],
            )
        tokenizer()
        goods = [rng.choice([(True, False), (False, True)]) for _ in range(1000)]
        for name in ("weighted", "alike"):
            write(f"{name}.jsonl", [chat(good, weighted=name == "weighted") for good in goods])
        write("held_out_chats.jsonl", [chat((True, True)) for _ in range(100)])
        random_texts = ["".join(rng.choices(LETTERS, k=16)) for _ in range(2000)]
        write("letters.jsonl", [{"prompt": "x:", "completion": text} for text in random_texts])
        for name, n in (("taught", 40), ("teaching", 2000), ("held_out_walks", 200)):
            write(f"{name}.jsonl", [{"prompt": "", "completion": walk(1, 60)} for _ in range(n)])
