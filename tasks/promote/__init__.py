"""`promote`, after the pipeline: the gate, the error budget, the registry's aliases, approval, rollback and copies."""
