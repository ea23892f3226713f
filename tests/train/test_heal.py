"""Healing, end to end: train a checkpoint's MTP layer, put it back, load it in transformers."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from draftsmith.drafters.checkpoint import load_drafter
from draftsmith.drafters.coins import SeededCoins
from draftsmith.drafters.proposal import Plan
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.target import RECURRENT, Target
from draftsmith.drafters.tree import chain
from draftsmith.train import cli
from draftsmith.train.trainer import train
from tests.drafters.test_mtp import begin, final_of
from tests.drafters.test_mtp_files import CASES, KINDS, PATTERNS, checkpoint
from tests.tiny import tiny_tokenizer
from tests.train.counting import counting_row, recipe_for, save_rows

TEXT = list(range(16, 24))


def heal(folder, run, **drafter):
    """Three steps from the checkpoint's own layer."""
    tiny_tokenizer().save_pretrained(folder)
    knobs = {"kind": "mtp", "draft_tokens": 2, "start": "checkpoint", **drafter}
    few = {"max_steps": 3, "rows_per_step": 2, "rows_per_micro_batch": 2}
    recipe = recipe_for(folder, train=few, optim={"lr": 1e-3, "warmup_steps": 0}, drafter=knobs)
    save_rows(run, [counting_row(number) for number in range(24)], folder)
    manifest = json.loads((run / "rows" / "manifest.json").read_text())
    manifest["target"] = Target.load(recipe.target).fingerprint
    (run / "rows" / "manifest.json").write_text(json.dumps(manifest))
    train(recipe, run)


def changed(before, after):
    """Names of tensors that differ; all files hold the same ones."""
    found = set()
    for path in before.glob("*.safetensors"):
        old, new = load_file(path), load_file(after / path.name)
        assert old.keys() == new.keys()
        found |= {name for name, value in old.items() if not torch.equal(value, new[name])}
    return found


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_only_the_layer_changes_and_transformers_drafts_with_it(
    tmp_path, monkeypatch, family, layout
):
    source, run, out = tmp_path / "x", tmp_path / "run", tmp_path / "healed"
    own = {"order": "hidden_first"} if layout == "mtp_layers" else {}
    checkpoint(source, family, layout, sharded=True)
    heal(source, run, **own)
    assert cli.main(["stitch", str(run), str(out), "--link"]) == 0
    moved = changed(source, out)
    layer = {"mtp": "mtp.", "next layer": "model.layers.4.", "mtp_layers": "model.mtp_layers.0."}
    assert moved and all(name.startswith(layer[layout]) for name in moved)
    assert len(moved) > 8
    for path in source.glob("*.json"):
        assert path.read_bytes() == (out / path.name).read_bytes()
    linked = [path.name for path in out.iterdir() if path.is_symlink()]
    assert "config.json" in linked and len(linked) < len(list(out.iterdir()))
    if layout in PATTERNS:  # transformers has no MiMo
        compare_drafts(monkeypatch, out, run, family, layout)


def compare_drafts(monkeypatch, out, run, family, layout):
    """transformers drafts what our drafter does."""
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    target = Target.from_model(model, tiny_tokenizer(), name="x")
    drafter = load_drafter(run / "drafter", target)
    model.config.num_mtp_layers = 1
    model.config.mtp_layer_types = [KINDS.get(family, "full_attention")]
    if hasattr(model.config, "mlp_layer_types"):
        model.config.mtp_mlp_layer_types = ["sparse"]
    model._keys_to_ignore_on_load_unexpected = [PATTERNS[layout]]
    # transformers does not assist models with recurrent states: its layer is called directly.
    drafts = called if target.layer_types & RECURRENT else generated
    found = drafts(monkeypatch, target)
    assert len(found) > 2
    for text, draft in found:
        plan = Plan(chain(1), Sampling(), SeededCoins([0]))
        state = begin(target, drafter, text[:-1])
        assert drafter.propose(state, torch.tensor(text[-1:]), plan).tokens.tolist() == [[draft]]


def generated(monkeypatch, target):
    """Texts and the drafts behind them while `use_mtp=True` decodes, greedily."""
    kept, forward = [], MtpModel.forward

    def spy(self, *args, full_input_ids, **kwargs):
        found = forward(self, *args, full_input_ids=full_input_ids, **kwargs)
        kept.append((full_input_ids[0].tolist(), int(found[0][0, 0])))
        return found

    monkeypatch.setattr(MtpModel, "forward", spy)
    ids = torch.tensor([TEXT])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    plain = target.model.generate(ids, **options)
    assert torch.equal(target.model.generate(ids, use_mtp=True, **options), plain)
    return kept


def called(monkeypatch, target):
    """Texts and the drafts behind them, by one pass over the whole text."""
    reference, found = MtpModel.from_pretrained(target.model).eval(), []
    for length in range(4, 8):
        ids, at = torch.tensor([TEXT[1:length]]), torch.arange(1, length)[None]
        with torch.no_grad():
            final = final_of(target, TEXT[: length - 1])[None]
            tokens, _, _ = reference(ids, final, None, at, None)
        found.append((TEXT[:length], int(tokens[0, 0])))
    return found
