"""Where work runs: the Ray cluster and its nodes, processes of this machine, and locks."""
