// The chat: a tree of messages, of which one path is shown. Editing a message or asking again makes a branch beside the old one.

import { call, events, h } from "./net.js";
import { markdown } from "./markdown.js";
import { chats } from "./store.js";
import { build, fields, summary, values } from "./settings.js";
import { tokenView } from "./tokens.js";

const $ = id => document.getElementById(id);
const input = $("input"), place = $("messages"), compare = $("compare");
const running = new Map(); // node -> AbortController
let chat, models = [], drawing = null;

const fresh = () => ({ id: crypto.randomUUID?.() ?? `${Date.now()}${Math.random()}`, title: "", time: Date.now(), nodes: [], leaf: null });
const node = id => chat.nodes.find(one => one.id === id);
const children = id => chat.nodes.filter(one => one.parent === id);

function path(leaf = chat.leaf) {
  const found = [];
  for (let one = node(leaf); one; one = node(one.parent)) found.unshift(one);
  return found;
}

function add(parent, role, properties) {
  const one = { id: `${Date.now()}.${chat.nodes.length}`, parent, role, content: "", ...properties };
  chat.nodes.push(one);
  chat.leaf = one.id;
  return one;
}

async function save(owner = chat) {
  owner.time = Date.now();
  owner.title ||= owner.nodes.find(one => one.role === "user")?.content.slice(0, 60) || "";
  if (owner.nodes.length) await chats.put(JSON.parse(JSON.stringify(owner))).catch(() => {});
  await drawList();
}

// -- asking

function messages(leaf, panel) {
  const found = path(leaf).map(one => {
    if (one.role === "tool") return { role: "tool", tool_call_id: one.call, content: one.content };
    const message = { role: one.role, content: one.content };
    if (one.calls?.length) {
      message.tool_calls = one.calls.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } }));
    }
    return message;
  });
  const system = values(panel).system;
  return system ? [{ role: "system", content: system }, ...found] : found;
}

function take(one, { delta, finish_reason: finish, logprobs }) {
  one.content += delta?.content || "";
  one.thinking = (one.thinking || "") + (delta?.reasoning_content || "");
  for (const part of delta?.tool_calls || []) {
    const mine = (one.calls ??= [])[part.index] ??= { id: "", name: "", text: "" };
    mine.id ||= part.id || "";
    mine.name += part.function?.name || "";
    mine.text += part.function?.arguments || "";
  }
  for (const token of logprobs?.content || []) {
    (one.tokens ??= []).push([token.token, token.logprob, token.top_logprobs.map(other => [other.token, other.logprob])]);
  }
  if (finish) one.finish = finish;
}

/** Asks for an answer below `parent`, by the settings of `panel`; it begins with `prefix`. */
async function answer(parent, panel, pair, prefix = "") {
  const owner = chat, one = add(parent, "assistant", { panel, pair, content: prefix, by: summary(panel) });
  const stop = new AbortController(), began = performance.now();
  running.set(one, stop);
  draw();
  try {
    const body = { ...fields(panel), messages: messages(parent, panel), stream: true, stream_options: { include_usage: true } };
    if (prefix) {
      body.messages.push({ role: "assistant", content: prefix });
      Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
    }
    for await (const event of events("v1/chat/completions", body, stop.signal)) {
      if (event.error) throw new Error(event.error.message);
      if (event.choices?.length) {
        one.first ??= performance.now() - began;
        take(one, event.choices[0]);
      }
      if (event.usage) one.usage = event.usage;
      draw(one);
    }
  } catch (error) {
    if (error.name === "AbortError") one.finish = "stopped";
    else one.error = error.message;
  }
  one.seconds = (performance.now() - began) / 1000;
  running.delete(one);
  draw();
  await save(owner);
}

async function ask(parent, text, role = "user", properties = {}) {
  const mine = add(parent, role, { content: text, ...properties });
  save();
  await again(mine.id);
}

async function again(parent) {
  if (!compare.checked) return answer(parent, 0);
  const pair = Date.now(), first = answer(parent, 0, pair), left = chat.leaf, second = answer(parent, 1, pair);
  chat.leaf = left;
  draw();
  await Promise.all([first, second]);
}

