import pytest
import torch

from draftsmith.drafters import methods
from draftsmith.drafters.coins import SeededCoins
from draftsmith.drafters.projection import slot_logits
from draftsmith.drafters.proposal import Plan
from draftsmith.drafters.sampler import Sampling, standardise
from draftsmith.drafters.slots import Batch, Roots, TargetStates
from draftsmith.drafters.tree import Tree, chain
from draftsmith.recipes.schema import MedusaConfig
from tests.tiny import tiny_target

KINDS = ["shared", "low_rank", "own"]


@pytest.mark.parametrize("reads_root", [False, True])
@pytest.mark.parametrize("projection", KINDS)
@pytest.mark.parametrize("ids", [None, torch.tensor([2, 5, 9, 30])], ids=["full", "reduced"])
def test_every_head_starts_as_the_targets_own(projection, ids, reads_root):
    target = tiny_target(40)
    config = MedusaConfig(heads=3, projection=projection, rank=4, reads_root=reads_root)
    drafter = methods.build(config, target, ids)
    hidden = torch.randn(7, target.hidden_size)
    logits = slot_logits(drafter.states(hidden, torch.arange(7)), drafter.head(), target.adjust)
    want = target.logits(hidden) if ids is None else target.logits(hidden)[:, ids]
    torch.testing.assert_close(logits, want[:, None].expand_as(logits))


@pytest.mark.parametrize("projection", KINDS)
def test_only_the_drafters_own_parameters_train(projection):
    target = tiny_target(40, tied=True)
    drafter = methods.build(MedusaConfig(heads=2, projection=projection, rank=4), target, None)
    sizes = {name: p.numel() for name, p in methods.trainable(drafter).items()}
    d, v = target.hidden_size, 40
    want = {"weight": 2 * d * d, "bias": 2 * d}
    if projection == "own":
        want["own"] = 2 * v * d
    if projection == "low_rank":
        want |= {"own": 2 * v * 4, "down": 2 * 4 * d}
    assert sizes == want
    assert all(p.dtype == torch.float32 for p in drafter.parameters())
    if projection == "own":  # a copy: training it must not move the target
        drafter.own.data.add_(1.0)
        assert not torch.equal(drafter.own[0], target.head_weight)


def test_heads_that_read_the_root_train_one_more_matrix_each_and_see_it():
    target = tiny_target(40, tied=True)
    drafter = methods.build(MedusaConfig(heads=2, reads_root=True), target, None)
    d = target.hidden_size
    sizes = {name: p.numel() for name, p in methods.trainable(drafter).items()}
    assert sizes == {"weight": 2 * d * d, "bias": 2 * d, "root_weight": 2 * d * d}
    assert drafter.embedding.data_ptr() == target.embedding.data_ptr()  # no copy
    with torch.no_grad():
        drafter.root_weight.normal_()
    hidden = torch.randn(1, d).expand(3, d)
    first, second, again = drafter.states(hidden, torch.tensor([5, 6, 5]))
    assert torch.equal(first, again) and not torch.allclose(first, second)


def test_proposals_lay_slot_guesses_out_as_the_tree():
    target = tiny_target(40)
    drafter = methods.build(MedusaConfig(heads=2), target, None)
    with torch.no_grad():
        drafter.weight.normal_()
    hidden = torch.randn(1, 3, target.hidden_size)
    state = drafter.start(hidden[..., 0].long(), torch.tensor([3]), TargetStates(hidden))
    tree = Tree(((0,), (2,), (0, 1), (2, 0)))
    plan = Plan(tree, Sampling(), SeededCoins([0]))
    tokens = drafter.propose(state, torch.tensor([4]), plan).tokens[0].tolist()
    logits = slot_logits(drafter.states(hidden[:, -1], torch.tensor([4])), drafter.head())[0]
    order = logits.argsort(dim=-1, descending=True).tolist()
    assert tokens == [order[0][0], order[0][2], order[1][1], order[1][0]]


def test_q_is_the_law_of_the_heads_and_of_alpha():
    target, ids, sampling = tiny_target(40), torch.tensor([2, 5, 9, 30]), Sampling(0.8)
    drafter = methods.build(MedusaConfig(heads=3, reads_root=True), target, ids)
    with torch.no_grad():
        drafter.root_weight.normal_(std=0.1)
        drafter.weight.normal_(std=0.1)
    text = torch.tensor([[3, 1, 4, 1, 5]])
    batch = Batch(text, torch.arange(5)[None], torch.zeros_like(text), text > 0)
    states = target.states(batch)
    root = Roots(torch.tensor([0]), torch.tensor([4]))
    state = drafter.start(text[:, :4], torch.tensor([4]), TargetStates(states.final[:, :4]))
    plan = Plan(chain(3), sampling, SeededCoins([0]), "chain")
    proposal = drafter.propose(state, text[:, 4], plan)
    assert proposal.draw == "chain" and set(proposal.tokens[0].tolist()) <= set(ids.tolist())
    law = standardise(drafter.first_logits(batch, states, root)(torch.tensor([0])), sampling)
    torch.testing.assert_close(proposal.q[:, 0], law)
