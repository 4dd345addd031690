"""The report of a run: `write_report(result, path)` makes one self-contained HTML file."""

from hushfleet.aggregator.results.report.report import render_report, write_report

__all__ = ["render_report", "write_report"]
