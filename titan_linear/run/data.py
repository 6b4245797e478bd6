"""Data for training as configured: corpora, streams, and their identity in a checkpoint."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from titan_linear.config import (
    COLUMNS,
    OTHER,
    Config,
    KeyRule,
    Source,
    Training,
    difference,
    keys_with,
)
from titan_linear.data import (
    Corpus,
    FileGroups,
    Length,
    MixedStreams,
    PackedStreams,
    Phase,
    Side,
    Streams,
    Targets,
    Texts,
    Tokenizer,
    TreeStreams,
    cached_corpus,
    open_corpus,
    split_corpus,
    streams_of,
)
from titan_linear.data.corpus.scores import content_of_scores, with_scores
from titan_linear.data.corpus.tree_records import BACK
from titan_linear.distributed.groups import of_all_ranks
from titan_linear.losses import build_loss
from titan_linear.models.config import fingerprint
from titan_linear.run.build import under_key
from titan_linear.run.origin import Origin
from titan_linear.storage.step_folders import Content, Progress


class RunData:
    """The corpora of a configuration, and the streams cut from them.

    Training has one corpus, or one for each source of the mixture. Validation may have a
    corpus of its own.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.training = config.training
        self.validation = config.validation
        self.parallelism = config.parallelism
        self.evaluation = config.evaluation
        self.keys = config.loss
        self.loss = build_loss(config.loss.name, config.objective)
        self.temperature = getattr(config.objective, "temperature", 1.0)
        self.file_groups = {group.name: group.files for group in config.metrics.loss_by_source}
        self.seed = config.debug.seed
        self.run = config.job.dump_folder

    # --- Corpora --------------------------------------------------------------------------

    def corpora(self, *, validation: bool = True) -> list[Corpus]:
        """Open the corpora of training, then validation's own corpus if it has one.

        validation: open the latter, too.
        """
        v = self.validation
        texts = [self._texts(source) for source in self.training.sources]
        corpora = [open_corpus(each, with_paths=bool(self.file_groups)) for each in texts]
        if validation and v.enable and v.dataset_path:
            own = replace(
                self._texts(self.training),
                path=v.dataset_path,
                path_key="validation.dataset_path",
            )
            corpora.append(open_corpus(own))
        return with_scores(corpora, filter(None, self.keys.scores.split(",")), self.temperature)

    def cached_corpora(self) -> list[Corpus | None]:
        """Return the corpora to train on; None for one that is missing or not tokenised yet."""
        return [cached_corpus(self._texts(source)) for source in self.training.sources]

    def validation_text(self) -> Side:
        """Return the documents to validate on, else to train on.

        Of a mixture, they are the first source's.
        """
        v = self.validation
        corpora = self.corpora()
        if v.enable and not v.dataset_path:
            return split_corpus(corpora[0], v.holdout, "validation")
        return split_corpus(corpora[-1 if v.enable else 0], 0.0, "train")

    def _texts(self, source: Training | Source) -> Texts:
        t = self.training
        uncut = self.loss.group or source.dataset_format == "tree" or t.share_prefixes
        return Texts(
            source.dataset,
            source.dataset_path or None,
            self.tokenizer,
            text_field=source.dataset_text_field,
            dataset_format=source.dataset_format,
            on_bad_document=t.on_bad_document,
            path_key=source.key("dataset_path"),
            columns={name: COLUMNS[name] for name in source.dataset_columns},
            share_prefixes=t.share_prefixes,
            group_field=t.group_field,
            seq_len=t.seq_len if uncut else 0,
            max_length=t.max_length,
            truncation=t.truncation,
        )

    def check_size(self, tokens: int) -> None:
        """Raise ValueError if a corpus of this many tokens is smaller than a step."""
        t = self.training
        step = t.global_batch_size * t.seq_len
        if tokens < step:
            raise ValueError(
                f"training.{'mixture' if t.mixture else 'dataset_path'}: the corpus has {tokens:,} tokens, and a step "
                f"takes training.global_batch_size × training.seq_len = {t.global_batch_size} × {t.seq_len} = {step:,},"
                " so that a batch would hold documents twice; take more texts, or lower one of these keys"
            )

    # --- Streams --------------------------------------------------------------------------

    def streams(self, progress: Progress | None) -> tuple[Streams, Streams | None]:
        """Build endless streams to train on, and one pass over the streams to validate on.

        Args:
            progress: the progress saved in the checkpoint that the run resumes from; None
                for a new run.
        """
        v = self.validation
        sources = self.training.sources
        corpora = self.corpora()
        own = corpora[len(sources) :]
        targets = self._targets()
        for corpus in corpora:
            self._check_columns(targets, corpus)
        holdout = v.holdout if v.enable and not own else 0.0

        def sides(split: str) -> list[Side]:
            return [
                _side(source, corpus, holdout, split) for source, corpus in zip(sources, corpora)
            ]

        def make(side: Side, **options: Any) -> PackedStreams:
            seq_len = self.training.seq_len
            return streams_of(side, seq_len=seq_len, seed=self.seed, targets=targets, **options)

        # Streams to train on: the mixture's, or a single source's.
        packed = [make(side) for side in sides("train")]
        streams = (
            self._mixed(packed, progress)
            if self.training.mixture
            else packed[0].of_lengths(self._lengths())
        )
        if not v.enable:
            return streams, None
        # Streams to validate on: validation's own corpus, or what is held out of each source.
        held_out = [split_corpus(corpus, 0.0, "train") for corpus in own] or sides("validation")
        passes = [make(side, repeat=False) for side in held_out]
        if not self.training.mixture:
            return streams, passes[0]
        named = dict(zip(streams.sources, passes, strict=True))
        return streams, MixedStreams(named, seed=self.seed, repeat=False)

    def groups(self, streams: Streams) -> FileGroups | None:
        """Return the groups of metrics.loss_by_source, or None.

        Args:
            streams: the streams to train on.

        Raises:
            ValueError: a group matches no file.
        """
        return FileGroups(streams, self.file_groups, OTHER) if self.file_groups else None

    def _targets(self) -> Targets:
        """Return what the loss reads, and which documents belong together."""
        loss = self.loss
        keys = self.keys
        if keys.reference == "base" and "reference" not in loss.columns:
            raise ValueError(
                f"loss.reference = 'base': {keys.name}, by its keys, reads no reference; remove it"
            )
        columns = tuple(
            name for name in loss.columns if name != "reference" or keys.reference == "column"
        )
        auto = "document" if loss.group else "token"
        normalise = auto if keys.normalise == "auto" else keys.normalise
        return Targets(normalise, columns, loss.group)

    def _check_columns(self, targets: Targets, corpus: Corpus) -> None:
        """Raise ValueError if a corpus lacks what the loss reads."""
        loss = self.loss
        name = f"loss.name = {self.keys.name!r}"
        if self.training.seq_len_schedule and loss.group:
            raise ValueError(
                f"training.seq_len_schedule cuts documents, and {name} takes them whole; remove it"
            )
        if BACK in corpus.columns:
            self._check_trees(targets, corpus.name)
        if corpus.pairs != (loss.group == 2):
            kinds = (
                "single documents",
                "pairs of documents (training.dataset_format = 'preference')",
            )
            raise ValueError(
                f"{name} takes {kinds[loss.group == 2]}, and {corpus.name} holds {kinds[corpus.pairs]}; change one"
            )
        if missing := [column for column in targets.columns if column not in corpus.columns]:
            raise ValueError(
                f"{name} reads the column {missing[0]!r}, and {corpus.name} has none; name the records' field in "
                "training.dataset_columns, or have titan-linear score write it"
            )
        # Columns with several numbers per token have as many as the first of them.
        several = 0
        for column in targets.columns:
            width = sum(corpus.columns[column].shape[1:])
            most = loss.columns[column]
            several = several or width
            if not min(most, 1) <= width <= most or width not in (0, several):
                fits = f"1 to {most}, as many ids as log-probabilities" if most else "1"
                raise ValueError(
                    f"{name}: the column {column!r} of {corpus.name} has {width or 1} for each token; give {fits}"
                )

    def _check_trees(self, targets: Targets, corpus: str) -> None:
        """Raise ValueError for keys that do not support prefix trees.

        With these keys, trees would train unlike their documents packed separately.
        """
        p = self.parallelism
        lengths = [part.model_dump() for part in self.training.seq_len_schedule]
        ring = p.context_parallel_degree > 1 and "ring" in p.context_parallel_method
        for key, value, unfit in (
            ("loss.normalise", self.keys.normalise, targets.normalise == "stream"),
            ("training.seq_len_schedule", lengths, bool(lengths)),
            ("parallelism.context_parallel_method", p.context_parallel_method, ring),
        ):
            if unfit:
                raise ValueError(
                    f"{key} = {value!r} is not for prefix trees, which {corpus} holds; change one"
                )

    def _mixed(self, packed: list[PackedStreams], progress: Progress | None) -> MixedStreams:
        """Return the mixture of these sources, in the order of training.mixture."""
        if len({isinstance(streams, TreeStreams) for streams in packed}) > 1:
            raise ValueError(
                "training.mixture has prefix trees beside other documents; give these as trees of one node"
            )
        names = [source.name for source in self.training.mixture]
        return MixedStreams(
            dict(zip(names, packed, strict=True)),
            self.mixture_phases(progress),
            seed=self.seed,
            known=progress.content.corpora if progress else None,
            lengths=self._lengths(),
        )

    def _lengths(self) -> list[Length]:
        """Return the streams' lengths by training.seq_len_schedule.

        They change where a step begins.
        """
        t = self.training
        starts = [0, *(part.until_step * t.global_batch_size for part in t.seq_len_schedule)]
        lengths = [*(part.seq_len for part in t.seq_len_schedule), t.seq_len]
        return list(map(Length, starts, lengths))

    def mixture_phases(self, progress: Progress | None) -> list[Phase]:
        """Return the phases of the run's mixture so far, and the phase from this step on.

        Raises:
            ValueError: training.mixture differs from the run's, and
                training.mixture_from_step does not announce a change at this step.
        """
        t = self.training
        weights = {source.name: source.weight for source in t.mixture}
        if progress is None:
            return [Phase(0, weights)]
        phases = [Phase(*phase) for phase in progress.content.mixture]
        if phases[-1].weights == weights:
            return phases
        if t.mixture_from_step != progress.step:
            before, now = (
                [{"name": n, "weight": w} for n, w in x.items()]
                for x in (phases[-1].weights, weights)
            )
            raise ValueError(
                f"training.mixture is another than that of the run in {self.run!r} at step {progress.step} "
                f"({difference(before, now)}); restore it, or say that it changes here: "
                f"training.mixture_from_step = {progress.step}"
            )
        # The new mixture replaces a phase that would begin at this step.
        start = progress.step * t.global_batch_size
        return [*(phase for phase in phases if phase.start < start), Phase(start, weights)]


