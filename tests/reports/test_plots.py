"""`dvc plots diff` with our templates and page, in a real Chromium without network."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.browser import browser
from tests.support.workspaces import PROJECT

CURVES = "step,eval/loss,eval/rewards/accuracies,loss,rewards/accuracies,rewards/chosen,rewards/rejected\n"
EMPTY = "2,,,0.6,0.5,0.1,-0.1\n10,,,0.5,0.6,0.2,-0.2\n"
FULL = "20,0.55,0.7,0.45,0.7,0.3,-0.3\n100,0.41,0.8,0.35,0.8,0.4,-0.4\n"
# The points of each curve, and the bars from left to right: (margin, pairs) as the tooltip of each has them.
DRAWN = """[...document.querySelectorAll('body > div')].map(div => [
  div.querySelector('h2').innerText,
  [...div.querySelectorAll('polyline')].map(line => line.getAttribute('points').split(' ').length),
  [...div.querySelectorAll('rect')].sort((a, b) => a.x.baseVal.value - b.x.baseVal.value).map(bar => bar.textContent),
])"""


def run(root: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_plots_need_no_network_draw_no_zero_for_an_empty_cell_and_sort_margins_as_numbers(tmp_path: Path) -> None:
    root = tmp_path / "repo"
    metrics = root / "data" / "metrics"
    metrics.mkdir(parents=True)
    shutil.copytree(PROJECT / ".dvc" / "plots", root / ".dvc" / "plots")
    shutil.copy(PROJECT / ".dvc" / "config", root / ".dvc")
    plots = yaml.safe_load((PROJECT / "dvc.yaml").read_text())["plots"]
    (root / "dvc.yaml").write_text(yaml.safe_dump({"plots": plots}))
    (metrics / "train.csv").write_text(CURVES + EMPTY + FULL)
    (metrics / "calibration.csv").write_text("confidence,accuracy,pairs\n0.55,0.5,10\n0.95,0.97,40\n")
    (metrics / "margins.csv").write_text("margin,pairs\n-10.0,1\n-2.0,4\n0.0,9\n10.0,3\n")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "one"]):
        run(root, "git", "-c", "user.name=test", "-c", "user.email=test@localhost", *command)
    (metrics / "train.csv").write_text(CURVES + FULL)
    run(root, sys.executable, "-m", "dvc", "plots", "diff", "HEAD", "workspace", "-o", str(tmp_path / "page"))
    assert "://cdn" not in (tmp_path / "page" / "index.html").read_text()
    with browser(tmp_path / "profile") as page:
        page.open((tmp_path / "page" / "index.html").as_uri())
        page.until("document.querySelectorAll('svg[role=img]').length", 5)
        drawn = {name: (curves, bars) for name, curves, bars in page.evaluate(DRAWN)}
        page.picture(tmp_path / "plots.png")
    assert drawn["loss"] == drawn["reward accuracy"] == ([2, 2, 4, 2], [])  # workspace: loss, eval; HEAD: loss, eval
    assert drawn["rewards"] == ([2, 2, 4, 4], [])
    assert drawn["calibration"] == ([2, 2], [])
    bars = [f"{rev} : {bin}" for bin in ("-10, 1", "-2, 4", "0, 9", "10, 3") for rev in ("workspace", "HEAD")]
    assert drawn["margins"] == ([], bars)
