// Shows what /stats tells once a second, and sends prompts. No library, no build step, no request but to this gateway.
"use strict";

const HISTORY_S = 300, SILENCE_MS = 5000, RETRY_MS = 2000, KEY = "tidegate-key";
const SVG = "http://www.w3.org/2000/svg", WIDTH = 300, HEIGHT = 60;
const REASONS = {
  queue_full: "Queue full", queue_timeout: "Waited too long", deadline_infeasible: "Deadline out of reach",
  engine_unavailable: "Engine away", draining: "Shutting down",
};
const OUTCOMES = {
  completed: "Completed", refused: "Refused", deadline: "Deadline passed", client_left: "Client left",
  engine_error: "Engine failed", invalid: "Invalid request",
};
const CAUSES = {
  exit: "it ended", killed: "it was killed", oom: "out of memory", stalled: "it stalled", start: "it could not start", unknown: "cause unknown",
};
const STATES = {
  ready: ["good", "Engine ready", ""],
  starting: ["warn", "Engine starting", "The engine is starting. Until it is ready, requests are answered with 503 and told when to come back."],
  restarting: ["warn", "Engine restarting", "The engine is away and starts again. Until it is ready, requests are answered with 503 and told when to come back."],
  stalled: ["bad", "Engine stalled", "The engine holds requests and does nothing for them. New ones are answered with 503."],
  dead: ["bad", "Engine dead", "The engine has failed and will not be started again. The log says why."],
};

const byId = (id) => document.getElementById(id);
const make = (name, properties, ...children) => {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
};
const pause = (ms) => new Promise((done) => setTimeout(done, ms));

// figures

const whole = (value) => value === null ? "–" : Math.round(value).toLocaleString("en");
const tenths = (value) => value === null ? "–" : value.toLocaleString("en", { maximumFractionDigits: 1 });
const percent = (share) => share === null ? "–" : `${(share * 100).toFixed(share < 0.1 ? 1 : 0)}%`;
function seconds(value) {
  if (value === null) return "–";
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 99.5) return `${value.toFixed(value < 9.95 ? 1 : 0)} s`;
  return `${(value / 60).toFixed(1)} min`;
}
function span(value) {
  const [size, unit] = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].find(([size]) => value >= size) ?? [1, "s"];
  return `${Math.floor(value / size)} ${unit}`;
}
const both = (times) => times === null ? "–" : `${seconds(times.p50)}, ${seconds(times.p95)}`;

// charts

const CHARTS = [
  {
    title: "In flight", lines: [(point) => point.in_flight], format: whole,
    top: (stats) => stats.limit,
    value: (stats) => [whole(stats.in_flight), `of ${stats.limit} slots`],
    note: (stats) => stats.engine.running === null ? "" : `${stats.engine.running} run in the engine, ${stats.engine.waiting} wait in it`,
  },
  {
    title: "Waiting", lines: [(point) => point.queue_depth], format: whole,
    value: (stats) => [whole(stats.queue_depth), "in the queue"],
    note: (stats) => Object.entries(stats.lanes).map(([name, lane]) => `${name} ${lane.queue_depth}`).join(" · "),
  },
  {
    title: "Batch size", lines: [(point) => point.avg_batch_size], format: tenths,
    value: (stats) => [tenths(stats.avg_batch_size), "sequences"],
    note: () => "mean of the steps of one minute",
  },
  {
    title: "First byte", lines: [(point) => point.first_byte_p50_s, (point) => point.first_byte_p95_s], format: seconds,
    value: (stats) => [seconds(stats.last_minute.first_byte_s?.p50 ?? null), "median"],
    note: (stats) => `95%: ${seconds(stats.last_minute.first_byte_s?.p95 ?? null)} · whole answer: ${seconds(stats.last_minute.total_s?.p50 ?? null)}`,
  },
  {
    title: "Refused", lines: [(point) => point.refused_per_s], format: tenths,
    value: () => [tenths(points.at(-1)?.refused_per_s ?? null), "a second"],
    note: (stats) => `${whole(total(stats.refusals))} of ${whole(stats.total_requests)} requests since the start`,
  },
  {
    title: "KV cache", lines: [(point) => point.kv_cache_usage], format: percent,
    top: () => 1,
    value: (stats) => [percent(stats.engine.kv_cache_usage), "in use"],
    note: () => "of the engine's memory for contexts",
  },
];
const total = (counts) => Object.values(counts).reduce((sum, count) => sum + count, 0);
let points = [];

