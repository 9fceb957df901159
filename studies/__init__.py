"""Experiments that anyone can rerun: ``python -m studies`` writes docs/studies.md and its figures."""
