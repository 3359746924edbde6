// The live page: one event stream of snapshots, and one box that streams an answer. No libraries.
import { bars, line } from "./charts.js";

const INTERVAL = 0.25; // seconds between snapshots
const CAPACITY = 480; // snapshots in a chart: two minutes
const TRAIL = 40; // snapshots in a request's row
const RATE_WINDOW = 8; // snapshots over which rates are taken

const element = (id) => document.getElementById(id);
const history = [];
const series = { throughput: [], acceptance: [] };
const trails = new Map(); // request id -> states, oldest first
let key = sessionStorage.getItem("aspire-key") ?? "";
let stopAnswer = null;

const headers = () => (key ? { Authorization: `Bearer ${key}` } : {});
const percent = (value) => `${(100 * value).toFixed(1)} %`;

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    buffer += value;
    const lines = buffer.split("\n");
    buffer = lines.pop();
    for (const text of lines) {
      if (text.startsWith("data: {")) yield JSON.parse(text.slice(6));
    }
  }
}

async function failure(response) {
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `HTTP ${response.status}`;
}

async function post(path, body, signal) {
  const response = await fetch(path, {
    method: "POST", body: JSON.stringify(body), signal, headers: { "Content-Type": "application/json", ...headers() },
  });
  if (!response.ok) throw new Error(await failure(response));
  return response;
}

// -- snapshots -------------------------------------------------------------------------------------------------------

