"""The Ray cluster: its nodes, worker groups, preemption and system metrics."""
