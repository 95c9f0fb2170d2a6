"""Sends the feedback journal to MLflow while `dpo serve` runs: `python -m services.serving.sender`.

A process of its own: it logs in to MLflow as another user than the reader of the registry, and takes no time from the
answers.
"""

import threading

from tasks.config.cluster import load_cluster
from tasks.config.paths import main_checkout
from tasks.feedback.journal import feedback_folder
from tasks.feedback.traces import follow

if __name__ == "__main__":
    follow(feedback_folder(), load_cluster(main_checkout()), threading.Event())
