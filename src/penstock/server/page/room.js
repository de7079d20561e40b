// The engine room: draws what /engine/events tells. Colours name requests: a request has one colour in every picture.

import { events, h } from "./net.js";

const HISTORY = 120, SPAN = 30;
const past = [];
let running = null, parts = null, steps = [];

const hue = id => [...id].reduce((sum, letter) => (sum * 31 + letter.charCodeAt(0)) % 360, 7) * 137 % 360;
const paint = (id, light = 52) => `hsl(${hue(id)} 62% ${light}%)`;
const style = name => getComputedStyle(document.documentElement).getPropertyValue(name);
const bytes = n => n >= 2 ** 30 ? `${(n / 2 ** 30).toFixed(1)} GiB` : n >= 2 ** 20 ? `${(n / 2 ** 20).toFixed(1)} MiB` : `${Math.round(n / 1024)} KiB`;
const time = s => s === undefined || s === Infinity ? "–" : s < 1 ? `${Math.round(1000 * s)} ms` : `${s.toFixed(1)} s`;

function canvas(height, label) {
  const node = h("canvas", { "aria-label": label });
  node.setAttribute("role", "img");
  node.dataset.height = height;
  return node;
}

/** A context scaled for the screen, its size in CSS pixels, and an empty picture. */
function brush(node, height = Number(node.dataset.height)) {
  const width = node.clientWidth || 300, ratio = devicePixelRatio || 1;
  node.style.height = `${height}px`;
  node.width = width * ratio;
  node.height = height * ratio;
  const context = node.getContext("2d");
  context.scale(ratio, ratio);
  context.font = "11px system-ui, sans-serif";
  return [context, width, height];
}

const card = (title, hint, ...children) =>
  h("section", { class: "card" }, h("h2", {}, title), h("p", { class: "hint" }, hint), children);

function build(place) {
  parts = {
    numbers: h("div", { class: "numbers" }), rate: canvas(70, "Tokens per second over the last minute"), steps: canvas(120, "Steps"),
    step: h("p", { class: "hint" }), queue: h("div"), pages: canvas(150, "Map of the KV cache"), pagesText: h("p", { class: "hint" }),
    tiers: h("div"), tree: h("div", { class: "tree scroll" }), life: canvas(160, "Life of requests"), memory: h("div"),
    kernels: h("table"), error: h("p", { class: "error", role: "alert" }),
  };
  place.replaceChildren(parts.error, parts.numbers, h("div", { class: "cards" },
    card("Tokens per second", "Generated tokens of all requests.", parts.rate),
    card("Steps", "One bar a step; its height is the tokens in it, a colour a request, dark for prompts, light for decoding.", parts.steps, parts.step),
    card("KV cache by owner", "A cell is a piece of the cache: a request's in its colour, dark grey kept for later prompts, striped shared, light free.", parts.pages, parts.pagesText, parts.tiers),
    card("Life of requests", `Grey waits, dark reads the prompt, light writes the answer; the last ${SPAN} s.`, parts.life),
    card("Prefix tree", "Contexts that later prompts may begin with; deeper further right. Coloured ones are in use.", parts.tree),
    card("Queue by class", "Waiting requests by class of service, and by priority where they have one.", parts.queue),
    card("Memory plan", "How the device's memory was divided at the start.", parts.memory),
    card("Kernels", "The implementation that was chosen for each operation.", h("div", { class: "scroll" }, parts.kernels))));
  parts.steps.onmousemove = event => tell(Math.floor(event.offsetX / (parts.steps.clientWidth / HISTORY)));
}

function tell(at) {
  const one = steps[at - HISTORY + steps.length];
  if (!one) return;
  const [id, , seconds, segments] = one, reading = segments.filter(segment => segment[2] > 1);
  parts.step.textContent = `Step ${id}: ${time(seconds)}, ${segments.length - reading.length} sequences decode` +
    (reading.length ? `, ${reading.map(([name, start, count]) => `${name} takes positions ${start} to ${start + count}`).join(", ")}` : "");
}

function bar(label, share, text) {
  const inner = h("i");
  inner.style.width = `${Math.min(100, 100 * share)}%`;
  return h("div", { class: "line" }, h("span", {}, label), h("span", { class: "bar" }, inner), h("span", {}, text));
}

/** A quantile of what a histogram counted since an older one. */
function quantile(now, then, share) {
  const counts = now.counts.map((count, i) => count - (then?.counts[i] ?? 0));
  let left = share * counts.reduce((a, b) => a + b, 0);
  if (!left) return undefined;
  const at = counts.findIndex(count => (left -= count) <= 0);
  return now.bounds[at] ?? Infinity;
}

