"""data_gen/rank_vocab.py with batches of a few documents, saved after each: what a kill can hit lies close together."""

from draftsmith.data_gen import corpus_counts, corpus_reader, rank_vocab, ranking  # noqa: F401 (imported before a lab forks)


def main() -> None:
    corpus_reader.PIECE_BYTES, corpus_reader.BATCH_CHARACTERS = 200, 600
    corpus_counts.SECONDS_BETWEEN_SAVES = 0.0
    corpus_counts.BATCHES_BEFORE_PROCESSES = 1
    rank_vocab.main()
