"""Toy targets and drafters with random laws, played by the real draws and rules round by round.

Everything a round does by chance is enumerated, so that the law of the output is exact.
"""

import random
from collections import Counter

import torch

from draftsmith.drafters.draws import draw_children, families
from draftsmith.drafters.proposal import Proposal
from draftsmith.drafters.sampler import Sampling, standardise
from draftsmith.drafters.tree import Tree, chain
from draftsmith.eval.history import history_for
from draftsmith.eval.verify import Laws
from tests.coins import law_of

V, START = 3, (1,)  # the vocabulary, and the context that output comes after
PLAIN = Sampling(1.0)

TREES = {
    "chain1": chain(1),
    "chain2": chain(2),
    "siblings": Tree(((0,), (1,))),
    "all": Tree(((0,), (1,), (2,))),
    "sparse": Tree(((0,), (1,), (0, 0), (1, 0))),
    "deep": Tree(((0,), (1,), (0, 1), (0, 1, 0))),
    "below": Tree(((0,), (0, 0), (0, 1))),
}
SAMPLINGS = {
    "plain": Sampling(1.0),
    "cold": Sampling(0.5),
    "top_k": Sampling(1.0, top_k=2),
    "top_p": Sampling(1.3, top_p=0.7),
    "both": Sampling(0.8, top_k=2, top_p=0.9),
    "min_p": Sampling(1.0, min_p=0.4),
    "penalty": Sampling(1.0, repetition_penalty=2.5),
    "bias": Sampling(1.0, logit_bias=((0, 1.5), (2, -0.7))),
    "everything": Sampling(1.4, 2, 0.95, 0.1, 1.6, ((1, 0.8),)),
}


def whole_law(seed, size):
    """A random law of small whole numbers."""
    noise = random.Random(seed)
    law = torch.tensor([noise.randint(1, 12) for _ in range(size)], dtype=torch.float64)
    return law / law.sum()


class ToyModel:
    """Random logits per context; a drafter's law, and its guesses, per context."""

    def __init__(self, seed, sampling, drafts=PLAIN, ids=None, vocab=V):
        self.seed, self.sampling, self.drafts, self.ids = seed, sampling, drafts, ids
        self.vocab, self.known = vocab, {}

    def random_logits(self, *what, size):
        key = (*what, size)
        if key not in self.known:
            noise = random.Random(f"{self.seed} {what}")
            logits = [noise.gauss(0, 1) for _ in range(size)]
            self.known[key] = torch.tensor(logits, dtype=torch.float64)
        return self.known[key]

    def logits(self, context):
        return self.random_logits(context, size=self.vocab)

    def law(self, context):
        """The target's, as plain decoding standardises it."""
        seen = torch.zeros(self.vocab, dtype=torch.bool)
        seen[list(context)] = True
        return standardise(self.logits(context), self.sampling, seen).tolist()

    def q(self, context):
        """The drafter's law [1, Vq] after a context."""
        size = self.vocab if self.ids is None else len(self.ids)
        return standardise(self.random_logits("draft", context, size=size), self.drafts)[None]

    def guesses(self, context, depth):
        """Ranked tokens of one slot: a permutation, as top-k of a head gives distinct tokens."""
        noise = random.Random(f"guess {self.seed} {context} {depth}")
        return noise.sample(range(self.vocab), self.vocab)


def propose(model, context, tree, draw="point", coins=None):
    """Point-mass guesses per slot, or children drawn from q at every node's own path."""
    tokens = torch.zeros((1, tree.nodes), dtype=torch.long)
    valid = torch.ones_like(tokens).bool()
    if draw == "point":
        for node, path in enumerate(tree.paths):
            tokens[0, node] = model.guesses(context, len(path))[path[-1]]
        return Proposal(tokens, tree.parent[None], valid)
    q = torch.zeros((1, tree.nodes, model.q(context).shape[1]), dtype=torch.float64)
    contexts = {0: context}
    for _, family in families(tree):
        before = contexts[int(tree.parent[family[0] - 1])]
        at = [node - 1 for node in family]
        drawn = draw_children(model.q(before), len(family), draw, coins, torch.tensor([0]))
        q[:, at], valid[:, at] = drawn.q, drawn.valid
        tokens[:, at] = drawn.tokens if model.ids is None else model.ids[drawn.tokens]
        contexts |= {node: (*before, int(tokens[0, node - 1])) for node in family}
    return Proposal(tokens, tree.parent[None], valid, q, draw, model.ids)


def node_contexts(context, proposal):
    """The context at every node: the committed one, then the drafted path to the node."""
    contexts = [context]
    for token, parent in zip(proposal.tokens[0].tolist(), proposal.parent[0].tolist(), strict=True):
        contexts.append((*contexts[parent], token))
    return contexts


def laws_of(model, context, proposal):
    """The target's laws at the nodes of a proposal, as the decoding loop hands them over."""
    logits = torch.stack([model.logits(c) for c in node_contexts(context, proposal)])
    history = history_for(model.sampling, [context], model.vocab, logits.device)
    return Laws(logits[None], model.sampling, history, proposal)


def committed(proposal, verdict):
    """The tokens of a round."""
    path = verdict.path[0, : int(verdict.length)]
    return (*proposal.tokens[0, path - 1].tolist(), int(verdict.next))


def play_round(model, context, tree, rule, draw, coins):
    proposal = propose(model, context, tree, draw, coins)
    return committed(proposal, rule(laws_of(model, context, proposal), proposal, coins))


def round_law(model, context, tree, rule, draw):
    """The law of the tokens that one round commits."""
    return law_of(lambda coins: play_round(model, context, tree, rule, draw, coins))


def output_law(model, tree, rule, draw="point", *, length, context=START):
    """The law of the next `length` tokens, by as many rounds as they need."""
    if length <= 0:
        return {(): 1.0}
    out = Counter()
    for tokens, share in round_law(model, context, tree, rule, draw).items():
        left = length - len(tokens)
        after = output_law(model, tree, rule, draw, length=left, context=(*context, *tokens))
        for more, chance in after.items():
            out[(*tokens[:length], *more)] += share * chance
    return out


def target_law(model, length, context=START):
    """The law of `length` tokens of plain decoding."""
    if length == 0:
        return {(): 1.0}
    return {
        (token, *rest): p * share
        for token, p in enumerate(model.law(context))
        for rest, share in target_law(model, length - 1, (*context, token)).items()
    }


def mean_drafts(model, tree, rule, draw, context=START):
    """The expected number of accepted drafts of a round."""
    law = round_law(model, context, tree, rule, draw)
    return sum((len(tokens) - 1) * share for tokens, share in law.items())
