"""Every rule against the target's own law, by enumeration; and what a rule refuses."""

import pytest
import torch

from draftsmith.drafters.coins import SeededCoins
from draftsmith.drafters.draws import draw_slots
from draftsmith.drafters.proposal import Proposal
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.tree import Tree, chain
from draftsmith.eval.rules import RULES
from draftsmith.eval.verify import Laws
from draftsmith.recipes.errors import UserError
from tests.coins import distance, law_of
from tests.toy import (
    SAMPLINGS,
    TREES,
    ToyModel,
    committed,
    laws_of,
    mean_drafts,
    output_law,
    propose,
    target_law,
)

PLAIN = Sampling(1.0)
DRAWS = ("chain", "iid", "without_replacement", "point")
CHAIN_RULES = ("token", "block", "multi_step", "without_replacement", "k_sequential")
TREE_RULES = {
    "multi_step": "iid",
    "k_sequential": "iid",
    "without_replacement": "without_replacement",
}


def assert_exact(model, tree, rule, draw, *, length=2):
    out = output_law(model, tree, rule, draw, length=length)
    assert sum(out.values()) == pytest.approx(1.0)
    assert distance(out, target_law(model, length)) < 1e-12


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("name", CHAIN_RULES)
def test_chains_are_exact(name, sampling):
    assert_exact(ToyModel(0, sampling), chain(2), RULES[name], "chain")


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("name", TREE_RULES)
def test_siblings_are_exact(name, sampling):
    assert_exact(ToyModel(1, sampling), TREES["siblings"], RULES[name], TREE_RULES[name])


@pytest.mark.parametrize("shape", ["all", "sparse", "below"])
@pytest.mark.parametrize("name", TREE_RULES)
def test_trees_are_exact(name, shape):
    model = ToyModel(2, SAMPLINGS["everything"])
    assert_exact(model, TREES[shape], RULES[name], TREE_RULES[name])


@pytest.mark.parametrize("name", ["token", "block"])
def test_chains_of_three_are_exact(name):
    assert_exact(ToyModel(3, SAMPLINGS["penalty"]), chain(3), RULES[name], "chain")


@pytest.mark.parametrize("name", ["token", "block"])
def test_three_tokens_of_a_chain_are_exact(name):
    assert_exact(ToyModel(3, SAMPLINGS["both"]), chain(2), RULES[name], "chain", length=3)


@pytest.mark.parametrize("drafts", [Sampling(0.6, top_k=2), Sampling(1.5, top_p=0.5)])
@pytest.mark.parametrize("name", CHAIN_RULES)
def test_drafts_may_be_filtered_otherwise_than_the_target(name, drafts):
    """Only the q that tokens are drawn from counts, not what filtered it; also where p has 0."""
    model = ToyModel(4, Sampling(1.0, top_k=2), drafts)
    assert_exact(model, chain(2), RULES[name], "chain")
    if name in TREE_RULES:
        assert_exact(model, TREES["siblings"], RULES[name], TREE_RULES[name])


@pytest.mark.parametrize("name", CHAIN_RULES)
def test_a_reduced_draft_vocabulary_is_exact(name):
    model = ToyModel(5, SAMPLINGS["penalty"], ids=torch.tensor([0, 3]), vocab=4)
    assert_exact(model, chain(2), RULES[name], "chain")
    if name in TREE_RULES:
        assert_exact(model, TREES["siblings"], RULES[name], TREE_RULES[name])


@pytest.mark.parametrize("name", [*CHAIN_RULES, "point_mass"])
def test_greedy_decoding_takes_drafts_of_any_draw(name):
    sampling = Sampling(repetition_penalty=1.8, logit_bias=((2, 0.4),))
    for draw in DRAWS:
        tree = chain(2) if draw == "chain" else TREES["siblings"]
        assert_exact(ToyModel(6, sampling), tree, RULES[name], draw)


@pytest.mark.parametrize("rho", [1.0, 1.3, 1.6, 2.0, 3.5])
def test_k_sequential_is_exact_for_any_scale_asked_for(rho):
    rule = RULES["k_sequential"].given(rho=rho)
    assert_exact(ToyModel(7, PLAIN), TREES["siblings"], rule, "iid")


def test_rows_that_run_out_of_draws_are_exact():
    """Without replacement, a law of two tokens gives two children, whatever was asked for."""
    model = ToyModel(8, PLAIN, drafts=Sampling(1.0, top_k=2))
    rule = RULES["without_replacement"]
    assert_exact(model, TREES["all"], rule, "without_replacement")


LEGAL = {
    "greedy": (),
    "point_mass": ("point",),
    "token": ("chain",),
    "block": ("chain",),
    "multi_step": ("chain", "iid"),
    "without_replacement": ("chain", "without_replacement"),
    "k_sequential": ("chain", "iid"),
    "lenient": ("chain",),
    "typical": DRAWS,
}


def small_proposal(draw, q=True):
    tokens = torch.tensor([[1]])
    q = torch.full((1, 1, 3), 1 / 3) if q else None
    return Proposal(tokens, torch.zeros_like(tokens), tokens.bool(), q, draw)


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("name", RULES)
def test_a_rule_refuses_the_draws_that_it_is_not_exact_for(name, draw):
    laws = Laws(torch.zeros(1, 2, 3), PLAIN)
    proposal = small_proposal(draw, q=draw != "point")
    if draw in LEGAL[name]:
        RULES[name](laws, proposal, SeededCoins([0]))
        return
    with pytest.raises(UserError, match=f"rule {name} is for .*not for '{draw}'"):
        RULES[name](laws, proposal, SeededCoins([0]))


