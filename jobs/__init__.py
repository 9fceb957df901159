"""What the training jobs of all frameworks share: options, data, metrics, the final table; and how jobs are started, on
this machine and on simulated hosts. Imports no framework."""
