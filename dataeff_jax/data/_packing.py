"""Rows of fixed length cut from the stream of all documents, with random access.

The stream is ``E d1 E d2 ... dn E`` where E is end_of_text. Row r has the tokens
``stream[r S : (r + 1) S]`` and as targets the same, one further on, so every token of
every document is predicted exactly once.
"""

import itertools
from typing import Any, Literal

import numpy as np

from dataeff_jax.data import _sources, _splits


class PackedRows:
    """Documents packed back to back into rows of ``length`` tokens.

    Two int64 a document are kept in memory; a row costs one binary search and the
    documents in it. A document that is longer than what is left of a row goes on in
    the next one, as a segment of its own whose positions start at 0 again.

    Args:
      documents: a ``TokenCache``, a part of one, or any ``Documents``.
      length: tokens a row, S.
      segments: ``"document"``: attention stays inside a document, told by segment_ids
        and positions. ``"row"``: neither is given and the whole row attends to itself.
      keep_remainder: keep the last row when it is not full, filled up with end_of_text
        in segment 0, whose weights are 0; all rows then have weights. Off, the last
        less than S tokens of the stream are not used and no row has weights.

    Returns of ``rows[r]``:
      tokens int32[S], targets int32[S], sample_id int64 (r itself), with ``"document"``
      segment_ids int32[S] (1, 2, ... in the row) and positions int32[S], with
      ``keep_remainder`` weights float32[S].

    Raises:
      ValueError: a length below 1, or fewer tokens than one row.

    Example:
      >>> from dataeff_jax import data
      >>> documents = data.TokenDocuments([[5, 6, 7], [8]], end_of_text=0)
      >>> row = data.PackedRows(documents, length=6)[0]
      >>> for name in ("tokens", "targets", "segment_ids", "positions"):
      ...     print(f"{name:12}", row[name].tolist())
      tokens       [0, 5, 6, 7, 0, 8]
      targets      [5, 6, 7, 0, 8, 0]
      segment_ids  [1, 1, 1, 1, 2, 2]
      positions    [0, 1, 2, 3, 0, 1]
    """

    def __init__(
        self,
        documents: _splits.Documents,
        *,
        length: int,
        segments: Literal["document", "row"] = "document",
        keep_remainder: bool = False,
    ):
        if length < 1:
            raise ValueError(f"length={length} must be at least 1.")
        if segments not in ("document", "row"):
            raise ValueError(f"segments={segments!r} must be 'document' or 'row'.")
        self.documents = documents
        self._length = length
        self._segments = segments
        self._keep_remainder = keep_remainder
        # Document d has its E at starts[d]; the last start is that of the final E.
        self._starts = np.concatenate([[0], np.cumsum(documents.lengths + 1)])
        self.num_targets = int(self._starts[-1])
        whole, rest = divmod(self.num_targets, length)
        self._num_rows = whole + bool(rest and keep_remainder)
        if not self._num_rows:
            raise ValueError(
                f"{len(documents)} documents give {self.num_targets} targets, fewer "
                f"than one row of length={length}; use a shorter length, more "
                f"documents, or keep_remainder=True."
            )

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = _sources.checked_index(index, self._num_rows)
        length = self._length
        begin = index * length
        filled = min(length, self.num_targets - begin)
        stream, heads = self._read(begin, length, filled)
        row = {
            "tokens": stream[:-1],
            "targets": stream[1:],
            "sample_id": np.int64(index),
        }
        if self._segments == "document":
            row |= _segments(heads, filled, length)
        if self._keep_remainder:
            row["weights"] = (np.arange(length) < filled).astype(np.float32)
        return row

    def _read(
        self, begin: int, length: int, filled: int
    ) -> tuple[np.ndarray, list[int]]:
        """Return ``stream[begin : begin + length + 1]`` and where its segments start.

        Only the first ``filled + 1`` are of the stream, the rest is end_of_text.
        """
        stream = np.full(length + 1, self.documents.end_of_text, np.int32)
        first = int(np.searchsorted(self._starts, begin, side="right")) - 1
        heads = [0]
        for document in range(first, len(self.documents)):
            # The document's first token lies at `body`, which may be before `begin`.
            body = int(self._starts[document]) + 1 - begin
            if body > filled:
                break
            if body > 1:
                heads.append(body - 1)
            tokens = self.documents[document]
            skipped = max(0, -body)
            piece = tokens[skipped : filled + 1 - body]
            stream[body + skipped : body + skipped + len(piece)] = piece
        return stream, heads


def _segments(heads: list[int], filled: int, length: int) -> dict[str, np.ndarray]:
    """Return segment_ids and positions of a row whose segments start at ``heads``."""
    segment_ids = np.zeros(length, np.int32)
    positions = np.zeros(length, np.int32)
    for number, (head, end) in enumerate(itertools.pairwise([*heads, filled]), start=1):
        segment_ids[head:end] = number
        positions[head:end] = np.arange(end - head, dtype=np.int32)
    return {"segment_ids": segment_ids, "positions": positions}
