"""Pipelines for `weightsync run`, and the classes that they name. Run them from the repository's root."""