def test_a_law_without_draws_and_draws_without_a_law_are_refused():
    laws = Laws(torch.zeros(1, 2, 3), PLAIN)
    with pytest.raises(UserError, match="'chain' without q"):
        RULES["token"](laws, small_proposal("chain", q=False), SeededCoins([0]))
    with pytest.raises(UserError, match="'point' with q"):
        RULES["point_mass"](laws, small_proposal("point"), SeededCoins([0]))


def test_parameters_are_named_and_bounded():
    assert RULES["typical"].given(delta=0.2).parameters == {"epsilon": 0.09, "delta": 0.2}
    assert RULES["typical"].described == "typical (epsilon 0.09, delta 0.3), lossy"
    assert RULES["token"].described == "token"
    with pytest.raises(UserError, match="no parameter theta; it has: epsilon, delta"):
        RULES["typical"].given(theta=0.2)
    with pytest.raises(UserError, match=r"lenience is 1\.5; give 1e-06 to 1"):
        RULES["lenient"].given(lenience=1.5)


@pytest.mark.parametrize("name", RULES)
def test_a_round_without_drafts_is_plain_decoding(name):
    model = ToyModel(9, Sampling() if name == "greedy" else PLAIN)
    none = torch.zeros((1, 0), dtype=torch.long)
    empty = Proposal(none, none, none.bool())
    laws = laws_of(model, (), empty)
    law = law_of(lambda coins: committed(empty, RULES[name](laws, empty, coins)))
    if RULES[name].lossless:
        assert distance(law, target_law(model, 1, ())) < 1e-12
    assert {len(tokens) for tokens in law} == {1}


def batch_of(draw, shapes=3, seed=0):
    """Rows whose chains and families end early, each in its own place."""
    tree = chain(3) if draw == "chain" else Tree(((0,), (1,), (2,), (0, 0), (1, 0), (1, 1)))
    noise = torch.Generator().manual_seed(seed)
    laws = torch.randn(shapes, 3, 5, generator=noise, dtype=torch.float64).softmax(-1)
    proposal = draw_slots(laws, tree, draw, SeededCoins(range(shapes)))
    valid = proposal.valid & (torch.rand(proposal.valid.shape, generator=noise) < 0.8)
    logits = torch.randn(shapes, tree.nodes + 1, 5, generator=noise, dtype=torch.float64)
    return logits, Proposal(proposal.tokens, proposal.parent, valid, proposal.q, draw)


@pytest.mark.parametrize(
    ("name", "draw"),
    [(n, d) for n in RULES for d in LEGAL[n] if d != "point"],
)
def test_rows_of_a_batch_get_what_they_get_alone(name, draw):
    """Rows end at different nodes; one that ended uses no coins of its own any more."""
    rule = RULES[name]
    for seed in range(20):
        logits, proposal = batch_of(draw, seed=seed)
        coins = SeededCoins(range(10, 13))
        both = rule(Laws(logits, PLAIN), proposal, coins)
        for row in range(3):
            one = slice(row, row + 1)
            parts = (proposal.tokens, proposal.parent, proposal.valid, proposal.q)
            mine = Proposal(*(part[one] for part in parts), draw)
            alone_coins = SeededCoins([10 + row])
            alone = rule(Laws(logits[one], PLAIN), mine, alone_coins)
            length = int(alone.length)
            assert int(both.length[row]) == length and both.next[row] == alone.next[0]
            assert both.path[row, :length].tolist() == alone.path[0, :length].tolist()
            assert not both.path[row, length:].any()
            state = coins.generators[row].get_state()
            assert torch.equal(state, alone_coins.generators[0].get_state())


class CountingLaws(Laws):
    """Counts the laws that are standardised."""

    count = 0

    def at(self, rows, node):
        self.count += len(rows)
        return super().at(rows, node)


@pytest.mark.parametrize("name", ["token", "multi_step", "without_replacement", "k_sequential"])
def test_only_laws_on_the_path_are_read(name):
    proposal = propose(ToyModel(0, PLAIN), (), chain(2), "chain", SeededCoins([0]))
    first = int(proposal.tokens[0, 0])
    logits = torch.zeros(1, 3, 3, dtype=torch.float64)
    logits[0, 0, first] = float("-inf")  # the first draft is impossible
    laws = CountingLaws(logits, PLAIN)
    verdict = RULES[name](laws, proposal, SeededCoins([0]))
    assert verdict.length.tolist() == [0] and laws.count == 1
    assert int(verdict.next) != first


def test_block_verification_accepts_no_less_than_token_rejection():
    """2403.10444, theorem 2: the most of all rules that judge a chain; equal for one draft."""
    for seed in range(6):
        model = ToyModel(seed, PLAIN)
        token, block = (
            mean_drafts(model, chain(2), RULES[name], "chain") for name in ("token", "block")
        )
        assert token <= block + 1e-12
        one, other = (
            mean_drafts(model, chain(1), RULES[name], "chain") for name in ("token", "block")
        )
        assert one == pytest.approx(other)


class Coin:
    """p = (1/3, 2/3) and q = (2/3, 1/3) after every context: the paper's example."""

    vocab, sampling, ids = 2, PLAIN, None

    def logits(self, context):
        return torch.tensor([1 / 3, 2 / 3], dtype=torch.float64).log()

    def q(self, context):
        return torch.tensor([[2 / 3, 1 / 3]], dtype=torch.float64)


def test_the_example_of_the_block_verification_paper():
    """2403.10444, section 2: of two drafts, 10/9 are accepted token by token, 11/9 as a block."""
    assert mean_drafts(Coin(), chain(2), RULES["token"], "chain") == pytest.approx(10 / 9)
    assert mean_drafts(Coin(), chain(2), RULES["block"], "chain") == pytest.approx(11 / 9)
