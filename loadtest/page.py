"""The report as one HTML page that needs nothing else, its pictures as PNGs, and a summary in Markdown."""

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from loadtest.findings import SPOKEN, Run, Runs, attempts, headline, load_of, of_group, outcomes, served, sources
from loadtest.pictures import draw

STYLE: Final = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#212121}"
    "img{max-width:100%}table{border-collapse:collapse;margin:1rem 0;font-size:14px}"
    "td,th{border:1px solid #ccc;padding:.25rem .6rem;text-align:right}td:first-child,th:first-child{text-align:left}"
    "small{color:#616161}section{margin-top:2.5rem}"
)
COLUMNS: Final = (
    ("goodput", "goodput, req/s", 1.0),
    ("short.good_rate", "short, good/s", 1.0),
    ("long.good_rate", "long, good/s", 1.0),
    ("short.first_p50_ms", "short, first token p50 ms", 1.0),
    ("short.first_p99_ms", "p99 ms", 1.0),
    ("long.first_p99_ms", "long, first token p99 ms", 1.0),
    ("short.refusal_p99_ms", "refusal p99 ms", 1.0),
    ("tokens_late_share", "tokens too late, %", 100.0),
    ("others_cpu_s", "CPU of others, s", 1.0),  # much of it: others used the machine, and the figures are theirs too
)
COUNTS: Final = ("offered", "started", "finished")
READING: Final = " ".join(
    """
    Open loop: requests arrive on a schedule fixed beforehand, whatever became of those before, and all times count
    from the scheduled moment. Good: ended whole, within its limit. Goodput: good requests a second of arrivals. A
    load of 1 is what the engine completes when it always has enough to do. Percentiles of first tokens are over
    requests that got one: who was still waiting when the client gave up (`cut`) is not in them, nor who was refused.
    The naive servers give their first token with their last, and go on computing for clients that have left. Client,
    gateway and engine share the machine.
    """.split()
)


def write_page(folder: Path, runs: Runs) -> Path:
    """Write `report.html`, the pictures and `summary.md`; returns the page."""
    pictures = draw(folder, runs)
    lines = headline(runs)
    tables = {title: rows for title, group in _groups().items() if len(rows := table(of_group(runs, group))) > 1}
    source = sources(runs)
    page = folder / "report.html"
    page.write_text(_html(folder, pictures, lines, tables, source))
    (folder / "summary.md").write_text(_markdown(pictures, lines, tables, source))
    return page


def _groups() -> dict[str, str]:
    return {
        "Steady arrivals (Poisson)": "sweep",
        "Arrivals in bursts (gamma)": "bursts",
        "A spike": "spike",
        "The spike with retries": "storm",
        "The embedded model": "embedded",
    }


def table(runs: Sequence[Run]) -> list[list[str]]:
    """One line for each run, the head first."""
    if not runs:
        return []
    ways = [name for name in outcomes(runs[0]) if any(outcomes(run)[name] for run in runs)]
    retries = any(run["step"]["retries"] for run in runs)
    head = ["arm", "load", "seed", *COUNTS, *ways, *(label for _, label, _ in COLUMNS)]
    lines = [[*head, *(["users served, %", "attempts"] if retries else [])]]
    for run in sorted(runs, key=lambda run: (load_of(run), run["step"]["seed"])):
        metrics, ended = run["metrics"], outcomes(run)
        line = [SPOKEN[run["step"]["arm"]], f"{load_of(run):g}", str(run["step"]["seed"])]
        line += [f"{metrics[f'short.{name}'] + metrics[f'long.{name}']:.0f}" for name in COUNTS]
        line += [str(ended[name]) for name in ways]
        found = [(metrics.get(name), factor) for name, _, factor in COLUMNS]
        line += ["-" if value is None else f"{value * factor:,.1f}" for value, factor in found]
        lines.append([*line, *([f"{100 * served(run):.0f}", f"{attempts(run):.2f}"] if retries else [])])
    return lines


def _html(
    folder: Path,
    pictures: Mapping[str, str],
    lines: Sequence[tuple[str, str]],
    tables: Mapping[str, Sequence[Sequence[str]]],
    source: Sequence[str],
) -> str:
    say = html.escape
    origin = "<br>".join(say(text) for text in source)
    parts = [f"<h1>Load tests</h1><p>{say(READING)}</p><p><small>{origin}</small></p>", "<table>"]
    parts += [f"<tr><td>{say(name)}</td><td>{say(text)}</td></tr>" for name, text in lines] + ["</table>"]
    for name, title in pictures.items():
        data = base64.b64encode((folder / name).read_bytes()).decode()
        image = f'<img alt="{say(title)}" src="data:image/png;base64,{data}">'
        parts.append(f"<section><h2>{say(title)}</h2>{image}<br><small>{origin}</small></section>")
    for title, rows in tables.items():
        head, *body = ["".join(f"<td>{say(cell)}</td>" for cell in row) for row in rows]
        parts.append(f"<section><h2>{say(title)}</h2><table><tr>{head.replace('td>', 'th>')}</tr>")
        parts += [f"<tr>{row}</tr>" for row in body] + ["</table></section>"]
    return f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Load tests</title><style>{STYLE}</style>' + (
        "\n".join(parts) + "</html>\n"
    )


def _markdown(
    pictures: Mapping[str, str],
    lines: Sequence[tuple[str, str]],
    tables: Mapping[str, Sequence[Sequence[str]]],
    source: Sequence[str],
) -> str:
    parts = ["# Load tests", "", READING, "", *(f"- {name}: {text}" for name, text in lines), ""]
    for title, (head, *body) in tables.items():
        parts += [f"## {title}", "", f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
        parts += [f"| {' | '.join(row)} |" for row in body] + [""]
    parts += [f"![{title}]({name})" for name, title in pictures.items()]
    return "\n".join([*parts, "", *(f"Measured with {text}" for text in source), ""])