class Chart {
  constructor(spec) {
    this.spec = spec;
    this.at = null; // seconds ago that the pointer is at
    this.value = make("span", { className: "value" });
    this.ceiling = make("span", { className: "ceiling", title: "top of the chart" });
    this.note = make("p", { className: "note" });
    this.svg = document.createElementNS(SVG, "svg");
    for (const [name, value] of Object.entries({ viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" })) {
      this.svg.setAttribute(name, value);
    }
    this.path("grid").setAttribute("d", `M0 0H${WIDTH}M0 ${HEIGHT}H${WIDTH}`);
    this.area = this.path("area");
    this.paths = spec.lines.map((_, index) => this.path(index ? "line second" : "line"));
    this.mark = this.path("mark");
    this.svg.addEventListener("pointermove", (event) => {
      const box = this.svg.getBoundingClientRect();
      this.at = Math.round((1 - (event.clientX - box.left) / box.width) * HISTORY_S);
      this.draw();
    });
    this.svg.addEventListener("pointerleave", () => { this.at = null; this.draw(); });
    this.figure = make("figure", {},
      make("figcaption", {}, make("span", { className: "title", textContent: spec.title }), this.ceiling),
      this.value, this.svg, this.note);
  }

  path(name) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", name);
    this.svg.append(path);
    return path;
  }

  show(stats) {
    this.stats = stats;
    const [value, unit] = this.spec.value(stats);
    this.value.replaceChildren(value, " ", make("small", { textContent: unit }));
    this.draw();
  }

  draw() {
    if (!this.stats) return;
    const { lines, format, title } = this.spec, now = this.stats.uptime_s;
    const seen = lines.flatMap((line) => points.map(line)).filter((value) => value !== null);
    const highest = seen.reduce((most, value) => Math.max(most, value), 0);
    const top = this.spec.top ? Math.max(this.spec.top(this.stats), highest) : niceAbove(highest);
    this.ceiling.textContent = seen.length ? format(top) : "";
    const place = (point, value) => [WIDTH - (now - point.uptime_s) / HISTORY_S * WIDTH, HEIGHT - value / top * HEIGHT];
    lines.forEach((line, index) => {
      const runs = runsOf(line, place);
      this.paths[index].setAttribute("d", runs.map((run) => `M${run.join("L")}${run.length > 1 ? "" : "h.01"}`).join(""));
      if (!index) {
        this.area.setAttribute("d", runs.map((run) => `M${run[0][0]} ${HEIGHT}L${run.join("L")}L${run.at(-1)[0]} ${HEIGHT}Z`).join(""));
      }
    });
    const told = lines.map((line) => points.length ? format(line(points.at(-1))) : "–").join(" and ");
    this.svg.setAttribute("aria-label", seen.length
      ? `${title} over the last five minutes: now ${told}, at most ${format(highest)}`
      : `${title}: nothing yet`);
    const pointed = this.at === null ? null : points.findLast((point) => point.uptime_s <= now - this.at);
    this.mark.setAttribute("d", pointed ? `M${place(pointed, 0)[0]} 0V${HEIGHT}` : "");
    this.note.textContent = pointed
      ? `${span(now - pointed.uptime_s)} ago: ${lines.map((line) => format(line(pointed))).join(" and ")}`
      : this.spec.note(this.stats);
  }
}

function runsOf(line, place) { // unbroken stretches of known values
  const runs = [];
  let run = null;
  for (const point of points) {
    const value = line(point);
    if (value === null) {
      run = null;
      continue;
    }
    if (!run) runs.push(run = []);
    run.push(place(point, value).map((number) => Math.round(number * 100) / 100));
  }
  return runs;
}

function niceAbove(value) {
  if (value <= 0) return 1;
  const size = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * size >= value) * size;
}

// what /stats tells

const charts = CHARTS.map((spec) => new Chart(spec));
byId("charts").append(...charts.map((chart) => chart.figure));

function take(point) {
  const before = points.at(-1);
  if (before && point.uptime_s <= before.uptime_s) return;
  const elapsed = before ? point.uptime_s - before.uptime_s : 0;
  point.refused_per_s = elapsed ? (point.refused - before.refused) / elapsed : null;
  points.push(point);
  while (points[0].uptime_s < point.uptime_s - HISTORY_S) points.shift();
}

