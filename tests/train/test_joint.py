"""Medusa-2: heads and the target's adapters trained together."""

import importlib.util
import json
import math

import pytest
import torch

from draftsmith.drafters.adapted import load_target
from draftsmith.drafters.checkpoint import load_drafter, read_metadata
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.tree import chain
from draftsmith.eval.decode import decode
from draftsmith.recipes.errors import UserError
from draftsmith.train import trainer
from draftsmith.train.checkpoint import load
from draftsmith.train.joint import Phase, head_share, phase_at
from draftsmith.train.objective import slot_weights
from draftsmith.train.processes import Processes
from draftsmith.train.setup import check_sharing, prepare
from draftsmith.train.trainer import take_step, train
from tests.train.children import in_children, job_of
from tests.train.counting import digest, read_log, recipe_for, weights

LOOSE = {"max_kl": None, "max_fall": None, "answers": 3, "max_new_tokens": 8}
ADAPTER = {"rank": 4, "lr": 2.5e-3, "checkpointing": False, "gate": LOOSE}


def joint_recipe(target, *, train=None, load_in=None, **adapter):
    """A recipe of Medusa-2."""
    recipe = recipe_for(target, train=train, adapter={**ADAPTER, **adapter})
    if load_in is None:
        return recipe
    return recipe.model_copy(
        update={"target": recipe.target.model_copy(update={"load_in": load_in})}
    )


def is_adapter(name):
    """Whether a trained weight is an adapter's."""
    return name.startswith("adapter.")


def test_phases_and_the_ramp(target):
    recipe = joint_recipe(target, heads_first=0.25, ramp="sine", head_share=0.01)
    assert phase_at(recipe, 4, 20) == Phase(False, 0, 5)
    assert phase_at(recipe, 5, 20) == phase_at(recipe, 20, 20) == Phase(True, 5, 20)
    shares = [head_share(recipe.adapter, Phase(True, 5, 20), step) for step in range(5, 21)]
    assert shares == pytest.approx([0.01 * math.sin(math.pi / 2 * i / 15) for i in range(16)])
    assert head_share(joint_recipe(target).adapter, Phase(True, 5, 20), 7) == 0.2
    assert phase_at(recipe_for(target), 7, 20) == Phase(False, 0, 20)
    assert phase_at(joint_recipe(target, heads_first=0.0), 0, 20).joint


def test_the_heads_first_phase_is_medusa_1_bit_for_bit(target, run, tmp_path):
    knobs = {"save_every": 6, "keep_checkpoints": 9, "epochs": 9}
    train(joint_recipe(target, train={"max_steps": 12, **knobs}, heads_first=0.5), run)
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "rows").symlink_to(run / "rows")
    train(recipe_for(target, train={"max_steps": 6, **knobs}), alone)
    both = load(run / "checkpoints" / "step-000006", step=6).trainables
    heads = {name: value for name, value in both.items() if not is_adapter(name)}
    medusa = weights(alone)
    assert heads.keys() == medusa.keys()
    assert all(torch.equal(value, medusa[name]) for name, value in heads.items())
    factors = [value for name, value in both.items() if "lora_B" in name]
    assert factors and not any(bool(value.any()) for value in factors)
    after = weights(run)
    assert all(bool(value.any()) for name, value in after.items() if "lora_B" in name)
    rates = [record["lr"] for record in read_log(run)]
    assert rates[:6] == rates[6:]  # the joint phase warms up anew


def test_adapters_and_heads_change_and_nothing_else(target, run):
    t = prepare(joint_recipe(target, heads_first=0.0), run)
    frozen = [value for value in t.target.model.parameters() if not value.requires_grad]
    assert len(frozen) == len(list(t.target.model.parameters())) - 2 * 8
    before, start = digest(frozen), {k: v.clone() for k, v in t.parallel.parameters.items()}
    for _ in range(3):
        take_step(t)
    assert digest(frozen) == before
    same = [
        name for name, value in t.parallel.parameters.items() if torch.equal(value, start[name])
    ]
    assert same == []
    rates = {group["lr"] for group in t.parallel.groups}
    assert len(rates) == 2 and max(rates) == pytest.approx(4 * min(rates))


def first_gradient(target, run, monkeypatch, **knobs):
    """The gradient of the first step, and the loss that is logged."""
    found = {}

    def keep(t):
        found.update({name: value.grad.clone() for name, value in t.parallel.parameters.items()})
        found["training"] = t

    monkeypatch.setattr(trainer, "apply_gradients", keep)
    t = prepare(joint_recipe(target, heads_first=0.0, dropout=0.0, **knobs), run)
    with torch.no_grad():
        for name, value in t.parallel.parameters.items():
            if is_adapter(name):
                value.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    take_step(t)
    return found


@pytest.mark.parametrize("language", ["text", "original"])
def test_the_loss_is_what_it_is_said_to_be(target, run, monkeypatch, language):
    knobs = {"train": {"rows_per_step": 4, "rows_per_micro_batch": 4}, "language": language}
    found = first_gradient(target, run, monkeypatch, head_share=0.3, **knobs)
    t = found.pop("training")
    t.step = 0
    batch = t.batch(t.next_rows())
    states = t.target.differentiable_states(batch).final
    said = t.target.logits(states).log_softmax(-1)
    with t.target.original() as original:
        before = original.logits(original.states(batch).final).log_softmax(-1)
    language_loss, heads, labels = 0.0, 0.0, 0
    lambdas = slot_weights(t.recipe.objective, 3)
    for row, at in batch.supervised.nonzero().tolist():
        if batch.positions[row, at] == 0:
            continue
        labels += 1
        token = batch.ids[row, at]
        if language == "text":
            language_loss = language_loss - said[row, at - 1, token]
        else:
            p, q = before[row, at - 1], said[row, at - 1]
            language_loss = language_loss + (p.exp() * (p - q)).sum()
        hidden = t.drafter.states(states[row, at - 1][None], token[None])[0]
        for slot in range(3):
            place = at + slot + 1
            if (
                place >= batch.ids.shape[1]
                or batch.documents[row, place] != batch.documents[row, at]
            ):
                break
            law = (hidden[slot] @ t.target.head_weight.T).log_softmax(-1)
            heads = heads - lambdas[slot] * law[batch.ids[row, place]]
    loss = (language_loss + 0.3 * heads) / labels
    names = list(t.parallel.parameters)
    wanted = torch.autograd.grad(loss, list(t.parallel.parameters.values()))
    for name, gradient in zip(names, wanted, strict=True):
        assert torch.allclose(found[name], gradient, atol=1e-5), name


