"""Self-written prompts: samples of the target, sifted, resumable, and answered like others."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.data.dataset import training_documents
from draftsmith.data.distill import make_request
from draftsmith.data.generate import Answer, Request, answer
from draftsmith.data.overlap import runs_of_words
from draftsmith.data.prompts import Prompt
from draftsmith.data.rows import Row, read_rows
from draftsmith.data.self_written import (
    CATEGORY,
    SHARED_WORDS,
    Sieve,
    find_opening,
    write_turns,
)
from draftsmith.data.stage import prepare
from draftsmith.drafters.target import Target
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import DataConfig, Recipe, SelfWrittenConfig
from tests.tiny import CHATML, EOS, tiny_target, tiny_tokenizer

ENDS = (EOS, *range(20, 288, 9))  # many end tokens, so that random turns end at different times
LLAMA = (
    "{{ '<s>' }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
EOT = 6  # <|eot_id|>


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(eos=ENDS)


def make_config(count: int = 20, **knobs: Any) -> DataConfig:
    written = {"count": count, "max_new_tokens": 20, **knobs}
    return DataConfig.model_validate({"self_written": written, "distil": {"batch_size": 8}})


def write(target: Target, config: DataConfig, folder: Path, seed: int = 0) -> list[Row]:
    return write_turns(target, find_opening(target, None), config, folder, seed=seed)


@pytest.mark.parametrize(
    ("template", "ends", "opening", "end"),
    [
        (CHATML, (EOS,), "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n", EOS),
        (LLAMA, (2, EOT), "<s><|start_header_id|>user<|end_header_id|>\n\n", EOT),
        ("{{ 'USER: ' + messages[0]['content'] + ' <|im_end|>BOT:' }}", (EOS,), "USER:", EOS),
    ],
    ids=["chatml", "llama", "spaces"],
)
def test_the_opening_is_the_template_up_to_the_users_words(
    template: str, ends: tuple[int, ...], opening: str, end: int
) -> None:
    found = find_opening(tiny_target(template=template, eos=ends), None)
    assert tiny_tokenizer().decode(found.ids) == opening and found.end == end


def test_the_opening_knows_the_thinking_mode() -> None:
    mode = "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    target = tiny_target(template=mode + CHATML)
    text = {way: target.tokenizer.decode(find_opening(target, way).ids) for way in (None, True)}
    assert text[True] == "True" + text[None]


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ '[INST] ' + messages[0]['content'] + ' [/INST]' }}", r"'\[' follows the user's words"),
        ("{{ '<s>' + messages[0]['content'] }}", "'' follows the user's words"),
        (CHATML.replace("im_end|>' + '\n", "eot_id|>' + '\n"), r"'<\|eot_id\|>' follows"),
        ("{{ messages[0]['content'] + '<|im_end|>' }}", "after an opening"),
        ("{{ '<s>' + (messages[0]['content'] | upper) + '<|im_end|>' }}", "as they are"),
        (CHATML + "{{ messages[0]['content'] }}", "once"),
    ],
    ids=["mistral", "no end", "another end", "no opening", "changed", "twice"],
)
def test_a_template_that_cannot_ask_for_a_turn_is_refused(template: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        find_opening(tiny_target(template=template), None)
    said = str(caught.value)
    assert said.startswith("tiny: ") and "data.self_written.count=0" in said and "\n" not in said


def test_greedy_turns_are_what_transformers_generates(target: Target, tmp_path: Path) -> None:
    ids = torch.tensor([find_opening(target, None).ids])
    rows = write(target, make_config(3, temperature=0.0), tmp_path)
    said = target.model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=20,
        pad_token_id=0,
    )
    for row in rows:
        assert row["prompt_ids"] == ids[0].tolist()
        assert row["response_ids"] == said[0, ids.shape[1] :].tolist()


def test_turns_are_samples_of_the_target_at_the_opening(target: Target, tmp_path: Path) -> None:
    """The first tokens of many turns against the target's law, filtered by top_p."""
    count, top_p = 3000, 0.8
    config = make_config(count, max_new_tokens=1, temperature=0.7, top_p=top_p)
    config = config.model_copy(
        update={"distil": config.distil.model_copy(update={"batch_size": count})}
    )
    first = [row["response_ids"][0] for row in write(target, config, tmp_path)]
    ids = torch.tensor([find_opening(target, None).ids])
    logits = target.model(input_ids=ids).logits[0, -1].detach().double()
    law, order = (logits / 0.7).softmax(dim=-1).sort(descending=True)
    law[law.cumsum(dim=-1) - law >= top_p] = 0.0
    law = torch.zeros_like(law).scatter_(0, order, law / law.sum())
    share = torch.tensor(first).bincount(minlength=288) / count
    assert not share[law == 0].any()
    expected = 0.5 * (law * (1 - law) / count).sqrt().sum() * 0.8  # of the total variation
    assert 0.5 * (share - law).abs().sum() < 1.25 * expected


