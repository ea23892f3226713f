"""An n-gram table as a drafter: next to no cost, and a true law q (Leviathan et al., 2211.17192,
section 4.2).

Longer grams back off to shorter ones inside the law itself: with a context h that was seen c(h)
times, `q(y|h) = (c(h y) + b q(y|h')) / (c(h) + b)`, h' without its first token and b the weight of
the back-off; below the single tokens lies the uniform law. An unseen context leaves q(y|h').
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.drafters.context import Context
from draftsmith.drafters.grow import best_columns, grow, lines
from draftsmith.drafters.proposal import Draw, Plan, Proposal, Verdict
from draftsmith.drafters.slots import (
    Batch,
    Roots,
    TargetStates,
    label_slots,
    tokens_up_to,
)
from draftsmith.drafters.target import Target
from draftsmith.recipes.schema import NgramConfig

NO_TOKEN = -1  # before the first token of a text
PARTS = ("keys", "starts", "tokens", "counts")


class Grams(nn.Module):
    """What followed every context of one length: row i is `tokens[starts[i] : starts[i + 1]]`.

    A context is one number, its tokens read as digits in base V.
    """

    keys: Tensor  # [C] int64, ascending
    starts: Tensor  # [C + 1] int64
    tokens: Tensor  # [E] int32
    counts: Tensor  # [E] int32

    def __init__(self) -> None:
        super().__init__()
        self.fill(torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))

    def fill(self, pairs: Tensor, counts: Tensor) -> None:
        """Take over distinct (key, token) pairs [E, 2] in ascending order, and their counts [E]."""
        keys, sizes = torch.unique_consecutive(pairs[:, 0], return_counts=True)
        starts = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        for name, value in zip(PARTS, (keys, starts, pairs[:, 1].int(), counts.int()), strict=True):
            self.register_buffer(name, value)

    def blend(self, law: Tensor, keys: Tensor, backoff: float) -> None:
        """Turn the shorter grams' laws [b, V] into this length's, for contexts [b]; -1: none."""
        if not len(self.keys):
            return
        at = torch.searchsorted(self.keys, keys).clamp(max=len(self.keys) - 1)
        for row in (self.keys[at] == keys).nonzero()[:, 0].tolist():
            start, end = self.starts[at[row]], self.starts[at[row] + 1]
            counts = self.counts[start:end].to(law.dtype)
            whole = counts.sum() + backoff
            law[row] *= backoff / whole
            law[row, self.tokens[start:end].long()] += counts / whole


class NgramTable(nn.Module):
    """Counts of grams of 1 to `order` tokens."""

    native_file = "ngram.safetensors"
    draft_ids = None
    draws: tuple[Draw, ...] = ("chain", "iid", "without_replacement")
    taps: tuple[int, ...] = ()
    single: Tensor  # [V] int32, how often every token was seen

    def __init__(self, config: NgramConfig, target: Target, draft_ids: Tensor | None) -> None:
        super().__init__()
        self.config, self.depth, self.width = config, config.draft_tokens, target.vocab_size
        self.reach = max(1, config.order - 1)  # tokens before that are looked at; single: in vain
        self.register_buffer("single", torch.zeros(target.vocab_size, dtype=torch.int32))
        self.grams = nn.ModuleList(Grams() for _ in range(1, config.order))  # of 2, 3, .. tokens

    def count(self, texts: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> None:
        """Count texts' tokens where they are supervised; contexts may lie before. Replaces what
        was counted.
        """
        context, tokens = observations(texts, self.reach)
        single = torch.bincount(tokens, minlength=self.width).int()
        self.single = single.to(self.single.device)
        for length, grams in enumerate(self.grams, start=1):
            assert isinstance(grams, Grams)
            keys = self.keys(context, length)
            pairs = torch.stack([keys, tokens], dim=1)[keys != NO_TOKEN]
            grams.fill(*torch.unique(pairs, dim=0, return_counts=True))
        self.to(self.single.device)

    def keys(self, context: Tensor, length: int) -> Tensor:
        """The last `length` tokens of contexts [b, n] as numbers [b]; NO_TOKEN where fewer are."""
        last = context[:, context.shape[1] - length :]
        digits = self.width ** torch.arange(length - 1, -1, -1, device=context.device)
        return torch.where((last == NO_TOKEN).any(dim=1), NO_TOKEN, (last * digits).sum(dim=1))

    def laws(self, context: Tensor) -> Tensor:
        """q after contexts [b, reach] (NO_TOKEN where a text is shorter): [b, V] fp32."""
        context, backoff = context.to(self.single.device), self.config.backoff
        single = self.single.float()
        law: Tensor = (single + backoff / self.width) / (single.sum() + backoff)
        law = law.repeat(len(context), 1)
        for length, grams in enumerate(self.grams, start=1):
            assert isinstance(grams, Grams)
            grams.blend(law, self.keys(context, length), backoff)
        return law

    def start(self, ids: Tensor, lengths: Tensor, states: TargetStates) -> Context:
        """After prefill: the prompts are the text so far."""
        return Context.of(ids, lengths)

    def propose(self, state: Context, root: Tensor, plan: Plan) -> Proposal:
        """Drafts in any tree: every node's law reads the tokens before it."""
        length, line = self.reach, lines(plan.tree)
        tails = torch.stack([tail(text, length) for text in state.texts(root)]).to(root.device)

        def below(nodes: list[int], tokens: Tensor) -> Tensor:
            before = [
                torch.cat([tails, tokens[:, [above - 1 for above in line[node]]]], dim=1)
                for node in nodes
            ]
            return torch.stack([self.laws(one[:, -length:]).log() for one in before], dim=1)

        return grow(plan, self.laws(tails).log(), below)

    def commit(
        self, state: Context, proposal: Proposal, verdict: Verdict, states: TargetStates
    ) -> Context:
        """The text grows."""
        return state.after(proposal, verdict)

    def select(self, state: Context, rows: Tensor) -> Context:
        """These rows of the batch."""
        return state.select(rows)

    def guesses(
        self,
        batch: Batch,
        states: TargetStates,
        roots: Roots,
        *,
        slots: int,
        count: int,
        chunk: int,
    ) -> Tensor:
        """The likeliest tokens of every slot, given the text before it: [N, slots, count]."""
        labels = label_slots(batch, roots, slots)
        before = tokens_up_to(batch, self.reach, fill=NO_TOKEN)  # [B, T, n]
        context = before[labels.teacher_row, labels.teacher_position].flatten(0, 1)
        distinct, place = torch.unique(context, dim=0, return_inverse=True)
        found = [best_columns(self.laws(part), count) for part in distinct.split(chunk)]
        return torch.cat(found)[place].view(*labels.label.shape, count)

    def first_logits(
        self, batch: Batch, states: TargetStates, roots: Roots
    ) -> Callable[[Tensor], Tensor]:
        """Of the laws after the roots."""
        context = tokens_up_to(batch, self.reach, fill=NO_TOKEN)[roots.row, roots.position]
        return lambda groups: self.laws(context[groups]).log()

    def assistance(self) -> dict[str, Any] | None:
        """None: transformers has no tables."""
        return None

    def cache_bytes_per_token(self) -> int:
        """One id."""
        return 8

    def named_parts(self) -> dict[str, Tensor]:
        """Every tensor under its name in the file: `1.counts`, `2.keys`, `2.starts`, ..."""
        parts = {"1.counts": self.single}
        for length, grams in enumerate(self.grams, start=2):
            parts |= {f"{length}.{name}": getattr(grams, name) for name in PARTS}
        return parts

    def native_tensors(self) -> dict[str, Tensor]:
        """The table, on the CPU."""
        return {name: value.contiguous().cpu() for name, value in self.named_parts().items()}

    def load_native(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `native_tensors` gave. Raises ValueError for what is no such table."""
        if tensors.keys() != self.named_parts().keys():
            raise ValueError(f"{self.native_file} holds other tensors than its drafter has")
        check_counts(tensors["1.counts"], self.width)
        device = self.single.device
        self.single = tensors["1.counts"].to(device)
        for length, grams in enumerate(self.grams, start=2):
            parts = {name: tensors[f"{length}.{name}"] for name in PARTS}
            check_grams(parts, self.width)
            for name, value in parts.items():
                grams.register_buffer(name, value.to(device))

    def native_config(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """config.json."""
        return {
            "model_type": "ngram",
            "order": self.config.order,
            "backoff": self.config.backoff,
            "vocab_size": self.width,
        }

    def native_extras(self, folder: Path) -> None:
        """None."""


def tail(text: Tensor, length: int) -> Tensor:
    """The last `length` tokens of a text [T], NO_TOKEN before its first."""
    return torch.cat([text.new_full((length,), NO_TOKEN), text])[len(text) :]


def observations(
    texts: Iterable[tuple[Sequence[int], Sequence[bool]]], length: int
) -> tuple[Tensor, Tensor]:
    """Supervised tokens [n] of all texts, and the `length` tokens before each, [n, length]."""
    contexts, tokens = [torch.zeros(0, length, dtype=torch.int64)], [torch.zeros(0).long()]
    for ids, supervised in texts:
        text, at = torch.tensor(ids), torch.tensor(supervised).nonzero()[:, 0]
        padded = torch.cat([text.new_full((length,), NO_TOKEN), text])
        contexts.append(padded[at[:, None] + torch.arange(length)])
        tokens.append(text[at])
    return torch.cat(contexts), torch.cat(tokens)


def check_counts(counts: Tensor, vocab: int) -> None:
    """Raises ValueError unless these count every token."""
    if counts.dtype != torch.int32 or counts.shape != (vocab,) or bool((counts < 0).any()):
        raise ValueError(f"1.counts does not count {vocab} tokens")


def check_grams(parts: Mapping[str, Tensor], vocab: int) -> None:
    """Raises ValueError unless these are the parts of a table over a vocabulary."""
    keys, starts, tokens, counts = (parts[name] for name in PARTS)
    dtypes = [part.dtype for part in (keys, starts, tokens, counts)]
    if dtypes != [torch.int64, torch.int64, torch.int32, torch.int32]:
        raise ValueError("a table of grams is of other dtypes")
    if any(part.ndim != 1 for part in parts.values()) or len(starts) != len(keys) + 1:
        raise ValueError("a table of grams has other shapes")
    ends = starts[0] == 0 and starts[-1] == len(tokens) == len(counts)
    if not ends or bool((starts.diff() < 1).any()) or bool((keys.diff() < 1).any()):
        raise ValueError("a table of grams is out of order")
    if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab):
        raise ValueError(f"a table of grams holds tokens outside 0 to {vocab - 1}")
    if bool((counts < 1).any()):
        raise ValueError("a table of grams holds counts below 1")
