"""Every drafter through the real loop: greedy answers stay, and sampled ones keep their law."""

import pytest
import torch

from draftsmith.drafters.lookup import PromptLookup
from draftsmith.drafters.ngram import NgramTable
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.tree import Tree, chain
from draftsmith.eval import decode as loop
from draftsmith.eval.decode import decode, decode_batch
from draftsmith.eval.rules import RULES
from draftsmith.recipes.schema import NgramConfig, PromptLookupConfig
from tests.coins import distance, law_of
from tests.drafters.test_draft_model import ready, small
from tests.drafters.test_mtp import mtp
from tests.eval.test_decode import noisy_drafter, target_law
from tests.tiny import tiny_target

WORDS = 40
PROMPTS = [[20, 21, 22, 20, 21], [5], [30, 31, 30, 31, 30, 31, 30]]
BUSHY = Tree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))


def table(target, texts=(), order=2):
    drafter = NgramTable(NgramConfig(kind="ngram", order=order), target, None)
    drafter.count([(text, [True] * len(text)) for text in texts])
    return drafter


def like(target, seed):
    """A model that often agrees with its target: the same weights and some noise."""
    other = tiny_target(WORDS, seed=seed, spread=0.15, eos=(), dtype=target.dtype)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for mine, theirs in zip(other.model.parameters(), target.model.parameters(), strict=True):
            mine.copy_(theirs + 0.02 * torch.randn(theirs.shape, generator=noise))
    return other


def answers(target, limit=14):
    return [
        decode(target, None, prompt, sampling=Sampling(), max_new_tokens=limit).tokens
        for prompt in PROMPTS
    ]


def drafters(target):
    plain = answers(target)
    lookup = PromptLookup(PromptLookupConfig(kind="prompt_lookup"), target, None)
    counted = table(target, [[*p, *a] for p, a in zip(PROMPTS, plain, strict=True)], order=3)
    stranger = small(7, dtype=target.dtype)
    return {
        "prompt_lookup": (lookup, chain(5)),
        "ngram chain": (counted, chain(3)),
        "ngram tree": (counted, BUSHY),
        "model chain": (ready(target, like(target, 1)), chain(3)),
        "model tree": (ready(target, like(target, 1)), BUSHY),
        "forest": (ready(target, like(target, 1), like(target, 2)), BUSHY),
        "forest of chains": (ready(target, like(target, 1), stranger), chain(3)),
        "mtp chain": (mtp(target, seed=1, noise=0.02), chain(3)),
        "mtp tree": (mtp(target, seed=1, noise=0.02), BUSHY),
    }


@pytest.mark.parametrize("name", drafters(tiny_target(WORDS, eos=())))
def test_greedy_output_is_the_plain_output_token_for_token(name):
    accepted, dtype = 0, torch.float64
    for seed in range(2):
        target = tiny_target(WORDS, seed=seed, spread=0.15, eos=(), dtype=dtype)
        drafter, tree = drafters(target)[name]
        want = answers(target)
        options = dict(sampling=Sampling(), max_new_tokens=14, tree=tree)
        for prompt, answer in zip(PROMPTS, want, strict=True):
            out = decode(target, drafter, prompt, **options)
            assert out.tokens == answer
            accepted += sum(r.accepted for r in out.rounds)
        together = decode_batch(target, drafter, PROMPTS, seeds=[0, 1, 2], **options)
        assert [out.tokens for out in together] == want
    assert accepted > 0  # else the test never took the path it is about


TWINS = Tree(((0,), (1,)))
LAWS = {
    "one": (chain(1), "chain", "token", 2),
    "chain": (chain(2), "chain", "token", 2),
    "block": (chain(2), "chain", "block", 2),
    "iid": (TWINS, "iid", "multi_step", 2),
    "iid tree": (Tree(((0,), (1,), (0, 0))), "iid", "multi_step", 2),
    "distinct": (TWINS, "without_replacement", "without_replacement", 2),
}


@pytest.mark.parametrize("kind", ["ngram", "draft_model", "mtp", "medusa"])
@pytest.mark.parametrize(("tree", "draw", "rule", "limit"), LAWS.values(), ids=LAWS)
@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7, top_k=2)], ids=["1", "top_k"])
def test_sampled_drafts_keep_the_target_s_law(monkeypatch, kind, tree, draw, rule, limit, sampling):
    words = 2 if tree.nodes == 3 else 3
    target = tiny_target(words, hidden=16, eos=(), spread=0.3)
    target.eos_ids = ()
    drafter = {
        "ngram": lambda: table(target, [[0, 1, 1, 1, 0, 1, 1, 0]]),
        "draft_model": lambda: ready(target, small(4, vocab=words, spread=0.4)),
        "mtp": lambda: mtp(target, noise=0.2),
        "medusa": lambda: noisy_drafter(target, heads=2, noise=0.3, reads_root=True),
    }[kind]()
    assert_exact(monkeypatch, target, drafter, tree, rule, limit, sampling, draw)


@pytest.mark.parametrize(
    ("tree", "draw"),
    [(chain(1), "chain"), (chain(2), "chain"), (TWINS, "iid"), (TWINS, "without_replacement")],
    ids=["one", "chain", "iid", "distinct"],
)
def test_a_forest_of_drawn_trees_keeps_the_target_s_law(monkeypatch, tree, draw):
    """Trees that hold the same token are joined; every draw is tried all the same."""
    target = tiny_target(2, hidden=16, eos=(), spread=0.3)
    target.eos_ids = ()
    models = [small(seed, vocab=2, spread=0.4) for seed in (4, 5)]
    drafter = ready(target, *models)
    assert_exact(monkeypatch, target, drafter, tree, "without_replacement", 2, Sampling(1.0), draw)


def assert_exact(monkeypatch, target, drafter, tree, rule, limit, sampling, draw):
    def run(coins):
        monkeypatch.setattr(loop, "SeededCoins", lambda seeds: coins)
        out = decode(
            target,
            drafter,
            [0, 1],
            sampling=sampling,
            max_new_tokens=limit,
            tree=tree,
            rule=RULES[rule],
            draw=draw,
        )
        return tuple(out.tokens)

    out = law_of(run)
    want = target_law(target, [0, 1], limit, sampling)
    assert sum(out.values()) == pytest.approx(1.0)
    assert distance(out, want) < 1e-5  # fp32 logits


def test_drafts_of_later_rounds_keep_it_too(monkeypatch):
    """An MTP block's cache has been rolled back then."""
    target = tiny_target(2, hidden=16, eos=(), spread=0.3)
    target.eos_ids = ()
    drafter = mtp(target, slots=2, noise=0.2)
    assert_exact(monkeypatch, target, drafter, chain(2), "token", 4, Sampling(1.0), "chain")


@pytest.mark.parametrize("kind", ["prompt_lookup", "ngram", "draft_model", "mtp"])
def test_point_drafts_keep_the_target_s_law(monkeypatch, kind):
    target = tiny_target(3, hidden=16, eos=(), spread=0.3)
    target.eos_ids = ()
    drafter = {
        "prompt_lookup": PromptLookup(PromptLookupConfig(kind="prompt_lookup"), target, None),
        "ngram": table(target, [[0, 1, 2, 2, 0, 1, 1, 0]]),
        "draft_model": ready(target, small(4, vocab=3), small(5, vocab=3)),
        "mtp": mtp(target, noise=0.2),
    }[kind]
    assert_exact(monkeypatch, target, drafter, chain(2), "point_mass", 3, Sampling(1.0), "point")
