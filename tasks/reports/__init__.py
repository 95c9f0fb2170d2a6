"""What people read of a run: the page, the terminal, plots, sweeps, costs."""
