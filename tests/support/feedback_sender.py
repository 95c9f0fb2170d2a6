"""Sends feedback to MLflow until it is killed: python -m tests.support.feedback_sender FOLDER TRACKING_URI."""

import sys
import threading
from pathlib import Path

from tasks.config.cluster import load_cluster
from tasks.feedback import traces

cluster = load_cluster().model_copy(update={"tracking_uri": sys.argv[2]})
traces.follow(Path(sys.argv[1]), cluster, threading.Event())
