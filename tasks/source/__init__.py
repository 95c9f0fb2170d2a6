"""The stage `source`: addresses, file formats and model folders, and the stage `fingerprint` before it."""
