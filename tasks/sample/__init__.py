"""The stage `sample`: on-policy pairs, from answers of the start model and a judge."""