async function watch() {
  for (;;) {
    try {
      const response = await fetch(`/dashboard/stream?interval=${INTERVAL}`, { headers: headers() });
      element("key-form").hidden = response.status !== 401;
      if (response.status === 401) {
        element("state").textContent = "an API key is needed";
        return;
      }
      if (!response.ok) throw new Error(await failure(response));
      for await (const snapshot of events(response)) show(snapshot);
      element("state").textContent = "connection ended, trying again";
    } catch (error) {
      element("state").textContent = `no connection (${error.message}), trying again`;
    }
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

function show(now) {
  const before = history.at(-RATE_WINDOW) ?? history[0];
  if (before && now.num_steps < before.num_steps) history.length = 0; // the server was started anew
  history.push(now);
  if (history.length > CAPACITY) history.shift();
  element("model").textContent = now.model;
  setText("state", now.state);
  const gained = before ? gain(before, now) : { throughput: null, acceptance: null, length: null };
  for (const name of ["throughput", "acceptance"]) {
    series[name].push(gained[name]);
    if (series[name].length > CAPACITY) series[name].shift();
  }
  element("throughput").textContent = gained.throughput === null ? "–" : gained.throughput.toFixed(0);
  element("acceptance").textContent = gained.acceptance === null ? "–" : percent(gained.acceptance);
  element("per-verification").textContent = gained.length === null ? "–" : gained.length.toFixed(1);
  element("running").textContent = now.num_running;
  element("waiting").textContent = now.num_waiting;
  element("kv").textContent = percent(now.kv_usage);
  element("kv-meter").value = now.kv_usage;
  line(element("chart-throughput"), series.throughput, CAPACITY, null, (value) => value.toFixed(0));
  line(element("chart-acceptance"), series.acceptance, CAPACITY, 1, percent);
  bars(element("chart-lengths"), now.draft_lengths);
  showRequests(now);
}

function gain(before, now) {
  const seconds = now.time - before.time;
  const difference = (name) => now[name] - before[name];
  const drafted = difference("num_draft_tokens");
  const drafts = difference("num_drafts");
  return {
    throughput: seconds > 0 ? difference("num_output_tokens") / seconds : null,
    acceptance: drafted > 0 ? difference("num_accepted_tokens") / drafted : null,
    length: drafts > 0 ? 1 + difference("num_accepted_tokens") / drafts : null,
  };
}

function setText(id, text) {
  // A status that did not change must not be read out again.
  if (element(id).textContent !== text) element(id).textContent = text;
}

function showRequests(now) {
  const live = new Set(now.requests.map((request) => request.request_id));
  for (const id of trails.keys()) if (!live.has(id)) trails.delete(id);
  element("requests").replaceChildren(...now.requests.map(row));
  element("no-requests").hidden = now.num_requests > 0;
  const hidden = now.num_requests - now.requests.length;
  if (hidden > 0) {
    const more = document.createElement("tr");
    more.append(cell(`and ${hidden} more`, ""));
    element("requests").append(more);
  }
}

function row(request) {
  const trail = trails.get(request.request_id) ?? [];
  trail.push(request.state);
  if (trail.length > TRAIL) trail.shift();
  trails.set(request.request_id, trail);
  const made = document.createElement("tr");
  const strip = document.createElement("td");
  strip.setAttribute("aria-hidden", "true");
  for (const state of trail) {
    const mark = document.createElement("span");
    mark.className = `cell ${state}`;
    strip.append(mark);
  }
  made.append(cell(request.request_id, "name"), cell(request.state, ""), strip, cell(request.num_prompt, "number"),
    cell(request.num_output, "number"), cell(request.num_drafted, "number"),
    cell(request.acceptance_rate === null ? "–" : percent(request.acceptance_rate), "number"));
  return made;
}

function cell(text, name) {
  const made = document.createElement("td");
  made.textContent = String(text);
  if (name) made.className = name;
  return made;
}

// -- the box ---------------------------------------------------------------------------------------------------------

async function ask() {
  stopAnswer?.abort();
  const control = new AbortController();
  stopAnswer = control;
  const answer = element("answer");
  answer.replaceChildren();
  element("answer-state").textContent = "writing";
  element("stop").disabled = false;
  const counts = { tokens: 0, accepted: 0, drafted: 0 };
  try {
    const source = await promptOf(element("prompt").value, control.signal);
    const response = await post("/generate", {
      ...source, stream: true,
      sampling_params: { max_tokens: Number(element("max-tokens").value), temperature: Number(element("temperature").value) },
    }, control.signal);
    for await (const piece of events(response)) {
      if (piece.error) throw new Error(piece.error.message);
      append(answer, piece);
      counts.tokens += piece.token_ids.length;
      counts.accepted += piece.num_accepted;
      counts.drafted = piece.metrics?.num_drafted ?? counts.drafted;
    }
    element("answer-state").textContent = `done: ${counts.tokens} tokens, ${counts.accepted} of ${counts.drafted} drafts accepted`;
  } catch (error) {
    element("answer-state").textContent = error.name === "AbortError" ? `stopped after ${counts.tokens} tokens` : `failed: ${error.message}`;
  } finally {
    if (stopAnswer === control) {
      stopAnswer = null;
      element("stop").disabled = true;
    }
  }
}

async function promptOf(text, signal) {
  if (element("kind").value === "text") return { prompt: text };
  const response = await post("/tokenize", { messages: [{ role: "user", content: text }] }, signal);
  return { token_ids: (await response.json()).tokens };
}

function append(answer, piece) {
  const atEnd = answer.scrollHeight - answer.scrollTop - answer.clientHeight < 40;
  const size = piece.num_accepted_chars ?? 0;
  if (size > 0) {
    const mark = document.createElement("mark");
    mark.className = "accepted";
    mark.textContent = piece.text.slice(0, size);
    answer.append(mark);
  }
  if (piece.text.length > size) {
    const picked = document.createElement("span");
    picked.className = piece.num_accepted_chars === null ? "" : "picked";
    picked.textContent = piece.text.slice(size);
    answer.append(picked);
  }
  if (atEnd) answer.scrollTop = answer.scrollHeight;
}

element("try").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  ask();
});
element("prompt").addEventListener("keydown", (pressed) => {
  if (pressed.key === "Enter" && (pressed.ctrlKey || pressed.metaKey)) {
    pressed.preventDefault();
    ask();
  }
});
document.addEventListener("keydown", (pressed) => {
  if (pressed.key === "Escape") stopAnswer?.abort();
});
element("stop").addEventListener("click", () => stopAnswer?.abort());
element("key-form").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  key = element("key").value;
  sessionStorage.setItem("aspire-key", key);
  watch();
});
watch();
