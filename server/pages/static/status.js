// Fetch JSON from GET / every second and write the values into the page as text, never as markup.
"use strict";
const $ = id => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300, HEIGHT = 68;
let latest = null, showAll = false, asking = false;

function text(node, value) { if (node.textContent !== value) node.textContent = value; }
function whole(n) { return Math.round(n).toLocaleString("en-US"); }
function short(n) {
  if (n === null || n === undefined) return "–";
  if (n >= 1e9) return (n / 1e9).toFixed(2) + " G";
  if (n >= 1e6) return (n / 1e6).toFixed(2) + " M";
  return n >= 1e5 ? (n / 1e3).toFixed(0) + " k" : n >= 100 || Number.isInteger(n) ? whole(n) : n.toFixed(1);
}
function percent(share) {
  if (share === null || share === undefined) return "–";
  return share === 1 || share === 0 ? share * 100 + "%" : (share * 100).toFixed(1) + "%";
}
function seconds(s) {
  if (s === null || s === undefined) return "–";
  const ms = s * 1000;
  return ms >= 10000 ? s.toFixed(1) + " s" : ms >= 1000 ? s.toFixed(2) + " s" : ms >= 100 ? ms.toFixed(0) + " ms"
    : ms >= 10 ? ms.toFixed(1) + " ms" : ms.toFixed(2) + " ms";
}
function span(s) {
  const d = Math.floor(s / 86400), h = Math.floor(s / 3600) % 24, m = Math.floor(s / 60) % 60;
  return d ? d + " d " + h + " h" : h ? h + " h " + m + " min" : m ? m + " min" : Math.floor(s) + " s";
}
function bytes(n) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (n < 1024 || unit === "GiB") return (unit === "B" || n >= 100 ? n.toFixed(0) : n.toFixed(1)) + " " + unit;
    n /= 1024;
  }
}
function split(node, shown) {  // the number large, its unit small
  const parts = /^([\d.,–]+)(.*)$/.exec(shown) || ["", shown, ""];
  if (node.dataset.shown === shown) return;
  node.dataset.shown = shown;
  const small = document.createElement("small");
  small.textContent = parts[2];
  node.replaceChildren(parts[1], small);
}

// ---- charts: each one is a card with a value, a line under it, and the last five minutes ----

function points(series, top, kept) {
  const step = WIDTH / (kept - 1), runs = [];
  let run = null;
  series.forEach((value, i) => {
    if (value === null) { run = null; return; }
    if (!run) runs.push(run = []);
    run.push([WIDTH - (series.length - 1 - i) * step, HEIGHT - (top ? value / top : 0) * (HEIGHT - 4)]);
  });
  return runs;
}
function path(cls, d) {
  const node = document.createElementNS(SVG, "path");
  node.setAttribute("class", cls);
  node.setAttribute("d", d);
  return node;
}
function line(run) {
  const d = run.map(([x, y], i) => (i ? "L" : "M") + x.toFixed(1) + " " + y.toFixed(1)).join("");
  return run.length === 1 ? d + "h.8" : d;
}
function ceiling(value) {  // the next round number, so that the scale rarely changes
  if (value <= 0) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 7.5, 10].map(n => n * unit).find(n => n >= value * 0.999);
}
const KEPT = 300;
function draw(id, main, other, show, least) {
  const card = $(id), svg = card.querySelector("svg");
  const numbers = [...main, ...other].filter(v => v !== null);
  const top = numbers.length ? ceiling(Math.max(least, ...numbers)) : 0;
  const drawn = [path("base", `M0 ${HEIGHT}H${WIDTH}`)];
  for (const run of points(other, top, KEPT)) drawn.push(path("other-line", line(run)));
  for (const run of points(main, top, KEPT)) {
    drawn.push(path("area", line(run) + `L${run[run.length - 1][0]} ${HEIGHT}L${run[0][0]} ${HEIGHT}Z`));
    drawn.push(path("main-line", line(run)));
  }
  if (card.at !== undefined) {
    const x = (card.at * WIDTH).toFixed(1);
    drawn.push(path("hair", `M${x} 0V${HEIGHT}`));
  }
  svg.replaceChildren(...drawn);
  const [left, right] = card.querySelectorAll(".scale span");
  const back = card.at === undefined ? 0 : Math.round((1 - card.at) * (KEPT - 1)), i = main.length - 1 - back;
  text(left, numbers.length ? "top " + show(top) : "nothing yet");
  text(right, card.at === undefined ? "last 5 min"
    : i < 0 ? "not recorded" : back + " s ago: " + show(main[i]) + (other.length ? " · " + show(other[i]) : ""));
}
for (const card of document.querySelectorAll(".chart")) {
  const svg = card.querySelector("svg");
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    card.at = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    if (latest) charts(latest);
  });
  svg.addEventListener("pointerleave", () => { card.at = undefined; if (latest) charts(latest); });
}
function last(series) { return series.length ? series[series.length - 1] : null; }
function charts(now) {
  const h = now.history, q = now.queue;
  split($("tokens").querySelector(".value"), short(last(h.output)));
  text($("tokens").querySelector(".under"), short(last(h.prompt)) + " prompt tokens per second");
  draw("tokens", h.output, [], short, 1);
  split($("requests").querySelector(".value"), whole(q.running || 0) + " running of " + whole(q.seats || 0));
  text($("requests").querySelector(".under"), whole(q.waiting || 0) + " waiting, room for " + whole(q.limit));
  draw("requests", h.running, h.waiting, whole, 4);
  for (const id of ["first", "next"]) {
    split($(id).querySelector(".value"), seconds(last(h[id + "_p50"])));
    const high = last(h[id + "_p95"]);
    text($(id).querySelector(".under"), high === null ? "no requests now" : "median; 95% below " + seconds(high));
    draw(id, h[id + "_p50"], h[id + "_p95"], seconds, 0);
  }
}

