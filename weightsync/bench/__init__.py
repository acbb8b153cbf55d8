"""`weightsync bench FILE.yaml`: updates of a user's own model on their own machine, beside a plain copy of its bytes."""
