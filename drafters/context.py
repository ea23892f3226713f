"""The committed tokens of every row, for drafters that read text instead of states."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.drafters.proposal import Proposal, Verdict


@dataclass
class Context:
    """What a decoding has committed, row by row. `propose` notes the root, `after` appends it."""

    rows: list[Tensor]  # per row [T] int64 on the CPU, the root not among them
    root: Tensor | None = None  # [B] int64

    @staticmethod
    def of(ids: Tensor, lengths: Tensor) -> "Context":
        """Prompts [B, T] of these lengths [B]; what lies behind is no part of them."""
        pairs = zip(ids.cpu(), lengths.tolist(), strict=True)
        return Context([row[:length] for row, length in pairs])

    def texts(self, root: Tensor) -> list[Tensor]:
        """Every row's text up to and with its new root [B]."""
        self.root = root
        return [torch.cat([row, one]) for row, one in zip(self.rows, split(root), strict=True)]

    def after(self, proposal: Proposal, verdict: Verdict) -> "Context":
        """The root and the accepted drafts are committed too."""
        assert self.root is not None, "commit follows propose"
        drafts, path, lengths = proposal.tokens.cpu(), verdict.path.cpu(), verdict.length.tolist()
        return Context(
            [
                torch.cat([row, one, drafts[index, path[index, : lengths[index]] - 1]])
                for index, (row, one) in enumerate(zip(self.rows, split(self.root), strict=True))
            ]
        )

    def select(self, rows: Tensor) -> "Context":
        """These rows of the batch [b]."""
        return Context([self.rows[row] for row in rows.tolist()])


def split(root: Tensor) -> list[Tensor]:
    """[B] -> B times [1], on the CPU."""
    return list(root.cpu()[:, None])


def chains(drafts: Sequence[Tensor], device: torch.device) -> Proposal:
    """A point-mass chain of its own length for every row, padded with invalid nodes."""
    longest = max(len(tokens) for tokens in drafts)
    tokens = torch.zeros(len(drafts), longest, dtype=torch.int64)
    valid = torch.zeros_like(tokens, dtype=torch.bool)
    for row, found in enumerate(drafts):
        tokens[row, : len(found)] = found
        valid[row, : len(found)] = True
    parent = torch.arange(longest).expand(len(drafts), -1)
    return Proposal(tokens.to(device), parent.to(device), valid.to(device))
