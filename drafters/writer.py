"""A small causal language model that drafts token by token, with a cache of its own.

The cache holds a prefix of the committed text, and behind it, while a round lasts, the drafts that
were read to write further ones. Text that is committed and not yet cached is read at the start of
the next round: always the root, and after full acceptance the last draft, which no draft followed.
"""

import sys
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from draftsmith.drafters.cache import TargetCache
from draftsmith.drafters.context import Context
from draftsmith.drafters.grow import grow
from draftsmith.drafters.layout import Nodes, last_of, padded
from draftsmith.drafters.proposal import Plan, Proposal
from draftsmith.drafters.slots import Batch, Head
from draftsmith.drafters.target import Target
from draftsmith.drafters.tree import Tree
from draftsmith.recipes.errors import UserError


@dataclass
class Page:
    """What a writer has read of every row. `propose` notes what it drafted."""

    cache: TargetCache
    lengths: list[int]  # per row: cached tokens of its text
    known: list[int] = field(default_factory=list)  # per row: tokens of its text, the root included
    drafted: Proposal | None = None
    read: list[int] = field(default_factory=list)  # the drafted nodes that are cached, in order


@dataclass(frozen=True)
class Writer:
    """A model, the rows of its head that drafts may use, and the target ids of these rows."""

    model: Target
    head: Tensor  # [Vq, D]
    ids: Tensor | None  # [Vq]; None: the rows in order

    @cached_property
    def positions(self) -> int:
        """How long a text it can read. Kept: every round asks."""
        return int(self.model.config.to_dict().get("max_position_embeddings") or sys.maxsize)

    def logits(self, hidden: Tensor) -> Tensor:
        """States [..., D] -> logits [..., Vq], at least fp32."""
        raw = nn.functional.linear(hidden, self.head)
        return self.model.adjust(raw if raw.dtype == torch.float64 else raw.float())

    def as_head(self) -> Head:
        """The same rows, as the projection takes them."""
        return Head(self.head, None, self.ids)

    def readable(self, ids: Tensor) -> Tensor:
        """A token that only the target has is read as token 0: drafts may be poor, never wrong."""
        return torch.where(ids < self.model.vocab_size, ids, 0)

    def start(self, ids: Tensor, lengths: Tensor) -> Page:
        """Read prompts [B, T] of these lengths [B]. Raises UserError where one is too long."""
        known = lengths.tolist()
        if max(known) > self.positions:
            raise UserError(
                f"{self.model.name} reads {self.positions} positions, a prompt has {max(known)}; "
                "shorten the prompts (data.max_prompt_tokens), or take another draft model"
            )
        cache = self.model.new_cache()
        self.model.prefill(self.readable(ids), lengths, cache)
        return Page(cache, known)

    def propose(self, page: Page, texts: list[Tensor], plan: Plan) -> Proposal:
        """Drafts behind every row's text, which ends with its root. None once a text has left the
        model's positions.
        """
        page.cache.crop(page.lengths)
        page.known, page.read, page.drafted = [len(text) for text in texts], [], None
        if max(page.known) + len(plan.tree.paths[-1]) > self.positions:
            return no_drafts(len(texts), self.model.device)
        first = self.catch_up(page, texts)
        reader = read_one if plan.tree.is_chain else read_tree

        def below(nodes: list[int], tokens: Tensor) -> Tensor:
            return self.logits(reader(self, page, plan.tree, nodes, tokens))

        page.drafted = grow(plan, self.logits(first), below, self.ids)
        return page.drafted

    def catch_up(self, page: Page, texts: list[Tensor]) -> Tensor:
        """Read what is committed and not cached; the states [B, D] at the roots."""
        missing = [text[length:] for text, length in zip(texts, page.lengths, strict=True)]
        ids, lengths = padded([row.tolist() for row in missing], self.model.device)
        hidden = self.model.step(self.readable(ids), page.cache).final
        page.cache.crop(page.known)
        return last_of(hidden, lengths)

    def commit(self, page: Page, after: Context) -> Page:
        """Keep what was read of the drafts that the text has taken over."""
        if page.drafted is None:
            return page
        kept = [
            matched(page, row, text[known:].tolist())
            for row, (text, known) in enumerate(zip(after.rows, page.known, strict=True))
        ]
        path, counts = padded(kept, self.model.device)[0], [len(row) for row in kept]
        moved = any(row != list(range(len(row))) for row in kept)
        page.cache.keep(page.known, path, counts, moved=moved)
        lengths = [known + count for known, count in zip(page.known, counts, strict=True)]
        return Page(page.cache, lengths)

    def select(self, page: Page, rows: Tensor) -> Page:
        """These rows of the batch."""
        page.cache.select(rows)
        return Page(page.cache, [page.lengths[row] for row in rows.tolist()])

    def states(self, batch: Batch) -> Tensor:
        """Final states [B, T, D] of packed rows."""
        batch = Batch(self.readable(batch.ids), batch.positions, batch.documents, batch.supervised)
        return self.model.states(batch).final

    def cache_bytes_per_token(self) -> int:
        """Keys and values of every layer."""
        config = self.model.config.to_dict()
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return int(2 * self.model.layers * heads * width * self.head.element_size())


def read_one(writer: Writer, page: Page, tree: Tree, nodes: list[int], tokens: Tensor) -> Tensor:
    """Read the newest draft of a chain behind all before it; its state [B, 1, D]."""
    page.read += nodes
    ids = writer.readable(tokens[:, [node - 1 for node in nodes]])
    return writer.model.step(ids, page.cache).final


def read_tree(writer: Writer, page: Page, tree: Tree, nodes: list[int], tokens: Tensor) -> Tensor:
    """Read these nodes of a tree, states [B, n, D].

    A pass tells its own tokens apart and sees all that is cached: the nodes above are read again.
    """
    page.read += nodes
    at = torch.tensor([node - 1 for node in page.read], device=tokens.device)
    page.cache.crop(page.known)
    visible = tree.visible[at + 1][:, at + 1]
    layout = Nodes(tree.depth[at][None] - 1, visible[None])
    hidden = writer.model.step(writer.readable(tokens[:, at]), page.cache, layout).final
    return hidden[:, -len(nodes) :]


def no_drafts(rows: int, device: torch.device) -> Proposal:
    """A proposal without a node."""
    none = torch.zeros((rows, 0), dtype=torch.int64, device=device)
    return Proposal(none, none, none.bool())


def matched(page: Page, row: int, accepted: list[int]) -> list[int]:
    """Places among the nodes that were read of those that lead along the accepted tokens."""
    assert page.drafted is not None, "commit follows propose"
    tokens, parent = page.drafted.tokens[row].tolist(), page.drafted.parent[row].tolist()
    found: list[int] = []
    above = 0
    for token in accepted:
        fits = (
            place
            for place, node in enumerate(page.read)
            if parent[node - 1] == above and tokens[node - 1] == token
        )
        place = next(fits, None)
        if place is None:
            break
        found.append(place)
        above = page.read[place]
    return found
