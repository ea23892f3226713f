"""The real loop on tiny models: greedy equality, the sampled law by enumeration, and cuts."""

import pytest
import torch

from draftsmith.drafters import methods
from draftsmith.drafters.coins import SeededCoins
from draftsmith.drafters.proposal import Plan, Proposal
from draftsmith.drafters.sampler import Sampling, standardise
from draftsmith.drafters.slots import TargetStates
from draftsmith.drafters.tree import Tree, chain
from draftsmith.eval import decode as loop
from draftsmith.eval.decode import decode, decode_batch
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import MedusaConfig
from tests.coins import distance, law_of
from tests.tiny import tiny_target

PROMPT = [20, 21, 22, 23, 24]
TREES = {
    "chain": chain(3),
    "tree": Tree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 2))),
}


def noisy_drafter(target, heads=3, seed=0, draft_ids=None, noise=0.05, **changes):
    """Heads that are right now and then."""
    drafter = methods.build(MedusaConfig(heads=heads, **changes), target, draft_ids)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        for parameter in drafter.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return drafter.eval()


class Patchy:
    """Gives every row a shape of its own, by its root: a chain, a tree, a part of one, or nothing.

    Its invalid nodes hold tokens that no vocabulary has.
    """

    shapes = (chain(3), Tree(((0,), (1,), (0, 0))))
    taps = ()

    def __init__(self, heads):
        self.heads, self.depth = heads, heads.depth
        self.start, self.commit, self.select = heads.start, heads.commit, heads.select

    def propose(self, state, root, plan):
        laid = [
            self.heads.propose(state, root, Plan(tree, plan.sampling, plan.coins))
            for tree in self.shapes
        ]
        second = (root % 2 == 1)[:, None]
        tokens, parent = (
            torch.where(second, getattr(laid[1], name), getattr(laid[0], name))
            for name in ("tokens", "parent")
        )
        valid = torch.arange(3) < (root // 2 % 4)[:, None]
        return Proposal(tokens.masked_fill(~valid, 10**9), parent, valid)


def plain(target, **options):
    return decode(target, None, PROMPT, **options)


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_greedy_output_is_the_plain_output_token_for_token(tree, dtype):
    accepted = 0
    for seed in range(6):
        target = tiny_target(40, seed=seed, spread=0.15, eos=(), dtype=dtype)
        options = dict(sampling=Sampling(), max_new_tokens=30)
        drafter = noisy_drafter(target, seed=seed, reads_root=seed % 2 == 1)
        out = decode(target, drafter, PROMPT, tree=tree, **options)
        assert out.tokens == plain(target, **options).tokens
        accepted += sum(r.accepted for r in out.rounds)
    assert accepted > 0  # else the test never took the path it is about


def test_rows_may_be_laid_out_unlike_the_plan():
    drafted = set()
    for seed in range(4):
        target = tiny_target(40, seed=seed, spread=0.15, eos=())
        options = dict(sampling=Sampling(), max_new_tokens=30)
        drafter = Patchy(noisy_drafter(target, seed=seed))
        out = decode(target, drafter, PROMPT, tree=chain(3), **options)
        assert out.tokens == plain(target, **options).tokens
        drafted |= {r.drafted for r in out.rounds}
    assert drafted == {0, 1, 2, 3}


PROMPTS = [[20, 21, 22, 23, 24], [30], list(range(40)) * 2, [5, 6], [7, 8, 9]]


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0.8, top_k=5)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("shape", ["plain", "chain", "tree", "patchy"])
def test_an_answer_in_a_batch_is_the_answer_alone(shape, sampling):
    target = tiny_target(40, seed=2, spread=0.15, eos=(17, 31))
    drafter = None if shape == "plain" else noisy_drafter(target, seed=2)
    if shape == "patchy":
        drafter = Patchy(drafter)
    tree = None if shape == "plain" else TREES.get(shape, chain(3))
    options = dict(sampling=sampling, max_new_tokens=24, tree=tree)
    seeds = [11, 12, 13, 14, 15]
    together = decode_batch(target, drafter, PROMPTS, seeds=seeds, **options)
    alone = [
        decode(target, drafter, prompt, seed=seed, **options)
        for prompt, seed in zip(PROMPTS, seeds, strict=True)
    ]
    for one, want in zip(together, alone, strict=True):
        assert (one.tokens, one.finish) == (want.tokens, want.finish)
        assert [(r.drafted, r.accepted, r.emitted) for r in one.rounds] == [
            (r.drafted, r.accepted, r.emitted) for r in want.rounds
        ]
    assert len({len(one.rounds) for one in together}) > 1  # rows left the batch


