"""The three files: complete, self-contained, and safe whatever the texts hold."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from draftsmith.data.dataset import Document
from draftsmith.drafters.checkpoint import read_metadata, save_drafter, target_metadata
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.target import Target
from draftsmith.drafters.tree import chain
from draftsmith.eval import stage, subjects
from draftsmith.eval.arms import Arm
from draftsmith.eval.assemble import (
    Verdicts,
    arm_report,
    drafter_bytes,
    stretch_texts,
    stretches_of,
)
from draftsmith.eval.decode import Decoded, decode
from draftsmith.eval.markdown import render_markdown
from draftsmith.eval.page import render_html
from draftsmith.eval.prompts import evaluation_prompts
from draftsmith.eval.report import Piece, Report, Sample, write_report
from draftsmith.eval.rows import Round
from draftsmith.eval.stage import Job, evaluate_checkpoint, evaluate_job, stored_recipe
from draftsmith.eval.subjects import Subject
from draftsmith.eval.summary import Trial
from draftsmith.eval.tables import leaderboard
from draftsmith.eval.training_log import training_curve
from draftsmith.eval.tune import calibrate, to_json
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import DataConfig, EvalConfig, MedusaConfig, Recipe, TargetConfig
from tests.eval.test_bench import drafter_of
from tests.tiny import tiny_target

HOSTILE = (
    """</title></style><script>alert("1")</script> & <img src=x onerror='x'> | $x_1$ `a` \\ \x00"""
)

REQUIRED = {
    "name": str,
    "drafter": str | None,
    "rule": str,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "batch": int,
    "dtype": str,
    "device": str,
    "draft_tokens": int | None,
    "tree": list | None,
    "prompts": int,
    "tokens": int,
    "tokens_per_second": float,
    "speedup": float,
    "speedup_interval": list | None,
    "predicted_speedup": float | None,
    "tau_micro": float,
    "tau_macro": float,
    "alpha": float | None,
    "conditional_acceptance": list,
    "joint_acceptance": list,
    "lossless": bool | str,
    "milliseconds": dict,
}


class Page(HTMLParser):
    """Which tags a page has, and what text stands in it."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Job:
    """A tiny drafter, calibrated, with hostile prompts; saved as a run."""
    run = tmp_path_factory.mktemp("run")
    prompts = [HOSTILE, "Explain tides.", "Sort 3 1 2", "Who are you?"]
    lines = [
        json.dumps({"prompt": text, "category": f"<i>{number % 2}</i>"})
        for number, text in enumerate(prompts)
    ]
    (run / "prompts.jsonl").write_text("\n".join(lines))
    target = tiny_target()
    recipe = Recipe(
        name="tiny",
        target=TargetConfig(model="tiny", dtype="float32"),
        data=DataConfig(eval_prompts=str(run / "prompts.jsonl")),
        drafter=MedusaConfig(heads=3),
        eval=EvalConfig(max_new_tokens=12, temperature=0.8, top_k=20),
    )
    drafter = drafter_of(target)
    calibration = calibrate(recipe, target, drafter, documents(target))
    metadata = {
        "target": target_metadata(target),
        "recipe": recipe.model_dump(mode="json"),
        "calibration": to_json(calibration),
    }
    save_drafter(drafter, run / "drafter", metadata)
    (run / "log.jsonl").write_text('{"kind": "train", "step": 1, "loss": 2.5}\n{"step": 2, "lo')
    subject = Subject("medusa", drafter, calibration, run / "drafter", keep_tree=True)
    return Job(recipe, target, [subject], run / "report", run / "log.jsonl")


def folder_of(job: Job) -> Path:
    """The drafter's."""
    return job.subjects[0].folder


def documents(target: Target) -> list[Document]:
    """Greedy answers for the calibration."""
    found = []
    for number in range(4):
        prompt = [40 + number, 50, 60]
        answer = decode(target, None, prompt, sampling=Sampling(), max_new_tokens=20)
        supervised = (False,) * 3 + (True,) * len(answer.tokens)
        ids = (*prompt, *answer.tokens)
        found.append(Document(str(number), "c", ids, supervised, True, answer.finish))
    return found


