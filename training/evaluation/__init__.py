"""Score pairs and sample answers with a trained policy."""
