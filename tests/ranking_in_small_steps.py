"""data_gen/rank_vocab.py with batches of a few documents, saved after each: what a kill can hit lies close together."""

from draftsmith.data_gen import rank_vocab
from draftsmith.data_gen.corpus import counts as corpus_counts
from draftsmith.data_gen.corpus import ranking  # noqa: F401 (imported before a lab forks)
from draftsmith.data_gen.corpus import reader as corpus_reader


def main() -> None:
    corpus_reader.PIECE_BYTES, corpus_reader.CHUNK_CHARACTERS = 200, 600
    corpus_counts.SECONDS_BETWEEN_SAVES = 0.0
    corpus_counts.CHUNKS_BEFORE_PROCESSES = 1
    rank_vocab.main()
