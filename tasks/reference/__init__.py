"""The stage `reference`: log-probabilities under the base model, by shard."""
