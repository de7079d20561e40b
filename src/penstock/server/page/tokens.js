// An answer's tokens, coloured by probability, with the alternatives to each on hover or by arrow keys.

import { h } from "./net.js";

const tip = h("div", { id: "tip", role: "tooltip", hidden: true });
document.body.append(tip);
document.addEventListener("scroll", () => (tip.hidden = true), true);

const percent = logprob => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
const shown = text => JSON.stringify(text).slice(1, -1) || "(nothing)";

function show(span, [text, logprob, others], choose) {
  const rows = others.map(([other, value]) => {
    const bar = h("i");
    bar.style.width = `${100 * Math.exp(value)}%`;
    return h("tr", { class: other === text ? "chosen" : "" }, h("td", {}, h("code", {}, shown(other))),
      h("td", {}, h("span", { class: "bar" }, bar)), h("td", {}, percent(value)),
      h("td", {}, other !== text && h("button", { class: "link", title: "Go on from here with this token", onclick: () => choose(other) }, "↳")));
  });
  tip.replaceChildren(h("b", {}, h("code", {}, shown(text)), ` ${percent(logprob)}`), h("table", {}, rows));
  tip.hidden = false;
  const box = span.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${box.bottom + tip.offsetHeight > innerHeight ? box.top - tip.offsetHeight : box.bottom}px`;
}

/** `tokens` are [text, logprob, [[text, logprob], ...]]; `choose(at, text)` is called for an alternative to token `at`. */
export function tokenView(tokens, choose) {
  let at = -1;
  const spans = tokens.map(token => h("span", { class: `t p${Math.min(4, Math.floor(Math.exp(token[1]) * 5))}` }, token[0]));
  const look = index => {
    spans[at]?.classList.remove("here");
    at = Math.max(0, Math.min(spans.length - 1, index));
    spans[at].classList.add("here");
    show(spans[at], tokens[at], text => choose(at, text));
  };
  const node = h("div", { class: "tokens", tabIndex: 0, title: "Arrow keys move from token to token" }, spans);
  node.onmouseover = event => spans.includes(event.target) && look(spans.indexOf(event.target));
  node.onmouseleave = event => event.relatedTarget !== tip && !tip.contains(event.relatedTarget) && (tip.hidden = true);
  tip.onmouseleave = () => (tip.hidden = true);
  node.onblur = () => setTimeout(() => tip.contains(document.activeElement) || (tip.hidden = true));
  node.onkeydown = event => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    look(at + step);
  };
  return node;
}