export const stop = () => running.forEach(controller => controller.abort());

// -- drawing

const button = (text, title, onclick) => h("button", { class: "link", type: "button", title, "aria-label": title, onclick }, text);

function show(id) {
  chat.leaf = id;
  for (let below = children(id); below.length; below = children(chat.leaf)) chat.leaf = below.at(-1).id;
  draw();
  save();
}

function edit(one, box) {
  const field = h("textarea", { class: "edit", value: one.content, rows: Math.min(12, one.content.split("\n").length + 1) });
  const done = () => ask(one.parent, field.value, one.role, { call: one.call, name: one.name });
  field.onkeydown = event => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) event.preventDefault(), done();
    if (event.key === "Escape") event.stopPropagation(), draw();
  };
  box.replaceChildren(field, h("div", { class: "tools" }, button("Send", "Send as a new branch (Enter)", done), button("Cancel", "Esc", () => draw())));
  field.focus();
}

function called(one) {
  return one.calls?.filter(Boolean).map(({ id, name, text }) => {
    const answered = children(one.id).some(below => below.call === id) || running.has(one);
    const field = h("textarea", { rows: 2, placeholder: `The result of ${name}` });
    return h("div", { class: "call" }, h("b", {}, `calls ${name}`), h("pre", {}, text), !answered && field,
      !answered && button("Send the result", "Send what the function returned", () => result(one, id, name, field.value)));
  }) || [];
}

/** Adds a call's result; the model goes on once all calls have one. */
async function result(one, id, name, text) {
  const before = path(one.id === chat.leaf || node(chat.leaf).role !== "tool" ? one.id : chat.leaf).at(-1);
  const done = path(before.id).filter(below => below.role === "tool" && one.calls.some(call => call.id === below.call)).length + 1;
  const mine = add(before.id, "tool", { content: text, call: id, name });
  if (done === one.calls.filter(Boolean).length) await again(mine.id);
  else draw();
}

function facts(one) {
  const parts = [one.by];
  if (one.usage) {
    const rest = one.seconds - one.first / 1000;
    parts.push(`${one.usage.prompt_tokens} in`, `${one.usage.completion_tokens} out`, `first after ${Math.round(one.first)} ms`);
    if (rest > 0 && one.usage.completion_tokens > 1) parts.push(`${((one.usage.completion_tokens - 1) / rest).toFixed(1)} tokens/s`);
  }
  if (one.finish && one.finish !== "stop") parts.push({ length: "cut off at the longest length" }[one.finish] || one.finish);
  return parts.filter(Boolean).join(" · ");
}

function content(one) {
  const parts = [];
  if (one.thinking) {
    const fold = h("details", { class: "thinking", open: Boolean(one.unfolded) },
      h("summary", {}, running.has(one) && !one.content ? "Thinking …" : "Thought"), markdown(one.thinking));
    fold.ontoggle = () => (one.unfolded = fold.open);
    parts.push(fold);
  }
  if (one.spread && one.tokens) {
    parts.push(tokenView(one.tokens, (at, text) =>
      answer(one.parent, one.panel || 0, undefined, one.tokens.slice(0, at).map(token => token[0]).join("") + text)));
  } else parts.push(...one.role === "assistant" ? markdown(one.content) : [h("p", { class: "plain" }, one.content)]);
  if (one.error) parts.push(h("p", { class: "error", role: "alert" }, one.error));
  return [...parts, ...called(one)];
}

