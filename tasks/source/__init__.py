"""The stage `source`: addresses, file formats and model folders; the stage `fingerprint`, which looks for changed content."""
