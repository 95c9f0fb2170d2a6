"""Log-probabilities of packed rows: attention, the fused head, recurrent layers, and the check against plain passes."""
