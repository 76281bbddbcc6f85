"""A stand-in for vLLM's OpenAI server that does what each request tells it to, and remembers what happened.

Start it on a Unix socket or a port:

    python -m tests.fake_engine --uds /tmp/engine.sock
    python -m tests.fake_engine --port 8001 --max-num-seqs 16 --defaults '{"events": 200, "gap_ms": 20, "size": 250}'

Every route of vLLM that a gateway forwards is there, with answers of the right shape. What one request experiences is
scripted by the field `fake` in its JSON body, else by the header `x-fake` (JSON too), else by the defaults:

    {"model": "m", "messages": [], "stream": true, "fake": {"events": 5, "first_ms": 100, "fault": "reset", "at": 3}}

streams three of five tokens and then resets the connection. `python -m tests.fake_engine --help` lists every field.

What happened is told under `/fake/`, on the same socket or, with `--control-uds`, on one that faults never touch:

    GET  /fake/log       every request with headers, size and sha256 of its body, times, events sent, outcome
    GET  /fake/counts    received, started, finished, aborted, faulted, queued, running, max_running, connections …
    POST /fake/defaults  the script of requests that carry none (the whole of it: `{}` clears)
    POST /fake/set       the server itself: `health_ms`, `metrics_frozen`, `hang`, `accept`, `max_num_seqs` …
    POST /fake/cut       `{"how": "reset" | "close", "which": "all" | "idle"}`: ends open connections
    POST /fake/reset     cuts open work, empties the log, puts back every default
    POST /fake/exit      `{"code": 0}`: the process ends at once

`/metrics` has vLLM's names and labels, and moves only when work is done.
"""
