"""HTML pages, tables and plots: reports of runs, comparisons and extensions, and an inspector of attention weights."""

from latte.report.build import Report, build_report, render_report
from latte.report.extension import report_of_extension
from latte.report.inspection import Inspection, LayerView, inspect_ids, inspect_text
from latte.report.latents import LatentUse, latent_use
from latte.report.page import render_inspection
from latte.report.runs import RunView, find_runs, read_run

__all__ = [
    "Inspection",
    "LatentUse",
    "LayerView",
    "Report",
    "RunView",
    "build_report",
    "find_runs",
    "inspect_ids",
    "inspect_text",
    "latent_use",
    "read_run",
    "render_inspection",
    "render_report",
    "report_of_extension",
]
