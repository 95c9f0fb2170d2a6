"""The data card: row statistics, histograms, shortcuts, preview and pages."""