const number = (label, value, hint) => h("div", { title: hint }, h("b", {}, value), h("span", {}, label));

function drawNumbers(look, then) {
  const { stats } = look, seconds = look.now - then.now || 1;
  const hits = stats.prompt_tokens ? 100 * stats.cached_tokens / stats.prompt_tokens : 0;
  look.rate = past.length > 1 ? (stats.generation_tokens - past.at(-2).stats.generation_tokens) / (look.now - past.at(-2).now) : 0;
  parts.numbers.replaceChildren(
    number("tokens/s", look.rate.toFixed(look.rate < 100 ? 1 : 0), "Generated, just now"),
    number("prompt tokens/s", ((stats.prompt_tokens - then.stats.prompt_tokens) / seconds).toFixed(0), "Admitted over the last minute"),
    number("first token, p50", `≤ ${time(quantile(look.first_token, then.first_token, 0.5))}`, "Of the last minute, by the bounds of a histogram"),
    number("first token, p95", `≤ ${time(quantile(look.first_token, then.first_token, 0.95))}`, "Of the last minute, by the bounds of a histogram"),
    number("between tokens, p95", `≤ ${time(quantile(look.between_tokens, then.between_tokens, 0.95))}`, "Of the last minute"),
    number("running", stats.running), number("waiting", stats.waiting), number("KV in use", `${(100 * stats.kv_usage).toFixed(0)} %`),
    number("cache hits", `${hits.toFixed(0)} %`, "Prompt tokens that the cache had, since the start"),
    number("preemptions", stats.preemptions, "Since the start"));
}

/** Columns of [count, colour], stacked, the newest at the right; the highest fills the height. None is lower than `least`. */
function drawColumns(node, columns, unit, least = 0) {
  const [to, width, height] = brush(node), each = width / HISTORY;
  const most = Math.max(1, ...columns.map(column => column.reduce((sum, [count]) => sum + count, 0)));
  columns.forEach((column, i) => {
    let y = height;
    for (const [count, colour] of column) {
      const tall = Math.max(least, (height - 14) * count / most);
      to.fillStyle = colour;
      to.fillRect(width - (columns.length - i) * each, y -= tall, each - 0.5, tall);
    }
  });
  to.fillStyle = style("--dim");
  to.fillText(`${most.toFixed(0)} ${unit}`, 2, 10);
}

function drawPages({ pages, sequences, stats }) {
  const cells = Uint8Array.from(atob(pages.cells), letter => letter.charCodeAt(0));
  const side = cells.length > 2000 ? 6 : cells.length > 600 ? 9 : 13, across = Math.max(1, Math.floor((parts.pages.clientWidth || 300) / side));
  const [to] = brush(parts.pages, Math.ceil(cells.length / across) * side);
  const free = style("--free"), kept = style("--kept"), other = style("--accent");
  cells.forEach((cell, i) => {
    const x = i % across * side, y = Math.floor(i / across) * side;
    to.fillStyle = cell === 0 ? free : cell === 1 ? kept : cell === 2 || !sequences[cell - 3] ? other : paint(sequences[cell - 3].id);
    to.fillRect(x, y, side - 1, side - 1);
    if (cell === 2) {
      to.fillStyle = kept;
      to.fillRect(x, y + side / 2 - 1, side - 1, 2);
    }
  });
  parts.pagesText.textContent = `${pages.slabs} pieces of ${bytes(pages.slab_bytes)}${pages.slabs_a_cell > 1 ? `, ${pages.slabs_a_cell} to a cell` : ""}; ` +
    `a page holds ${pages.page_tokens} tokens; in use by cache group: ${pages.groups.join(", ")}`;
  parts.tiers.replaceChildren(...stats.tiers.map(tier => bar(tier.name, tier.used_bytes / (tier.capacity_bytes || 1),
    `${bytes(tier.used_bytes)} of ${bytes(tier.capacity_bytes)}, ${tier.hit_tokens} tokens found`)));
}

function drawTree({ tree }) {
  const depths = [], below = tree.map(() => []), order = [];
  tree.forEach((node, i) => node.parent >= 0 && below[node.parent].push(i));
  const visit = (i, depth) => {
    depths[i] = depth;
    order.push(i);
    below[i].forEach(child => visit(child, depth + 1));
  };
  tree.forEach((node, i) => node.parent < 0 && visit(i, 0));
  const longest = Math.max(1, ...tree.map(node => node.start + node.tokens));
  parts.tree.replaceChildren(...order.slice(0, 60).map(i => {
    const node = tree[i], inner = h("i", { class: node.held ? "held" : "" });
    inner.style.marginLeft = `${70 * node.start / longest}%`;
    inner.style.width = `${Math.max(0.7, 70 * node.tokens / longest)}%`;
    return h("div", { title: `positions ${node.start} to ${node.start + node.tokens}, depth ${depths[i]}, priority ${node.priority}` }, inner,
      h("small", {}, `${node.tokens} tokens, used ${node.uses}×${node.adapter ? `, adapter ${node.adapter}` : ""}${node.children > below[i].length ? ", …" : ""}`));
  }));
  if (!order.length) parts.tree.textContent = "Nothing is kept yet.";
}