const pointOf = (stats) => ({
  uptime_s: stats.uptime_s, in_flight: stats.in_flight, queue_depth: stats.queue_depth,
  avg_batch_size: stats.avg_batch_size, refused: total(stats.refusals), kv_cache_usage: stats.engine.kv_cache_usage,
  first_byte_p50_s: stats.last_minute.first_byte_s?.p50 ?? null,
  first_byte_p95_s: stats.last_minute.first_byte_s?.p95 ?? null,
});

function list(element, rows) {
  element.replaceChildren(...rows.map(([name, value]) =>
    make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value }))));
}

function show(stats) {
  take(pointOf(stats));
  document.body.classList.remove("stale");
  const [tone, state, explained] = STATES[stats.engine.state];
  const { restarts, last_restarts: last, last_start_s: start } = stats.engine;
  if (stats.draining) {
    setState("warn", "Shutting down", "This gateway is shutting down: what is running may finish, new requests are answered with 503.");
  } else {
    setState(tone, state, explained && start !== null ? `${explained} The last start took ${seconds(start)}.` : explained);
  }
  byId("about").textContent = `up ${span(stats.uptime_s)} · version ${stats.version}`;
  for (const chart of charts) chart.show(stats);
  byId("lanes").replaceChildren(...Object.entries(stats.lanes).map(([name, lane]) => {
    const cells = [whole(lane.in_flight), `${whole(lane.queue_depth)} of ${whole(lane.max_queue)}`, both(lane.first_byte_s), both(lane.total_s)];
    return make("tr", {}, make("th", { scope: "row", textContent: name }), ...cells.map((textContent) => make("td", { textContent })));
  }));
  list(byId("engine"), [
    ["State", stats.engine.state],
    ["Restarts", whole(restarts)],
    ...last.toReversed().map(({ at, cause }) => [`${span(Math.max(0, Date.now() / 1000 - at))} ago`, CAUSES[cause]]),
    ["Last start took", start === null ? "–" : seconds(start)],
  ]);
  list(byId("refusals"), Object.entries(stats.refusals).map(([reason, count]) => [REASONS[reason], whole(count)]));
  list(byId("outcomes"), Object.entries(stats.outcomes).map(([outcome, count]) => [OUTCOMES[outcome], whole(count)]));
  if (stats.engine.state === "ready" && !byId("model").options.length) listModels();
}

function setState(tone, state, notice) {
  const shown = byId("state"), told = byId("notice");
  shown.dataset.tone = tone;
  if (shown.textContent !== state) shown.textContent = state; // else a screen reader would say it every second
  if (told.textContent !== notice) told.textContent = notice;
  told.hidden = !notice;
}

// the gateway

const headers = () => {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
};

async function* eventsOf(response, onBytes = () => {}) { // name and data of each event of a stream
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    onBytes();
    text += value.replaceAll("\r", "");
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const fields = part.split("\n").map((line) => /^(\w+): ?(.*)$/.exec(line)).filter(Boolean);
      const data = fields.filter(([, name]) => name === "data").map(([, , rest]) => rest).join("\n");
      if (data) yield { name: fields.find(([, name]) => name === "event")?.[2] ?? "message", data };
    }
  }
}

async function watch() { // until it ends; how it did
  const silence = new AbortController();
  const restless = () => setTimeout(() => silence.abort(), SILENCE_MS);
  let timer = restless();
  try {
    const response = await fetch("stats?watch=1&history=1", { headers: headers(), cache: "no-store", signal: silence.signal });
    if (response.status === 401) return "locked";
    if (!response.ok) return "away";
    for await (const { name, data } of eventsOf(response, () => { clearTimeout(timer); timer = restless(); })) {
      if (name === "history") {
        points = [];
        JSON.parse(data).forEach(take);
      } else {
        show(JSON.parse(data));
      }
    }
  } catch (error) {
    if (error instanceof SyntaxError) throw error; // what fetch throws when nobody answers is no news
  } finally {
    clearTimeout(timer);
  }
  return "away";
}

async function keepWatching() {
  for (;;) {
    if (await watch() === "locked") {
      await askForKey();
      continue;
    }
    document.body.classList.add("stale");
    setState("bad", "Gateway away", "The gateway does not answer. The figures below are the last it told. This page goes on asking and recovers by itself.");
    await pause(RETRY_MS);
  }
}