function message(one) {
  const box = h("div", { class: "body" }, content(one));
  const beside = children(one.parent).filter(other => !one.pair || other.pair !== one.pair || other === one);
  const at = beside.indexOf(one), tools = h("div", { class: "tools" });
  if (beside.length > 1) {
    tools.append(button("‹", "The branch before", () => show(beside[(at || beside.length) - 1].id)), `${at + 1}/${beside.length}`,
      button("›", "The next branch", () => show(beside[(at + 1) % beside.length].id)));
  }
  if (!running.has(one)) {
    tools.append(button("Copy", "Copy the text", () => navigator.clipboard.writeText(one.content)));
    if (one.role === "assistant") tools.append(button("Again", "Ask again, in a branch of its own", () => again(one.parent)));
    else tools.append(button("Edit", "Edit, in a branch of its own", () => edit(one, box)));
    if (one.tokens) {
      tools.append(button("Probabilities", "Show each token's probability", () => {
        one.spread = !one.spread;
        draw();
      }));
    }
  }
  const name = { user: "You", assistant: one.pair ? `Answer ${"AB"[one.panel]}` : "Answer", tool: `Result of ${one.name}` }[one.role];
  return h("article", { class: one.role, "data-id": one.id, "aria-busy": String(running.has(one)) }, h("h2", {}, name), box,
    h("footer", {}, tools, one.role === "assistant" && h("small", {}, facts(one))));
}

function pairOf(one) {
  const both = children(one.parent).filter(other => other.pair === one.pair).slice(0, 2);
  return h("div", { class: "pair" }, both.map(other => {
    const box = message(other);
    if (other === one) box.classList.add("chosen");
    else box.querySelector(".tools").prepend(button("Go on with this", "Later messages follow this answer", () => show(other.id)));
    return box;
  }));
}

/** Draws everything at the next frame, or only the answer that has grown. */
function draw(grown) {
  if (grown && drawing === null) {
    drawing = setTimeout(() => {
      drawing = null;
      const old = place.querySelector(`[data-id="${CSS.escape(grown.id)}"] .body`);
      const below = place.scrollHeight - place.scrollTop - place.clientHeight < 60;
      for (const one of running.keys()) place.querySelector(`[data-id="${CSS.escape(one.id)}"] .body`)?.replaceChildren(...content(one));
      if (old && below) place.scrollTop = place.scrollHeight;
    }, 50);
  }
  if (grown) return;
  clearTimeout(drawing);
  drawing = null;
  const shown = path();
  place.replaceChildren(...shown.map(one => one.pair ? pairOf(one) : message(one)));
  if (!shown.length) place.append(h("div", { class: "welcome" }, h("h1", {}, models[0] || "Penstock"), h("p", {}, "Everything stays between this browser and the server.")));
  $("send").hidden = running.size > 0;
  $("stop").hidden = !running.size;
  place.scrollTop = place.scrollHeight;
}

async function drawList() {
  const all = await chats.all().catch(() => []);
  $("list").replaceChildren(...all.map(one => h("li", { class: one.id === chat.id ? "here" : "" },
    h("button", { onclick: () => load(one) }, one.title || "(empty)"),
    button("✕", `Delete ${one.title}`, async () => {
      await chats.remove(one.id);
      if (one.id === chat.id) load(fresh());
      else drawList();
    }))));
}

export function load(one = fresh()) {
  stop();
  chat = one;
  document.body.classList.remove("history");
  draw();
  drawList();
  input.focus();
}

const grow = () => {
  input.style.height = "auto";
  input.style.height = `${Math.min(input.scrollHeight, innerHeight / 3)}px`;
};

export async function start() {
  load();
  $("new").onclick = () => load();
  $("clear").onclick = async () => confirm("Delete all conversations in this browser?") && (await chats.clear(), load());
  $("stop").onclick = stop;
  $("tune").onclick = () => ($("settings").hidden = !$("settings").hidden);
  compare.onchange = () => build($("panels"), models, compare.checked);
  input.oninput = grow;
  input.onkeydown = event => event.key === "Enter" && !event.shiftKey && !event.isComposing && (event.preventDefault(), $("ask").requestSubmit());
  $("ask").onsubmit = event => {
    event.preventDefault();
    const text = input.value;
    if (!text.trim() || running.size) return;
    input.value = "";
    grow();
    ask(chat.leaf, text);
  };
  build($("panels"), models, false);
  models = (await (await call("v1/models")).json()).data.map(model => model.id);
  build($("panels"), models, compare.checked);
  draw();
}
