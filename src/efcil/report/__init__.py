"""Reports of complete and partial runs: tables, curves, accuracy matrices and an HTML page with all of them."""

from efcil.report.figures import curve_figure, matrix_figure
from efcil.report.html import html_page
from efcil.report.load import load_summaries
from efcil.report.tables import csv_table, latex_table, markdown_table
from efcil.report.write import REPORT_FILES, write_report

__all__ = [
    "REPORT_FILES",
    "csv_table",
    "curve_figure",
    "html_page",
    "latex_table",
    "load_summaries",
    "markdown_table",
    "matrix_figure",
    "write_report",
]
