"""Inputs that have broken other tools, and which test holds the right answer to each."""

import re
from pathlib import Path

import pytest
import torch

from draftsmith.data.distill import distil
from draftsmith.data.rows import read_rows
from draftsmith.drafters.target import Target
from tests.data.asking import ENDS, make_config, make_prompts
from tests.tiny import tiny_model, tiny_tokenizer

HERE = Path(__file__).parent
CONVERSATIONS = {
    "template without generation markers": "templates: a_row_is_what_serving_renders_and",
    "nothing but a system message": "given: what_cannot_be_trained_is_counted",
    "nothing but a system message, to be asked": "prompts: rows_without_a_prompt_are_dropped",
    "an empty answer": "given: what_cannot_be_trained_is_counted",
    "fewer supervised tokens than wanted": "dataset: too_little_to_learn_from_is_dropped",
    "an answer of null, for it is a tool call": "templates: a_tool_call_is_trained_as_the",
    "a tool call in the history": "prompts: a_tool_call_without_text_keeps_its_call",
    "a question at the end, in training": "given: every_form_of_a_row_gives_the_same",
    "an answer at the end, in generation": "prompts: answers_at_the_end_are_removed",
    "an end of turn outside of markers": "templates: a_row_is_what_serving_renders_and",
    "thoughts in two turns": "templates: qwen3_thinks_as_it_was_served",
    "an empty thought in the last turn alone": "templates: qwen3_without_thinking_is_asked",
    "a prompt that fills the row": "dataset: a_prompt_that_fills_the_row_is_dropped",
    "a row that ends within the answer": "dataset: a_partial_answer_stays_supervised",
    "a template that writes BOS": "render: one_bos_and_the_template_writes_it",
    "two BOS of the server's making": "served: a_server_s_own_beginning_token_is_not_doubled",
    "two forms in a file, unknown roles": "prompts: forms_mix_in_one_file_and_unknown_roles",
    "a tokenizer without padding": "traps: a_tokenizer_without_padding_answers_in_batches",
    "padding that is the end token": "dataset: end_tokens_stay_supervised_whatever",
    "two documents in a row": "dataset: documents_of_a_row_do_not_see_one_another",
    "two documents in a row, labels": "dataset: no_label_crosses_a_border",
    "separators of another model": "templates: a_row_is_what_serving_renders_and",
}
GENERATION = {
    "rows written out of order, then killed": "distill: rows_are_found_by_key_in_whatever_order",
    "keys that are read otherwise than written": "distill: a_finished_run_asks_nothing_again",
    "another limit between two runs": "prompts: limit_draws_the_same_prompts_in_any_order",
    "another order of prompts": "distill: the_plan_does_not_depend_on_the_order",
    "a last line that is cut": "distill: a_file_cut_anywhere_is_completed",
    "an empty file": "prompts: broken_files_are_one_clear_line",
    "blank lines": "prompts: blank_lines_and_a_byte_order_mark_are_ignored",
    "an answer that runs into its limit": "distill: batched_greedy_answers_are_those_of_each",
    "what becomes of it": "dataset: cut_answers_follow_the_recipe",
    "a request that fails once": "served: trouble_that_passes_costs_no_row",
    "a request that always fails": "served: a_row_that_always_fails_is_dropped",
    "another temperature into the same folder": "distill: other_settings_are_refused_and_named",
    "one of several that is ten times slower": "served: a_slow_answer_holds_up_nobody",
    "several machines, none waits for another": "merge: shares_together_are_what_one_machine",
}


@pytest.mark.parametrize(("trap", "where"), (CONVERSATIONS | GENERATION).items())
def test_every_trap_has_its_test(trap: str, where: str) -> None:
    file, _, name = where.partition(": ")
    text = (HERE / f"test_{file}.py").read_text(encoding="utf-8")
    assert len(re.findall(rf"^def test_{name}", text, re.MULTILINE)) == 1, trap


def test_a_tokenizer_without_padding_answers_in_batches(tmp_path: Path) -> None:
    def answers(pad: str | None, folder: Path) -> list[list[int]]:
        target = Target.from_model(tiny_model(eos=ENDS), tiny_tokenizer(pad=pad), name="tiny")
        assert (target.tokenizer.pad_token_id is None) == (pad is None)
        distil(target, make_prompts(9), make_config(), folder, seed=0)
        return [row["response_ids"] for row in read_rows(folder)]

    torch.manual_seed(0)
    assert answers(None, tmp_path / "none") == answers("<|endoftext|>", tmp_path / "some")