@pytest.fixture(scope="module")
def report(job) -> Report:
    """The real stage's report."""
    kept: list[Report] = []
    original = stage.write_report
    stage.write_report = lambda found, folder: kept.append(found) or original(found, folder)
    try:
        evaluate_job(job)
    finally:
        stage.write_report = original
    return kept[0]


@pytest.fixture(scope="module")
def written(job, report) -> dict:
    """report.json."""
    return json.loads((job.report / "report.json").read_text())


def test_every_arm_has_the_required_fields(written):
    assert len(written["arms"]) >= 5
    for arm in written["arms"]:
        for name, kind in REQUIRED.items():
            assert isinstance(arm[name], kind), name
        assert set(arm["milliseconds"]) == {"draft", "verify", "overhead"}
        assert (arm["drafter"] is None) == (arm["draft_tokens"] is None) == (arm["alpha"] is None)
        assert len(arm["conditional_acceptance"]) == (arm["draft_tokens"] or 0)


def test_figures_agree_with_one_another(written):
    by_name = {arm["name"]: arm for arm in written["arms"]}
    assert by_name["plain"]["speedup"] == 1.0
    for arm in written["arms"]:
        assert arm["lossless"] is True
        plain = by_name[arm["baseline"]]
        assert plain["temperature"] == arm["temperature"]
        quotient = arm["tokens_per_second"] / plain["tokens_per_second"]
        assert arm["speedup"] == pytest.approx(quotient)
        low, high = arm["speedup_interval"]
        assert low <= arm["speedup"] <= high
        if arm["drafter"] and arm["temperature"] == 0:
            assert arm["tau_walk"] == arm["tau_micro"]  # fp32: the walk is exact


def test_the_chosen_tree_is_kept_with_the_drafter(job, report, written):
    paths = read_metadata(folder_of(job))["tree"]
    assert written["trees"]["medusa"]["chosen"] == len(paths)
    best = max(
        t / ms
        for t, ms in zip(report.trees["medusa"].tau, report.trees["medusa"].round_ms, strict=True)
    )
    chosen = report.trees["medusa"].nodes.index(len(paths))
    assert report.trees["medusa"].tau[chosen] / report.trees["medusa"].round_ms[chosen] == best


def test_every_definition_and_condition_travels(job, report, written):
    text = (job.report / "report.md").read_text()
    page = Page()
    page.feed((job.report / "report.html").read_text())
    html = " ".join(page.text)
    for name, sentence in written["definitions"].items():
        assert sentence in html, name
        assert sentence.split("(")[0].replace("_", "\\_")[:40] in text, name
    assert "as published" in html
    assert "as published" in text


def test_page_is_self_contained_and_escapes_hostile_text(job, report):
    text = (job.report / "report.html").read_text()
    page = Page()
    page.feed(text)
    tags = [tag for tag, _ in page.tags]
    assert not {"script", "img", "iframe", "link", "i", "object"} & set(tags)
    for _, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "xlink:href"):
            value = attributes.get(name)
            assert value is None or value.startswith("#"), value
    assert not re.search(r"url\((?!#)|@import", text)
    assert 'alert("1")' in "".join(page.text)  # there, as text
    assert "<i>0</i>" in "".join(page.text)


def test_hostile_names_are_escaped_everywhere(report):
    arms = [replace(report.arms[2], name=HOSTILE, check=HOSTILE)]
    bad = replace(
        report,
        name=HOSTILE,
        command=HOSTILE,
        notes=[HOSTILE],
        arms=arms,
        target={**report.target, "model": HOSTILE},
        conditions={**report.conditions, "machine": HOSTILE},
        samples=[Sample(HOSTILE, HOSTILE, HOSTILE, [Piece(HOSTILE, True, 1)])],
    )
    text = render_html(bad, {})
    assert "<script" not in text
    assert "<img" not in text
    markdown = render_markdown(bad, [])
    assert "<script" not in markdown
    for line in markdown.splitlines():
        if line.startswith("| ") and "alert" in line:
            cells = re.split(r"(?<!\\)\|", line)
            assert len(cells) in {len(re.split(r"(?<!\\)\|", other)) for other in tables(markdown)}


def tables(markdown: str) -> list[str]:
    """Rule lines of the tables."""
    return [line for line in markdown.splitlines() if line.startswith("| ---")]