// ---- gauges, tables ----

function gauge(id, share, under, alarm) {
  const card = $(id);
  split(card.querySelector(".value"), percent(share));
  card.querySelector("i").style.width = (100 * (share || 0)).toFixed(1) + "%";
  card.querySelector(".track").classList.toggle("waste", Boolean(alarm));
  text(card.querySelector(".under"), under);
}
function list(id, facts) {
  $(id).replaceChildren(...facts.map(([name, value, cls]) => {
    const row = document.createElement("div"), dt = document.createElement("dt"), dd = document.createElement("dd");
    dt.textContent = name;
    dd.textContent = value;
    if (cls) dd.className = cls;
    row.append(dt, dd);
    return row;
  }));
}
function bar(share, waste) {
  const cell = document.createElement("td"), number = document.createElement("span");
  number.className = "number";
  number.textContent = percent(share);
  if (share !== null) {
    const track = document.createElement("span"), fill = document.createElement("i");
    track.className = waste ? "track waste" : "track";
    fill.style.width = (100 * share).toFixed(1) + "%";
    track.append(fill);
    cell.append(track);
  }
  cell.append(number);
  return cell;
}
function cell(value, cls) {
  const node = document.createElement("td");
  node.textContent = value;
  if (cls) node.className = cls;
  return node;
}
function buckets(all) {
  const used = all.filter(one => one.steps || one.captured || one.failed), rest = all.length - used.length;
  const shown = showAll ? all : used;
  $("more").hidden = !rest;
  text($("more"), showAll ? "show those in use" : "show " + rest + " unused");
  if (!shown.length) {
    const row = document.createElement("tr"), none = cell(
      all.length ? "No decode step has run yet, and no graph is captured."
        : "No graphs are configured: every step runs eager.");
    none.colSpan = 6;
    none.style.textAlign = "left";
    row.append(none);
    return $("buckets").replaceChildren(row);
  }
  $("buckets").replaceChildren(...shown.map(one => {
    const row = document.createElement("tr");
    if (!one.steps) row.className = "idle";
    const state = cell(one.failed ? "failed" : one.captured + " of " + one.wanted, one.failed ? "wide failed" : "wide");
    if (one.failed) state.title = one.failed;
    row.append(cell(whole(one.bucket)), cell(short(one.steps)), bar(one.steps ? one.hits / one.steps : null),
               bar(one.padding, true), state, cell(one.bytes ? bytes(one.bytes) : "–", "wide"));
    return row;
  }));
}
$("more").addEventListener("click", () => {
  showAll = !showAll;
  if (latest && latest.graphs) buckets(latest.graphs.buckets);
});

