"""Names from the stages that params.yaml may use; tests/config/test_params.py compares both sides."""

from collections.abc import Iterable

# prepare.format: the keys of SHAPES in tasks/prepare/rows/row_shapes.py.
ROW_FORMATS = (
    *("openai", "votes", "pairs", "messages", "instruction", "transcript", "scored", "ranked", "alpaca", "tree"),
    "unpaired",
)
# prepare.columns
COLUMNS = (
    *("prompt", "chosen", "rejected", "instruction", "input", "system", "messages", "tools"),
    *(
        "completion",
        "completions",
        "scores",
        "output",
        "response1",
        "response2",
        "winner",
        "annotator1",
        "score1",
        "score2",
    ),
    *("score_chosen", "score_rejected", "label", "margin", "weight", "id"),
)
# prepare.values: what a value of the column says about the two answers, or about the answer of an unpaired row.
VALUES = {"winner": ("first", "second", "tie"), "label": ("desirable", "undesirable")}
# prepare.thresholds: the keys of REJECT_REASONS in tasks/source/reject_reasons.py.
REJECT_REASONS = (
    *("invalid_json", "invalid_utf8", "unreadable_value", "not_an_object", "missing_field", "not_text", "bad_number"),
    *("wrong_role", "turn_order", "no_shared_prompt", "empty_prompt", "empty_answer", "equal_answers", "absurd_length"),
    *("unsupported_part", "template_refused", "template_drops", "template_rewrites", "nothing_left"),
    *("contradiction", "prompt_in_eval", "id_not_unique"),
    *("duplicate", "near_duplicate", "over_length", "tie", "no_comparison", "small_margin", "excluded", "not_sampled"),
)
# evaluate.harness.tasks: names for several tasks of lm-evaluation-harness.
HARNESS_PRESETS = {
    "capability": ("arc_challenge", "hellaswag", "winogrande", "mmlu", "gsm8k"),
    "instructions": ("ifeval",),
    "safety": ("truthfulqa_mc2", "toxigen", "hendrycks_ethics", "crows_pairs_english"),
}
# promote.drift: the keys of DRIFT_METRICS in tasks/prepare/card/drift.py.
DRIFT_METRICS = ("fewer_pairs", "tokens", "sources", "left_out", "chosen_longer", "probe")


def check_names(key: str, names: Iterable[str], allowed: Iterable[str]) -> None:
    for name in names:
        if name not in allowed:
            raise ValueError(f"{key}: unknown name `{name}`. Known names: {', '.join(allowed)}")
