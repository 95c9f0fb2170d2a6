"""What `dpo compare` prints."""

from tasks.compare.compare import comparison_table

ROW = {"ours": 0.75, "theirs": 0.5, "difference": 0.25, "low": 0.125, "high": 0.375, "count": 9, "prompts": 9}


def test_long_names_are_whole_and_stand_above_their_values() -> None:
    names = "sweep-1a2b3c-1-beta-0.05", "sweep-1a2b3c-2-beta-0.1"
    head, line = comparison_table({"win_rate": ROW}, *names).splitlines()
    assert head.split()[:2] == list(names)
    assert [head.index(name) + len(name) for name in names] == [
        line.index(f" {value} ") + 7 for value in ("0.7500", "0.5000")
    ]
    assert line.endswith("+0.2500 (+0.1250 to +0.3750), n = 9")


def test_short_names_have_the_width_of_a_number() -> None:
    head, line = comparison_table({"win_rate": ROW}, "this model", "champion").splitlines()
    assert head == f"{'':8} {'this model':>14} {'champion':>14}  difference (95% interval)"
    assert line.startswith(f"win_rate {'0.7500':>14} {'0.5000':>14}  ")