def test_1x8_accumulation_equals_8x1(target, run, monkeypatch):
    def step(size):
        knobs = {"train": {"rows_per_step": 8, "rows_per_micro_batch": size}}
        found = first_gradient(target, run, monkeypatch, language="original", **knobs)
        found.pop("training")
        return found

    whole, parts = step(8), step(1)
    assert all(torch.allclose(whole[name], parts[name], atol=1e-6) for name in whole)


def test_self_distillation_starts_from_zero_and_asks_for_nothing(target, run):
    recipe = joint_recipe(
        target, language="original", heads_first=0.0, head_share=0.01, ramp="sine"
    )
    train(recipe, run)
    log = read_log(run)
    assert abs(log[0]["language_loss"]) < 1e-6 < max(one["language_loss"] for one in log)
    assert len(list(run.glob("features"))) == 0


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_killed_run_goes_on_exactly(target, run, tmp_path, checkpointing):
    other = tmp_path / "other"
    other.mkdir()
    (other / "rows").symlink_to(run / "rows")
    recipe = joint_recipe(
        target,
        train={"epochs": 9, "max_steps": 12, "save_every": 2, "log_every": 3},
        heads_first=0.4,
        dropout=0.3,
        checkpointing=checkpointing,
    )
    train(recipe, run)
    killed = ["draftsmith.train.trainer", "take_step", 10]
    jobs = [job_of(recipe, other, call=killed), job_of(recipe, other)]
    assert in_children(tmp_path, jobs) == [True, False]
    one, two = weights(run), weights(other)
    assert one.keys() == two.keys() and any(map(is_adapter, one))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert [r["loss"] for r in read_log(run)] == [r["loss"] for r in read_log(other)]


def test_two_processes_learn_what_one_does(target, run, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "rows").symlink_to(run / "rows")
    knobs = {"epochs": 9, "max_steps": 6, "rows_per_micro_batch": 1}
    recipe = joint_recipe(target, train=knobs, dropout=0.0, language="original")
    assert in_children(tmp_path, [job_of(recipe, run), job_of(recipe, other, processes=2)])
    one, two = weights(run), weights(other)
    assert one.keys() == two.keys() and any(bool(v.any()) for k, v in one.items() if "lora_B" in k)
    assert all(torch.allclose(one[name], two[name], atol=1e-4) for name in one)


def test_adapters_are_not_spread_over_processes():
    with pytest.raises(UserError, match="not trained by fsdp2 here; use --accelerate ddp"):
        check_sharing(Processes(None, "fsdp2"))
    check_sharing(Processes(None, "ddp"))


@pytest.mark.parametrize(
    "load_in",
    [
        None,
        pytest.param(
            "nf4",
            marks=pytest.mark.skipif(
                importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes"
            ),
        ),
    ],
)
def test_what_is_written_decodes_as_the_adapted_target_does(target, run, load_in):
    recipe = joint_recipe(target, load_in=load_in, merged=load_in is None)
    folder = train(recipe, run)
    meta = read_metadata(folder)
    assert meta["target"]["adapter"] != "none" and meta["change"]["kl"]["mean"] > 0
    (gate,) = read_log(run, "gate")
    assert gate["kl"] == meta["change"]["kl"] and gate["asked"] == 3 and gate["documents"] == 8
    card = (folder / "README.md").read_text()
    said = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert said["r"] == 4 and "lm_head" in said["target_modules"]
    assert "not the original target's" in card and "KL(original || adapted)" in card
    adapted = load_target(recipe.target, folder, meta)
    drafter = load_drafter(folder, adapted)
    prompt, limits = [17, 18, 19], {"sampling": Sampling(), "max_new_tokens": 20}
    plain = decode(adapted, None, prompt, **limits)
    drafted = decode(adapted, drafter, prompt, tree=chain(3), **limits)
    assert drafted.tokens == plain.tokens
    assert (folder / "merged").is_dir() == (load_in is None)
    if load_in is None:
        named = recipe.target.model_copy(update={"model": str(folder / "merged")})
        merged = type(adapted).load(named)
        assert torch.equal(merged.served_head, adapted.served_head)
        assert decode(merged, None, prompt, **limits).tokens == plain.tokens
    with pytest.raises(UserError, match="was trained with the adapter"):
        load_drafter(folder, type(adapted).load(recipe.target))


def test_a_target_that_changed_too_much_is_not_written(target, run):
    strict = {**LOOSE, "max_kl": 1e-9, "max_fall": 1e-9}
    with pytest.raises(UserError, match=r"KL .* is over adapter\.gate\.max_kl") as error:
        train(joint_recipe(target, gate=strict, heads_first=0.0), run)
    assert "\n" not in str(error.value)
    assert not (run / "drafter").exists() and (run / "checkpoints").exists()
    assert read_log(run, "gate")
