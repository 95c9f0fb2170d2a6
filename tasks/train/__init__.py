"""The stages `train` and `sft`: the driver, its workers, and continued trainings."""
