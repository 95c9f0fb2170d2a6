"""What happens to a run: create or resume it, plan it, reuse earlier results, reproduce it, forget its rows."""