async function askForKey() {
  setState("unknown", "Locked", "");
  const form = byId("unlock");
  byId("unlock-error").textContent = sessionStorage.getItem(KEY) ? "This key is not known here." : "";
  form.hidden = false;
  byId("key").focus();
  await new Promise((done) => form.addEventListener("submit", done, { once: true }));
  // What can't stand in a header can't be a key; an empty one is refused like any other.
  sessionStorage.setItem(KEY, byId("key").value.trim().replace(/[^\x21-\x7e]/g, "?"));
  byId("key").value = "";
  form.hidden = true;
}

async function listModels() {
  try {
    const response = await fetch("v1/models", { headers: headers(), cache: "no-store" });
    if (!response.ok) return; // the next look tries again
    const { data } = await response.json();
    byId("model").replaceChildren(...data.map(({ id }) => make("option", { textContent: id })));
  } catch (error) {
    if (!(error instanceof TypeError)) throw error;
  }
}

// the prompt

let sending = null; // an AbortController while an answer is under way

function tell(tone, text) {
  byId("outcome").dataset.tone = tone;
  byId("outcome").textContent = text;
}

function refusal(response, body) {
  const reason = response.headers.get("x-tidegate-reason");
  const wait = response.headers.get("retry-after-ms");
  const what = reason === null ? `The engine answered ${response.status}` : `${REASONS[reason] ?? reason} (${response.status})`;
  const said = body?.error?.message ?? "";
  return `${what}. ${said}${wait ? ` It may be sent again in ${seconds(Number(wait) / 1000)}.` : ""}`;
}

async function send(signal) {
  const began = performance.now();
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    signal,
    headers: { "content-type": "application/json", ...headers() },
    body: JSON.stringify({
      model: byId("model").value,
      messages: [{ role: "user", content: byId("prompt").value }],
      max_tokens: Number(byId("tokens").value),
      temperature: 0, // so that the same question shows what has changed
      stream: true,
      stream_options: { include_usage: true },
    }),
  });
  if (!response.ok) {
    const body = await response.json().catch(() => null); // an error of something in between need not be JSON
    return tell("bad", refusal(response, body));
  }
  byId("t-lane").textContent = response.headers.get("x-tidegate-lane") ?? "–";
  const waited = response.headers.get("x-tidegate-queue-ms");
  byId("t-queue").textContent = waited === null ? "–" : seconds(Number(waited) / 1000);
  byId("timing").hidden = byId("answer").hidden = false;
  let first = null, last = began, tokens = 0, ended = false;
  for await (const { data } of eventsOf(response)) {
    if (data === "[DONE]") {
      ended = true;
      continue;
    }
    const event = JSON.parse(data);
    if (event.error) return tell("bad", `The answer broke off: ${event.error.message}`);
    const delta = event.choices?.[0]?.delta, text = delta?.content || delta?.reasoning || delta?.reasoning_content;
    if (text) {
      last = performance.now();
      tokens += 1;
      if (first === null) {
        first = last;
        byId("t-first").textContent = seconds((first - began) / 1000);
      }
      byId("answer").append(text);
    }
    tokens = event.usage?.completion_tokens ?? tokens;
    byId("t-rate").textContent = tokens > 1 && last > first ? tenths((tokens - 1) / (last - first) * 1000) : "–";
  }
  if (!ended) return tell("bad", "The answer broke off: the connection ended too early.");
  tell("good", `Done: ${tokens} ${tokens === 1 ? "token" : "tokens"} in ${seconds((performance.now() - began) / 1000)}`);
}

byId("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (sending) return;
  sending = new AbortController();
  byId("send").disabled = true;
  byId("stop").disabled = false;
  byId("answer").replaceChildren();
  byId("timing").hidden = byId("answer").hidden = true;
  for (const id of ["t-first", "t-rate"]) byId(id).textContent = "–";
  tell("unknown", "Waiting for the answer");
  try {
    await send(sending.signal);
  } catch (error) {
    if (error.name === "AbortError") tell("unknown", "Stopped");
    else if (error instanceof TypeError) tell("bad", "The gateway does not answer, or broke off.");
    else throw error;
  } finally {
    sending = null;
    byId("send").disabled = false;
    byId("stop").disabled = true;
  }
});
byId("stop").addEventListener("click", () => sending?.abort());
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
});
byId("unlock").addEventListener("submit", (event) => event.preventDefault());

keepWatching();
