"""One document a row, filled up: what an order by length works on."""

from typing import Any

import numpy as np

from dataeff_jax import data


class DocumentRows:
    """Documents as rows of their own: ``E d E ... E``, with what is not d's weighing 0.

    A row predicts every token of its document and the end_of_text behind it, so its
    real length is that of the document and one more. Longer documents are cut.

    Args:
      documents: a ``data.TokenCache``, a part of one, or any ``data.Documents``.
      length: tokens a row, S.

    Returns of ``rows[i]``:
      tokens int32[S], targets int32[S], segment_ids int32[S] (1, and 0 at padding),
      positions int32[S], weights float32[S], sample_id int64 (i itself).

    Raises:
      ValueError: a length below 1.

    Example:
      >>> from dataeff_jax import curriculum, data
      >>> documents = data.TokenDocuments([[5, 6], [7, 8, 9]], end_of_text=0)
      >>> row = curriculum.DocumentRows(documents, length=4)[0]
      >>> row["tokens"].tolist(), row["targets"].tolist(), row["weights"].tolist()
      ([0, 5, 6, 0], [5, 6, 0, 0], [1.0, 1.0, 1.0, 0.0])
    """

    def __init__(self, documents: data.Documents, *, length: int):
        if length < 1:
            raise ValueError(f"length={length} must be at least 1.")
        self.documents = documents
        self._length = length

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"index={index} is outside {len(self)} rows.")
        length = self._length
        document = self.documents[index][:length]
        stream = np.full(length + 1, self.documents.end_of_text, np.int32)
        stream[1 : len(document) + 1] = document
        place = np.arange(length, dtype=np.int32)
        used = place < len(document) + 1
        return {
            "tokens": stream[:-1],
            "targets": stream[1:],
            "sample_id": np.int64(index),
            "segment_ids": used.astype(np.int32),
            "positions": np.where(used, place, 0),
            "weights": used.astype(np.float32),
        }
