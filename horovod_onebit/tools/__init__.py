"""What helps before, during and after a training run, and what the training itself does without."""