function warming(warm) {
  const isWarming = Boolean(warm.pending) && warm.mode !== "lazy";  // lazy: captured on first use
  $("warm").hidden = !isWarming;
  if (!isWarming) return;
  text($("warm-title"), whole(warm.captured) + " of " + whole(warm.captured + warm.pending) + " graphs captured");
  $("warm-bar").style.width = (100 * warm.captured / (warm.captured + warm.pending)).toFixed(1) + "%";
}

function replicas(all) {  // name -> status; the rest of the page shows the first one
  const names = Object.keys(all || {});
  $("replicas-part").hidden = !names.length;
  list("replicas", names.map((name, i) => {
    const one = all[name], shown = i ? name : name + " (shown)";
    const facts = [one.state, whole(one.queue.running || 0) + " running", whole(one.queue.waiting || 0) + " waiting"];
    if (one.model) facts.push("weights " + one.model.weight_version);
    return [shown, facts.join(" · "), one.state === "ready" ? "" : "failed"];
  }));
}

const STATES = { ready: "ready", loading: "loading", recovering: "recovering", draining: "draining", dead: "dead" };
function show(now) {
  latest = now;
  const m = now.model;
  text($("state"), STATES[now.state] || now.state);
  $("state").className = "pill " + now.state;
  $("banner").hidden = !now.reasons.length;
  text($("banner"), now.reasons.join("; "));
  text($("version"), "Encore " + now.version + ", up " + span(now.uptime));
  $("banner").classList.toggle("waiting", now.state !== "dead");
  warming(now.warm);
  replicas(now.replicas);
  charts(now);
  if (!m) return;
  text($("model"), m.name);
  document.title = (now.state === "ready" ? "" : now.state + " · ") + m.name + " · Encore";
  text($("facts"), [m.architecture, m.device, m.weight_format === "int4" ? "int4 weights, " + m.dtype : m.dtype,
    "context " + whole(m.max_model_len), "weights " + m.weight_version].join(" · "));
  const e = now.engine, g = now.graphs;
  gauge("kv", e.kv, whole(e.preemptions) + " preemptions", e.kv > 0.95);
  gauge("prefix", e.prefix_hits, short(e.prompt_tokens) + " prompt tokens in all");
  const sum = name => g.buckets.reduce((n, one) => n + one[name], 0);
  const captured = sum("captured"), wanted = sum("wanted");
  gauge("hits", g.hit_rate, wanted ? captured + " of " + wanted + " graphs captured" : "no graphs");
  gauge("padding", g.padding, bytes(g.pool_bytes) + " memory pool", true);
  buckets(g.buckets);
  const facts = [["Output tokens", short(e.output_tokens)], ["Prompt tokens", short(e.prompt_tokens)],
    ["Warm-up", now.warm.mode || "–"],
    ["Last report", e.silent.toFixed(1) + " s ago"], ["Restarts", whole(e.restarts), e.restarts ? "failed" : ""]];
  if (e.last_error) facts.push(["Last error", e.last_error, "failed"]);
  list("engine", facts);
  const names = { stop: "Stopped", length: "Full length", abort: "Aborted", error: "Failed" };
  list("ended", Object.keys(names).map(
    key => [names[key], short(e.ended[key] || 0), key === "error" && e.ended[key] ? "failed" : ""]));
  const eager = Object.entries(g.eager);
  $("eager-part").hidden = !eager.length;
  list("eager", eager.map(([reason, count]) => [reason.replaceAll("_", " "), short(count)]));
}
async function refresh() {
  if (asking || document.hidden) return;
  asking = true;
  try {
    const answer = await fetch(location.pathname, { headers: { Accept: "application/json" }, cache: "no-store",
                                                    signal: AbortSignal.timeout(5000) });
    if (!answer.ok) throw new Error("it answers " + answer.status);
    show(await answer.json());
    document.body.classList.remove("stale");
  } catch (error) {
    document.body.classList.add("stale");
    $("state").className = "pill unreachable";
    text($("state"), "not reachable");
    $("banner").hidden = false;
    $("banner").classList.remove("waiting");
    text($("banner"), "The server can't be asked: " + error.message + ". What is shown is the last that was known.");
  }
  asking = false;
}
document.addEventListener("visibilitychange", refresh);
setInterval(refresh, 1000);
refresh();
