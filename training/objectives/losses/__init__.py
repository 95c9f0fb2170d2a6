"""The losses, a file for each or for a family. registry.py imports every module here; CONTRIBUTING.md: "Add a loss".

No module here imports torch when it is loaded: a configuration is validated from these declarations, and fast.
"""