def test_plain_output_is_transformers_own():
    target = tiny_target(40, spread=0.3, eos=())
    out = plain(target, sampling=Sampling(), max_new_tokens=20)
    ids = torch.tensor([PROMPT])
    want = target.model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert out.tokens == want[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_the_token_limit_is_exact(limit):
    target = tiny_target(40, eos=())
    out = decode(
        target,
        noisy_drafter(target),
        PROMPT,
        sampling=Sampling(),
        max_new_tokens=limit,
        tree=chain(3),
    )
    assert len(out.tokens) == limit and out.finish == "length"
    assert sum(r.emitted for r in out.rounds) == limit - 1


def test_every_token_as_eos_stops_where_plain_decoding_stops():
    """Declare each produced token to be EOS in turn; EOS also falls inside accepted drafts."""
    target = tiny_target(40, seed=3, spread=0.15, eos=())
    target.eos_ids = ()
    options = dict(sampling=Sampling(), max_new_tokens=24)
    whole = plain(target, **options).tokens
    for tree in TREES.values():
        for token in set(whole):
            target.eos_ids = (token, 39)
            want = plain(target, **options)
            out = decode(target, noisy_drafter(target, seed=3), PROMPT, tree=tree, **options)
            assert out.tokens == want.tokens == whole[: whole.index(token) + 1]
            assert out.finish == want.finish == "stop"
    target.eos_ids = ()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_an_end_is_exact_wherever_it_falls(batch, depth):
    """Over end tokens, limits, block lengths and batch sizes; some ends lie inside blocks."""
    target = tiny_target(40, seed=3, spread=0.15, eos=())
    drafter = noisy_drafter(target, heads=4, seed=3)
    prompts, inside = PROMPTS[:batch], 0
    whole = [
        decode(target, None, prompt, sampling=Sampling(), max_new_tokens=20).tokens
        for prompt in prompts
    ]
    ends = [
        (),
        *((token, other) for token, other in zip(whole[0][1::4], whole[-1][::4], strict=True)),
    ]
    for eos in ends:
        for limit in (1, 2, 5, 20):
            options = dict(sampling=Sampling(), max_new_tokens=limit, eos_ids=eos)
            out = decode_batch(
                target, drafter, prompts, tree=chain(depth), seeds=range(batch), **options
            )
            for answer, tokens in zip(out, whole, strict=True):
                first = next((i + 1 for i, t in enumerate(tokens) if t in eos), limit)
                want = tokens[: min(first, limit)]
                assert answer.tokens == want
                assert answer.finish == ("stop" if want[-1] in eos else "length")
                assert sum(r.emitted for r in answer.rounds) == len(want) - 1
                inside += sum(r.emitted <= r.accepted for r in answer.rounds)
    assert inside > 0


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_stop_strings_end_where_generate_ends(tree):
    target = tiny_target(100, seed=1, spread=0.15, eos=())  # tokens from 11 on: one letter each
    prompt = [40, 41, 42]
    options = dict(sampling=Sampling(), max_new_tokens=24)
    whole = decode(target, None, prompt, **options).tokens
    text = "".join(target.tokenizer.convert_ids_to_tokens(whole))
    drafter, ids = noisy_drafter(target, seed=1), torch.tensor([prompt])
    begun = target.tokenizer.decode([*prompt[-1:], *whole[:2]])  # begins in the prompt
    for strings in (
        [begun],
        *([target.tokenizer.decode(whole[i : i + 3]), "~~"] for i in (3, 8, 14)),
    ):
        want = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            stop_strings=strings,
            tokenizer=target.tokenizer,
            max_new_tokens=24,
            do_sample=False,
            pad_token_id=0,
        )
        out = decode(target, drafter, prompt, tree=tree, stops=strings, **options)
        assert out.tokens == want[0, 3:].tolist() and out.finish == "stop", text


