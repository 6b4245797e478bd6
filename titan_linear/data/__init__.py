"""The data path, from texts to the batches of one rank.

Steps 1 to 3 are in corpus/, 4 to 7 in streams/.

1. **Sources** (sources.py) yield documents in a fixed order: files, lines or rows of text,
   or a corpus of tokens.
2. **A tokenizer** (tokenizer.py), bytes or any Hugging Face tokenizer.json, turns each
   document into tokens and an end token, in processes on all cores (tokenise.py). For
   conversations, chat.py also marks the tokens that are trained on.
3. **A corpus** (corpus.py) holds the documents on disk: all tokens end to end, where each
   document begins, and a hash of each; for conversations, where each answer begins and
   ends; for texts, which documents come from each file. One process writes it, once
   (writing.py; for texts into the user's cache, cache.py). All processes memory-map it, so
   that ranks of a machine share its pages.
4. **A split** (split.py) holds documents out for validation by their hash, so that no text
   is on both sides.
5. **Packed streams** (packing.py): every epoch lays the training documents end to end in an
   order drawn from (seed, epoch), and epochs follow without a gap. Stream i is tokens [i·T,
   (i+1)·T) of that endless line, computed from i directly. Nothing is dropped or padded,
   and labels never cross into another document.
6. **A mixture** (mixture.py), if configured, takes each of its streams from one of several
   sources.
7. **A loader** (loader.py) gives step s the streams [s·G, (s+1)·G), and each data-parallel
   rank its share of them, L at a time, as a `Batch`. Context parallelism cuts a batch
   later, elsewhere.

So the tokens of step s depend only on the corpus or mixture, the held-out share, the
tokenizer, seq_len (and its schedule), G and the seed. They do not depend on the number of
ranks, the split of work among them, the number of workers that read ahead, or restarts. To
resume, a checkpoint keeps one number: the global index of the next stream, after the
streams of finished steps. Fingerprints of the data, stored with it, let a resume refuse
another corpus.

    tokenizer = build_tokenizer(None)
    corpus = open_corpus(Texts("stdlib", None, tokenizer))
    verify_corpus(corpus)
    streams = PackedStreams(split_corpus(corpus, 0.01, "train"), seq_len=4096, seed=0)
    loader = StreamLoader(streams, global_batch_size=8, local_batch_size=1, dp_rank=0, dp_degree=2)
    for batch in loader: ...
"""

from titan_linear.data.corpus.cache import Texts, cached_corpus, open_corpus, tokenise_corpus
from titan_linear.data.corpus.corpus import Corpus, load_corpus, verify_changed, verify_corpus
from titan_linear.data.corpus.sources import Document
from titan_linear.data.corpus.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
    build_tokenizer,
)
from titan_linear.data.corpus.writing import write_corpus
from titan_linear.data.streams.file_groups import FileGroups
from titan_linear.data.streams.loader import Batch, StreamLoader, validation_batches
from titan_linear.data.streams.mixture import MixedStreams, Phase, Streams
from titan_linear.data.streams.packing import IGNORE, Length, PackedStreams, Stream, Targets
from titan_linear.data.streams.prompts import Prompts, Questions, TaskSample
from titan_linear.data.streams.split import Side, split_corpus
from titan_linear.data.streams.whole import TreeStreams, WholeStreams, streams_of