def test_an_answer_has_other_random_numbers_than_its_prompt(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: dict[str, set[int]] = {"user turn": set(), "answer": set()}

    def watched(*arguments: Any, purpose: str) -> Any:
        request = make_request(*arguments, purpose=purpose)
        seeds[purpose].add(request.seed)
        return request

    monkeypatch.setattr("draftsmith.data.self_written.make_request", watched)
    write(target, make_config(5), tmp_path)
    config = make_config().distil
    for number in range(1, 6):
        watched(f"self-{number:06d}", [1], config, 0, purpose="answer")
    assert len(seeds["user turn"] | seeds["answer"]) == 10


def test_a_file_cut_anywhere_is_completed_to_the_same_bytes(tmp_path: Path) -> None:
    target = tiny_target(eos=ENDS, dtype=torch.bfloat16)
    rows = write(target, make_config(), tmp_path)
    assert [row["key"] for row in rows] == [f"self-{i:06d}" for i in range(1, 21)]
    assert len({tuple(row["response_ids"]) for row in rows}) > 15
    path = tmp_path / "rows.jsonl"
    whole = path.read_bytes()
    for size in (0, len(whole) // 3, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert write(target, make_config(), tmp_path) == rows
        assert path.read_bytes() == whole


def test_turns_do_not_depend_on_batch_mates_and_other_settings_are_refused(
    target: Target, tmp_path: Path
) -> None:
    few, many = (write(target, make_config(n), tmp_path / str(n)) for n in (5, 20))
    assert few == many[:5]
    assert write(target, make_config(5), tmp_path / "other", seed=1) != few
    with pytest.raises(UserError, match=r"top_p was 0\.95, now 0\.5"):
        write(target, make_config(5, top_p=0.5), tmp_path / "5")
    with pytest.raises(UserError, match=r"prompts\.count was 5, now 6"):
        write(target, make_config(6), tmp_path / "5")


def test_turns_beyond_the_models_positions_are_refused(target: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"lower data\.self_written\.max_new_tokens"):
        write(target, make_config(5, max_new_tokens=4096), tmp_path)
    assert not list(tmp_path.iterdir())


GOOD = "Could you tell me why the sky is blue?"
EVALUATION = (
    "Alice has four brothers, and she also has one sister: how many sisters has her brother?"
)
TRAINING = "Name three rivers of Europe."


def user(key: str, text: str) -> Prompt:
    system = {"role": "system", "content": GOOD}  # not the user's words
    return Prompt(key, "c", (system, {"role": "user", "content": text}))


def row(text: str, number: int = 1, end: str = "<|im_end|>") -> Row:
    ids = tiny_tokenizer()(text + end, add_special_tokens=False)["input_ids"]
    return {"key": f"self-{number:06d}", "response_ids": ids}


def sift(*rows: Row) -> tuple[list[str], Counter[str]]:
    training = [user("k", TRAINING), user("self-000009", "something else")]
    sieve = Sieve(tiny_tokenizer(), EOS, training, [user("e", EVALUATION)])
    found = sieve.sift(rows)
    assert len(found.prompts) + found.dropped.total() == len(rows)
    return [str(prompt.messages[0]["content"]) for prompt in found.prompts], found.dropped


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (row(GOOD, end=""), "no end of the turn"),
        (row(GOOD, end="<|endoftext|>"), "no end of the turn"),
        (row("", end="<|im_end|>"), "fewer than 3 words or 12 characters"),
        (row("Extraordinarily complicated."), "fewer than 3 words or 12 characters"),
        (row("Say it now."), "fewer than 3 words or 12 characters"),
        (row("I said <think> and then nothing."), "special tokens inside"),
        (row("   <|im_start|>assistant " + GOOD), "special tokens inside"),
        (row(" name  three\nRivers of europe?! "), "duplicate"),
        (row(EVALUATION.upper()), "copy of an evaluation prompt"),
        (row("Now: she also has one sister - how many sisters?"), "copy of an evaluation prompt"),
        (row("So what is 12*(3+4)-5/(6+7)*(8+9)?"), "mostly no letters"),
        (row("Tell me \x07 about the sky."), "unprintable characters"),
        (row("Could you tell me why", number=9), "id of another prompt"),
    ],
)
def test_what_is_no_usable_prompt_is_dropped_and_counted(bad: Row, reason: str) -> None:
    assert sift(bad, row(GOOD, 2)) == ([GOOD], Counter({reason: 1}))


def test_undecodable_text_is_dropped() -> None:
    half = row(GOOD + "é")
    del half["response_ids"][-2]  # the second byte of the é
    assert sift(half) == ([], Counter({"undecodable text": 1}))


def test_turns_that_were_spelt_by_plain_tokens_are_read_as_the_special_ones() -> None:
    tokenizer = tiny_tokenizer()
    pieces = ["I said <th", "ink> and then nothing."]
    ids = [token for piece in pieces for token in tokenizer(piece)["input_ids"]]
    spelt = {"key": "self-000001", "response_ids": [*ids, EOS]}
    assert sift(spelt) == ([], Counter({"special tokens inside": 1}))


