"""Corpora of tokens: write one, and manage the caches that runs have made.

titan-linear corpus write corpora/web --dataset jsonl --path 'data/*.jsonl.gz' --tokenizer Qwen3.5-2B
titan-linear corpus list
titan-linear corpus check                     # every cache; or: check corpora/web jsonl-0123…
titan-linear corpus prune --older-than 30     # days since their last use; or: prune jsonl-0123… or: prune --all

write     tokenizes texts, of any kind that training.dataset has, into a folder of their own. A
          run reads it with training.dataset = "tokens" and training.dataset_path = that folder.
          A command that was stopped resumes when it is run again.
list      prints where the caches are ($XDG_CACHE_HOME/titan_linear, else ~/.cache/titan_linear),
          what they contain, and their size.
check     checks every byte against the checksums.
prune     removes caches, which runs make again from their texts. It removes nothing else, and no
          cache that is being written.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from titan_linear.commands import command_parser
from titan_linear.config import RECORDS, SECTIONS
from titan_linear.data import Texts, build_tokenizer, load_corpus, tokenise_corpus, verify_corpus
from titan_linear.data.corpus.cache import remove_cache
from titan_linear.data.corpus.corpus import CACHE_NAME
from titan_linear.data.corpus.sources import FORMATS, TEXT_SOURCES
from titan_linear.data.corpus.writing import lock_file, temporary_folder
from titan_linear.distributed.process import refusing
from titan_linear.storage.files import default_cache_dir

# Seconds.
DAY = 86400


@refusing
def main(argv: list[str]) -> int:
    args = parse(argv)
    if args.command == "write":
        return write(args)
    if args.command == "list":
        return show(default_cache_dir())
    if args.command == "check":
        return check([named(name) for name in args.folders] or caches(default_cache_dir()))
    return prune(args)


def write(args: argparse.Namespace) -> int:
    # Options of formats with fields are errors elsewhere, not ignored.
    if args.format != "text" and args.dataset not in RECORDS:
        raise ValueError(f"--format {args.format} is for --dataset {', '.join(RECORDS)}; remove it")
    if args.text_field != "text" and (args.format != "text" or args.dataset not in RECORDS):
        given = f"--format {args.format}" if args.format != "text" else f"--dataset {args.dataset}"
        raise ValueError(
            f"--text-field {args.text_field} is not used by {given}; remove one of them"
        )
    if args.max_length < 0:
        raise ValueError(f"--max-length {args.max_length} must be 0 or more; 0 allows any length")
    texts = Texts(
        args.dataset,
        args.path,
        build_tokenizer(args.tokenizer, "--tokenizer"),
        text_field=args.text_field,
        dataset_format=args.format,
        on_bad_document=args.on_bad_document,
        max_length=args.max_length,
        truncation=args.truncation,
        path_key="--path",
    )
    corpus = tokenise_corpus(Path(os.path.expanduser(args.folder)).absolute(), texts)
    print(corpus.summary)
    return 0


def caches(folder: Path) -> list[Path]:
    """Return the caches in this folder, complete or unfinished, sorted by name."""
    names = {path.name.removesuffix(".tmp") for path in folder.glob("*-*") if path.is_dir()}
    return [folder / name for name in sorted(names) if CACHE_NAME.fullmatch(name)]


def named(name: str) -> Path:
    """Return the folder of a cache, given by its name, or of a corpus, given by its path."""
    if CACHE_NAME.fullmatch(name) and not Path(name).exists():
        return default_cache_dir() / name
    return Path(os.path.expanduser(name)).absolute()


def show(folder: Path) -> int:
    found = caches(folder)
    print(f"{len(found)} token caches, {sum(map(size, found)) / 2**30:.2f} GiB, in {folder}")
    for cache in found:
        print(
            f"{cache.name}  {size(cache) / 2**20:,.1f} MiB  used {days(cache):.0f} days ago  {describe(cache)}"
        )
    return 0


def describe(cache: Path) -> str:
    if not cache.exists():
        return "unfinished: a run with these texts continues it"
    try:
        corpus = load_corpus(cache)
    except ValueError as error:
        return f"damaged: {error}"
    tokenizer = corpus.info["tokenizer"]["fingerprint"]
    return f"{corpus.num_documents:,} documents, {corpus.num_tokens:,} tokens by {tokenizer}"


def size(cache: Path) -> int:
    """Return the bytes of a cache and of its unfinished folder."""
    files = [*cache.glob("*"), *temporary_folder(cache).glob("*")]
    return sum(file.stat().st_size for file in files if file.is_file())


def days(cache: Path) -> float:
    """Return the days since a run last opened the cache."""
    lock = lock_file(cache)
    return (time.time() - (lock if lock.exists() else cache).stat().st_mtime) / DAY


def check(folders: list[Path]) -> int:
    damaged = 0
    for folder in folders:
        lacking = CACHE_NAME.fullmatch(folder.name) and not folder.exists()
        # A cache that is still being written has no checksums yet.
        if lacking and temporary_folder(folder).exists():
            print(f"{folder.name}: unfinished")
            continue
        # A damaged corpus does not keep the others from being checked.
        try:
            if lacking:
                raise ValueError(
                    f"{folder} is not there; titan-linear corpus list names the token caches"
                )
            corpus = load_corpus(folder)
            verify_corpus(corpus)
            print(f"{folder}: whole, {corpus.num_tokens:,} tokens")
        except ValueError as error:
            damaged += 1
            print(f"error: {error}", file=sys.stderr)
    return 2 if damaged else 0


def prune(args: argparse.Namespace) -> int:
    folder = default_cache_dir()
    # Refuse wrong arguments before anything is removed.
    if strange := [name for name in args.names if folder / name not in caches(folder)]:
        raise ValueError(
            f"{strange[0]!r} is not a token cache in {folder}; titan-linear corpus list names them"
        )
    if sum((bool(args.names), args.older_than is not None, args.all)) != 1:
        raise ValueError("prune needs names of caches, or --older-than DAYS, or --all")
    if args.older_than is not None and not args.older_than >= 0:
        raise ValueError(f"--older-than {args.older_than:g} must be 0 or more days")
    # Caches that a process is using are kept.
    for cache in [folder / name for name in args.names] or caches(folder):
        if args.older_than is None or days(cache) > args.older_than:
            removed = f"removed {cache.name}, {size(cache) / 2**20:,.1f} MiB"
            print(removed if remove_cache(cache) else f"in use: {cache.name}")
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command_parser("titan-linear corpus", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    # Options of `write`, whose descriptions are those keys' in the configuration.
    option = commands.add_parser("write").add_argument
    option("folder", metavar="FOLDER", help="must not exist")
    option("--dataset", choices=TEXT_SOURCES, required=True, help="kind of the texts")
    option("--path", help="a file, a folder, or globs separated by commas")
    option(
        "--tokenizer",
        default="",
        help="a tokenizer.json or the folder that holds one (default: bytes)",
    )
    option(
        "--text-field", default="text", help="field or column of a document's text (default: text)"
    )
    keys = SECTIONS["training"].model_fields
    about = {name: key.description for name, key in keys.items()}
    option(
        "--format",
        choices=FORMATS,
        default="text",
        help=f"{about['dataset_format']} (default: text)",
    )
    option(
        "--on-bad-document",
        choices=("stop", "skip"),
        default="stop",
        help=about["on_bad_document"],
    )
    option("--max-length", type=int, default=0, metavar="TOKENS", help=about["max_length"])
    option(
        "--truncation",
        choices=("right", "left", "skip"),
        default="right",
        help=about["truncation"],
    )
    # Options of `list`, `check` and `prune`.
    commands.add_parser("list")
    commands.add_parser("check").add_argument(
        "folders",
        metavar="FOLDER",
        nargs="*",
        help="names of caches, paths of corpora (default: caches)",
    )
    remove = commands.add_parser("prune")
    remove.add_argument(
        "names", metavar="NAME", nargs="*", help="names of caches, as list has them"
    )
    remove.add_argument(
        "--older-than", type=float, metavar="DAYS", help="caches not used for DAYS days"
    )
    remove.add_argument("--all", action="store_true", help="all caches")
    return parser.parse_args(argv)
