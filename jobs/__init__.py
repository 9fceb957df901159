"""What the training jobs of all frameworks share: options, data, metrics, the final table. Imports no framework."""
