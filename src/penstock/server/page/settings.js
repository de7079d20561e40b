// The settings of a request: their controls, and the fields of a chat request that they become.

import { h } from "./net.js";

// [name, label, kind, hint]; a number's hint is min, max, step.
const FIELDS = [
  ["model", "Model", "model"],
  ["system", "System message", "text"],
  ["temperature", "Temperature", "number", [0, 2, 0.05]],
  ["top_p", "Top p", "number", [0.01, 1, 0.01]],
  ["top_k", "Top k", "number", [-1, 1000, 1]],
  ["min_p", "Min p", "number", [0, 1, 0.01]],
  ["max_tokens", "Longest answer (tokens)", "number", [1, 1e6, 1]],
  ["seed", "Seed", "number", [0, 2 ** 31, 1]],
  ["presence_penalty", "Presence penalty", "number", [-2, 2, 0.1]],
  ["frequency_penalty", "Frequency penalty", "number", [-2, 2, 0.1]],
  ["repetition_penalty", "Repetition penalty", "number", [0.01, 2, 0.05]],
  ["stop", "Stop at (one a line)", "text"],
  ["thinking", "Thinking", "choice", ["", "on", "off"]],
  ["reasoning_effort", "Reasoning effort", "choice", ["", "minimal", "low", "medium", "high"]],
  ["logprobs", "Token probabilities: alternatives", "number", [0, 20, 1]],
  ["schema", "Answer by JSON schema", "text"],
  ["tools", "Tools (a JSON list of functions)", "text"],
];

const saved = JSON.parse(localStorage.getItem("settings") || "[{},{}]");

/** The values of panel 0 or 1. */
export const values = panel => saved[panel];

function json(text, name) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name} is not JSON: ${error.message}`, { cause: error });
  }
}

/** A chat request's fields for a panel, without messages. Throws an Error that names the setting at fault. */
export function fields(panel) {
  const body = {}, one = saved[panel];
  for (const [name, , kind] of FIELDS) {
    if (one[name] && kind === "number" && name !== "logprobs") body[name] = Number(one[name]);
  }
  if (one.model) body.model = one.model;
  if (one.reasoning_effort) body.reasoning_effort = one.reasoning_effort;
  if (one.thinking) body.chat_template_kwargs = { enable_thinking: one.thinking === "on" };
  if (one.stop) body.stop = one.stop.split("\n").filter(Boolean);
  if (Number(one.logprobs)) Object.assign(body, { logprobs: true, top_logprobs: Number(one.logprobs) });
  if (one.schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: json(one.schema, "The schema") } };
  if (one.tools) {
    body.tools = json(one.tools, "The list of tools");
    if (!Array.isArray(body.tools)) body.tools = [body.tools];
    body.tools = body.tools.map(tool => tool.function ? tool : { type: "function", function: tool });
  }
  return body;
}

/** In a few words, where a panel differs from the server's defaults. */
export const summary = panel => FIELDS.filter(([name]) => saved[panel][name] && name !== "logprobs")
  .map(([name, , kind]) => kind === "text" ? name : `${name} ${saved[panel][name]}`).join(", ") || "defaults";

function control([name, label, kind, hint], panel, models) {
  const one = saved[panel];
  let field;
  if (kind === "number") field = h("input", { type: "number", min: hint[0], max: hint[1], step: hint[2], placeholder: "default" });
  else if (kind === "text") field = h("textarea", { rows: one[name] ? 4 : 1, spellcheck: false });
  else field = h("select", {}, (kind === "model" ? models : hint).map(value => h("option", { value }, value || "default")));
  field.value = one[name] || (kind === "model" ? models[0] || "" : "");
  field.onchange = field.oninput = event => {
    one[name] = event.target.value;
    localStorage.setItem("settings", JSON.stringify(saved));
  };
  return h("label", {}, label, field);
}

/** Builds one panel, or two where settings are compared. */
export function build(place, models, both) {
  place.replaceChildren(...[0, 1].slice(0, both ? 2 : 1).map(panel => h("fieldset", {},
    h("legend", {}, both ? "AB"[panel] : "Settings"), FIELDS.map(field => control(field, panel, models)),
    h("button", { type: "button", class: "link", onclick: () => {
      saved[panel] = {};
      localStorage.setItem("settings", JSON.stringify(saved));
      build(place, models, both);
    } }, "Defaults"))));
}