function drawLife(look) {
  const live = look.sequences.map(one => ({ ...one, finished: 0, queued: one.scheduled ? one.scheduled - one.arrival : 0 }));
  const rows = [...live, ...look.ended.filter(one => one.finished > look.now - SPAN).reverse()].slice(0, 40).sort((a, b) => a.arrival - b.arrival);
  const tall = 11, [to, width] = brush(parts.life, Math.max(60, rows.length * tall + 16)), left = Math.min(220, width / 2);
  const x = at => Math.max(left, left + (width - left) * (1 - (look.now - at) / SPAN));
  rows.forEach((one, i) => {
    const end = one.finished || look.now, scheduled = one.queued ? one.arrival + one.queued : one.scheduled ?? one.arrival;
    const piece = (from, to_, colour) => {
      to.fillStyle = colour;
      to.fillRect(x(from), i * tall, Math.max(1, x(to_) - x(from)), tall - 2);
    };
    piece(one.arrival, scheduled || end, style("--kept"));
    if (scheduled) piece(scheduled, one.first || end, paint(one.id, 38));
    if (one.first) piece(one.first, end, paint(one.id, 62));
    to.fillStyle = style("--text");
    const wrote = one.output ?? one.known - one.prompt;
    to.fillText(`${one.id}: ${one.prompt} in${one.cached ? ` (${one.cached} cached)` : ""}, ${wrote} out${one.preemptions ? `, preempted ${one.preemptions}×` : ""}`,
      2, i * tall + 8, left - 6);
  });
  to.fillStyle = style("--dim");
  for (let s = 0; s < SPAN; s += 5) to.fillText(`-${s} s`, x(look.now - s) - 28, rows.length * tall + 12);
}

function drawFacts({ info, names }) {
  const pieces = [["Weights", info.weight_bytes], ["A step's work", info.step_bytes], ["CUDA graphs", info.graph_bytes], ["KV cache", info.kv_bytes]];
  const all = pieces.reduce((sum, [, size]) => sum + size, 0) || 1;
  parts.memory.replaceChildren(...pieces.map(([name, size]) => bar(name, size / all, bytes(size))),
    h("p", { class: "hint" }, `${names.join(", ")}: ${info.architecture}, ${info.dtype}, on ${info.device}; up to ${info.max_model_len} tokens a request, ${info.max_num_seqs} requests and ${info.max_num_batched_tokens} tokens a step; room for ${info.kv_tokens} tokens.`),
    ...info.notes.map(note => h("p", { class: "hint" }, note)));
  parts.kernels.replaceChildren(...info.kernels.map(([operation, kernel]) => h("tr", {}, h("td", {}, operation), h("td", {}, h("code", {}, kernel)))));
}

function draw(look) {
  past.push(look);
  if (past.length > HISTORY) past.shift();
  steps = look.steps;
  drawNumbers(look, past[0]);
  const accent = style("--accent");
  drawColumns(parts.rate, past.map(one => [[one.rate || 0, accent]]), "tokens/s");
  drawColumns(parts.steps, steps.map(one => one[3].map(([name, , count]) => [count, paint(name, count > 1 ? 38 : 62)])), "tokens", 0.5);
  drawPages(look);
  drawTree(look);
  drawLife(look);
  const waiting = look.queue.reduce((sum, [, count]) => sum + count, 0);
  parts.queue.replaceChildren(...look.queue.map(([[service, priority], count]) =>
    bar(priority ? `${service}, ${priority}` : service, count / waiting, String(count))));
  if (!waiting) parts.queue.textContent = "Nobody waits.";
}

/** Starts watching, and goes on after a lost connection until `leave`. */
export async function watch() {
  if (running) return;
  if (!parts) build(document.getElementById("room"));
  const mine = running = new AbortController();
  while (running === mine) {
    try {
      for await (const event of events("engine/events", undefined, mine.signal)) {
        parts.error.textContent = "";
        if (event.info) drawFacts(event);
        else draw(event);
      }
    } catch (error) {
      if (running === mine) parts.error.textContent = error.message;
    }
    await new Promise(resolve => setTimeout(resolve, 2000));
  }
}

export function leave() {
  running?.abort();
  running = null;
}
