"""`python -m tasks STAGE` runs a stage of dvc.yaml in the current folder."""

import sys

from tasks.run_stage import main

main(sys.argv[1:])
