"""The public name of ``horovod_onebit.tools.diagnostics``."""

from horovod_onebit.tools.diagnostics import Collector, Layer, Report

__all__ = ["Collector", "Layer", "Report"]