def test_a_reduced_draft_vocabulary_drafts_only_its_ids():
    target = tiny_target(40, eos=())
    ids = torch.tensor([3, 7, 20, 21, 30])
    drafter = noisy_drafter(target, draft_ids=ids, projection="own")
    state = drafter.start(
        torch.tensor([[0, 1]]), torch.tensor([2]), TargetStates(torch.randn(1, 2, 32))
    )
    plan = Plan(TREES["tree"], Sampling(), SeededCoins([0]))
    proposal = drafter.propose(state, torch.tensor([1]), plan)
    assert set(proposal.tokens.unique().tolist()) <= set(ids.tolist())
    options = dict(sampling=Sampling(), max_new_tokens=16)
    out = decode(target, drafter, PROMPT, tree=chain(3), **options)
    assert out.tokens == plain(target, **options).tokens


@pytest.mark.parametrize(
    ("tree", "limit"),
    [(chain(1), 3), (chain(2), 2), (Tree(((0,), (1,))), 2), (Tree(((0,), (1,), (0, 0))), 2)],
    ids=["chain1", "chain2", "siblings", "tree"],
)
@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0), Sampling(0.6, top_k=2), Sampling(1.2, top_p=0.8)],
    ids=["plain", "top_k", "top_p"],
)
def test_the_law_of_the_real_loop_is_the_targets(monkeypatch, tree, limit, sampling):
    target = tiny_target(3, hidden=16, eos=(), spread=0.3)
    target.eos_ids = ()
    drafter = noisy_drafter(target, heads=2)

    def run(coins):
        monkeypatch.setattr(loop, "SeededCoins", lambda seeds: coins)
        options = dict(sampling=sampling, max_new_tokens=limit, tree=tree)
        return tuple(decode(target, drafter, [0, 1], **options).tokens)

    out, want = law_of(run), target_law(target, [0, 1], limit, sampling)
    assert sum(out.values()) == pytest.approx(1.0)
    assert distance(out, want) < 1e-5  # fp32 logits


def target_law(target, context, left, sampling):
    if left == 0:
        return {(): 1.0}
    final = target.base(input_ids=torch.tensor([context])).last_hidden_state[0, -1]
    law = standardise(target.logits(final).double(), sampling)
    return {
        (token, *rest): float(law[token]) * share
        for token in range(target.vocab_size)
        if law[token] > 0
        for rest, share in target_law(target, [*context, token], left - 1, sampling).items()
    }


def test_sampling_is_repeatable_by_seed():
    target = tiny_target(40, eos=())
    options = dict(sampling=Sampling(1.0), max_new_tokens=16, tree=chain(3))
    drafter = noisy_drafter(target)
    runs = [decode(target, drafter, PROMPT, seed=seed, **options).tokens for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_bad_calls_are_one_clear_line():
    target = tiny_target(40)
    with pytest.raises(UserError, match="at least one token"):
        decode(target, None, [], sampling=Sampling(), max_new_tokens=4)
    with pytest.raises(UserError, match="none may be empty"):
        decode(target, None, PROMPT, sampling=Sampling(), max_new_tokens=4, stops=[""])
    with pytest.raises(UserError, match="one seed per prompt"):
        decode_batch(target, None, PROMPTS, seeds=[0], sampling=Sampling(), max_new_tokens=4)
    with pytest.raises(UserError, match="or neither"):
        decode(target, None, PROMPT, sampling=Sampling(), max_new_tokens=4, tree=chain(1))