def test_figures_are_drawn_for_hostile_names(tmp_path, report):
    arms = [replace(arm, name=f"{HOSTILE} {arm.name}".replace("\x00", "")) for arm in report.arms]
    path = write_report(replace(report, arms=arms), tmp_path)
    assert path == tmp_path / "report.html"
    assert {png.stem for png in (tmp_path / "figures").glob("*.png")} >= {
        "speedup",
        "acceptance_by_slot",
        "tau_by_category",
        "round_breakdown",
    }


def test_training_curve_skips_cut_lines(job, tmp_path):
    assert training_curve(job.log) == [{"step": 1.0, "loss": 2.5}]
    assert training_curve(tmp_path / "none.jsonl") == []


def test_training_curve_skips_what_no_report_can_hold(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(
        b"\xff\xfe\n" + b"[" * 100_000 + b'\n{"step": 1, "loss": NaN, "lr": 2, "much": 1e999}\n'
    )
    assert training_curve(path) == [{"step": 1.0, "lr": 2.0}]


@pytest.mark.parametrize(
    "override",
    [
        *("optim.lr=1.0", "drafter.heads=2", "drafter={kind: medusa}", "data.held_out=3"),
        *("data.distil.temperature=1.0", "data={eval_prompts: starter}", "train.epochs=1"),
    ],
)
def test_what_a_drafter_was_trained_with_does_not_change(job, override):
    meta = read_metadata(folder_of(job))
    key = override.partition("=")[0]
    with pytest.raises(UserError, match=f"command line: {key}: the drafter in .* is trained"):
        stored_recipe(meta, folder_of(job), [override])


def test_what_a_drafter_is_measured_with_may_change(job):
    overrides = ["eval.prompts=1", "eval={repeats: 2}", "target.model=other", "seed=3", "name=b"]
    overrides += ["data.eval_prompts=starter", "data.eval_split=x", "data.max_prompt_tokens=9"]
    overrides += ["data.thinking=true", "runs=there", "train.rows_per_micro_batch=1"]
    recipe = stored_recipe(read_metadata(folder_of(job)), folder_of(job), overrides)
    assert (recipe.eval.repeats, recipe.target.model, recipe.seed) == (2, "other", 3)


@pytest.mark.parametrize(
    ("model", "content"), [("./target", "0123"), ("target", "0123"), ("../target", "none")]
)
def test_a_target_that_a_moved_drafter_does_not_find_is_asked_for(
    job, tmp_path, monkeypatch, model, content
):
    monkeypatch.chdir(tmp_path)
    meta = read_metadata(folder_of(job))
    meta["target"] = {**meta["target"], "model": model, "content": content}
    meta["recipe"]["target"]["model"] = model
    with pytest.raises(UserError, match=r"draftsmith\.json says .* target\.model=PATH"):
        stored_recipe(meta, folder_of(job))
    (tmp_path / "here").mkdir()
    stored_recipe(meta, folder_of(job), ["target.model=./here"])
    stored_recipe(meta, folder_of(job), ["target.model=some/model"])


def test_a_folder_alone_is_enough(job, report, monkeypatch, capsys):
    monkeypatch.setattr(Target, "load", staticmethod(lambda config: job.target))
    few = job.recipe.model_copy(
        update={"eval": EvalConfig(prompts=2, max_new_tokens=6, tree_nodes=2)}
    )
    shipped = (folder_of(job) / "draftsmith.json").read_bytes()
    path = evaluate_checkpoint(folder_of(job), few, folder_of(job) / "report")
    assert path == folder_of(job) / "report" / "report.html"
    assert path.is_file()
    printed = capsys.readouterr().out
    assert "medusa tree" in printed or "medusa chain" in printed
    assert str(path) in printed
    assert (folder_of(job) / "draftsmith.json").read_bytes() == shipped


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_loaded(job, monkeypatch):
    monkeypatch.setattr(Target, "load", lambda config: pytest.fail("loaded"))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(UserError, match=r"no permission to write the report; .* runs=FOLDER"):
        evaluate_checkpoint(folder_of(job), job.recipe, folder_of(job) / "report")


@pytest.mark.parametrize(("nodes", "kept"), [("auto", True), (2, False)])
def test_only_a_searched_tree_is_shipped(job, monkeypatch, tmp_path, nodes, kept):
    run = folder_of(job).parent
    monkeypatch.setattr(Target, "load", staticmethod(lambda config: job.target))
    monkeypatch.setattr(subjects, "held_out_documents", lambda recipe, run: documents(job.target))
    monkeypatch.setattr(stage, "evaluate_job", lambda job: job)
    recipe = job.recipe.model_copy(update={"eval": EvalConfig(tree_nodes=nodes)})
    assert stage.evaluate(recipe, run).subjects[0].keep_tree is kept


def test_answers_that_end_with_prefill_leave_dashes(job, report, tmp_path):
    """Every figure that needs a timed token is none; the three files are written all the same."""
    ended = [Trial(n, "c", Decoded([7], [], 0.1, 0.0, "stop")) for n in range(3)]
    sampling = Sampling()
    arms = [
        Arm("plain", "plain", sampling),
        Arm(
            "chain",
            "plain",
            sampling,
            kind="medusa",
            drafter=job.subjects[0].drafter,
            tree=chain(3),
        ),
    ]
    verdicts = Verdicts(True, "fine", None, None)
    made = [arm_report(job.target, a, ended, ended, verdicts, None) for a in arms]
    for arm in made:
        assert arm.speedup is arm.speedup_interval is arm.tokens_per_second is None
        assert arm.speedup_with_prefill == 1.0
    empty = replace(report, arms=made)
    assert leaderboard(empty).rows[1][2:5] == ["-", "-", "-"]
    assert "NaN" not in write_report(empty, tmp_path).with_suffix(".json").read_text()
    assert "nan" not in " ".join(cell for row in leaderboard(empty).rows for cell in row)


def test_a_folder_without_calibration_says_what_to_do(job, tmp_path):
    metadata = {"target": target_metadata(job.target), "recipe": {}}
    save_drafter(job.subjects[0].drafter, tmp_path / "bare", metadata)
    with pytest.raises(UserError, match="calibration"):
        evaluate_checkpoint(tmp_path / "bare", job.recipe, tmp_path / "report")


def test_prompts_are_spread_over_categories_and_counted(job):
    few = job.recipe.model_copy(update={"eval": EvalConfig(prompts=2)})
    prompts, _ = evaluation_prompts(job.target, few)
    assert [prompt.category for prompt in prompts] == ["<i>0</i>", "<i>1</i>"]
    short = job.recipe.model_copy(
        update={"data": job.recipe.data.model_copy(update={"max_prompt_tokens": 1})}
    )
    with pytest.raises(UserError, match="4 longer than 1 tokens"):
        evaluation_prompts(job.target, short)


def test_drafter_bytes_leave_out_what_the_target_has(job):
    size, heads = job.target.hidden_size, 3
    held = drafter_bytes(job.subjects[0].drafter, job.target)
    assert held == {"weights": 4 * heads * (size * size + size), "cache_per_token": 0}
    assert drafter_bytes(None, job.target)["weights"] == 0


def test_stretches_add_up_to_the_answer():
    rounds = [Round(3, 2, 3, 0, 0, 0), Round(3, 0, 1, 0, 0, 0), Round(3, 3, 2, 0, 0, 0)]
    decoded = Decoded(list(range(7)), rounds, 0.0, 0.0, "length")
    stretches = stretches_of(decoded)
    assert [token for tokens, _, _ in stretches for token in tokens] == list(range(7))
    drafted = [token for tokens, mine, _ in stretches for token in tokens if mine]
    assert drafted == [1, 2, 5, 6]


def test_a_character_that_spans_stretches_is_written_once(job):
    tokenizer = job.target.tokenizer
    ids = tokenizer("ab é 漢 c", add_special_tokens=False)["input_ids"]
    for size in (1, 2, 3):
        cut = [ids[at : at + size] for at in range(0, len(ids), size)]
        assert "".join(stretch_texts(tokenizer, cut)) == "ab é 漢 c"


def test_threads_are_reported(written):
    assert {arm["threads"] for arm in written["arms"]} == {torch.get_num_threads()}
