"""Schemas of params.yaml and infra/cluster.yaml, the operator's access list, and artifact paths."""
