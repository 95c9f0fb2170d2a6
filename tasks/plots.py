"""Figures of a run, by matplotlib."""

from pathlib import Path

PANELS = (
    ("loss", ("loss", "eval/loss")),
    ("reward accuracy", ("rewards/accuracies", "eval/rewards/accuracies")),
    ("rewards", ("rewards/chosen", "rewards/rejected")),
    ("log-probabilities", ("logps/chosen", "logps/rejected")),
)


def curves(steps: dict[int, dict[str, float]], path: Path) -> None:
    """The course of training in four panels."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(10, 6.5), layout="constrained")
    for axis, (title, names) in zip(axes.flat, PANELS, strict=True):
        for name in names:
            points = [(step, row[name]) for step, row in steps.items() if name in row]
            if points:
                axis.plot(*zip(*points, strict=True), label=name, marker="o" if len(points) == 1 else None)
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