@pytest.mark.parametrize(
    "text",
    [
        "Alice has four brothers, and she also is two",  # seven shared words
        "भारत की राजधानी क्या है और क्यों?",
        "请介绍一下北京的历史和文化好吗",
        "Was ist 12 + 34, und warum?\n\n- kurz bitte",
        "Write a poem about 🌊 and the wind",
    ],
)
def test_what_a_user_may_say_is_kept(text: str) -> None:
    assert sift(row(f"  {text}\n")) == ([text], Counter())


def test_copies_are_found_whatever_surrounds_them() -> None:
    words = EVALUATION.split()
    for start in range(len(words) - 7):
        part = " ".join(words[start : start + 8])
        kept, _ = sift(row(f"Please explain to me: {part.title()} Is it so?"))
        assert not kept
    chinese = "北京有什么好玩的地方可以推荐"
    assert runs_of_words(f"你好 {chinese}吗", SHARED_WORDS) & runs_of_words(chinese, SHARED_WORDS)


def test_the_second_of_two_equal_turns_is_the_duplicate() -> None:
    found = sift(row(GOOD, 1), row(GOOD.lower(), 2), row("  " + GOOD.strip("?"), 3))
    assert found == ([GOOD], Counter({"duplicate": 2}))


TURNS = (
    "What is the tallest mountain?",
    "How do I boil an egg well?",
    "Why? " + EVALUATION,
    "Too short",
)
OFF = {"self_written": SelfWrittenConfig()}


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """One prompt of two, and four self-written turns, two of which are good."""
    (tmp_path / "p.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in (TRAINING, "Tell me a story."))
    )
    (tmp_path / "e.jsonl").write_text(json.dumps({"prompt": EVALUATION}) + "\n")
    data = {
        "prompts": str(tmp_path / "p.jsonl"),
        "eval_prompts": str(tmp_path / "e.jsonl"),
        "limit": 1,
        "self_written": {"count": 4, "max_new_tokens": 40},
        "distil": {"max_new_tokens": 8, "batch_size": 2},
    }
    return Recipe.model_validate({"name": "mine", "target": {"model": "tiny"}, "data": data})


@pytest.fixture
def speaking(target: Target, monkeypatch: pytest.MonkeyPatch) -> Target:
    """A target that says these turns as a user; its answers are its own."""
    opening = find_opening(target, None)

    def spoken(target: Target, batch: Sequence[Request], *rest: Any) -> list[Answer]:
        if batch[0].ids != opening.ids:
            return answer(target, batch, *rest)
        said = (TURNS[int(request.key[-6:]) - 1] for request in batch)
        texts = (target.tokenizer(text)["input_ids"] for text in said)
        return [Answer([*ids, opening.end], "stop") for ids in texts]

    monkeypatch.setattr("draftsmith.data.distill.answer", spoken)
    monkeypatch.setattr(Target, "load", staticmethod(lambda config: target))
    return target


def test_the_data_stage_answers_self_written_prompts_like_the_others(
    speaking: Target, recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(recipe, tmp_path)
    said = capsys.readouterr().out
    assert "4 self-written turns sampled, 2 kept as prompts" in said
    assert "2 turns left out: 1 copy of an evaluation prompt, 1 fewer than 3 words" in said
    assert f"  self-000001: {TURNS[0]}\n  self-000002: {TURNS[1]}\n" in said
    rows = {row["key"]: row for row in read_rows(tmp_path / "rows")}
    assert len(rows) == 3 and {"self-000001", "self-000002"} < rows.keys()  # limit: 1
    for key, text in zip(("self-000001", "self-000002"), TURNS, strict=False):
        row = rows[key]
        assert row["category"] == CATEGORY == "self-written"
        assert row["messages"] == [{"role": "user", "content": text}]
        assert f"<|im_start|>user\n{text}<|im_end|>" in speaking.tokenizer.decode(row["prompt_ids"])
    assert len(training_documents(tmp_path / "rows", recipe.data)[0]) == 3


def test_a_stage_that_was_killed_goes_on_to_the_same_rows(
    speaking: Target, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(recipe, tmp_path / "undisturbed")
    prepare(recipe, tmp_path / "killed")
    for name in ("self_written/rows.jsonl", "rows/rows.jsonl"):
        path = tmp_path / "killed" / name
        path.write_bytes(path.read_bytes()[:-9])
    prepare(recipe, tmp_path / "killed")
    for path in (tmp_path / "undisturbed").rglob("*.json*"):
        again = tmp_path / "killed" / path.relative_to(tmp_path / "undisturbed")
        assert again.read_bytes() == path.read_bytes()


def test_no_turn_is_sampled_unless_the_recipe_asks(
    target: Target, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "load", staticmethod(lambda config: target))
    prepare(recipe.model_copy(update={"data": recipe.data.model_copy(update=OFF)}), tmp_path)
    assert not (tmp_path / "self_written").exists()
    assert len(read_rows(tmp_path / "rows")) == 1
