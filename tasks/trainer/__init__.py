"""The stages that train: the driver, its workers, continued trainings, and estimates of memory and time."""
