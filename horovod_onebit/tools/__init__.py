"""The command line and what it is made of: checks, estimates and reports. Training does not need them."""
