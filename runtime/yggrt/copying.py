"""What a text may go on with by copying from itself: what followed its last tokens where they stood before.

Answers repeat their prompts and themselves, word for word and at length, which a small drafter seldom foresees. So the
tree that it grows takes one path from here, as far as it is believed: see `yggrt.artifacts.draft_inputs`. Nothing here
changes which token comes next.

Source: prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding; the rates by match are ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LONGEST_MATCH = 8
"""Tokens before a place that are compared; longer matches count as this long."""

NOTHING = -1
"""Stands for a token where nothing is copied."""


def find_match(text: NDArray[np.int64], longest: int = LONGEST_MATCH) -> tuple[int, int]:
    """Where the text's end stood before, the longest such match and of several the last.

    text: int64[n], at least one token. Returns the place after the earlier occurrence and the match's length, up to
    `longest`; (n, 0) where the last token is new.
    """
    last = text.size - 1
    ends = np.flatnonzero(text[:last] == text[last])
    length = min(ends.size, 1)
    while length and length < longest:
        earlier = ends[ends >= length]
        longer = earlier[text[earlier - length] == text[last - length]]
        if not longer.size:
            break
        ends, length = longer, length + 1
    return (int(ends[-1]) + 1, length) if length else (text.size, 0)


class Copies:
    """The path to copy for every root of one text.

    capacity: tokens a text may reach; nodes: of a tree, root included.
    """

    def __init__(self, capacity: int, nodes: int) -> None:
        self._text = np.zeros(capacity, np.int64)
        self._num_known = 0
        self._nodes = nodes
        self.none = (torch.full((nodes,), NOTHING), torch.zeros(nodes))
        self._depths = np.arange(nodes - 1)

    def reset(self) -> None:
        """Another text."""
        self._num_known = 0

    def path(self, tokens: Sequence[int], copied_log_a: Sequence[float]) -> tuple[Tensor, Tensor]:
        """What may be copied below the last token: int64[nodes] tokens and float32[nodes] log a, by depth.

        tokens:    the text so far, which goes on from the one of the last call unless `reset` was called.
        copied_log_a: by length of a match from 1, log of how often it is right; empty copies nothing.
        """
        if not copied_log_a:
            return self.none
        count, known, longest = len(tokens), self._num_known, len(copied_log_a)
        self._text[known:count] = tokens[known:]
        self._num_known = count
        start, length = find_match(self._text[:count], longest)
        if not length:
            return self.none
        path, log_a = np.empty(self._nodes, np.int64), np.zeros(self._nodes, np.float32)
        path[0] = tokens[-1]
        path[1:] = np.resize(self._text[start:count], self._nodes - 1)  # past the text's end it repeats itself
        log_a[1:] = np.array(copied_log_a)[np.minimum(self._depths + length, longest) - 1]
        return torch.from_numpy(path), torch.from_numpy(log_a)
