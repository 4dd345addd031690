"""The figures as tables in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.crowd.audit import Finding
from benchmarks.crowd.figures import Figures


def print_tables(figures: Figures, console: Console) -> None:
    plain = figures.to_json()
    console.print(_rounds(figures), _usages(figures))
    latency = plain["latency_s"]
    console.print(
        f"all {figures.devices:,} devices present after {figures.present_s:.1f} s; "
        f"{plain['updates_per_s']:,.1f} updates, {plain['messages_per_s']:,.0f} messages and "
        f"{plain['mb_per_s']:.1f} MB a second at the devices, both ways\n"
        f"from offer to ack: half within {latency['p50']:.2f} s, 95 % within {latency['p95']:.2f} s, 99 % within "
        f"{latency['p99']:.2f} s, all within {latency['longest']:.2f} s; {figures.duplicates} duplicates\n"
        "messages: "
        + ", ".join(
            f"{count:,} {what} ({1e-6 * figures.traffic_bytes[what]:.1f} MB)"
            for what, count in sorted(figures.messages.items())
        ),
        highlight=False,
    )


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    for finding in findings:
        sign, style = ("kept  ", "green") if finding.kept else ("BROKEN", "bold red")
        console.print(f"[{style}]{sign}[/] {finding.promise}: {finding.found}", highlight=False)


def _rounds(figures: Figures) -> Table:
    table = Table(title="seconds since the round was opened, when the last device ...", title_justify="left")
    for head in ("round", "has the plan", "has the model", "has trained", "has its ack", "closed", "acks/s", "MB up"):
        table.add_column(head, justify="right")
    for each in figures.rounds:
        times = (each.plan_out_s, each.model_out_s, each.trained_s, each.acked_s, each.closed_s)
        table.add_row(
            str(each.round),
            *(f"{seconds:.2f}" for seconds in times),
            f"{each.updates_s:,.0f}",
            f"{1e-6 * each.payload_bytes:.2f}",
        )
    return table


def _usages(figures: Figures) -> Table:
    table = Table()
    for head in ("process", "CPU s", "CPU ms an update", "peak MiB", "after round 1", "after the last", "MiB a device"):
        table.add_column(head, justify="left" if head == "process" else "right")
    for name, usage in sorted(figures.usages.items()):
        table.add_row(
            name,
            f"{usage['cpu_s']:.1f}",
            f"{usage['cpu_ms_per_update']:.2f}",
            *(f"{usage[key]:.0f}" for key in ("peak_mib", "after_first_round_mib", "after_last_round_mib")),
            f"{usage['mib_per_device']:.2f}" if "mib_per_device" in usage else "",
        )
    return table
