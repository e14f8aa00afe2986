"""Pages to look at: reports of runs, and an inspector of what a model attends to."""

from latte.report.inspection import Inspection, LayerView, inspect_text
from latte.report.loading import load
from latte.report.page import render_inspection

__all__ = ["Inspection", "LayerView", "inspect_text", "load", "render_inspection"]