def _side(source: Training | Source, corpus: Corpus, holdout: float, split: str) -> Side:
    if isinstance(source, Source):
        return under_key(
            f"training.mixture, source {source.name!r}", split_corpus, corpus, holdout, split
        )
    return split_corpus(corpus, holdout, split)


def with_epochs(config: Config) -> Config:
    """Return the configuration with the number of steps that training.epochs takes, if set."""
    t = config.training
    if not t.epochs:
        return config
    streams, _ = RunData(config, Origin.of(config).tokenizer).streams(None)
    steps = -(-streams.streams_in(t.epochs) // t.global_batch_size)
    return config.changed({"training.steps": steps})


def tokens_of(streams: Streams) -> int:
    """Return the number of tokens in an epoch of all sources."""
    return sum(source.num_tokens for source in streams.sources.values())


# --- What identifies it -----------------------------------------------------------------------------------------------


def content_of(origin: Origin, streams: Streams, held_out: Streams | None, base: str) -> Content:
    """Return what a checkpoint records to identify data and model by their content.

    Args:
        base: the fingerprint of the adapters' base.
    """
    config = origin.config
    own = config.validation.enable and config.validation.dataset_path
    return Content(
        tokenizer=origin.tokenizer.fingerprint,
        model=fingerprint(origin.model),
        corpora=streams.fingerprints,
        mixture=streams.phases if isinstance(streams, MixedStreams) else [],
        validation=held_out.corpus.fingerprint if own else "",
        base=base,
        scores=content_of_scores(config.loss.scores),
    )


def check_content(config: Config, known: Content, given: Content) -> None:
    """Raise ValueError if the run so far has had another model or other data."""
    run = config.job.dump_folder
    # A mixture may gain sources, but none of its names may stand for another corpus.
    for name, corpus in known.corpora.items():
        other = given.corpora.get(name, corpus)
        if name and other != corpus:
            raise ValueError(
                f"training.mixture, source {name!r} is another corpus than the run in {run!r} has (fingerprints "
                f"{other} and {corpus}); restore it, or give a new source a name of its own"
            )
    # Everything else must be the same wherever both sides know it.
    for key, what, before, now in (
        ("training.dataset_path", "corpus", known.corpora.get(""), given.corpora.get("")),
        ("validation.dataset_path", "validation corpus", known.validation, given.validation),
        ("loss.scores", "set of scores", known.scores, given.scores),
        ("model.tokenizer_path", "tokenizer", known.tokenizer, given.tokenizer),
        (
            "checkpoint.initial_load_path or model.hf_assets_path",
            "base of its adapters",
            known.base,
            given.base,
        ),
        ("model.name, flavor, sizes or hf_assets_path", "model", known.model, given.model),
    ):
        if before and now and before != now:
            raise ValueError(
                f"{key} gives another {what} than the run in {run!r} has (fingerprints {now} and {before}); restore "
                "it, or start a new run in another job.dump_folder"
            )


def check_alike(keys: Mapping[str, Any], content: Content, host: dist.ProcessGroup) -> None:
    """Raise ValueError on every rank if data or keys of any rank differ from rank 0's.

    That rank is on another node, for example. Paths may differ.

    Args:
        keys: the configuration's values, by "section.key".
    """
    of_a_node = keys_with(KeyRule.OF_A_NODE)
    compared = {key: value for key, value in keys.items() if key not in of_a_node}
    contents = {f"the content of {name}": x for name, x in content.model_dump().items()}
    ranks = of_all_ranks(compared | contents, host)
    for rank, of_rank in enumerate(ranks):
        for name, value in of_rank.items():
            if value != ranks[0].get(name):
                raise ValueError(
                    f"{name} is {value!r} on rank {rank} and {ranks[0].get(name)!r} on rank 0; start every node with "
                    "the same keys, on the same texts"
                )
